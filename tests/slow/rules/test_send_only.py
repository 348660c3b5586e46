from tests.unit.test_send_only import *  # noqa: F403
