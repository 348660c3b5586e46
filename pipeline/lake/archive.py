"""Moves archived messages from the outbox into the lake (S6), each exactly once.

A copy is identified by its number in the outbox, its message and its time. It leaves the outbox once the lake has it on
disk. Before reading, a run looks for copies that the lake already has, in the files whose statistics overlap: on an
ordinary run there are none; after a run that was killed between its two steps, they only need to leave the outbox.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, DateType, LongType, StringType, StructField, StructType

from mediator.errors import SetupError, UnavailableError
from mediator.mailboxes.ports import Copy
from mediator.ops.units import format_count
from pipeline.lake import ARCHIVE as ARCHIVE_TABLE
from pipeline.lake import spark_path, table_path
from pipeline.lake.delta import LakeTable
from pipeline.lake.folder import check_lake, lock_lake
from pipeline.lake.outbox import SEQ, OutboxRange, newest_seq, read_copies, read_identities, split_outbox
from pipeline.lake.sealing import Key, Opener, Sealer
from pipeline.progress import ProgressCallback, no_progress
from pipeline.source.options import ReadOptions
from pipeline.source.schema import MESSAGES

ARCHIVE = StructType(
    [
        *MESSAGES.fields,
        StructField(SEQ, LongType()),
        StructField("key_id", StringType()),
        StructField("sealed_headers", BinaryType()),
        StructField("date", DateType()),
    ]
)
"""An archived message. ``date`` is the day of ``created_at`` in UTC.

``key_id`` is null if the message is not sealed. Otherwise it names the key that opens ``payload`` and
``sealed_headers`` (the headers as JSON), and ``headers`` is null.
"""
PARTITION = "date"
OPENED = StructType([field for field in ARCHIVE.fields if field.name != "sealed_headers"])
_SOURCE = "outbox"
_PLAIN = StructType([field for field in ARCHIVE.fields if field.name != PARTITION])
_MAP = pa.map_(pa.string(), pa.string())

RemoveCopies = Callable[[Sequence[Copy]], object]
"""Removes copies from the outbox."""


@dataclass(slots=True)
class ArchiveResult:
    """What a run of ``archive`` did."""

    messages: int = 0
    """Messages added to the lake."""
    found: int = 0
    """Messages that a killed run had added already; they left the outbox now."""

    def lines(self) -> Iterator[str]:
        """Yield the result as lines for people."""
        yield f"{format_count(self.messages, 'message')} archived"
        if self.found:
            yield f"{self.found:,} more were in the archive already, and left the outbox"


def archive(
    spark: SparkSession,
    place: ReadOptions,
    lake: Path,
    key: Key | None,
    remove: RemoveCopies,
    on_progress: ProgressCallback = no_progress,
) -> ArchiveResult:
    """Move what is in the outbox now into the table ``archive``; create the lake if needed.

    ``place`` locates the store, ``key`` seals payloads and headers. Raises :class:`BadRequestError` when the store
    cannot be read; :class:`SetupError` when the folder is not a lake, or is sealed and ``key`` is missing;
    :class:`UnavailableError` when another process works on the lake, it cannot be written, the store goes away, or
    removed copies are still there; and what ``remove`` raises. Nothing is lost: the next run continues.
    """
    with lock_lake(lake, create=True):
        archived = LakeTable(table_path(lake, ARCHIVE_TABLE), ARCHIVE, PARTITION)
        archived.sweep()
        if key is None and any(file["max.key_id"] is not None for file in archived.files("key_id")):
            raise SetupError(f"{archived.path}: the archive is sealed; pass --key-file, or archive into another lake")
        summary = ArchiveResult()
        until = newest_seq(place)
        before: list[Copy] = []
        while until is not None and (waiting := split_outbox(place, until)):
            on_progress("messages", summary.messages, summary.messages + until - waiting[0].first + 1)
            there = _there(archived, place, OutboxRange(waiting[0].first, waiting[-1].last))
            if there:
                if there == before:
                    raise UnavailableError(
                        "removed messages are still in the outbox: do the settings name the service's store?"
                    )
                remove(there)
                summary.found += len(there)
                before = there
                continue
            version = archived.version
            number = archived.read_up_to(_SOURCE) + 1
            rows = _rows(spark, place, waiting, key)
            summary.messages += archived.append(rows, f"{number:020d}-{_SOURCE}", {_SOURCE: number})
            # What was committed, not what was requested: PostgreSQL may show a number after a higher one.
            remove(_copies(archived.added_since(version) or []))
        return summary


def _there(archived: LakeTable, place: ReadOptions, span: OutboxRange) -> list[Copy]:
    """Return which copies of a range the lake already has."""
    bounds = f"min.{SEQ}", f"max.{SEQ}"
    files = [
        file["path"]
        for file in archived.files(SEQ)
        if None in (file[bounds[0]], file[bounds[1]])
        or (file[bounds[0]] <= span.last and file[bounds[1]] >= span.first)
    ]
    if not files:
        return []
    known = set(_copies(files, (ds.field(SEQ) >= span.first) & (ds.field(SEQ) <= span.last)))
    return [copy for copy in _named(read_identities(place, span)) if copy in known]


def _copies(files: Sequence[str], wanted: ds.Expression | None = None) -> list[Copy]:
    """Return the copies that files of the lake hold."""
    if not files:
        return []
    columns = {name: ds.field(name) for name in (SEQ, *Copy._fields[1:])}
    columns["created_at"] = columns["created_at"].cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
    return _named(ds.dataset(files, format="parquet").to_table(columns=columns, filter=wanted))


def _named(rows: Any) -> list[Copy]:
    return [Copy(*row) for row in zip(*(column.to_pylist() for column in rows.columns), strict=True)]


def _rows(spark: SparkSession, place: ReadOptions, waiting: Sequence[OutboxRange], key: Key | None) -> DataFrame:
    """Return the copies of the ranges as :data:`ARCHIVE`, one task for each range."""
    numbers = spark.range(0, len(waiting), 1, len(waiting))
    return numbers.mapInArrow(partial(_read, place, tuple(waiting), key), ARCHIVE)


def _read(
    place: ReadOptions, waiting: Sequence[OutboxRange], key: Key | None, numbers: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    sealer = None if key is None else Sealer(key)
    schema = to_arrow_schema(ARCHIVE, timezone="UTC")
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            for rows in read_copies(place, waiting[number]):
                columns = {name: rows.column(name) for name in rows.schema.names}
                columns["key_id"] = columns["sealed_headers"] = pa.nulls(rows.num_rows)
                columns[PARTITION] = columns["created_at"].cast(pa.timestamp("us")).cast(pa.date32())
                if key is not None and sealer is not None:
                    columns |= _sealed(columns, key, sealer)
                yield pa.RecordBatch.from_arrays(
                    [columns[field.name].cast(field.type) for field in schema], schema=schema
                )


def _sealed(columns: dict[str, Any], key: Key, sealer: Sealer) -> dict[str, Any]:
    numbers, ids, headers, payloads = (
        columns[name].to_pylist() for name in ("mailbox_no", "msg_id", "headers", "payload")
    )
    messages = list(zip(numbers, ids, strict=True))
    encoded = [orjson.dumps(dict(each)) for each in headers]
    return {
        "payload": pa.array(
            [sealer.seal(data, "payload", *name) for data, name in zip(payloads, messages, strict=True)], pa.binary()
        ),
        "sealed_headers": pa.array(
            [sealer.seal(data, "headers", *name) for data, name in zip(encoded, messages, strict=True)], pa.binary()
        ),
        "headers": pa.nulls(len(messages), _MAP),
        "key_id": pa.repeat(pa.scalar(key.id), len(messages)),
    }


def read_stored(spark: SparkSession, lake: Path) -> DataFrame:
    """Return the archive's rows as stored, sealed or not (:data:`ARCHIVE`); empty if nothing was archived yet.

    Raises :class:`SetupError` when the folder is not a lake, or a newer version wrote the table.
    """
    check_lake(lake)
    path = table_path(lake, ARCHIVE_TABLE)
    files = (
        [file["path"] for file in LakeTable(path, ARCHIVE, PARTITION).files()] if (path / "_delta_log").exists() else []
    )
    if not files:
        return spark.createDataFrame([], ARCHIVE)
    # The day is in the names of folders, which Spark and deltalake write differently.
    rows = spark.read.schema(_PLAIN).parquet(*map(spark_path, files))
    return rows.selectExpr("*", f"to_date(created_at) AS {PARTITION}")


def unseal(rows: DataFrame, keys: Sequence[Key]) -> DataFrame:
    """Return rows of :func:`read_stored` with payloads and headers unsealed, as :data:`OPENED`.

    A task that finds a row sealed with another key fails with a :class:`SetupError` that names the key.
    """
    return rows.select(*ARCHIVE.names).mapInArrow(partial(_open, tuple(keys)), OPENED)


def read_archive(spark: SparkSession, lake: Path, keys: Sequence[Key] = ()) -> DataFrame:
    """Return the archived messages, unsealed, as :data:`OPENED`; see :func:`read_stored` and :func:`unseal`."""
    return unseal(read_stored(spark, lake), keys)


def _open(keys: Sequence[Key], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    opener = Opener(keys)
    schema = to_arrow_schema(OPENED, timezone="UTC")
    for rows in batches:
        columns = {name: rows.column(name) for name in rows.schema.names}
        if columns["key_id"].null_count < rows.num_rows:
            columns |= _unsealed(columns, opener)
        yield pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in schema], schema=schema)


def _unsealed(columns: dict[str, Any], opener: Opener) -> dict[str, Any]:
    names = ("key_id", "mailbox_no", "msg_id", "payload", "headers", "sealed_headers")
    payloads, headers = [], []
    for key_id, number, msg_id, payload, plain, sealed in zip(
        *(columns[name].to_pylist() for name in names), strict=True
    ):
        if key_id is None:
            payloads.append(payload)
            headers.append(plain)
        else:
            payloads.append(opener.open(key_id, payload, "payload", number, msg_id))
            headers.append(list(orjson.loads(opener.open(key_id, sealed, "headers", number, msg_id)).items()))
    return {"payload": pa.array(payloads, pa.binary()), "headers": pa.array(headers, _MAP)}
