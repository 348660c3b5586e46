"""Runs a program until something shows, and ends it and its Java with SIGKILL then."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep

PATIENCE = 240.0
LOOK_SECONDS = 0.002


def killed(words: Sequence[object], shows: Callable[[], object], environment: Mapping[str, str] | None = None) -> bool:
    """Return True if it was killed, False when it ended before."""
    child = subprocess.Popen(
        list(map(str, words)),
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until = monotonic() + PATIENCE
    try:
        while child.poll() is None:
            assert monotonic() < until
            if shows():
                child.send_signal(signal.SIGKILL)
                return child.wait() == -signal.SIGKILL
            sleep(LOOK_SECONDS)
        return False
    finally:
        # The JVM too: it would end a moment later by itself.
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
