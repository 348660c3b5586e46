"""Runs a program as a child with low priority, on one core, and with a time limit."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import mediator.system.leash

NICE: Final = 10
"""Added to the service's nice value."""
GRACE_SECONDS: Final = 5.0
"""Between SIGTERM and SIGKILL; Spark removes its scratch files in this time."""

_LEASH: Final = Path(mediator.system.leash.__file__)


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """How a child ended."""

    code: int
    """The exit code; negative: the signal that ended it."""
    timed_out: bool
    """Whether it was stopped because it exceeded its time limit."""

    @property
    def signal_name(self) -> str:
        """The signal that ended it; empty if none did."""
        return signal.Signals(-self.code).name if self.code < 0 else ""


async def run_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    within: float,
    read: Callable[[asyncio.StreamReader], Awaitable[None]],
    stdin: bytes = b"",
) -> ChildEnd:
    """Run a program for at most ``within`` seconds; then it gets SIGTERM, and SIGKILL if that does not end it.

    Cancelling stops the child in the same way. ``command`` begins with the program's path; ``read`` reads its output,
    errors included, to the end, since a full pipe would block it. The child's process group is stopped with it. Call
    this on a thread that lives as long as the service: the kernel ties the child to it. Raises :class:`OSError` when no
    process can be started.
    """
    process = await asyncio.create_subprocess_exec(
        # With all cores Spark is hardly faster, and a SEND takes twice as long.
        *(sys.executable, "-I", "-S", _LEASH, str(os.getpid()), "--low", str(NICE)),
        *command,
        stdin=PIPE if stdin else DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        # uvloop takes no other mapping.
        env=dict(environment),
        # A Ctrl-C in the terminal is for the service, which stops the child.
        start_new_session=True,
    )
    assert process.stdout is not None
    if process.stdin is not None:
        process.stdin.write(stdin)
        process.stdin.close()
    reading = asyncio.ensure_future(read(process.stdout))
    timed_out = False
    try:
        async with asyncio.timeout(within):
            await process.wait()
    except TimeoutError:
        timed_out = True
    finally:
        await _surely(asyncio.create_task(_end(process, reading)))
    assert process.returncode is not None
    return ChildEnd(process.returncode, timed_out)


async def _surely(ending: asyncio.Task[None]) -> None:
    """Wait for the end of a child, also when cancelled meanwhile: it may be asked for more than once."""
    cancelled = False
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


async def _end(process: Process, reading: asyncio.Future[None]) -> None:
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
