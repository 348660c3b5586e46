from tests.unit.test_planning import *  # noqa: F403
