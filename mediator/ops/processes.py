"""Unique names of processes, to tell later whether a process is gone."""

import os
from pathlib import Path

_PROC = Path("/proc")


def process_name(pid: int | None = None) -> str:
    """Return a process's name (boot, PID namespace, PID, start time), of this one by default; empty if it is gone."""
    return _name(os.getpid() if pid is None else pid)


def is_gone(name: str, *, ours: bool) -> bool:
    """Whether a process with this name is gone.

    ``ours``: it belonged to this installation, so it is gone if the machine or the container was restarted. Processes
    elsewhere cannot be checked and count as running.
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
