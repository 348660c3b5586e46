"""What every layer of tests shares: how tests are dealt out to processes that run them at the same time."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

SPARK = "tests/pipeline/"
JAVA_OF_THEIR_OWN = ("_killed.py", "/test_cluster.py", "/test_java.py", "/test_session.py")


class ByFile(LoadFileScheduling):
    """A file to a process, and all that use the one Spark to one process: a second Spark costs as much as they do."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return SPARK if file.startswith(SPARK) and not file.endswith(JAVA_OF_THEIR_OWN) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Take the place of what ``--dist`` says."""
    return ByFile(config, log)
