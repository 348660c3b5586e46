"""A PostgreSQL of a test's own that can be stopped and started again, as when its machine fails."""

import signal
from pathlib import Path
from urllib.parse import urlsplit

from tests import postgres
from tests.postgres import PrivateServer


class Cluster(PrivateServer):
    """A private server with an off switch; its data and its port stay."""

    def __init__(self, programs: Path) -> None:
        super().__init__(programs)
        self._programs = programs

    def halt(self) -> None:
        """Stop it at once, as a power cut would: connections break, and it recovers at its next start."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def resume(self) -> None:
        """Start it again and wait until it answers."""
        port = urlsplit(self._url).port
        assert port is not None
        self._start(self._programs, port)


def cluster() -> Cluster:
    """Make one; without the programs the test is skipped, but fails where CI is set."""
    programs = postgres._programs()
    if programs is None:
        postgres._missing("a PostgreSQL that can be stopped needs its programs, and initdb was not found")
    return Cluster(programs)
