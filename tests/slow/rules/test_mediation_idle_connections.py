from tests.unit.test_mediation_idle_connections import *  # noqa: F403
