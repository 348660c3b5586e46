"""Replays archived messages into one mailbox: lane by lane in their old order, each exactly once, even if killed.

A replay first writes a plan, the messages and their order, as a file in the lake. Then it sends them in chunks, small
enough that the mailbox remembers all dedup ids of a chunk (S3), and saves its progress beside the plan. After a killed
run, the next one with the same selection and target continues: it repeats the last chunk, whose duplicates the mailbox
drops.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any, Self

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from mediator.errors import BadRequestError, DamagedError, UnavailableError
from mediator.mailboxes.bounds import MAX_HEADERS
from mediator.mailboxes.lanes import LANES
from mediator.operate.units import format_count
from pipeline.lake import REPLAYS, Place, ProgressCallback, no_progress
from pipeline.lake.archive import ARCHIVE, read_stored, unseal
from pipeline.lake.delta import check_lake, check_present, lock_folder, translate_errors
from pipeline.lake.sealing import Key, unknown_key
from pipeline.lake.storage import DataFiles, open_filesystem, read_file, read_files, write_file, write_rows
from pipeline.source.datasource import FORMAT, register
from pipeline.source.sink import SinkColumns

PLAN = "plan"
_PROGRESS = "progress.json"
ORIGINAL_TIME = "mq9-original-time"
"""The header with the time of the archived message: Unix seconds, with milliseconds."""
CHUNK = 20_000
"""Messages that one step sends; a mailbox remembers five times as many."""
_KEY = ("mailbox_no", "msg_id", "created_at")
_MESSAGE = ("payload", "lane", "key", "tags", "reply_to", "headers")
_TTL = StructField("ttl", LongType())
_OUTGOING = StructType(
    [
        *(ARCHIVE[name] for name in _MESSAGE),
        StructField("dedup_id", StringType()),
        StructField("refused", StringType()),
    ]
)
PLAN_SCHEMA = StructType([StructField("no", LongType()), *(ARCHIVE[name] for name in (*_KEY, "lane", "key_id"))])
_WORDS = [lane.name.lower() for lane in LANES]


@dataclass(frozen=True, slots=True)
class ReplaySelection:
    """Which messages of the archive. Times are milliseconds since the epoch, when messages became visible."""

    tenant: str
    mailboxes: tuple[str, ...]
    since: int | None = None
    until: int | None = None
    """Only messages before this time."""
    tags: tuple[str, ...] = ()
    """A message has all of them (Q1)."""
    ids: tuple[int, ...] = ()
    """The msg_ids; none: all."""


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """The mailbox that messages are sent to, and the options of the sink."""

    address: str
    options: tuple[tuple[str, str], ...]
    ttl: int | None = None
    """Seconds; None: they do not expire."""


@dataclass(frozen=True, slots=True)
class ReplayPreview:
    """What a replay would send."""

    lanes: dict[str, int]
    replaced: int

    def lines(self) -> Iterator[str]:
        """Yield it as lines for people."""
        for lane, count in self.lanes.items():
            yield f"{count:,} {lane}"
        messages = format_count(sum(self.lanes.values()), "message")
        yield f"{messages} would be sent, {self.replaced:,} older ones of their keys not"


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How far a replay has come."""

    messages: int
    """Messages in the plan."""
    replaced: int = 0
    """Older messages of a key, which are not sent."""
    done: int = 0
    """Messages of the plan that were handled, from its beginning."""
    missing: int = 0
    """Planned messages that were no longer in the archive."""
    refused: int = 0
    """Planned messages that NATS cannot carry unchanged."""
    example: str = ""
    """Why one of them was refused."""
    files: Sequence[str] = field(default=(), compare=False)
    """The files of the plan."""

    @property
    def sent(self) -> int:
        """Messages that the service confirmed."""
        return self.done - self.missing - self.refused

    @property
    def numbers(self) -> dict[str, int]:
        """The counts by name."""
        names = ("messages", "replaced", "missing", "refused", "sent")
        return {name: getattr(self, name) for name in names}

    def after(self, end: int, found: int, refused: int, example: str | None) -> Self:
        """Return the progress after a chunk that ends before ``end``."""
        return replace(
            self,
            done=end,
            missing=self.missing + end - self.done - found,
            refused=self.refused + refused,
            example=self.example or example or "",
        )

    def lines(self) -> Iterator[str]:
        """Yield the result as lines for people."""
        yield f"{format_count(self.sent, 'message')} sent"
        if self.replaced:
            yield f"{self.replaced:,} older ones of their keys were not"
        if self.missing:
            yield f"{self.missing:,} were no longer in the archive"
        if self.refused:
            yield f"{self.refused:,} cannot be sent as they are, such as {self.example}"


class ReplayCheckpoint:
    """The folder of one replay, named by a hash of the selection and the target."""

    def __init__(self, lake: Place, identity: list[Any]) -> None:
        digest = sha256(orjson.dumps(identity, option=orjson.OPT_SERIALIZE_DATACLASS | orjson.OPT_SORT_KEYS))
        self._name = digest.hexdigest()[:16]
        self._replays = lake / REPLAYS
        self.folder = self._replays / self._name
        open_filesystem(lake).create_dir(f"{REPLAYS}/{self._name}", recursive=True)
        self._saved: ReplayProgress | None = None

    def load(self) -> ReplayProgress | None:
        """Return the progress, None for a new replay; :class:`DamagedError` when it cannot be read."""
        self._saved = self._read()
        return self._saved

    def _read(self) -> ReplayProgress | None:
        try:
            return ReplayProgress(**orjson.loads(read_file(self.folder, _PROGRESS)))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            raise DamagedError(
                f"{self.folder}/{_PROGRESS} cannot be read; remove {self.folder} to start over"
            ) from None

    def save(self, progress: ReplayProgress) -> None:
        """Save the progress; :class:`UnavailableError` if another process has saved its own since."""
        # In an object store there is no lock. What two of them may have sent twice, the mailbox has dropped.
        if self._read() != self._saved:
            raise UnavailableError(f"another process has gone on with the replay in {self.folder}")
        write_file(self.folder, _PROGRESS, orjson.dumps(asdict(progress)))
        self._saved = progress

    def plan(self, progress: ReplayProgress) -> DataFiles:
        """Return the files of the plan."""
        return DataFiles(self.folder, progress.files)

    def remove(self) -> None:
        """Remove the checkpoint, the progress first: without it the rest is ignored."""
        open_filesystem(self.folder).delete_file(_PROGRESS)
        open_filesystem(self._replays).delete_dir(self._name)


def preview(spark: SparkSession, lake: Place, selection: ReplaySelection) -> ReplayPreview:
    """Return what a replay would send, without sending; raises as :func:`pipeline.lake.archive.read_stored`."""
    found = _select(spark, lake, selection)
    lanes = {row["lane"]: row["count"] for row in plan(found).groupBy("lane").count().collect()}
    return ReplayPreview({word: lanes[word] for word in _WORDS if word in lanes}, found.count() - sum(lanes.values()))


def replay(
    spark: SparkSession,
    lake: Place,
    selection: ReplaySelection,
    target: ReplayTarget,
    keys: Sequence[Key],
    on_progress: ProgressCallback = no_progress,
) -> ReplayProgress:
    """Send the selection and return what was done, including by runs that were killed.

    Raises :class:`SetupError` for a folder that is no lake and for messages that are sealed with a key that is not
    there, and :class:`UnavailableError` when the same replay runs already, or the lake cannot be written. What the sink
    raises ends a task, and with it the run; the next one goes on.
    """
    check_lake(lake)
    register(spark)
    login = next((value for name, value in target.options if name in {"nats.user", "nats.nkey", "nats.creds"}), None)
    checkpoint = ReplayCheckpoint(lake, [selection, target.address, target.ttl, login])
    with translate_errors(lake), lock_folder(checkpoint.folder, f"the replay in {checkpoint.folder}"):
        progress = checkpoint.load()
        if progress is None:
            on_progress("plan", 0, None)
            progress = _begin(spark, lake, selection, checkpoint)
        planned = checkpoint.plan(progress)
        for unknown in _key_ids(planned) - {key.id for key in keys}:
            raise unknown_key(unknown)
        while progress.done < progress.messages:
            on_progress("messages", progress.done, progress.messages)
            progress = _send(spark, lake, planned, progress, target, keys)
            checkpoint.save(progress)
        on_progress("messages", progress.done, progress.messages)
        checkpoint.remove()
        return progress


def plan(rows: DataFrame) -> DataFrame:
    """Return the messages, by key, in the order in which to send them, numbered from ``no`` 0, with lane and key id.

    Of those with one key only the newest is included: an older one in a lower lane, sent later, would replace it (S2).
    """
    plain = F.col("key").isNull()
    of_key = Window.partitionBy("key", *(F.when(plain, F.col(name)) for name in _KEY)).orderBy(
        *(F.desc(name) for name in ("created_at", "mailbox_no", "msg_id"))
    )
    rank = F.array_position(F.array(*map(F.lit, _WORDS)), F.col("lane"))
    newest = rows.select(*_KEY, "lane", "key", "key_id", F.row_number().over(of_key).alias("age")).where("age = 1")
    order = Window.orderBy(rank, *_KEY)
    number = F.row_number().over(order).cast("bigint") - 1
    return newest.select(number.alias("no"), *_KEY, "lane", "key_id")


def _select(spark: SparkSession, lake: Place, selection: ReplaySelection) -> DataFrame:
    """Return what :func:`plan` needs of the selected messages."""
    wanted = (ds.field("tenant") == selection.tenant) & ds.field("mailbox").isin(selection.mailboxes)
    if selection.since is not None:
        wanted &= ds.field("created_at") >= _moment(selection.since * 1000)
    if selection.until is not None:
        wanted &= ds.field("created_at") < _moment(selection.until * 1000)
    if selection.ids:
        wanted &= ds.field("msg_id").isin(selection.ids)
    found = read_stored(spark, lake, ("tenant", "mailbox", *_KEY, "lane", "key", "tags", "key_id"), wanted)
    for tag in selection.tags:
        found = found.where(F.array_contains("tags", tag))
    return found


def _moment(microseconds: int) -> pa.Scalar:
    return pa.scalar(microseconds, pa.timestamp("us", "UTC"))


def _begin(
    spark: SparkSession, lake: Place, selection: ReplaySelection, checkpoint: ReplayCheckpoint
) -> ReplayProgress:
    found = _select(spark, lake, selection)
    written = write_rows(plan(found), PLAN_SCHEMA, checkpoint.folder, PLAN)
    check_present(checkpoint.folder, PLAN, written)
    messages = sum(file.rows for file in written)
    files = [file.path for file in written]
    progress = ReplayProgress(messages, replaced=found.count() - messages, files=files)
    checkpoint.save(progress)
    return progress


def _key_ids(planned: DataFiles) -> set[str]:
    """Return the ids of the keys that a plan needs."""
    if not planned.names:
        return set()
    batches = planned.dataset().to_batches(columns=["key_id"])
    return {key_id for batch in batches for key_id in batch.column(0).unique().drop_null().to_pylist()}


def _send(
    spark: SparkSession,
    lake: Place,
    planned: DataFiles,
    progress: ReplayProgress,
    target: ReplayTarget,
    keys: Sequence[Key],
) -> ReplayProgress:
    """Send the next chunk of a plan."""
    end = min(progress.done + CHUNK, progress.messages)
    ordered = picked(spark, lake, planned, progress.done, end).repartition(1).sortWithinPartitions("no")
    shaped = unseal(ordered, keys).mapInArrow(partial(_outgoing, target.address), _OUTGOING)
    if target.ttl is not None:
        shaped = shaped.withColumn(_TTL.name, F.lit(target.ttl).cast(_TTL.dataType))
    sent = Observation()
    counts = F.count(F.lit(1)).alias("rows"), F.count("refused").alias("refused"), F.min("refused").alias("example")
    outgoing = shaped.observe(sent, *counts).where("refused IS NULL").drop("refused")
    writer = outgoing.write.format(FORMAT).mode("append").option("address", target.address)
    writer.options(**dict(target.options)).save()
    return progress.after(end, int(sent.get["rows"]), int(sent.get["refused"]), sent.get["example"])


def picked(spark: SparkSession, lake: Place, planned: DataFiles, start: int, end: int) -> DataFrame:
    """Return the rows of the archive that a plan has from ``start`` on and before ``end``, with their ``no``."""
    part = (ds.field("no") >= start) & (ds.field("no") < end)
    bounds = planned.dataset().to_table(columns=list(_KEY), filter=part)
    # So that tasks skip files without them.
    near = ds.scalar(True)
    for name in _KEY:
        found = pc.min_max(bounds[name])
        near &= (ds.field(name) >= found["min"]) & (ds.field(name) <= found["max"])
    names = read_files(spark, PLAN_SCHEMA, planned, part).select("no", *_KEY)
    return read_stored(spark, lake, where=near).join(F.broadcast(names), list(_KEY))


def _outgoing(address: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Convert messages to rows of the sink; those that NATS cannot transmit unchanged get a reason in ``refused``."""
    columns = SinkColumns.of(StructType(_OUTGOING.fields[:-1]), address)
    schema = to_arrow_schema(_OUTGOING, timezone="UTC")
    for batch in batches:
        for rows in (batch.slice(start, 512) for start in range(0, batch.num_rows, 512)):
            shaped = [_outgoing_row(row, columns) for row in rows.select([*_MESSAGE, *_KEY, "mailbox"]).to_pylist()]
            yield pa.RecordBatch.from_pylist(shaped, schema=schema)


def _outgoing_row(row: dict[str, Any], columns: SinkColumns) -> dict[str, Any]:
    at = round(row["created_at"].timestamp() * 1000)
    number, msg_id = row["mailbox_no"], row["msg_id"]
    message = {name: row[name] for name in _MESSAGE}
    headers = row["headers"]
    # A message that was replayed before keeps its first time; one with the maximum of headers has no room for it.
    if len(headers) < MAX_HEADERS and all(name.lower() != ORIGINAL_TIME for name, _ in headers):
        message["headers"] = [*headers, (ORIGINAL_TIME, f"{at // 1000}.{at % 1000:03d}")]
    # After a backup was restored, numbers are given again; the time tells such messages apart.
    message["dedup_id"] = f"replay:{number}.{msg_id}.{at}"
    try:
        columns.message(message)
    except BadRequestError as error:
        return {**message, "refused": f"{row['mailbox']} {msg_id}: {error}"}
    return {**message, "refused": None}
