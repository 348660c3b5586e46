"""Registered cards in the service's database that have no vectors of a model yet."""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pipeline.source.mailbox_batch import open_database
from pipeline.source.mailboxes import sql_literal
from pipeline.source.options import ReadOptions

SLICE = 500
"""Agent numbers read by one query."""
_CARDS = "no bigint, card_revision bigint, digest binary, card binary"


def read_registered(spark: SparkSession, place: ReadOptions, space: str) -> DataFrame:
    """Return ``no``, ``card_revision``, ``digest`` and ``card`` of agents without vectors of a space, of all tenants.

    Each task opens the database itself; :class:`BadRequestError` naming ``data.dir`` or ``database.url``
    when it cannot be read.
    """
    with closing(open_database(place)) as database:
        (ends,) = database.table(
            "SELECT coalesce(min(no), 1) AS first, coalesce(max(no), 0) AS last FROM agent"
        ).to_pylist()
    tasks = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    slices = spark.range(ends["first"], ends["last"] + 1, SLICE, tasks)
    return slices.mapInArrow(partial(_read, place, space), _CARDS)


def _read(place: ReadOptions, space: str, batches: Iterator[Any]) -> Iterator[Any]:
    with closing(open_database(place)) as database:
        for batch in batches:
            for first in batch.column("id").to_pylist():
                found = database.table(_select(first, space))
                cards = [bytes(card) for card in found["card"].to_pylist()]
                yield pa.RecordBatch.from_arrays(
                    [
                        *(found[name].combine_chunks().cast(pa.int64()) for name in ("no", "card_revision")),
                        pa.array([hashlib.sha256(card).digest() for card in cards], pa.binary()),
                        pa.array(cards, pa.binary()),
                    ],
                    names=["no", "card_revision", "digest", "card"],
                )


def _select(first: int, space: str) -> str:
    return (
        "SELECT no, card_revision, card FROM agent JOIN agent_card ON agent_card.agent_no = no"
        f" WHERE no BETWEEN {first} AND {first + SLICE - 1} AND NOT EXISTS (SELECT 1 FROM agent_vectors"
        f" WHERE space = {sql_literal(space)} AND agent_vectors.agent_no = no"
        " AND agent_vectors.card_revision = agent.card_revision)"
    )
