from tests.unit.test_mediation_message_queue import *  # noqa: F403
