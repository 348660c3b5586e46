from tests.unit.test_quotas import *  # noqa: F403
