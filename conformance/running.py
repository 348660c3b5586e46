"""Runs checks one after the other, each in a session and a time of its own, and says what came of each."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from conformance.checks import CannotTryError, Check, CheckFailedError, NotOfferedError, Transcript

S = TypeVar("S")
CLEANUP_SECONDS = 15.0
"""What a session may take to remove what its check made."""


class Outcome(StrEnum):
    """What came of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_OFFERED = "not offered"
    """The mediator does not claim to speak the protocol."""
    SKIPPED = "skipped"
    """It could not be tried; the reason is said."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one check."""

    check: Check[Any]
    outcome: Outcome
    detail: str
    """Why, unless it passed."""
    milliseconds: int
    transcript: Sequence[dict[str, Any]]


async def run_checks(
    checks: Iterable[Check[S]],
    open_session: Callable[[Transcript], AbstractAsyncContextManager[S]],
    notify: Callable[[Result], None] = lambda _result: None,
) -> list[Result]:
    """Run the checks in order; ``notify`` is told of each result.

    ``open_session`` makes what a check is given, and on the way out removes what was made for it.
    """
    results = []
    for check in checks:
        result = await _run(check, open_session)
        notify(result)
        results.append(result)
    return results


async def _run(check: Check[S], open_session: Callable[[Transcript], AbstractAsyncContextManager[S]]) -> Result:
    transcript, began = Transcript(), time.monotonic()
    outcome, detail = Outcome.PASSED, ""
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(check.seconds) as limit:
                session = await stack.enter_async_context(open_session(transcript))
                await check.run(session)
        except NotOfferedError as error:
            outcome, detail = Outcome.NOT_OFFERED, str(error)
        except CannotTryError as error:
            outcome, detail = Outcome.SKIPPED, str(error)
        except CheckFailedError as error:
            outcome, detail = Outcome.FAILED, str(error)
        except Exception as error:
            # Whatever the peer did to make a client raise this is no answer as the sentence has it.
            late = isinstance(error, TimeoutError) and limit.expired()
            detail = f"did not end within {check.seconds:g} s" if late else f"{type(error).__name__}: {error}"
            outcome = Outcome.FAILED
        milliseconds = round((time.monotonic() - began) * 1000)
        try:
            async with asyncio.timeout(CLEANUP_SECONDS):
                await stack.aclose()
        except Exception as error:
            transcript.came("clean-up failed", f"{type(error).__name__}: {error}")
    return Result(check, outcome, detail, milliseconds, transcript.entries)
