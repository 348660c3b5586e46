from tests.unit.test_mediation_connections import *  # noqa: F403
