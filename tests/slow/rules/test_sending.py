from tests.unit.test_sending import *  # noqa: F403
