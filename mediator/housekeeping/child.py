"""Runs a program as a child that yields to the service: on one core, low in priority, bounded in time and words."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

import mediator.leash
from mediator.errors import SetupError

NICE: Final = 10
"""How much lower than the service's the child's priority is."""
GRACE_SECONDS: Final = 5.0
"""Between SIGTERM and SIGKILL; Spark takes its scratch files away meanwhile."""
MAX_LINES: Final = 200
"""Lines of one child that reach the log."""
MAX_LINE: Final = 500
"""Bytes of one line."""

_LEASH: Final = Path(mediator.leash.__file__)
_TAIL: Final = 20
_log = structlog.get_logger("pipeline")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended."""

    code: int
    """Below 0: the signal that ended it."""
    late: bool
    """Whether it was ended because its time was over."""
    said: Sequence[str]
    """Its last lines."""


async def run_child(command: Sequence[str], environment: Mapping[str, str], within: float) -> Ended:
    """Run a program to its end, ``within`` seconds at most: then SIGTERM ends it, and SIGKILL if that does not.

    Cancelled, it ends the child in the same way. The first of ``command`` is the program's path. What the child starts
    is ended with it, unless it left its process group. Call it on a thread that lasts as long as the service: the
    kernel ties the child to that. Raises :class:`SetupError` when it cannot be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _LEASH, str(os.getpid())),
            *command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=environment,
            # A Ctrl-C in the terminal is for the service, which ends the child.
            start_new_session=True,
        )
    except OSError as error:
        raise SetupError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    with contextlib.suppress(ProcessLookupError):
        give_way(process.pid)
    said: deque[str] = deque(maxlen=_TAIL)
    assert process.stdout is not None
    listening = asyncio.create_task(_listen(process.stdout, said), name="pipeline log")
    late = False
    try:
        async with asyncio.timeout(within):
            await process.wait()
    except TimeoutError:
        late = True
    finally:
        await _end(process, listening)
    assert process.returncode is not None
    return Ended(process.returncode, late, tuple(said))


def give_way(pid: int) -> None:
    """Have a process yield to this one, before it has threads, which inherit it."""
    os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE))
    if sys.platform == "linux":
        # With all cores Spark is hardly faster, and whoever waits for a SEND waits twice as long.
        os.sched_setaffinity(pid, {max(os.sched_getaffinity(0))})


async def _end(process: Process, listening: asyncio.Task[None]) -> None:
    """End what still runs, politely first; a JVM outlives for a moment who started it, and holds the pipe so long."""
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
    await asyncio.wait({listening}, timeout=GRACE_SECONDS)
    if process.returncode is None or not listening.done():
        _signal(process, signal.SIGKILL)
    await process.wait()
    # Who left the group may hold the pipe for ever.
    await asyncio.wait({listening}, timeout=GRACE_SECONDS)
    listening.cancel()


def _signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def _listen(stream: asyncio.StreamReader, said: deque[str]) -> None:
    """Pass on what the child says until it ends, whatever the logger does: a full pipe would stop the child."""
    rest, count = b"", 0
    while chunk := await stream.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[:MAX_LINE]
        for line in lines:
            count += _note(line, said, quiet=count >= MAX_LINES)
    count += _note(rest, said, quiet=count >= MAX_LINES)
    if count > MAX_LINES:
        _log.info("the pipeline said more", lines=count - MAX_LINES)


def _note(line: bytes, said: deque[str], *, quiet: bool) -> int:
    text = line[:MAX_LINE].decode(errors="replace").strip()
    if text:
        said.append(text)
        if not quiet:
            with contextlib.suppress(Exception):
                _log.info("the pipeline says", text=text)
    return 1 if text else 0
