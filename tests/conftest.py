"""What every layer of tests shares: how tests are dealt out to processes that run them at the same time."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

PIPELINE = "tests/pipeline/"
JAVA_OF_THEIR_OWN = ("/test_killed.py", "/test_java.py", "/test_session.py")


class ByFile(LoadFileScheduling):
    """A file to a process, and half of those that share a Spark to one: Java learns what to do there once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if not file.startswith(PIPELINE) or file.endswith(JAVA_OF_THEIR_OWN):
            return file
        return "mail" if file.startswith((f"{PIPELINE}test_source", f"{PIPELINE}test_sink")) else "lake"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Take the place of what ``--dist`` says."""
    return ByFile(config, log)
