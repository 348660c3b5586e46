"""A run of a pipeline command, as it is kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

KEPT = 1000
"""The newest runs are kept, older ones are forgotten as new ones begin."""

RUN_VARIABLE = "MEDIATOR_RUN"
"""The environment variable that tells a child of the service the number of the run that was begun for it."""

Numbers = Mapping[str, int | float]
"""What a run counted, by a word: rows, files, …"""


class Outcome(StrEnum):
    """How a run stands."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """It ended by itself, with an error."""
    KILLED = "killed"
    """It was ended, or its process has gone without a word."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that begins; made by :func:`mediator.runs.recording.new_run`, which bounds it and leaves secrets out."""

    command: str
    arguments: tuple[str, ...]
    instance: str
    """The service whose data it works on."""
    process: str
    """The process it cannot outlive, named so that no later one has the same name."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended; made by :func:`mediator.runs.recording.ending`."""

    outcome: Outcome
    numbers: Numbers
    error: str
    """One line; empty when there was none."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run. Times are milliseconds since the epoch."""

    no: int
    command: str
    arguments: tuple[str, ...]
    instance: str
    process: str
    started_at: int
    ended_at: int | None
    """None while it runs, and for ever when its process went without a word."""
    outcome: Outcome
    numbers: Numbers
    error: str
