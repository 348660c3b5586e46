"""CPU time and memory of processes, as Linux tells them in /proc."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


def cpu_seconds(pid: int | Sequence[int], *, alone: bool = False) -> float:
    """Return the CPU seconds of processes, and, except ``alone``, of all their descendants, ended ones included."""
    pids = [pid] if isinstance(pid, int) else pid
    return sum(_cpu_seconds(one, alone) for one in pids)


def _cpu_seconds(pid: int, alone: bool) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, ended = (sum(map(int, fields[at : at + 2])) / os.sysconf("SC_CLK_TCK") for at in (11, 13))
    # In nanoseconds instead of hundredths of a second, but without threads that have ended.
    tasks = Path(f"/proc/{pid}/task").iterdir()
    own = max(own, sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9)
    return own if alone else own + ended + sum(_cpu_seconds_of_child(child) for child in children(pid))


def _cpu_seconds_of_child(pid: int) -> float:
    # It may have ended since it was listed.
    with suppress(FileNotFoundError, ProcessLookupError):
        return _cpu_seconds(pid, False)
    return 0.0


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process without its children, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    return 0.0
