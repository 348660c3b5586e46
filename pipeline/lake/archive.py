"""Moves archived messages from the outbox into the lake (S6), each exactly once; reads them there, and forgets them.

A copy is identified by its number in the outbox, its message and its time. It leaves the outbox once the lake has it on
disk. Before reading, a run looks for copies that the lake already has, in the files whose statistics overlap: on an
ordinary run there are none; after a run that was killed between its two steps, they only need to leave the outbox.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, DateType, LongType, StringType, StructField, StructType

from mediator.errors import SetupError, UnavailableError
from mediator.mailboxes.message import OutboxKey
from mediator.operate.units import format_count
from pipeline.lake import ARCHIVE as ARCHIVE_TABLE
from pipeline.lake import Place, ProgressCallback, no_progress
from pipeline.lake.delta import LakeTable, check_lake, lock_lake
from pipeline.lake.sealing import Key, Opener, Sealer
from pipeline.lake.storage import DataFiles, is_table, read_files
from pipeline.source.database import open_database
from pipeline.source.options import ReadOptions
from pipeline.source.schema import MESSAGES, NAMES, to_batch

TASK_BYTES = 16 << 20
"""Bytes of messages that a task holds in memory at a time, plus one message."""
TASK_MESSAGES = 10_000
COMMIT_BYTES = 256 << 20
"""Bytes of messages of one commit."""
COMMIT_MESSAGES = 100_000
"""Messages of one commit; a killed run repeats at most one commit."""
SEQ = "outbox_seq"
_OTHER_NAMES = tuple(name for name in NAMES if name not in ("tenant", "mailbox"))
_COLUMNS = "seq, mailbox_no, msg_id, lane, size, created_at, expire_at, tenant, address, payload"
# SQLite's driver infers a column's type from the first rows; from NULLs alone it infers a number.
_SQLITE_NULLABLE = ", ".join(f"COALESCE({name}, char(0)) AS {name}" for name in ("key", "tags", "recipient"))
_SQLITE_NULLABLE += ", COALESCE(extra, x'') AS extra"
_POSTGRES_NULLABLE = "key, tags, recipient, extra"
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
_MAP = pa.map_(pa.string(), pa.string())
RemoveCopies = Callable[[Sequence[OutboxKey]], object]
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


@dataclass(frozen=True, slots=True)
class OutboxRange:
    """Copies from one number to another, both included; numbers between them may be missing."""

    first: int
    last: int


def archive(
    spark: SparkSession,
    source: ReadOptions,
    lake: Place,
    key: Key | None,
    remove: RemoveCopies,
    on_progress: ProgressCallback = no_progress,
) -> ArchiveResult:
    """Move what is in the outbox now into the table ``archive``; create the lake if needed.

    ``source`` locates the store, ``key`` seals payloads and headers. Raises :class:`BadRequestError` when the store
    cannot be read; :class:`SetupError` when the folder is not a lake, or is sealed and ``key`` is missing;
    :class:`UnavailableError` when another process works on the lake, it cannot be written, the store goes away, or
    removed copies are still there; and what ``remove`` raises. Nothing is lost: the next run continues.
    """
    with lock_lake(lake, create=True):
        archived = LakeTable(lake / ARCHIVE_TABLE, ARCHIVE, PARTITION)
        archived.sweep()
        if key is None and any(file["max.key_id"] is not None for file in archived.files("key_id")):
            raise SetupError(f"{archived.path}: the archive is sealed; pass --key-file, or archive into another lake")
        summary = ArchiveResult()
        until = newest_seq(source)
        before: list[OutboxKey] = []
        while until is not None and (waiting := split_outbox(source, until)):
            on_progress("messages", summary.messages, summary.messages + until - waiting[0].first + 1)
            known = _archived_copies(archived, source, OutboxRange(waiting[0].first, waiting[-1].last))
            if known:
                if known == before:
                    raise UnavailableError(
                        "removed messages are still in the outbox: do the settings name the service's store?"
                    )
                remove(known)
                summary.found += len(known)
                before = known
                continue
            version = archived.version
            summary.messages += archived.append_next(_read_outbox(spark, source, waiting, key), "outbox")
            # What was committed, not what was requested: PostgreSQL may show a number after a higher one.
            added = archived.added_since(version)
            remove([] if added is None else _copies(added))
        return summary


def _archived_copies(archived: LakeTable, source: ReadOptions, span: OutboxRange) -> list[OutboxKey]:
    """Return which copies of a range the lake already has."""
    bounds = f"min.{SEQ}", f"max.{SEQ}"
    files = [
        file["name"]
        for file in archived.files(SEQ)
        if None in (file[bounds[0]], file[bounds[1]])
        or (file[bounds[0]] <= span.last and file[bounds[1]] >= span.first)
    ]
    if not files:
        return []
    archived_copies = set(
        _copies(archived.open_files(files), (ds.field(SEQ) >= span.first) & (ds.field(SEQ) <= span.last))
    )
    return [copy for copy in _to_copies(read_identities(source, span)) if copy in archived_copies]


def _copies(files: DataFiles, wanted: ds.Expression | None = None) -> list[OutboxKey]:
    """Return the copies that files of the lake hold."""
    if not files.names:
        return []
    columns = {name: ds.field(name) for name in (SEQ, *OutboxKey._fields[1:])}
    columns["created_at"] = columns["created_at"].cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
    return _to_copies(files.dataset().to_table(columns=columns, filter=wanted))


def _to_copies(rows: Any) -> list[OutboxKey]:
    return [OutboxKey(*row) for row in zip(*(column.to_pylist() for column in rows.columns), strict=True)]


def newest_seq(source: ReadOptions) -> int | None:
    """Return the highest number, None when the outbox is empty.

    Raises :class:`BadRequestError` and :class:`UnavailableError` as :func:`open_database`; as do all functions here.
    """
    with closing(open_database(source)) as database:
        last = database.table("SELECT MAX(seq) AS last FROM outbox").column("last")[0].as_py()
    return None if last is None else int(last)


def split_outbox(source: ReadOptions, until: int) -> list[OutboxRange]:
    """Return the ranges of the next commit, in order."""
    sql = f"SELECT seq, size FROM outbox WHERE seq <= {until} ORDER BY seq LIMIT {COMMIT_MESSAGES}"
    with closing(open_database(source)) as database:
        found = database.table(sql)
    seqs = found.column("seq").to_numpy()
    if not len(seqs):
        return []
    # A message belongs to the range in which it begins.
    begins = np.cumsum(found.column("size").to_numpy()) - found.column("size").to_numpy()
    count = max(1, int(np.searchsorted(begins, COMMIT_BYTES)))
    numbers = np.maximum(begins[:count] // TASK_BYTES, np.arange(count) // TASK_MESSAGES)
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), count]
    return [OutboxRange(int(seqs[begin]), int(seqs[end - 1])) for begin, end in pairwise(edges)]


def read_identities(source: ReadOptions, span: OutboxRange) -> Any:
    """Return the columns that identify the copies of a range: ``seq``, ``mailbox_no``, ``msg_id``, ``created_at``."""
    with closing(open_database(source)) as database:
        return database.table(f"SELECT seq, mailbox_no, msg_id, created_at FROM outbox WHERE {_within(span)}")


def read_copies(source: ReadOptions, copies: OutboxRange) -> Iterator[Any]:
    """Yield record batches of a range: the columns of a message as in the data source, and :data:`SEQ`."""
    nullable = _SQLITE_NULLABLE if source.database_url is None else _POSTGRES_NULLABLE
    with closing(open_database(source)) as database:
        found = database.table(f"SELECT {_COLUMNS}, {nullable} FROM outbox WHERE {_within(copies)} ORDER BY seq")
    for rows in found.to_batches():
        others = to_batch(rows, _OTHER_NAMES, "", {})
        tenant, mailbox = (rows.column(name).cast(pa.string()) for name in ("tenant", "address"))
        columns = [tenant, mailbox, *others.columns, rows.column("seq").cast(pa.int64())]
        yield pa.RecordBatch.from_arrays(columns, names=["tenant", "mailbox", *_OTHER_NAMES, SEQ])


def _within(span: OutboxRange) -> str:
    return f"seq BETWEEN {span.first} AND {span.last}"


def _read_outbox(
    spark: SparkSession, source: ReadOptions, waiting: Sequence[OutboxRange], key: Key | None
) -> DataFrame:
    """Return the copies of the ranges as :data:`ARCHIVE`, one task for each range."""
    numbers = spark.range(0, len(waiting), 1, len(waiting))
    return numbers.mapInArrow(partial(_read, source, tuple(waiting), key), ARCHIVE)


def _read(
    source: ReadOptions, waiting: Sequence[OutboxRange], key: Key | None, numbers: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    sealer = None if key is None else Sealer(key)
    schema = to_arrow_schema(ARCHIVE, timezone="UTC")
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            for rows in read_copies(source, waiting[number]):
                columns = {name: rows.column(name) for name in rows.schema.names}
                columns["key_id"] = columns["sealed_headers"] = pa.nulls(rows.num_rows)
                columns[PARTITION] = columns["created_at"].cast(pa.timestamp("us")).cast(pa.date32())
                if key is not None and sealer is not None:
                    columns |= _seal_columns(columns, key, sealer)
                yield pa.RecordBatch.from_arrays(
                    [columns[field.name].cast(field.type) for field in schema], schema=schema
                )


def _seal_columns(columns: dict[str, Any], key: Key, sealer: Sealer) -> dict[str, Any]:
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


def read_stored(
    spark: SparkSession, lake: Place, columns: Sequence[str] = ARCHIVE.names, where: ds.Expression | None = None
) -> DataFrame:
    """Return columns of the archive's rows as stored, sealed or not (:data:`ARCHIVE`).

    ``where`` has tasks skip rows that fail it. Raises :class:`SetupError` when the folder is not a lake, or a newer
    version wrote the table.
    """
    check_lake(lake)
    path = lake / ARCHIVE_TABLE
    files = LakeTable(path, ARCHIVE, PARTITION).all_files() if is_table(path) else DataFiles(path, ())
    stored = StructType([ARCHIVE[name] for name in columns if name != PARTITION])
    rows = read_files(spark, stored, files, where)
    # The day is not in the files.
    return rows.withColumn(PARTITION, F.to_date("created_at")) if PARTITION in columns else rows


def unseal(rows: DataFrame, keys: Sequence[Key]) -> DataFrame:
    """Return rows of :func:`read_stored` with payloads and headers unsealed, as :data:`OPENED`.

    A task that finds a row sealed with another key fails with a :class:`SetupError` that names the key.
    """
    return rows.select(*ARCHIVE.names).mapInArrow(partial(_open, tuple(keys)), OPENED)


def read_archive(spark: SparkSession, lake: Place, keys: Sequence[Key] = ()) -> DataFrame:
    """Return the archived messages, unsealed, as :data:`OPENED`; see :func:`read_stored` and :func:`unseal`."""
    return unseal(read_stored(spark, lake), keys)


def _open(keys: Sequence[Key], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    opener = Opener(keys)
    schema = to_arrow_schema(OPENED, timezone="UTC")
    for rows in batches:
        columns = {name: rows.column(name) for name in rows.schema.names}
        if columns["key_id"].null_count < rows.num_rows:
            columns |= _unseal_columns(columns, opener)
        yield pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in schema], schema=schema)


def _unseal_columns(columns: dict[str, Any], opener: Opener) -> dict[str, Any]:
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


def forget(lake: Place, tenant: str, address: str) -> int:
    """Remove a mailbox's messages from the archive, and return how many there were; starts no Spark.

    The days that have such messages are rewritten without them. Former files are deleted, and so is the table's log,
    whose statistics name addresses: there is no time travel to an earlier version. Sealed messages need no key.
    Raises as :func:`pipeline.lake.delta.lock_lake`.
    """
    with lock_lake(lake):
        table = LakeTable(lake / ARCHIVE_TABLE, ARCHIVE, PARTITION)
        days: dict[str, list[str]] = {}
        for file in table.files():
            days.setdefault(str(file["partition"]), []).append(file["name"])
        its = (ds.field("tenant") == tenant) & (ds.field("mailbox") == address)
        removed = 0
        for day, names in days.items():
            count = table.open_files(names).dataset().count_rows(filter=its)
            if count:
                table.rewrite(day, names, lambda rows: rows.filter(~its))
                removed += count
        # Also where a former run was killed between its commits and this.
        table.drop_history()
        return removed
