from tests.unit.test_agents_registering import *  # noqa: F403
