"""Embeds a catalog or registered cards and sends the vectors to the service; a killed run loses one batch at most.

Vectors are kept in the lake by the hash of the card, so each card is encoded once for a model.
"""

import asyncio
import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType
from pyspark.storagelevel import StorageLevel

from mediator.errors import BadRequestError, SetupError, UnavailableError
from mediator.operate.control import send_command
from mediator.operate.operations import MAX_LONG_REQUEST
from mediator.operate.units import format_count
from pipeline.embedding.cards import read_catalog, read_registered
from pipeline.embedding.model import Model
from pipeline.lake import BAD_CARDS, VECTORS, Place, ProgressCallback, no_progress
from pipeline.lake.delta import LakeTable, lock_lake
from pipeline.lake.storage import read_files
from pipeline.source.options import ReadOptions
from registry.api.operations import MAX_TOGETHER

REQUEST_BYTES = MAX_LONG_REQUEST - 64 * 1024
"""Bytes of the agents of one request."""
SizedAgent = tuple[list[Any], int]
"""An agent as in a request, and its maximum size there in bytes."""
VECTORS_SCHEMA = StructType(
    [
        StructField("digest", BinaryType()),
        StructField("space", StringType()),
        StructField("vectors", BinaryType()),
        StructField("problem", StringType()),
    ]
)
"""``digest`` is the SHA-256 of a card's bytes; ``vectors`` null where ``problem`` says why the model made none."""
BAD_CARDS_SCHEMA = StructType(
    [
        StructField("seen", TimestampType()),
        StructField("file", StringType()),
        StructField("digest", BinaryType()),
        StructField("reason", StringType()),
        StructField("size", LongType()),
        StructField("text", StringType()),
    ]
)
"""``size`` is in bytes, ``text`` the first 4 KiB."""
TEXT_BYTES = 4096
BATCH_CARDS = 10_000
"""Cards of one commit; a killed run repeats at most one commit."""
PART_CARDS = 2000
"""Cards that the driver holds at a time while sending."""


@dataclass(slots=True)
class EmbedResult:
    """What a run of ``embed`` did."""

    cards: int = 0
    """Valid cards, one for each mailbox."""
    repeated: int = 0
    """Cards of a mailbox that has a later one in the catalog."""
    bad: int = 0
    """Invalid cards, and cards that the model cannot encode."""
    encoded: int = 0
    """Cards encoded in this run; the vectors of the others were in the lake."""
    added: int = 0
    replaced: int = 0
    embedded: int = 0
    """Registered agents with this card that got vectors."""
    unchanged: int = 0
    """Agents that had both, or whose card has changed since."""

    def lines(self) -> Iterator[str]:
        """Yield the result as lines for people."""
        yield f"{format_count(self.cards, 'card')} read, {self.encoded:,} of them encoded now"
        if self.repeated:
            yield f"{self.repeated:,} left out, since a later card has their mailbox"
        yield (
            f"handed over: {self.added:,} new agents, {self.replaced:,} with another card,"
            f" {self.embedded:,} given vectors, {self.unchanged:,} as they were"
        )
        if self.bad:
            yield f"{self.bad:,} could not be read: see the table {BAD_CARDS}"


@dataclass(frozen=True, slots=True)
class RegistryClient:
    """A service that runs on a data directory, with its registry."""

    data_dir: Path

    def space(self) -> str:
        """Return the space of the configured model; :class:`SetupError` without a service or a registry with a model.

        :class:`UnavailableError` while the service does not know it yet.
        """
        model = self.status()["model"]
        if model is None:
            raise SetupError("the service has no model to compare with: registry.semantic is turned off")
        if model["space"] is None:
            raise UnavailableError(f"the service does not know its model yet: {model['problem']}")
        return str(model["space"])

    def status(self) -> dict[str, Any]:
        """Return the status of the registry; :class:`SetupError` without a service or a registry."""
        try:
            return self._request("registry")
        except BadRequestError as error:
            raise SetupError("the service runs without its registry: see registry.enabled") from error

    def put(
        self, tenant: str, space: str, agents: Iterator[SizedAgent], on_progress: Callable[[int], None]
    ) -> dict[str, int]:
        """Register cards with their vectors; return the counts of :class:`registry.rules.BulkOutcome`."""
        return self._send("agents-put", agents, on_progress, tenant=tenant, space=space)

    def embed(self, space: str, agents: Iterator[SizedAgent], on_progress: Callable[[int], None]) -> dict[str, int]:
        """Give vectors to agents whose card is still as it was; return how many were ``embedded``."""
        return self._send("agents-embed", agents, on_progress, space=space)

    def _send(
        self, command: str, agents: Iterator[SizedAgent], on_progress: Callable[[int], None], **fields: Any
    ) -> dict[str, int]:
        total: dict[str, int] = {}
        handed = 0
        for some in batch_agents(agents):
            answer = self._request(command, agents=some, **fields)
            for name in answer.keys() - {"error", "revision"}:
                total[name] = total.get(name, 0) + answer[name]
            handed += len(some)
            on_progress(handed)
        return total

    def _request(self, command: str, **fields: Any) -> dict[str, Any]:
        answer = asyncio.run(send_command(self.data_dir, command, **fields))
        if answer["error"]:
            field, colon, problem = str(answer["error"]).partition(": ")
            if colon and field in ("command", "space", "tenant"):
                raise BadRequestError(field, problem)
            raise UnavailableError(f"the service refused: {answer['error']}")
        return answer


class VectorTable:
    """The lake's table of vectors."""

    def __init__(self, spark: SparkSession, lake: Place) -> None:
        """Open or create it; the lake must be locked."""
        self._spark = spark
        self._table = LakeTable(lake / VECTORS, VECTORS_SCHEMA)
        self._table.sweep()

    def read(self, space: str) -> DataFrame:
        """Return the vectors of a space: ``digest``, ``vectors``, ``problem``."""
        rows = read_files(self._spark, VECTORS_SCHEMA, self._table.all_files())
        return rows.where(F.col("space") == space).drop("space")

    def fill(self, cards: DataFrame, model: Model, on_progress: ProgressCallback) -> int:
        """Encode the cards that the table lacks, and return how many; ``cards`` have ``digest`` and ``card``.

        Each batch is kept once it is committed.
        """
        lacking = cards.join(self.read(model.space).select("digest"), "digest", "left_anti")
        count = lacking.count()
        on_progress("cards encoded", 0, count)
        batches = ceil(count / BATCH_CARDS)
        if not batches:
            return 0
        batch = F.pmod(F.xxhash64("digest"), F.lit(batches)).cast("int")
        # Persisted, or each batch would read all cards again.
        parted = lacking.withColumn("batch", batch).repartition(batches, "batch").persist(StorageLevel.DISK_ONLY)
        tasks = int(self._spark.conf.get("spark.sql.shuffle.partitions") or 1)
        done = 0
        for number in range(batches):
            some = parted.where(F.col("batch") == number).repartition(tasks)
            made = model.encode(some).withColumn("space", F.lit(model.space))
            done += self._table.append_next(made.select(*VECTORS_SCHEMA.names), VECTORS)
            on_progress("cards encoded", done, count)
        parted.unpersist()
        return done


def embed_catalog(
    spark: SparkSession,
    lake: Place,
    files: Sequence[Path],
    model: Model,
    service: RegistryClient,
    tenant: str,
    on_progress: ProgressCallback = no_progress,
) -> EmbedResult:
    """Embed the cards of files and register them with a service, as agents of a tenant; create the lake if needed.

    Raises :class:`BadRequestError` naming ``space`` when the service reads with another model, what
    :func:`pipeline.lake.delta.lock_lake` raises, and :class:`UnavailableError` when the service refuses or goes away:
    what was encoded stays in the lake, and what was handed over with the service.
    """
    space = service.space()
    if space != model.space:
        raise BadRequestError("model", f"expected that of the service, {space}, got {model.space}")
    with lock_lake(lake, create=True):
        on_progress("cards", 0, None)
        read = read_catalog(spark, files).persist(StorageLevel.DISK_ONLY)
        try:
            summary = _count(read)
            if summary.bad:
                store_bad_cards(spark, lake, read.where(F.col("reason").isNotNull()))
            cards = read.where(F.col("reason").isNull() & F.col("latest")).select("file", "digest", "card")
            vectors = _fill(spark, lake, cards, model, summary, on_progress)
            agents = (card_with(bytes(row.card), bytes(row.vectors)) for row in _rows(cards, vectors, summary.cards))
            counts = service.put(
                tenant, space, agents, lambda done: on_progress("cards handed over", done, summary.cards)
            )
        finally:
            read.unpersist()
    for name, count in counts.items():
        setattr(summary, name, count)
    return summary


def embed_registered(
    spark: SparkSession,
    lake: Place,
    source: ReadOptions,
    model: Model,
    service: RegistryClient,
    on_progress: ProgressCallback = no_progress,
) -> EmbedResult:
    """Embed the cards that are registered at a service, of all tenants, and hand it the vectors.

    The model may be one that the service will use later. Raises as :func:`embed_catalog`, and
    :class:`BadRequestError` when the database cannot be read.
    """
    service.status()
    with lock_lake(lake, create=True):
        on_progress("cards", 0, None)
        read = read_registered(spark, source, model.space).persist(StorageLevel.DISK_ONLY)
        try:
            summary = EmbedResult(cards=read.count())
            # Two tenants may have the same card.
            cards = read.select("digest", "card", F.lit("registered").alias("file")).dropDuplicates(["digest"])
            vectors = _fill(spark, lake, cards, model, summary, on_progress)
            rows = _rows(read.select("digest", "no", "card_revision"), vectors, summary.cards)
            agents = (agent_with(row.no, row.card_revision, bytes(row.vectors)) for row in rows)
            handed = 0

            def progress(done: int) -> None:
                nonlocal handed
                handed = done
                on_progress("cards handed over", done, summary.cards)

            summary.embedded = service.embed(model.space, agents, progress).get("embedded", 0)
            summary.unchanged = handed - summary.embedded
        finally:
            read.unpersist()
    return summary


def _count(read: DataFrame) -> EmbedResult:
    good = F.col("reason").isNull()
    row = read.agg(
        F.count_if(good & F.col("latest")).alias("cards"),
        F.count_if(good & ~F.col("latest")).alias("repeated"),
        F.count_if(~good).alias("bad"),
    ).first()
    assert row is not None
    return EmbedResult(cards=row["cards"], repeated=row["repeated"], bad=row["bad"])


def _fill(
    spark: SparkSession,
    lake: Place,
    cards: DataFrame,
    model: Model,
    summary: EmbedResult,
    on_progress: ProgressCallback,
) -> DataFrame:
    """Return the vectors of cards; those that the model cannot encode are stored as bad cards."""
    table = VectorTable(spark, lake)
    summary.encoded = table.fill(cards, model, on_progress)
    vectors = table.read(model.space)
    refused = vectors.where(F.col("problem").isNotNull()).withColumnRenamed("problem", "reason")
    refusing = cards.join(refused.select("digest", "reason"), "digest")
    count = refusing.count()
    if count:
        summary.bad += count
        store_bad_cards(spark, lake, refusing)
    return vectors.where(F.col("vectors").isNotNull()).select("digest", "vectors")


def _rows(cards: DataFrame, vectors: DataFrame, count: int) -> Iterator[Row]:
    """Join cards and vectors, in partitions that the driver reads one by one."""
    parts = max(1, ceil(count / PART_CARDS))
    joined = cards.repartition(parts, "digest").join(vectors.repartition(parts, "digest"), "digest")
    return joined.toLocalIterator(prefetchPartitions=True)


def batch_agents(agents: Iterator[SizedAgent]) -> Iterator[list[list[Any]]]:
    """Group agents into requests."""
    some: list[list[Any]] = []
    room = REQUEST_BYTES
    for agent, size in agents:
        if some and (size > room or len(some) == MAX_TOGETHER):
            yield some
            some, room = [], REQUEST_BYTES
        some.append(agent)
        room -= size
    if some:
        yield some


def card_with(card: bytes, vectors: bytes) -> SizedAgent:
    """Return a card with its vectors for :meth:`RegistryClient.put`."""
    encoded = base64.b64encode(vectors).decode()
    # Inside a JSON string each byte of a JSON text takes two bytes at most.
    return [card.decode(), encoded], 2 * len(card) + len(encoded) + 16


def agent_with(agent_no: int, card_revision: int, vectors: bytes) -> SizedAgent:
    """Return an agent's number with vectors of its card for :meth:`RegistryClient.embed`."""
    encoded = base64.b64encode(vectors).decode()
    return [agent_no, card_revision, encoded], len(encoded) + 64


def store_bad_cards(spark: SparkSession, lake: Place, cards: DataFrame) -> None:
    """Add cards with ``file``, ``digest`` and ``reason`` to the table of bad cards, unless it has them."""
    table = LakeTable(lake / BAD_CARDS, BAD_CARDS_SCHEMA)
    table.sweep()
    known = read_files(spark, BAD_CARDS_SCHEMA, table.all_files())
    new = cards.dropDuplicates(["digest"]).join(known.select("digest", "reason"), ["digest", "reason"], "left_anti")
    start = F.col("card").substr(1, TEXT_BYTES)
    rows = new.select(
        F.current_timestamp().alias("seen"),
        "file",
        "digest",
        "reason",
        F.coalesce(F.octet_length("card"), F.lit(0)).cast("bigint").alias("size"),
        F.make_valid_utf8(start.cast("string")).alias("text"),
    )
    table.append_next(rows, BAD_CARDS)
