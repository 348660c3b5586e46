"""What the journal dropped before it was read, as a table: reports over such a time are incomplete."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType, TimestampType

from mediator.segments import GAPS as GAPS_FILE
from pipeline.lake.delta import Table

GAPS = StructType(
    [
        StructField("at", TimestampType()),
        StructField("why", StringType()),
        StructField("segment", StringType()),
        StructField("seqs", MapType(StringType(), ArrayType(LongType()))),
        StructField("from", TimestampType()),
        StructField("to", TimestampType()),
        StructField("events", LongType()),
        StructField("bytes", LongType()),
        StructField("line", StringType()),
    ]
)
"""As in docs/journal.md, times as such, and the line itself, by which a gap is known again."""
UNREADABLE = "unreadable"
"""The ``why`` of a gap that the journal tells in a damaged line: nobody knows what is missing."""
_SOURCE = "gaps"


def ingest_gaps(spark: SparkSession, journal: Path, table: Table) -> int:
    """Add the gaps that the table does not have; return how many."""
    path = journal / GAPS_FILE
    told = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
    known = set(table.column("line")) if told else set()
    new = [line for line in dict.fromkeys(told) if line not in known]
    if new:
        number = table.read_up_to(_SOURCE) + 1
        rows = spark.createDataFrame([_row(line) for line in new], GAPS).coalesce(1)
        table.append(rows, f"{number:020d}-{_SOURCE}", {_SOURCE: number})
    return len(new)


def _row(line: str) -> tuple[Any, ...]:
    try:
        gap = orjson.loads(line)
        seqs = {str(name): [int(first), int(last)] for name, (first, last) in gap["seqs"].items()}
        numbers = (int(gap["events"]), int(gap["bytes"]))
        return (
            _moment(gap["at"]),
            str(gap["why"]),
            gap.get("segment"),
            seqs,
            _moment(gap["from"]),
            _moment(gap["to"]),
            *numbers,
            line,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return (None, UNREADABLE, None, None, None, None, None, None, line)


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
