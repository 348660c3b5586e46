from tests.unit.test_agents_collecting import *  # noqa: F403
