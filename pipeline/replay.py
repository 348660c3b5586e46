"""Replays archived messages into one mailbox: lane by lane in their old order, each exactly once, even if killed.

A replay first writes a plan, the messages and their order, as a file in the lake. Then it sends them in chunks, small
enough that the mailbox remembers all dedup ids of a chunk (S3), and saves its progress beside the plan. After a killed
run, the next one with the same selection and target continues: it repeats the last chunk, whose duplicates the mailbox
drops.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from mediator.errors import BadRequestError
from mediator.mailboxes.bounds import MAX_HEADERS
from mediator.mailboxes.lanes import LANES
from mediator.ops.units import format_count
from pipeline.lake import spark_path
from pipeline.lake.archive import ARCHIVE, read_stored, unseal
from pipeline.lake.folder import check_lake, lock_folder, translate_errors
from pipeline.lake.replay_checkpoint import PLAN, ReplayCheckpoint, ReplayProgress
from pipeline.lake.sealing import Key, unknown_key
from pipeline.progress import ProgressCallback, no_progress
from pipeline.source.datasource import FORMAT, register
from pipeline.source.messages import SinkColumns

ORIGINAL_TIME = "mq9-original-time"
"""The header with the time of the archived message: Unix seconds, with milliseconds."""
CHUNK = 20_000
"""Messages that one step sends; a mailbox remembers five times as many."""

_NAME = ("mailbox_no", "msg_id", "created_at")
_MESSAGE = ("payload", "lane", "key", "tags", "reply_to", "headers")
_TTL = StructField("ttl", LongType())
_OUTGOING = StructType(
    [
        *(ARCHIVE[name] for name in _MESSAGE),
        StructField("dedup_id", StringType()),
        StructField("refused", StringType()),
    ]
)
_MAP = pa.map_(pa.string(), pa.string())
_WORDS = [lane.name.lower() for lane in LANES]


@dataclass(frozen=True, slots=True)
class ReplaySelection:
    """Which messages of the archive. Times are milliseconds since the epoch, of becoming visible."""

    tenant: str
    mailboxes: tuple[str, ...]
    since: int | None = None
    until: int | None = None
    """The first time that is not wanted any more."""
    tags: tuple[str, ...] = ()
    """A message has all of them (Q1)."""
    ids: tuple[int, ...] = ()
    """The msg_ids; none: all."""


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """Where they go: a mailbox, and the options of the sink that say how it is reached."""

    address: str
    options: tuple[tuple[str, str], ...]
    ttl: int | None = None
    """Seconds; None: they do not expire."""


@dataclass(frozen=True, slots=True)
class ReplayPreview:
    """What would be sent."""

    lanes: dict[str, int]
    replaced: int

    def lines(self) -> Iterator[str]:
        """Say it to people."""
        for lane, count in self.lanes.items():
            yield f"{count:,} {lane}"
        messages = format_count(sum(self.lanes.values()), "message")
        yield f"{messages} would be sent, {self.replaced:,} older ones of their keys not"


def preview(spark: SparkSession, lake: Path, wanted: ReplaySelection) -> ReplayPreview:
    """Say what a replay would send, without sending; raises as :func:`pipeline.lake.archive.read_stored`."""
    found = _chosen(read_stored(spark, lake), wanted)
    lanes = {row["lane"]: row["count"] for row in plan(found).groupBy("lane").count().collect()}
    return ReplayPreview({word: lanes[word] for word in _WORDS if word in lanes}, found.count() - sum(lanes.values()))


def replay(
    spark: SparkSession,
    lake: Path,
    wanted: ReplaySelection,
    target: ReplayTarget,
    keys: Sequence[Key],
    on_progress: ProgressCallback = no_progress,
) -> ReplayProgress:
    """Send what is wanted and return what was done, by runs that were killed too.

    Raises :class:`SetupError` for a folder that is no lake and for messages that are sealed with a key that is not
    there, and :class:`UnavailableError` when the same replay runs already, or the lake cannot be written. What the sink
    raises ends a task, and with it the run; the next one goes on.
    """
    check_lake(lake)
    register(spark)
    who = next((value for name, value in target.options if name in {"nats.user", "nats.nkey", "nats.creds"}), None)
    replays = ReplayCheckpoint(lake, [wanted, target.address, target.ttl, who])
    with translate_errors(lake), lock_folder(replays.folder, f"the replay in {replays.folder}"):
        progress = replays.progress()
        if progress is None:
            on_progress("plan", 0, None)
            progress = _begin(spark, lake, wanted, replays)
        path = replays.folder / PLAN
        for unknown in _sealed_with(path) - {key.id for key in keys}:
            raise unknown_key(unknown)
        while progress.done < progress.messages:
            on_progress("messages", progress.done, progress.messages)
            progress = _send(spark, lake, path, progress, target, keys)
            replays.keep(progress)
        on_progress("messages", progress.done, progress.messages)
        replays.forget()
        return progress


def plan(rows: DataFrame) -> DataFrame:
    """Return the names of messages in the order in which they are to be sent, from ``no`` 0 on, with lane and key id.

    Of several with one key only the newest is there: an older one in a lower lane, sent later, would replace it (S2).
    """
    plain = F.col("key").isNull()
    of_key = Window.partitionBy("key", *(F.when(plain, F.col(name)) for name in _NAME)).orderBy(
        *(F.desc(name) for name in ("created_at", "mailbox_no", "msg_id"))
    )
    rank = F.array_position(F.array(*map(F.lit, _WORDS)), F.col("lane"))
    newest = rows.select(*_NAME, "lane", "key", "key_id", F.row_number().over(of_key).alias("age")).where("age = 1")
    order = Window.orderBy(rank, *_NAME)
    number = F.row_number().over(order).cast("bigint") - 1
    return newest.select(number.alias("no"), *_NAME, "lane", "key_id")


def _plan_schema() -> StructType:
    return StructType([StructField("no", LongType()), *(ARCHIVE[name] for name in (*_NAME, "lane", "key_id"))])


def _chosen(rows: DataFrame, wanted: ReplaySelection) -> DataFrame:
    found = rows.where((F.col("tenant") == wanted.tenant) & F.col("mailbox").isin(list(wanted.mailboxes)))
    if wanted.since is not None:
        found = found.where(F.col("created_at") >= F.timestamp_millis(F.lit(wanted.since)))
    if wanted.until is not None:
        found = found.where(F.col("created_at") < F.timestamp_millis(F.lit(wanted.until)))
    for tag in wanted.tags:
        found = found.where(F.array_contains("tags", tag))
    return found.where(F.col("msg_id").isin(list(wanted.ids))) if wanted.ids else found


def _begin(spark: SparkSession, lake: Path, wanted: ReplaySelection, replays: ReplayCheckpoint) -> ReplayProgress:
    found = _chosen(read_stored(spark, lake), wanted)
    path = replays.folder / PLAN
    plan(found).write.mode("overwrite").parquet(f"file:{path}")
    messages = ds.dataset(path, format="parquet").count_rows()
    progress = ReplayProgress(messages, replaced=found.count() - messages)
    replays.keep_plan(progress)
    return progress


def _sealed_with(path: Path) -> set[str]:
    """Return the ids of the keys that a plan needs."""
    batches = ds.dataset(path, format="parquet").to_batches(columns=["key_id"])
    return {key_id for batch in batches for key_id in batch.column(0).unique().drop_null().to_pylist()}


def _send(
    spark: SparkSession, lake: Path, path: Path, progress: ReplayProgress, target: ReplayTarget, keys: Sequence[Key]
) -> ReplayProgress:
    """Send the next chunk of a plan."""
    end = min(progress.done + CHUNK, progress.messages)
    ordered = picked(read_stored(spark, lake), path, progress.done, end).repartition(1).sortWithinPartitions("no")
    shaped = unseal(ordered, keys).mapInArrow(partial(_outgoing, target.address), _OUTGOING)
    if target.ttl is not None:
        shaped = shaped.withColumn(_TTL.name, F.lit(target.ttl).cast(_TTL.dataType))
    sent = Observation()
    counts = F.count(F.lit(1)).alias("rows"), F.count("refused").alias("refused"), F.min("refused").alias("example")
    outgoing = shaped.observe(sent, *counts).where("refused IS NULL").drop("refused")
    writer = outgoing.write.format(FORMAT).mode("append").option("address", target.address)
    writer.options(**dict(target.options)).save()
    return progress.after(end, int(sent.get["rows"]), int(sent.get["refused"]), sent.get["example"])


def picked(rows: DataFrame, path: Path, start: int, end: int) -> DataFrame:
    """Return the rows of the archive that a plan names from ``start`` on and before ``end``, with their ``no``."""
    columns = {name: ds.field(name) for name in _NAME}
    # As numbers: as dates of Python they would be those of this machine's zone.
    columns["created_at"] = columns["created_at"].cast(pa.timestamp("us")).cast(pa.int64())
    part = (ds.field("no") >= start) & (ds.field("no") < end)
    bounds = ds.dataset(path, format="parquet").to_table(columns=columns, filter=part)
    for name in _NAME:
        low, high = (F.lit(bound) for bound in pc.min_max(bounds[name]).as_py().values())
        if name == "created_at":
            low, high = F.timestamp_micros(low), F.timestamp_micros(high)
        # Said so that files without them are passed over.
        rows = rows.where(F.col(name).between(low, high))
    planned = rows.sparkSession.read.schema(_plan_schema()).parquet(spark_path(path))
    names = planned.where(F.col("no").between(start, end - 1)).select("no", *_NAME)
    return rows.join(F.broadcast(names), list(_NAME))


def _outgoing(address: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Shape messages for the sink; what NATS does not carry as it is, is refused in words instead of sent."""
    columns = SinkColumns.of(StructType(_OUTGOING.fields[:-1]), address)
    schema = to_arrow_schema(_OUTGOING, timezone="UTC")
    for batch in batches:
        for rows in (batch.slice(start, 512) for start in range(0, batch.num_rows, 512)):
            shaped = [_shaped(row, columns) for row in rows.select([*_MESSAGE, *_NAME, "mailbox"]).to_pylist()]
            yield pa.RecordBatch.from_pylist(shaped, schema=schema)


def _shaped(row: dict[str, Any], columns: SinkColumns) -> dict[str, Any]:
    at = round(row["created_at"].timestamp() * 1000)
    number, msg_id = row["mailbox_no"], row["msg_id"]
    message = {name: row[name] for name in _MESSAGE}
    headers = row["headers"]
    # One that was sent again before keeps its first time; one with all the headers there may be has no room for it.
    if len(headers) < MAX_HEADERS and all(name.lower() != ORIGINAL_TIME for name, _ in headers):
        message["headers"] = [*headers, (ORIGINAL_TIME, f"{at // 1000}.{at % 1000:03d}")]
    # The time tells apart what stores that count from the beginning again call the same.
    message["dedup_id"] = f"replay:{number}.{msg_id}.{at}"
    try:
        columns.message(message)
    except BadRequestError as error:
        return {**message, "refused": f"{row['mailbox']} {msg_id}: {error}"}
    return {**message, "refused": None}
