from tests.unit.test_claims import *  # noqa: F403
