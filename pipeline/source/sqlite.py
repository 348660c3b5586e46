"""Reads the SQLite file beside the service that owns it, read-only and without blocking it."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import adbc_driver_sqlite.dbapi
import numpy as np

from mediator.errors import BadRequestError, UnavailableError
from mediator.store.sqlite_file import find_read_access
from pipeline.source.adbc import Snapshot
from pipeline.source.mailboxes import SLICES, MessageRange, RowRange, select_ranges
from pipeline.source.options import ReadOptions

BATCH_ROWS = 8192
BATCH_BYTES = 16 << 20
"""Bytes of messages in one batch, plus one message; a batch is in memory several times."""

_BODY = "CASE WHEN body_no IS NULL THEN payload ELSE (SELECT body.payload FROM body WHERE body.no = body_no) END"
# The driver infers a column's type from the first rows; from NULLs alone it infers a number.
_COLUMNS = {
    "key": "COALESCE(key, char(0)) AS key",
    "tags": "COALESCE(tags, char(0)) AS tags",
    "recipient": "COALESCE(recipient, char(0)) AS recipient",
    "extra": "COALESCE(extra, x'') AS extra",
    "payload": f"{_BODY} AS payload",
}
_LARGE = frozenset({"payload", "extra"})
# If no service runs, the first reader recovers the log of a killed one, and others must wait.
_WAIT = "PRAGMA busy_timeout = 30000"
# In the order of this index, whatever the counters of the tables say.
_MESSAGE = "message INDEXED BY message_uid"


class SqliteDatabase(Snapshot):
    """One snapshot of the file; see :class:`pipeline.source.mailboxes.MailboxDatabase`."""

    find = "instr"
    option = "data.dir"
    batches = MappingProxyType({"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})

    def __init__(self, options: ReadOptions) -> None:
        """Open the file; :class:`BadRequestError` names ``data.dir`` if there is none, or it is no such file."""
        file = options.file
        if not file.is_file():
            raise BadRequestError(self.option, f"there is no {file.name} in {file.parent}")
        try:
            self._access = find_read_access(file)
        except UnavailableError as error:
            raise BadRequestError(self.option, str(error)) from None
        # Without autocommit the first SELECT begins the snapshot that all others see.
        super().__init__(lambda: adbc_driver_sqlite.dbapi.connect(self._access.uri), str(file), (_WAIT,))

    def close(self) -> None:
        """Close it; raises :class:`UnavailableError` where what was read cannot be relied on."""
        super().close()
        self._access.confirm()

    def stretch(self) -> RowRange | None:
        """Return the rows of the table."""
        row = self.table("SELECT MIN(id) AS first, MAX(id) AS last FROM message").to_pylist()[0]
        return None if row["first"] is None else RowRange(row["first"], row["last"])

    def messages(
        self, columns: Sequence[str], slices: Sequence[MessageRange], stretch: RowRange | None, where: str
    ) -> Iterator[Any]:
        """Yield batches of at most ``BATCH_ROWS`` messages, and about ``BATCH_BYTES`` where payloads are read."""
        shown = ", ".join(_COLUMNS.get(column, column) for column in columns)
        large = bool(_LARGE & set(columns))
        if stretch is not None:
            wanted = f"mailbox_no {self._of(slices)} AND {where}"
            for part in self._bounded(stretch) if large else [stretch]:
                yield from self._stream(f"SELECT {shown} FROM {_within(part)} AND {wanted}")
            return
        for at in range(0, len(slices), SLICES):
            chunk = slices[at : at + SLICES]
            for piece in self._pieces(chunk, where) if large else [chunk]:
                yield from self._stream(select_ranges(shown, piece, where, _MESSAGE))

    def _of(self, slices: Sequence[MessageRange]) -> str:
        """Say which numbers of mailboxes are wanted: every row is asked, and a list takes a third of the time."""
        numbers = sorted(each.mailbox_no for each in slices)
        span = f"BETWEEN {numbers[0]} AND {numbers[-1]}"
        there = self.table(
            f"SELECT no FROM mailbox WHERE no {span} AND EXISTS (SELECT * FROM message WHERE mailbox_no = mailbox.no)"
        )
        others = not set(there.column("no").to_pylist()) <= set(numbers)
        return f"IN ({', '.join(map(str, numbers))})" if others else span

    def _bounded(self, stretch: RowRange) -> Iterator[RowRange]:
        """Cut a stretch so that each piece is one batch."""
        for rows in self._stream(f"SELECT id, size FROM {_within(stretch)}"):
            ids, sizes = (rows.column(at).to_numpy() for at in range(2))
            for begin, end in _runs(np.cumsum(sizes) // BATCH_BYTES):
                yield RowRange(int(ids[begin]), int(ids[end - 1]))

    def _pieces(self, slices: Sequence[MessageRange], where: str) -> Iterator[list[MessageRange]]:
        """Cut slices so that each piece is one batch: the driver counts rows, not bytes."""
        addresses = {each.mailbox_no: each.address for each in slices}
        for rows in self._stream(select_ranges("mailbox_no, msg_id, size", slices, where, _MESSAGE)):
            numbers, ids, sizes = (rows.column(at).to_numpy() for at in range(3))
            for begin, end in _runs(np.cumsum(sizes) // BATCH_BYTES):
                piece = []
                for first, after in _runs(numbers[begin:end]):
                    number = int(numbers[begin + first])
                    piece.append(
                        MessageRange(number, addresses[number], int(ids[begin + first]), int(ids[begin + after - 1]))
                    )
                yield piece


def _within(stretch: RowRange) -> str:
    # By the place of the rows, whichever index there may be for a condition.
    return f"message NOT INDEXED WHERE id BETWEEN {stretch.first} AND {stretch.last}"


def _runs(values: Any) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    for begin, end in pairwise(edges):
        if begin < end:
            yield begin, end
