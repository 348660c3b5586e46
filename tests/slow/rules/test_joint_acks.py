from tests.unit.test_joint_acks import *  # noqa: F403
