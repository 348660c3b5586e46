from tests.unit.test_mediation_keylist import *  # noqa: F403
