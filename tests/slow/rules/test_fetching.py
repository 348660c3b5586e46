from tests.unit.test_fetching import *  # noqa: F403
