"""Records the run of a pipeline command in the history. A history that cannot be written never fails the run."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from mediator.errors import BadRequestError
from mediator.ops.runs.records import RUN_VARIABLE, Outcome


class RunRecorder(Protocol):
    """The history of runs."""

    def begin(self, command: str, arguments: Sequence[str]) -> int:
        """Record a run that begins now, and return its number."""

    def end(self, no: int, outcome: Outcome, numbers: Mapping[str, int | float], error: str) -> None:
        """Record how a run ended."""


@contextmanager
def record_run(
    book: RunRecorder, command: str, arguments: Sequence[str], say: Callable[[str], None]
) -> Iterator[dict[str, int | float]]:
    """Record the body as a run; yields a dictionary for its figures (rows, files, …).

    An exception is recorded as the run's error and raised again. A child of the service ends the run that the service
    began for it. If the run cannot be recorded, ``say`` gets one line with the reason.
    """
    numbers: dict[str, int | float] = {}
    no = 0
    try:
        no = _begun() or book.begin(command, arguments)
    except Exception as error:
        say(f"this run is not recorded: {error}")
    outcome, why = Outcome.FAILED, ""
    try:
        yield numbers
        outcome = Outcome.SUCCEEDED
    except KeyboardInterrupt:
        outcome, why = Outcome.KILLED, "interrupted"
        raise
    except BaseException as error:
        why = str(error) or type(error).__name__
        raise
    finally:
        if no:
            _end(book, no, outcome, numbers, why, say)


def _end(
    book: RunRecorder,
    no: int,
    outcome: Outcome,
    numbers: Mapping[str, int | float],
    why: str,
    say: Callable[[str], None],
) -> None:
    try:
        try:
            book.end(no, outcome, numbers, why)
        except BadRequestError as error:
            say(f"the numbers of this run are not recorded: {error}")
            book.end(no, outcome, {}, why)
    except Exception as error:
        say(f"the end of this run is not recorded: {error}")


def _begun() -> int:
    """Return the run that the service began for this process; 0: none."""
    text = os.environ.get(RUN_VARIABLE, "")
    return int(text) if text.isascii() and text.isdigit() else 0
