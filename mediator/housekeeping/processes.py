"""Names processes so that nobody else is ever called the same, and says which of them are gone."""

import os
from pathlib import Path

_PROC = Path("/proc")


def process_name(pid: int | None = None) -> str:
    """Return the name of a process, this one by default: boot, PID namespace, number and start; empty if it is gone."""
    return _name(os.getpid() if pid is None else pid)


def is_gone(name: str, *, ours: bool) -> bool:
    """Whether a process that was named once is no more.

    ``ours``: it belonged to this installation, so that it is gone when the machine or the container was started anew;
    of those elsewhere nothing is known, and they count as there.
    """
    place, here = name.split()[:2], _place()
    if place != here:
        return ours
    try:
        return _name(int(name.split()[2])) != name
    except (ValueError, IndexError):
        return ours


def _name(pid: int) -> str:
    try:
        # The name of the program stands in parentheses and may hold anything.
        state, *fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in ("Z", "X") else " ".join([*_place(), str(pid), fields[18]])


def _place() -> list[str]:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink(_PROC / "self/ns/pid")]
    except OSError:
        return ["unknown", "unknown"]
