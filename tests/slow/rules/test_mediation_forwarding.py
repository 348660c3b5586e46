from tests.unit.test_mediation_forwarding import *  # noqa: F403
