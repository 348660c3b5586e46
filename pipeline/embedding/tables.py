"""The lake's tables of cards: vectors by the hash of the card, and invalid cards."""

from math import ceil
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType
from pyspark.storagelevel import StorageLevel

from pipeline.embedding.model import Model
from pipeline.lake import BAD_CARDS, VECTORS, spark_path, table_path
from pipeline.lake.delta import LakeTable
from pipeline.progress import ProgressCallback

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


class VectorTable:
    """The table of vectors."""

    def __init__(self, spark: SparkSession, lake: Path) -> None:
        """Open or create it; the lake must be locked."""
        self._spark = spark
        self._table = LakeTable(table_path(lake, VECTORS), VECTORS_SCHEMA)
        self._table.sweep()

    def of(self, space: str) -> DataFrame:
        """Return what the table has of a space: ``digest``, ``vectors``, ``problem``."""
        rows = read(self._spark, self._table, VECTORS_SCHEMA)
        return rows.where(F.col("space") == space).drop("space")

    def fill(self, cards: DataFrame, model: Model, on_progress: ProgressCallback) -> int:
        """Have those cards encoded that the table lacks, and return how many; ``cards`` have ``digest`` and ``card``.

        Each batch is there for good once it is committed.
        """
        lacking = cards.join(self.of(model.space).select("digest"), "digest", "left_anti")
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
            done += append(self._table, made.select(*VECTORS_SCHEMA.names), VECTORS)
            on_progress("cards encoded", done, count)
        parted.unpersist()
        return done


def store_bad_cards(spark: SparkSession, lake: Path, cards: DataFrame) -> None:
    """Keep cards with their ``file``, ``digest`` and ``reason`` that are not kept yet."""
    kept = LakeTable(table_path(lake, BAD_CARDS), BAD_CARDS_SCHEMA)
    kept.sweep()
    new = cards.dropDuplicates(["digest"]).join(
        read(spark, kept, BAD_CARDS_SCHEMA).select("digest", "reason"), ["digest", "reason"], "left_anti"
    )
    start = F.col("card").substr(1, TEXT_BYTES)
    rows = new.select(
        F.current_timestamp().alias("seen"),
        "file",
        "digest",
        "reason",
        F.coalesce(F.octet_length("card"), F.lit(0)).cast("bigint").alias("size"),
        F.make_valid_utf8(start.cast("string")).alias("text"),
    )
    append(kept, rows, BAD_CARDS)


def append(kept: LakeTable, rows: DataFrame, source: str) -> int:
    """Add rows in one commit; return how many."""
    number = kept.read_up_to(source) + 1
    return kept.append(rows, f"{number:020d}-{source}", {source: number})


def read(spark: SparkSession, kept: LakeTable, schema: StructType) -> DataFrame:
    """Return a table as it is now."""
    files = [file["path"] for file in kept.files()]
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*map(spark_path, files))
