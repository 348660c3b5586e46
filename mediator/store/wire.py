"""A connection to PostgreSQL whose statements wait until an answer is needed, and then leave in one packet.

It speaks to libpq in its pipeline mode. The driver's cursors cost a packet a statement there, and each eight times the
CPU.
"""

import select
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

import psycopg
from psycopg.adapt import AdaptersMap, Dumper, PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.types.numeric import Int8BinaryDumper

from mediator.mailboxes.rows import Row

Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"

WAITING_SECONDS = 1

_SYNC = object()
"""Outstanding: the end of a transaction's statements, until which the server passes over what follows an error."""


class _Prepared:
    """A statement as one connection knows it."""

    __slots__ = ("name", "types")

    def __init__(self, name: bytes, types: tuple[int, ...]) -> None:
        self.name = name
        self.types = types


class Wire:
    """One transaction at a time; the connection is opened when first used, and again after it broke."""

    def __init__(self, connect: Callable[[], Connection], waiting: Callable[[], None] = lambda: None) -> None:
        """``waiting`` is called each time that an answer has not come for another ``WAITING_SECONDS``."""
        self._connect = connect
        self._waiting = waiting
        self._connection: Connection | None = None
        self._outstanding: deque[Any] = deque()
        """What was sent and not answered: the SQL of a statement that is being prepared, None for one that is run."""
        self._repeatable: list[tuple[str, Sequence[Any]]] | None = None
        """All statements of a transaction of which nothing was answered yet."""
        self.open = False
        """Whether a transaction is open."""
        self.warned = False
        """Whether the server warned of something in the last commit."""

    @property
    def failed(self) -> bool:
        """Whether the server says that the transaction failed."""
        return self._connection is not None and self._pg.transaction_status == TransactionStatus.INERROR

    def begin(self, sql: str) -> None:
        """Begin a transaction; that leaves with its first question."""
        if not self._alive():
            self._open()
        self._repeatable = []
        self.open = True
        self.tell(sql)

    def tell(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        """Queue a statement; if it fails, so does the next question or the commit."""
        if self._repeatable is not None:
            self._repeatable.append((sql, parameters))
        self._send(sql, parameters)

    def ask(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Send what is queued and this statement, and return its rows."""
        try:
            self.tell(sql, parameters)
            rows = self._answer()
        except psycopg.Error:
            if self._repeatable is None or not self._broken:
                raise
            # The server was restarted before this transaction began, so nothing of it was done.
            statements = self._repeatable
            self._open()
            for statement in statements:
                self._send(*statement)
            rows = self._answer()
        self._repeatable = None
        return rows

    def commit(self) -> bool:
        """Send what is queued, and COMMIT; return False when the server rolled back instead."""
        self._repeatable = None
        self.warned = False
        self._send("COMMIT", ())
        self._send_sync()
        result = self._read()
        self.open = False
        return result is not None and result.command_status == b"COMMIT"

    def roll_back(self) -> None:
        """End the transaction without waiting for the answer."""
        self.open = False
        try:
            self._send("ROLLBACK", ())
            self._send_sync()
            self._flush()
        except psycopg.Error:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def _broken(self) -> bool:
        return self._connection is None or self._connection.closed

    def _alive(self) -> bool:
        """Whether the connection is there, as far as one can tell without asking the server."""
        try:
            while not self._broken and self._poll.poll(0):
                self._pg.consume_input()
        except psycopg.Error:
            return False
        return not self._broken

    def _open(self) -> None:
        self.close()
        self._outstanding.clear()
        self._statements: dict[str, _Prepared] = {}
        self._names = 0
        self._connection = connection = self._connect()
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        teach(connection.adapters)
        connection.add_notice_handler(self._take_notice)
        self._pg = connection.pgconn
        self._transformer = Transformer(connection)
        self._poll = select.poll()
        self._poll.register(self._pg.socket, select.POLLIN)
        self._pg.enter_pipeline_mode()

    def _take_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        self.warned = self.warned or notice.severity_nonlocalized == "WARNING"

    def _send(self, sql: str, parameters: Sequence[Any]) -> None:
        if self._connection is None:
            raise psycopg.OperationalError("the connection is closed")
        values = self._transformer.dump_sequence(parameters, (PyFormat.BINARY,) * len(parameters))
        types = self._transformer.types or ()
        prepared = self._statements.get(sql)
        if prepared is None or prepared.types != types:
            prepared = self._prepare(sql, prepared, types)
        self._pg.send_query_prepared(prepared.name, values, self._transformer.formats, Format.BINARY)
        self._outstanding.append(None)

    def _prepare(self, sql: str, known: _Prepared | None, types: tuple[int, ...]) -> _Prepared:
        """Prepare a statement, and again only when a place has its first value: NULL has no type."""
        if known is not None:
            types = tuple(new or old for new, old in zip(types, known.types, strict=True))
            if types == known.types:
                return known
        self._names += 1
        prepared = self._statements[sql] = _Prepared(b"s%d" % self._names, types)
        self._pg.send_prepare(prepared.name, _translated(sql), types)
        self._outstanding.append(sql)
        return prepared

    def _send_sync(self) -> None:
        self._pg.pipeline_sync()
        self._outstanding.append(_SYNC)

    def _answer(self) -> list[Row]:
        self._pg.send_flush_request()
        try:
            result = self._read()
        except psycopg.Error:
            # Let the server listen again; that the transaction failed, it knows.
            with suppress(psycopg.Error):
                self._send_sync()
                self._read()
            raise
        if result is None or result.status != ExecStatus.TUPLES_OK:
            return []
        self._transformer.set_pgresult(result)
        rows: list[Row] = self._transformer.load_rows(0, result.ntuples, tuple)
        self._transformer.set_pgresult(None)
        return rows

    def _read(self) -> PGresult | None:
        """Read all answers that are outstanding and return the last; raise the first error among them."""
        self._flush()
        error: psycopg.Error | None = None
        last: PGresult | None = None
        outstanding = self._outstanding
        while outstanding:
            result = self._result()
            sent = outstanding.popleft()
            if sent is _SYNC:
                continue
            if result is None or result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
                if sent is not None:
                    self._statements.pop(sent, None)
                if error is None and result is not None:
                    error = error_from_result(result, "utf-8")
                if self._broken or result is None:
                    raise error or psycopg.OperationalError("the connection is lost")
            elif sent is None:
                last = result
            # Each result but that of a sync is followed by None.
            self._result()
        if error is not None:
            raise error
        return last

    def _result(self) -> PGresult | None:
        while self._pg.is_busy():
            if not self._poll.poll(WAITING_SECONDS * 1000):
                self._waiting()
            self._pg.consume_input()
        return self._pg.get_result()

    def _flush(self) -> None:
        while self._pg.flush():
            self._poll.modify(self._pg.socket, select.POLLIN | select.POLLOUT)
            ready = self._poll.poll()
            self._poll.modify(self._pg.socket, select.POLLIN)
            if ready[0][1] & select.POLLIN:
                # A server that cannot send its answers reads no more statements.
                self._pg.consume_input()


@cache
def _translated(sql: str) -> bytes:
    """Number the places; there are few statements, since lists are arrays."""
    head, *rest = sql.split("?")
    return "".join((head, *(f"${number}{part}" for number, part in enumerate(rest, 1)))).encode()


# Columns of values as binary arrays, several times cheaper to write than through the driver.

_HEAD = struct.Struct("!iiIii")
_EMPTY = struct.Struct("!iiI")
_INT8 = struct.Struct("!iq").pack
_LENGTH = struct.Struct("!i").pack
_NULL = b"\xff\xff\xff\xff"


class Array:
    """One array, ready for the wire."""

    element: int
    """The type's number in PostgreSQL's catalogue, the same in every server."""

    __slots__ = ("wire",)

    def __init__(self, count: int, nulls: bool, items: bytes) -> None:
        self.wire = _HEAD.pack(1, nulls, self.element, count, 1) + items if count else _EMPTY.pack(0, 0, self.element)


class BigInts(Array):
    """``bigint[]``."""

    __slots__ = ()
    element = 20

    def __init__(self, values: Sequence[int | None]) -> None:
        nulls = None in values
        if nulls:
            items = [_NULL if value is None else _INT8(8, value) for value in values]
        else:
            items = [_INT8(8, value) for value in values]
        super().__init__(len(values), nulls, b"".join(items))


class Blobs(Array):
    """``bytea[]``."""

    __slots__ = ()
    element = 17

    def __init__(self, values: Sequence[bytes | None]) -> None:
        items = []
        for value in values:
            if value is None:
                items.append(_NULL)
            else:
                items += (_LENGTH(len(value)), value)
        super().__init__(len(values), None in values, b"".join(items))


class Texts(Blobs):
    """``text[]``."""

    __slots__ = ()
    element = 25

    def __init__(self, values: Sequence[str | None]) -> None:
        super().__init__([None if value is None else value.encode() for value in values])


class _ArrayDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: Array) -> bytes:
        return obj.wire


class BigIntsDumper(_ArrayDumper):
    """Tells the driver what :class:`BigInts` are."""

    oid = 1016


class BlobsDumper(_ArrayDumper):
    """Tells the driver what :class:`Blobs` are."""

    oid = 1001


class TextsDumper(_ArrayDumper):
    """Tells the driver what :class:`Texts` are."""

    oid = 1009


def teach(adapters: AdaptersMap) -> None:
    """Make a connection take arrays as parameters."""
    adapters.register_dumper(BigInts, BigIntsDumper)
    adapters.register_dumper(Blobs, BlobsDumper)
    adapters.register_dumper(Texts, TextsDumper)
