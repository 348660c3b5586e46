"""Reads the outbox (S6) beside the service that fills it: what waits there, in pieces, and the rows of a piece."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.source.options import Options
from pipeline.source.reading import open_database
from pipeline.source.schema import NAMES, shape

PIECE_BYTES = 16 << 20
"""Bytes of the messages that a task has in memory at a time, and one message more."""
PIECE_MESSAGES = 10_000
COMMIT_BYTES = 256 << 20
COMMIT_MESSAGES = 100_000
"""Messages of one commit; a run that is killed does no more than that anew."""

SEQ = "outbox_seq"
_WORDS = ("tenant", "address")
_SHAPED = tuple(name for name in NAMES if name not in ("tenant", "mailbox"))
_NUMBERS = "seq, mailbox_no, msg_id, lane, size, created_at, expire_at, tenant, address"
# SQLite's driver guesses the type of a column from the first rows, and from nothing but NULLs it guesses a number.
_SQLITE = ", ".join(f"COALESCE({name}, char(0)) AS {name}" for name in ("key", "tags", "recipient"))
_SQLITE += ", COALESCE(extra, x'') AS extra"
_POSTGRES = "key, tags, recipient, extra"


@dataclass(frozen=True, slots=True)
class Piece:
    """Copies from one number to another, both included; between them, numbers may be missing."""

    first: int
    last: int


def newest(place: Options) -> int | None:
    """Return the number of the copy that came last, None when the outbox is empty.

    Raises :class:`BadRequestError` and :class:`UnavailableError` as :func:`open_database`; so do all others here.
    """
    with closing(open_database(place)) as database:
        last = database.table("SELECT MAX(seq) AS last FROM outbox").column("last")[0].as_py()
    return None if last is None else int(last)


def pieces(place: Options, until: int) -> list[Piece]:
    """Cut what waits into pieces, in order: the first of it, as much as one commit may be of."""
    sql = f"SELECT seq, size FROM outbox WHERE seq <= {until} ORDER BY seq LIMIT {COMMIT_MESSAGES}"
    with closing(open_database(place)) as database:
        found = database.table(sql)
    seqs = found.column("seq").to_numpy()
    if not len(seqs):
        return []
    # A message belongs to the piece in which it begins.
    begins = np.cumsum(found.column("size").to_numpy()) - found.column("size").to_numpy()
    count = max(1, int(np.searchsorted(begins, COMMIT_BYTES)))
    numbers = np.maximum(begins[:count] // PIECE_BYTES, np.arange(count) // PIECE_MESSAGES)
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), count]
    return [Piece(int(seqs[begin]), int(seqs[end - 1])) for begin, end in pairwise(edges)]


def names(place: Options, span: Piece) -> Any:
    """Return what tells the copies of a span from all others: ``seq``, ``mailbox_no``, ``msg_id``, ``created_at``."""
    with closing(open_database(place)) as database:
        return database.table(f"SELECT seq, mailbox_no, msg_id, created_at FROM outbox WHERE {_within(span)}")


def read(place: Options, piece: Piece) -> Iterator[Any]:
    """Yield record batches of a piece: the columns of a message as the source shows them, and :data:`SEQ`."""
    with closing(open_database(place)) as database:
        found = database.table(f"SELECT {_columns(place)} FROM outbox WHERE {_within(piece)} ORDER BY seq")
    for rows in found.to_batches():
        shaped = shape(rows, _SHAPED, "", {})
        tenant, mailbox = (rows.column(name).cast(pa.string()) for name in _WORDS)
        columns = [tenant, mailbox, *shaped.columns, rows.column("seq").cast(pa.int64())]
        yield pa.RecordBatch.from_arrays(columns, names=["tenant", "mailbox", *_SHAPED, SEQ])


def _columns(place: Options) -> str:
    texts = _SQLITE if place.database_url is None else _POSTGRES
    return f"{_NUMBERS}, {texts}, payload"


def _within(span: Piece) -> str:
    return f"seq BETWEEN {span.first} AND {span.last}"
