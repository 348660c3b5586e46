"""Cards to embed: from catalogs, which are files, and those that are registered with the service."""

import glob
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from mediator.errors import BadRequestError
from pipeline.lake import spark_path
from pipeline.source.database import open_database, sql_literal
from pipeline.source.options import ReadOptions
from registry.cards.card import read_card

JSON_LINES = frozenset({".jsonl", ".ndjson"})
PARQUET = ".parquet"
MAX_FILES = 100_000
CARD = "card"
"""The column of a Parquet file that holds cards as JSON; in one without it each row is a card."""
_CATALOG_ROWS = "file string, block bigint, row bigint, card binary, digest binary, address string, reason string"
AGENTS_OF_QUERY = 500
"""Agent numbers read by one query."""
_REGISTERED_ROWS = "no bigint, card_revision bigint, digest binary, card binary"


def files_of(sources: Sequence[str]) -> list[Path]:
    """Return the files that paths, folders and patterns (``cards-*.jsonl``) name, in the order of their names.

    :class:`BadRequestError` naming ``source`` for one that names no JSON lines and no Parquet.
    """
    found: set[Path] = set()
    for source in sources:
        paths = [Path(source)] if Path(source).exists() else [Path(path) for path in glob.glob(source, recursive=True)]
        files = [file.absolute() for path in paths for file in _files(path, source)]
        if not files:
            raise BadRequestError("source", f'no {", ".join(sorted(JSON_LINES))} or {PARQUET} file at "{source[:500]}"')
        found.update(files)
    if len(found) > MAX_FILES:
        raise BadRequestError("source", f"expected at most {MAX_FILES} files, got {len(found)}")
    return sorted(found)


def _files(path: Path, source: str) -> Iterator[Path]:
    if path.is_dir():
        yield from (file for file in path.rglob("*") if _is_catalog(file) and file.is_file())
    elif _is_catalog(path):
        yield path
    else:
        raise BadRequestError("source", f'expected .jsonl, .ndjson or {PARQUET}, got "{source[:500]}"')


def _is_catalog(path: Path) -> bool:
    return path.suffix.lower() in JSON_LINES | {PARQUET}


def read_catalog(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    """Return every card of the files, good or bad.

    Columns: ``file``; ``card`` as it was written, without blanks around it, a row of Parquet as JSON; ``digest``, the
    SHA-256 of that; ``reason`` why it is no card, else null; ``latest``, whether no later card, in the order of the
    files' names, has its mailbox.
    """
    lines = [file for file in files if file.suffix.lower() in JSON_LINES]
    rows = [file for file in files if file.suffix.lower() == PARQUET]
    parts = ([_read_json_lines(spark, lines)] if lines else []) + ([_read_parquet(spark, rows)] if rows else [])
    every = parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])
    read = every.mapInArrow(_read_catalog, _CATALOG_ROWS)
    # Cards without a mailbox are partitioned by digest, or they would all go to one task.
    same = Window.partitionBy("address", F.when(F.col("address").isNull(), F.col("digest")))
    number = F.row_number().over(same.orderBy(F.desc("file"), F.desc("block"), F.desc("row")))
    return read.select("file", "card", "digest", "reason", (number == 1).alias("latest"))


def _read_json_lines(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    text = spark.read.option("lineSep", "\n").text(list(map(spark_path, files)))
    card = F.col("value").cast("binary")
    return _select_cards(text.where(F.expr("length(trim(BOTH ' \t\r' FROM value)) > 0")), card)


def _read_parquet(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    rows = spark.read.option("mergeSchema", "true").parquet(*map(spark_path, files))
    if dict(rows.dtypes).get(CARD) in ("string", "binary"):
        return _select_cards(rows, F.col(CARD).cast("binary"))
    return _select_cards(rows, F.to_json(F.struct("*")).cast("binary"))


def _select_cards(rows: DataFrame, card: Any) -> DataFrame:
    return rows.select(
        F.col("_metadata.file_path").alias("file"),
        F.col("_metadata.file_block_start").alias("block"),
        # Ascending within each part of a file.
        F.monotonically_increasing_id().alias("row"),
        card.alias("card"),
    )


def _read_catalog(batches: Iterator[Any]) -> Iterator[Any]:
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


def read_registered(spark: SparkSession, source: ReadOptions, space: str) -> DataFrame:
    """Return ``no``, ``card_revision``, ``digest`` and ``card`` of agents without vectors of a space, of all tenants.

    Each task opens the database itself; :class:`BadRequestError` naming ``data.dir`` or ``database.url``
    when it cannot be read.
    """
    with closing(open_database(source)) as database:
        (ends,) = database.table(
            "SELECT coalesce(min(no), 1) AS first, coalesce(max(no), 0) AS last FROM agent"
        ).to_pylist()
    tasks = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    slices = spark.range(ends["first"], ends["last"] + 1, AGENTS_OF_QUERY, tasks)
    return slices.mapInArrow(partial(_read_registered, source, space), _REGISTERED_ROWS)


def _read_registered(source: ReadOptions, space: str, batches: Iterator[Any]) -> Iterator[Any]:
    with closing(open_database(source)) as database:
        for batch in batches:
            for first in batch.column("id").to_pylist():
                found = database.table(
                    "SELECT no, card_revision, card FROM agent JOIN agent_card ON agent_card.agent_no = no"
                    f" WHERE no BETWEEN {first} AND {first + AGENTS_OF_QUERY - 1}"
                    f" AND NOT EXISTS (SELECT 1 FROM agent_vectors WHERE space = {sql_literal(space)}"
                    " AND agent_vectors.agent_no = no AND agent_vectors.card_revision = agent.card_revision)"
                )
                cards = [bytes(card) for card in found["card"].to_pylist()]
                yield pa.RecordBatch.from_arrays(
                    [
                        *(found[name].combine_chunks().cast(pa.int64()) for name in ("no", "card_revision")),
                        pa.array([hashlib.sha256(card).digest() for card in cards], pa.binary()),
                        pa.array(cards, pa.binary()),
                    ],
                    names=["no", "card_revision", "digest", "card"],
                )
