from tests.unit.test_agents_showing import *  # noqa: F403
