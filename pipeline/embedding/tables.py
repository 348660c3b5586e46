"""What the lake keeps of cards: their vectors by what the cards are, and those that could not be read."""

from math import ceil
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType
from pyspark.storagelevel import StorageLevel

from pipeline.embedding.model import Model
from pipeline.lake import BAD_CARDS, VECTORS, readable, table
from pipeline.lake.delta import Table
from pipeline.telling import Told

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
"""Cards of one commit: a run that is killed encodes no more than these anew."""


class Vectors:
    """The table of vectors."""

    def __init__(self, spark: SparkSession, lake: Path) -> None:
        """Open or make it; the lake is held."""
        self._spark = spark
        self._table = Table(table(lake, VECTORS), VECTORS_SCHEMA)
        self._table.sweep()

    def of(self, space: str) -> DataFrame:
        """Return what the table has of a space: ``digest``, ``vectors``, ``problem``."""
        rows = read(self._spark, self._table, VECTORS_SCHEMA)
        return rows.where(F.col("space") == space).drop("space")

    def fill(self, cards: DataFrame, model: Model, told: Told) -> int:
        """Have those cards encoded that the table lacks, and return how many; ``cards`` have ``digest`` and ``card``.

        Each batch is there for good once it is committed.
        """
        lacking = cards.join(self.of(model.space).select("digest"), "digest", "left_anti")
        count = lacking.count()
        told("cards encoded", 0, count)
        batches = ceil(count / BATCH_CARDS)
        if not batches:
            return 0
        batch = F.pmod(F.xxhash64("digest"), F.lit(batches)).cast("int")
        # Read once, or each batch would go through all cards.
        parted = lacking.withColumn("batch", batch).repartition(batches, "batch").persist(StorageLevel.DISK_ONLY)
        tasks = int(self._spark.conf.get("spark.sql.shuffle.partitions") or 1)
        done = 0
        for number in range(batches):
            some = parted.where(F.col("batch") == number).repartition(tasks)
            made = model.encode(some).withColumn("space", F.lit(model.space))
            done += append(self._table, made.select(*VECTORS_SCHEMA.names), VECTORS)
            told("cards encoded", done, count)
        parted.unpersist()
        return done


def keep_bad(spark: SparkSession, lake: Path, cards: DataFrame) -> None:
    """Keep cards with their ``file``, ``digest`` and ``reason`` that are not kept yet."""
    kept = Table(table(lake, BAD_CARDS), BAD_CARDS_SCHEMA)
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


def append(kept: Table, rows: DataFrame, source: str) -> int:
    """Add rows in one commit; return how many."""
    number = kept.read_up_to(source) + 1
    return kept.append(rows, f"{number:020d}-{source}", {source: number})


def read(spark: SparkSession, kept: Table, schema: StructType) -> DataFrame:
    """Return a table as it is now."""
    files = [file["path"] for file in kept.files()]
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*map(readable, files))
