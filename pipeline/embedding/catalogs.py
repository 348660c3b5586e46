"""Catalogs of cards: which files they are, and what is in them, each card checked as the registry does."""

import glob
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from mediator.errors import BadRequestError
from pipeline.lake import spark_path
from registry.cards.card import read_card

LINES = frozenset({".jsonl", ".ndjson"})
PARQUET = ".parquet"
MAX_FILES = 100_000
CARD = "card"
"""The column of a Parquet file that holds cards as JSON; in one without it each row is a card."""
_READ = "file string, block bigint, row bigint, card binary, digest binary, address string, reason string"


def files_of(sources: Sequence[str]) -> list[Path]:
    """Return the files that paths, folders and patterns (``cards-*.jsonl``) name, in the order of their names.

    :class:`BadRequestError` naming ``source`` for one that names no JSON lines and no Parquet.
    """
    found: set[Path] = set()
    for source in sources:
        paths = [Path(source)] if Path(source).exists() else [Path(path) for path in glob.glob(source, recursive=True)]
        files = [file.absolute() for path in paths for file in _files(path, source)]
        if not files:
            raise BadRequestError("source", f'no {", ".join(sorted(LINES))} or {PARQUET} file at "{source[:500]}"')
        found.update(files)
    if len(found) > MAX_FILES:
        raise BadRequestError("source", f"expected at most {MAX_FILES} files, got {len(found)}")
    return sorted(found)


def _files(path: Path, source: str) -> Iterator[Path]:
    if path.is_dir():
        yield from (file for file in path.rglob("*") if _fits(file) and file.is_file())
    elif _fits(path):
        yield path
    else:
        raise BadRequestError("source", f'expected .jsonl, .ndjson or {PARQUET}, got "{source[:500]}"')


def _fits(path: Path) -> bool:
    return path.suffix.lower() in LINES | {PARQUET}


def read_catalog(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    """Return every card of the files, good or bad.

    Columns: ``file``; ``card`` as it was written, without blanks around it, a row of Parquet as JSON; ``digest``, the
    SHA-256 of that; ``reason`` why it is no card, else null; ``latest``, whether no later card, in the order of the
    files' names, has its mailbox.
    """
    lines = [file for file in files if file.suffix.lower() in LINES]
    rows = [file for file in files if file.suffix.lower() == PARQUET]
    parts = ([_lines(spark, lines)] if lines else []) + ([_rows(spark, rows)] if rows else [])
    every = parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])
    read = every.mapInArrow(_read, _READ)
    # Those without a mailbox apart from each other, or they would all go to one task.
    same = Window.partitionBy("address", F.when(F.col("address").isNull(), F.col("digest")))
    number = F.row_number().over(same.orderBy(F.desc("file"), F.desc("block"), F.desc("row")))
    return read.select("file", "card", "digest", "reason", (number == 1).alias("latest"))


def _lines(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    text = spark.read.option("lineSep", "\n").text(list(map(spark_path, files)))
    card = F.col("value").cast("binary")
    return _placed(text.where(F.expr("length(trim(BOTH ' \t\r' FROM value)) > 0")), card)


def _rows(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    rows = spark.read.option("mergeSchema", "true").parquet(*map(spark_path, files))
    if dict(rows.dtypes).get(CARD) in ("string", "binary"):
        return _placed(rows, F.col(CARD).cast("binary"))
    return _placed(rows, F.to_json(F.struct("*")).cast("binary"))


def _placed(rows: DataFrame, card: Any) -> DataFrame:
    return rows.select(
        F.col("_metadata.file_path").alias("file"),
        F.col("_metadata.file_block_start").alias("block"),
        # Grows along each part of a file.
        F.monotonically_increasing_id().alias("row"),
        card.alias("card"),
    )


def _read(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        cards = [(card or b"").strip() for card in batch.column("card").to_pylist()]
        addresses, reasons = zip(*map(_check, cards), strict=True) if cards else ((), ())
        digests = [hashlib.sha256(card).digest() for card in cards]
        yield pa.RecordBatch.from_arrays(
            [
                *(batch.column(name) for name in ("file", "block", "row")),
                pa.array(cards, pa.binary()),
                pa.array(digests, pa.binary()),
                pa.array(addresses, pa.string()),
                pa.array(reasons, pa.string()),
            ],
            names=["file", "block", "row", "card", "digest", "address", "reason"],
        )


def _check(card: bytes) -> tuple[str | None, str | None]:
    """Return the address of a card, or what is wrong with it."""
    try:
        return read_card(card).address, None
    except BadRequestError as error:
        return None, str(error)
