"""Runs a program that is told what to do, and ends it and its Java with SIGKILL."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Self

PATIENCE = 240.0
LOOK_SECONDS = 0.002
_TAIL = 4000


class Victim:
    """A module with a ``main``, run as a program; used as a context, at the end of which nothing of it is left."""

    def __init__(self, log: Path, module: str, *arguments: object) -> None:
        """What it says goes to ``log``."""
        self._log = log
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                bufsize=1,
                start_new_session=True,
            )

    def said(self, what: str) -> bool:
        """Whether it wrote a line."""
        return what in self._log.read_text("utf-8").splitlines()

    def tell(self, word: str) -> None:
        """Give it a line to read."""
        # What is waited for next tells why it ended.
        with suppress(BrokenPipeError):
            self._child.stdin.write(f"{word}\n")

    def until(self, shows: Callable[[], object]) -> None:
        """Wait until something shows; fail, with what it said last, when it ended before."""
        until = monotonic() + PATIENCE
        while not shows():
            over = self._child.poll() is not None or monotonic() > until
            assert not over, self._log.read_text("utf-8")[-_TAIL:]
            sleep(LOOK_SECONDS)

    def kill(self) -> None:
        """Kill it; fail when it had ended by itself."""
        os.killpg(self._child.pid, signal.SIGKILL)
        assert self._child.wait() == -signal.SIGKILL, self._log.read_text("utf-8")[-_TAIL:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        # Its Java too, which ends a moment after it.
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._child.stdin.close()
