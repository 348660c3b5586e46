from tests.unit.test_settling import *  # noqa: F403
