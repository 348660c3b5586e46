"""Runs a program as a child with low priority, on one core, with a time limit and a bounded log."""

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

import mediator.system.leash
from mediator.errors import SetupError

NICE: Final = 10
"""Added to the service's nice value."""
GRACE_SECONDS: Final = 5.0
"""Between SIGTERM and SIGKILL; Spark removes its scratch files in this time."""
MAX_LINES: Final = 200
"""Lines of one child that reach the log."""
MAX_LINE: Final = 500
"""Bytes of one line."""

_LEASH: Final = Path(mediator.system.leash.__file__)
_TAIL: Final = 20
_log = structlog.get_logger("pipeline")


@dataclass(frozen=True, slots=True)
class ChildResult:
    """How a child ended."""

    code: int
    """The exit code; negative: the signal that ended it."""
    timed_out: bool
    """Whether it was stopped because it exceeded its time limit."""
    last_lines: Sequence[str]
    """The last lines of its output."""


async def run_child(command: Sequence[str], environment: Mapping[str, str], within: float) -> ChildResult:
    """Run a program for at most ``within`` seconds; then it gets SIGTERM, and SIGKILL if that does not end it.

    Cancelling stops the child in the same way. ``command`` begins with the program's path. The child's process group
    is stopped with it. Call this on a thread that lives as long as the service: the kernel ties the child to it.
    Raises :class:`SetupError` when the program cannot be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            # With all cores Spark is hardly faster, and a SEND takes twice as long.
            *(sys.executable, "-I", "-S", _LEASH, str(os.getpid()), "--low", str(NICE)),
            *command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=environment,
            # A Ctrl-C in the terminal is for the service, which stops the child.
            start_new_session=True,
        )
    except OSError as error:
        raise SetupError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    last_lines: deque[str] = deque(maxlen=_TAIL)
    assert process.stdout is not None
    reading = asyncio.create_task(_read_output(process.stdout, last_lines), name="pipeline log")
    timed_out = False
    try:
        async with asyncio.timeout(within):
            await process.wait()
    except TimeoutError:
        timed_out = True
    finally:
        await _end(process, reading)
    assert process.returncode is not None
    return ChildResult(process.returncode, timed_out, tuple(last_lines))


async def _end(process: Process, reading: asyncio.Task[None]) -> None:
    """Stop what still runs, SIGTERM first; a JVM briefly outlives its parent and holds the pipe."""
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
    await asyncio.wait({reading}, timeout=GRACE_SECONDS)
    if process.returncode is None or not reading.done():
        _signal(process, signal.SIGKILL)
    await process.wait()
    # A process that left the group may hold the pipe forever.
    await asyncio.wait({reading}, timeout=GRACE_SECONDS)
    reading.cancel()


def _signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def _read_output(stream: asyncio.StreamReader, last_lines: deque[str]) -> None:
    """Log the child's output until it ends; always read on, since a full pipe would block the child."""
    rest, count = b"", 0
    while chunk := await stream.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[:MAX_LINE]
        for line in lines:
            count += _note(line, last_lines, quiet=count >= MAX_LINES)
    count += _note(rest, last_lines, quiet=count >= MAX_LINES)
    if count > MAX_LINES:
        _log.info("more output of the pipeline", lines=count - MAX_LINES)


def _note(line: bytes, last_lines: deque[str], *, quiet: bool) -> int:
    text = line[:MAX_LINE].decode(errors="replace").strip()
    if text:
        last_lines.append(text)
        if not quiet:
            with contextlib.suppress(Exception):
                _log.info("pipeline output", text=text)
    return 1 if text else 0
