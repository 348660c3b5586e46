"""Options that streams of mailboxes and of the journal share: start, rows at once, whether lost data is an error."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import orjson
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from mediator.errors import BadRequestError, LostDataError
from pipeline.source.options import read_integer

Offset: TypeAlias = dict[str, Any]
"""What Spark keeps in its checkpoint, as JSON."""

EARLIEST = "earliest"
LATEST = "latest"
MAX_ROWS = 2**53

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a stream is followed, whatever it is a stream of."""

    starting: str | Offset
    """Where a new query begins: ``earliest``, ``latest`` or an offset. One with a checkpoint goes on there."""
    most: int | None
    """Rows of one batch, at most; None: all there are."""
    strict: bool
    """Whether rows that are gone before they were read end the query."""

    @classmethod
    def of(cls, options: Mapping[str, str], default: str) -> Self:
        """Read ``startingOffsets``, ``maxOffsetsPerTrigger`` and ``failOnDataLoss``."""
        return cls(
            starting=_starting(options.get("startingOffsets") or default),
            most=read_integer(options, "maxOffsetsPerTrigger", 1, MAX_ROWS),
            strict=one_of(options, "failOnDataLoss", ("true", "false")) == "true",
        )

    @property
    def limit(self) -> ReadLimit:
        """What Spark hands back with each question for the next batch."""
        return ReadAllAvailable() if self.most is None else ReadMaxRows(self.most)

    def report_lost(self, what: str) -> None:
        """Report that rows are gone: raise :class:`LostDataError`, or log it if the options allow that."""
        if self.strict:
            raise LostDataError(f"{what}; failOnDataLoss=false goes on without")
        log.warning("rows are gone that a stream was to read: %s", what)


def max_rows(limit: ReadLimit) -> int | None:
    """Return how many rows Spark wants at most, None for all."""
    return limit.max_rows if isinstance(limit, ReadMaxRows) else None


def _starting(text: str) -> str | Offset:
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    try:
        offset = orjson.loads(text)
    except ValueError:
        offset = None
    if not isinstance(offset, dict):
        raise BadRequestError("startingOffsets", f'expected earliest, latest or an offset as JSON, got "{text[:200]}"')
    return offset


def one_of(options: Mapping[str, str], name: str, words: tuple[str, str]) -> str:
    """Return the option's value, one of two words; the first is the default."""
    word = (options.get(name) or words[0]).lower()
    if word not in words:
        raise BadRequestError(name, f'expected {words[0]} or {words[1]}, got "{word[:200]}"')
    return word
