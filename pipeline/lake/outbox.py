"""Reads the outbox (S6) beside the running service: its contents in ranges, and the rows of a range."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.source.mailbox_batch import open_database
from pipeline.source.options import ReadOptions
from pipeline.source.schema import NAMES, to_batch

PIECE_BYTES = 16 << 20
"""Bytes of messages that a task holds in memory at a time, plus one message."""
PIECE_MESSAGES = 10_000
COMMIT_BYTES = 256 << 20
COMMIT_MESSAGES = 100_000
"""Messages of one commit; a killed run repeats at most one commit."""

SEQ = "outbox_seq"
_WORDS = ("tenant", "address")
_SHAPED = tuple(name for name in NAMES if name not in ("tenant", "mailbox"))
_NUMBERS = "seq, mailbox_no, msg_id, lane, size, created_at, expire_at, tenant, address"
# SQLite's driver infers a column's type from the first rows; from NULLs alone it infers a number.
_SQLITE = ", ".join(f"COALESCE({name}, char(0)) AS {name}" for name in ("key", "tags", "recipient"))
_SQLITE += ", COALESCE(extra, x'') AS extra"
_POSTGRES = "key, tags, recipient, extra"


@dataclass(frozen=True, slots=True)
class OutboxRange:
    """Copies from one number to another, both included; numbers between them may be missing."""

    first: int
    last: int


def newest_seq(place: ReadOptions) -> int | None:
    """Return the highest number, None when the outbox is empty.

    Raises :class:`BadRequestError` and :class:`UnavailableError` as :func:`open_database`; as do all functions here.
    """
    with closing(open_database(place)) as database:
        last = database.table("SELECT MAX(seq) AS last FROM outbox").column("last")[0].as_py()
    return None if last is None else int(last)


def split_outbox(place: ReadOptions, until: int) -> list[OutboxRange]:
    """Return the ranges of the next commit, in order."""
    sql = f"SELECT seq, size FROM outbox WHERE seq <= {until} ORDER BY seq LIMIT {COMMIT_MESSAGES}"
    with closing(open_database(place)) as database:
        found = database.table(sql)
    seqs = found.column("seq").to_numpy()
    if not len(seqs):
        return []
    # A message belongs to the range in which it begins.
    begins = np.cumsum(found.column("size").to_numpy()) - found.column("size").to_numpy()
    count = max(1, int(np.searchsorted(begins, COMMIT_BYTES)))
    numbers = np.maximum(begins[:count] // PIECE_BYTES, np.arange(count) // PIECE_MESSAGES)
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), count]
    return [OutboxRange(int(seqs[begin]), int(seqs[end - 1])) for begin, end in pairwise(edges)]


def read_identities(place: ReadOptions, span: OutboxRange) -> Any:
    """Return what identifies the copies of a range: ``seq``, ``mailbox_no``, ``msg_id``, ``created_at``."""
    with closing(open_database(place)) as database:
        return database.table(f"SELECT seq, mailbox_no, msg_id, created_at FROM outbox WHERE {_within(span)}")


def read_copies(place: ReadOptions, piece: OutboxRange) -> Iterator[Any]:
    """Yield record batches of a range: the columns of a message as in the data source, and :data:`SEQ`."""
    with closing(open_database(place)) as database:
        found = database.table(f"SELECT {_columns(place)} FROM outbox WHERE {_within(piece)} ORDER BY seq")
    for rows in found.to_batches():
        shaped = to_batch(rows, _SHAPED, "", {})
        tenant, mailbox = (rows.column(name).cast(pa.string()) for name in _WORDS)
        columns = [tenant, mailbox, *shaped.columns, rows.column("seq").cast(pa.int64())]
        yield pa.RecordBatch.from_arrays(columns, names=["tenant", "mailbox", *_SHAPED, SEQ])


def _columns(place: ReadOptions) -> str:
    texts = _SQLITE if place.database_url is None else _POSTGRES
    return f"{_NUMBERS}, {texts}, payload"


def _within(span: OutboxRange) -> str:
    return f"seq BETWEEN {span.first} AND {span.last}"
