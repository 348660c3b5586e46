"""The table of gaps: what the journal dropped before it was read, so that reports can say they are incomplete."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType, TimestampType

from mediator.ops.journal.segments import GAPS as GAPS_FILE
from pipeline.lake.delta import LakeTable

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
"""The fields of docs/journal.md with times as timestamps, and the line itself, which identifies the gap."""
UNREADABLE = "unreadable"
"""The ``why`` of a gap whose line is damaged: what is missing is unknown."""
_SOURCE = "gaps"


def ingest_gaps(spark: SparkSession, journal: Path, table: LakeTable) -> int:
    """Add the gaps that the table does not have yet; return how many."""
    path = journal / GAPS_FILE
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
    known = set(table.column("line")) if lines else set()
    new = [line for line in dict.fromkeys(lines) if line not in known]
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
