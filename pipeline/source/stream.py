"""Streams of the ``mq9`` source: which one the options ask for, and the options both understand."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import orjson
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError
from pipeline.source.options import JOURNAL_STREAM, named_alike

Offset: TypeAlias = dict[str, Any]
"""What Spark keeps in its checkpoint, as JSON."""

EARLIEST = "earliest"
LATEST = "latest"
MAX_ROWS = 2**53


def stream_reader(options: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    """Make the reader of ``readStream.format("mq9")``; :class:`BadRequestError` names a wrong option.

    With ``group`` it is a consumer group, with ``journal`` it follows the journal in that folder, else mailboxes.
    """
    if options.get("group"):
        from pipeline.source.group_stream import GroupStream

        return GroupStream(options, schema)
    if options.get("journal"):
        from pipeline.source.journal_stream import JournalStream

        named_alike(options, JOURNAL_STREAM)
        skip = _one_of(options, "badLines", ("fail", "skip")) == "skip"
        return JournalStream(Path(options["journal"]), schema, Following.of(options, EARLIEST), skip_bad=skip)
    from pipeline.source.mailbox_stream import MailboxStream

    return MailboxStream(options, schema, Following.of(options, LATEST))


@dataclass(frozen=True, slots=True)
class Following:
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
            most=_most(options.get("maxOffsetsPerTrigger")),
            strict=_one_of(options, "failOnDataLoss", ("true", "false")) == "true",
        )

    @property
    def limit(self) -> ReadLimit:
        """What Spark hands back with each question for the next batch."""
        return ReadAllAvailable() if self.most is None else ReadMaxRows(self.most)


def rows_of(limit: ReadLimit) -> int | None:
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


def _most(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and 0 < int(text) <= MAX_ROWS):
        raise BadRequestError("maxOffsetsPerTrigger", f'expected a whole number above 0, got "{text[:200]}"')
    return int(text)


def _one_of(options: Mapping[str, str], name: str, words: tuple[str, str]) -> str:
    """Return which word an option says; the first is the default."""
    word = (options.get(name) or words[0]).lower()
    if word not in words:
        raise BadRequestError(name, f'expected {words[0]} or {words[1]}, got "{word[:200]}"')
    return word
