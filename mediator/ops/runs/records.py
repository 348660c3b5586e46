"""A run of a pipeline command, as recorded."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

KEPT = 1000
"""Number of runs kept; older ones are removed as new ones begin."""

RUN_VARIABLE = "MEDIATOR_RUN"
"""The environment variable with the number of the run that the service began for its child."""

Numbers = Mapping[str, int | float]
"""Counts of a run by name: rows, files, …"""


class Outcome(StrEnum):
    """The state of a run."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """It ended by itself, with an error."""
    KILLED = "killed"
    """It was stopped, or its process disappeared."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that begins; made by ``new_run``, which bounds it and removes secrets."""

    command: str
    arguments: tuple[str, ...]
    instance: str
    """The service whose data it works on."""
    process: str
    """The unique name of the process that it cannot outlive."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended; made by :func:`mediator.ops.runs.rules.new_ending`."""

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
    """None while it runs, and if its process disappeared."""
    outcome: Outcome
    numbers: Numbers
    error: str
