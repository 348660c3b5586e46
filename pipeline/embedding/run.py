"""Embeds a catalog or registered cards and sends the vectors to the service; a killed run loses one batch at most."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from mediator.errors import BadRequestError
from mediator.ops.units import format_count
from pipeline.embedding.catalogs import read_catalog
from pipeline.embedding.model import Model
from pipeline.embedding.registered import read_registered
from pipeline.embedding.registry_client import RegistryClient, agent_with, card_with
from pipeline.embedding.tables import VectorTable, store_bad_cards
from pipeline.lake import BAD_CARDS
from pipeline.lake.folder import lock_lake
from pipeline.progress import ProgressCallback, no_progress
from pipeline.source.options import ReadOptions

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


def embed_catalog(
    spark: SparkSession,
    lake: Path,
    files: Sequence[Path],
    model: Model,
    service: RegistryClient,
    tenant: str,
    on_progress: ProgressCallback = no_progress,
) -> EmbedResult:
    """Embed the cards of files and register them with a service, as agents of a tenant; create the lake if needed.

    Raises :class:`BadRequestError` naming ``space`` when the service reads with another model, what
    :func:`pipeline.lake.folder.lock_lake` raises, and :class:`UnavailableError` when the service refuses or goes away:
    what was encoded stays in the lake, and what was handed over with the service.
    """
    space = service.space()
    if space != model.space:
        raise BadRequestError("model", f"expected that of the service, {space}, got {model.space}")
    with lock_lake(lake, create=True):
        on_progress("cards", 0, None)
        read = read_catalog(spark, files).persist(StorageLevel.DISK_ONLY)
        try:
            summary = _counted(read)
            if summary.bad:
                store_bad_cards(spark, lake, read.where(F.col("reason").isNotNull()))
            cards = read.where(F.col("reason").isNull() & F.col("latest")).select("file", "digest", "card")
            vectors = _filled(spark, lake, cards, model, summary, on_progress)
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
    lake: Path,
    place: ReadOptions,
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
        read = read_registered(spark, place, model.space).persist(StorageLevel.DISK_ONLY)
        try:
            summary = EmbedResult(cards=read.count())
            # Two tenants may have the same card.
            cards = read.select("digest", "card", F.lit("registered").alias("file")).dropDuplicates(["digest"])
            vectors = _filled(spark, lake, cards, model, summary, on_progress)
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


def _counted(read: DataFrame) -> EmbedResult:
    good = F.col("reason").isNull()
    row = read.agg(
        F.count_if(good & F.col("latest")).alias("cards"),
        F.count_if(good & ~F.col("latest")).alias("repeated"),
        F.count_if(~good).alias("bad"),
    ).first()
    assert row is not None
    return EmbedResult(cards=row["cards"], repeated=row["repeated"], bad=row["bad"])


def _filled(
    spark: SparkSession, lake: Path, cards: DataFrame, model: Model, summary: EmbedResult, on_progress: ProgressCallback
) -> DataFrame:
    """Return the vectors of cards, those that can be had."""
    table = VectorTable(spark, lake)
    summary.encoded = table.fill(cards, model, on_progress)
    vectors = table.of(model.space)
    refused = vectors.where(F.col("problem").isNotNull()).withColumnRenamed("problem", "reason")
    refusing = cards.join(refused.select("digest", "reason"), "digest")
    count = refusing.count()
    if count:
        summary.bad += count
        store_bad_cards(spark, lake, refusing)
    return vectors.where(F.col("vectors").isNotNull()).select("digest", "vectors")


def _rows(cards: DataFrame, vectors: DataFrame, count: int) -> Iterator[Row]:
    """Bring cards and vectors together in parts that the driver takes one by one."""
    parts = max(1, ceil(count / PART_CARDS))
    joined = cards.repartition(parts, "digest").join(vectors.repartition(parts, "digest"), "digest")
    return joined.toLocalIterator(prefetchPartitions=True)
