from tests.unit.test_creating import *  # noqa: F403
