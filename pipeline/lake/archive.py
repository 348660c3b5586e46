"""From the outbox into the lake (S6): each message once, and out of the outbox when the lake has it on the disk.

A copy is known again by its number in the outbox, its message and its time. Before copies are read, those files of the
lake are asked whose statistics say they may have some of them: on ordinary runs none, after a run that was killed
between its two steps those it wrote. What the lake has then only has to leave the outbox.
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
from mediator.operators.spans import show_count
from pipeline.lake import ARCHIVE as ARCHIVE_TABLE
from pipeline.lake import readable, table
from pipeline.lake.delta import Table
from pipeline.lake.folder import check, held
from pipeline.lake.outbox import SEQ, Piece, names, newest, pieces, read
from pipeline.lake.sealing import Key, Opener, Sealer
from pipeline.source.options import Options
from pipeline.source.schema import MESSAGES
from pipeline.telling import Told, to_nobody

ARCHIVE = StructType(
    [
        *MESSAGES.fields,
        StructField(SEQ, LongType()),
        StructField("key_id", StringType()),
        StructField("sealed_headers", BinaryType()),
        StructField("date", DateType()),
    ]
)
"""A message that was archived. ``date`` is the day of ``created_at`` in UTC.

``key_id`` is null where nothing is sealed. Else it names the key that opens ``payload`` and ``sealed_headers``, which
has the headers as JSON, and ``headers`` is null.
"""
PARTITION = "date"
OPENED = StructType([field for field in ARCHIVE.fields if field.name != "sealed_headers"])
_SOURCE = "outbox"
_PLAIN = StructType([field for field in ARCHIVE.fields if field.name != PARTITION])
_MAP = pa.map_(pa.string(), pa.string())

Remove = Callable[[Sequence[Copy]], object]
"""Takes copies out of the outbox."""


@dataclass(slots=True)
class Summary:
    """What a run did."""

    messages: int = 0
    """Added to the lake."""
    found: int = 0
    """Messages that the lake had, of a run that was killed; they left the outbox."""

    def lines(self) -> Iterator[str]:
        """Say it to people."""
        yield f"{show_count(self.messages, 'message')} archived"
        if self.found:
            yield f"{self.found:,} more were in the archive already, and left the outbox"


def archive(
    spark: SparkSession, place: Options, lake: Path, key: Key | None, remove: Remove, told: Told = to_nobody
) -> Summary:
    """Bring what waits in the outbox now into the table ``archive``; make the lake if needed.

    ``place`` says where the store is, ``key`` seals payloads and headers. Raises :class:`BadRequestError` when the
    store cannot be read, :class:`SetupError` when the folder is no lake, or is sealed and ``key`` was forgotten,
    :class:`UnavailableError` when another works on it, when it cannot be written, the store goes away, or what
    ``remove`` took out of it is still there, and what ``remove`` raises. Nothing is lost then; the next run goes on.
    """
    with held(lake, create=True):
        archived = Table(table(lake, ARCHIVE_TABLE), ARCHIVE, PARTITION)
        archived.sweep()
        if key is None and any(file["max.key_id"] is not None for file in archived.files("key_id")):
            raise SetupError(f"{archived.path}: it is sealed; give the file of its keys, or archive into another lake")
        summary = Summary()
        until = newest(place)
        before: list[Copy] = []
        while until is not None and (waiting := pieces(place, until)):
            told("messages", summary.messages, summary.messages + until - waiting[0].first + 1)
            there = _there(archived, place, Piece(waiting[0].first, waiting[-1].last))
            if there:
                if there == before:
                    raise UnavailableError(
                        "the outbox keeps what was taken out of it: is the store that the settings name the service's?"
                    )
                remove(there)
                summary.found += len(there)
                before = there
                continue
            version = archived.version
            number = archived.read_up_to(_SOURCE) + 1
            rows = _rows(spark, place, waiting, key)
            summary.messages += archived.append(rows, f"{number:020d}-{_SOURCE}", {_SOURCE: number})
            # Not what was asked for: PostgreSQL shows some numbers later than higher ones.
            remove(_copies(archived.added_since(version) or []))
        return summary


def _there(archived: Table, place: Options, span: Piece) -> list[Copy]:
    """Return which copies of a span the lake has."""
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
    return [copy for copy in _named(names(place, span)) if copy in known]


def _copies(files: Sequence[str], wanted: ds.Expression | None = None) -> list[Copy]:
    """Return what files of the lake have; where another archive was quicker, a commit brought none."""
    if not files:
        return []
    columns = {name: ds.field(name) for name in (SEQ, *Copy._fields[1:])}
    columns["created_at"] = columns["created_at"].cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
    return _named(ds.dataset(files, format="parquet").to_table(columns=columns, filter=wanted))


def _named(rows: Any) -> list[Copy]:
    return [Copy(*row) for row in zip(*(column.to_pylist() for column in rows.columns), strict=True)]


def _rows(spark: SparkSession, place: Options, waiting: Sequence[Piece], key: Key | None) -> DataFrame:
    """Return the copies of pieces, each piece read by a task, as :data:`ARCHIVE`."""
    numbers = spark.range(0, len(waiting), 1, len(waiting))
    return numbers.mapInArrow(partial(_read, place, tuple(waiting), key), ARCHIVE)


def _read(
    place: Options, waiting: Sequence[Piece], key: Key | None, numbers: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    sealer = None if key is None else Sealer(key)
    schema = to_arrow_schema(ARCHIVE, timezone="UTC")
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            for rows in read(place, waiting[number]):
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
    told = [orjson.dumps(dict(each)) for each in headers]
    return {
        "payload": pa.array(
            [sealer.seal(data, "payload", *name) for data, name in zip(payloads, messages, strict=True)], pa.binary()
        ),
        "sealed_headers": pa.array(
            [sealer.seal(data, "headers", *name) for data, name in zip(told, messages, strict=True)], pa.binary()
        ),
        "headers": pa.nulls(len(messages), _MAP),
        "key_id": pa.repeat(pa.scalar(key.id), len(messages)),
    }


def kept(spark: SparkSession, lake: Path) -> DataFrame:
    """Return the archive's rows as they lie in the lake, as :data:`ARCHIVE`; none where nothing was archived yet.

    Raises :class:`SetupError` when the folder is no lake, or a newer program wrote the table.
    """
    check(lake)
    path = table(lake, ARCHIVE_TABLE)
    files = [file["path"] for file in Table(path, ARCHIVE, PARTITION).files()] if (path / "_delta_log").exists() else []
    if not files:
        return spark.createDataFrame([], ARCHIVE)
    # The day is in the names of folders, which differ between what was written and what was merged.
    rows = spark.read.schema(_PLAIN).parquet(*map(readable, files))
    return rows.selectExpr("*", f"to_date(created_at) AS {PARTITION}")


def opened(rows: DataFrame, keys: Sequence[Key]) -> DataFrame:
    """Return rows of :func:`kept` with payloads and headers as they were sent, as :data:`OPENED`.

    A task that meets a row sealed with another key fails with a :class:`SetupError` that names the key.
    """
    return rows.select(*ARCHIVE.names).mapInArrow(partial(_open, tuple(keys)), OPENED)


def archived(spark: SparkSession, lake: Path, keys: Sequence[Key] = ()) -> DataFrame:
    """Return what was archived, as :data:`OPENED`; see :func:`kept` and :func:`opened`."""
    return opened(kept(spark, lake), keys)


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
