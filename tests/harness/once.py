"""What the processes of one run of the tests need alike is made by the first that does, while the others wait."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time go on; the file stays."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that ``make`` filled, once in this run of the tests, whichever worker asked first."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    there = shared / name
    with alone(shared / f"{name}.lock"):
        if not there.exists():
            made = factory.mktemp(name)
            make(made)
            made.rename(there)
    return there
