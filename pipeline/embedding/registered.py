"""The cards that are registered in the service's database, those that a model has not read."""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pipeline.source.mailboxes import literal
from pipeline.source.options import Options
from pipeline.source.reading import open_database

SLICE = 500
"""Numbers of agents that are read with one question."""
_CARDS = "no bigint, card_revision bigint, digest binary, card binary"


def read_registered(spark: SparkSession, place: Options, space: str) -> DataFrame:
    """Return ``no``, ``card_revision``, ``digest`` and ``card`` of agents without vectors of a space, of all tenants.

    The database is looked at by each task on its own; :class:`BadRequestError` naming ``data.dir`` or ``database.url``
    when it cannot be read.
    """
    with closing(open_database(place)) as database:
        (ends,) = database.table(
            "SELECT coalesce(min(no), 1) AS first, coalesce(max(no), 0) AS last FROM agent"
        ).to_pylist()
    tasks = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    slices = spark.range(ends["first"], ends["last"] + 1, SLICE, tasks)
    return slices.mapInArrow(partial(_read, place, space), _CARDS)


def _read(place: Options, space: str, batches: Iterator[Any]) -> Iterator[Any]:
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
        f" WHERE space = {literal(space)} AND agent_vectors.agent_no = no"
        " AND agent_vectors.card_revision = agent.card_revision)"
    )
