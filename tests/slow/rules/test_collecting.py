from tests.unit.test_collecting import *  # noqa: F403
