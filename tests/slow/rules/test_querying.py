from tests.unit.test_querying import *  # noqa: F403
