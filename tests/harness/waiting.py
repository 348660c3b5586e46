"""Waiting for what no event tells of: another process, a file, a counter."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

PATIENCE = 40.0
"""Seconds until a test gives up; only one that fails waits so long."""
LOOK_EVERY = 0.005


async def until(
    condition: Callable[[], Awaitable[Any] | Any], within: float = PATIENCE, what: str = "", every: float = LOOK_EVERY
) -> Any:
    """Ask again, every so many seconds, until the answer is true, and return it; fail after ``within`` seconds."""
    end = time.monotonic() + within
    while True:
        answer = condition()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return answer
        assert time.monotonic() < end, f"not within {within:g} s: {what or condition}"
        await asyncio.sleep(every)


def block_until(condition: Callable[[], Any], within: float = PATIENCE, what: str = "") -> Any:
    """Do the same in a test without an event loop."""
    end = time.monotonic() + within
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {within:g} s: {what or condition}"
        time.sleep(LOOK_EVERY)
    return answer
