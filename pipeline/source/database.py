"""Read-only snapshots of the service's database, SQLite or PostgreSQL, as Arrow through ADBC; they never block it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import adbc_driver_manager.dbapi
import numpy as np

from mediator.errors import BadRequestError, UnavailableError
from mediator.store.sqlite_file import find_read_access
from pipeline.source.options import ReadOptions
from pipeline.source.side import who_looked

BATCH_ROWS = 8192
"""Rows of one batch from SQLite."""
BATCH_BYTES = 16 << 20
"""Approximate bytes of messages in one batch, plus one message; a batch is in memory several times."""
MAX_RANGES = 500
"""Mailboxes in one SELECT."""

_PAYLOAD = (
    "CASE WHEN body_no IS NULL THEN payload ELSE (SELECT body.payload FROM body WHERE body.no = body_no) END AS payload"
)


@dataclass(frozen=True, slots=True)
class MessageRange:
    """The messages of a mailbox from one msg_id to another, both included."""

    mailbox_no: int
    address: str
    first: int
    last: int
    weight: int = 1
    """Approximate number of messages in it."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """A range of rows of the table of messages, of all mailboxes; both ends included."""

    first: int
    last: int


class MailboxDatabase(ABC):
    """An open connection whose queries all see the same snapshot."""

    option: ClassVar[str]
    """The option that locates the database; errors name it."""
    position: ClassVar[str]
    """The SQL function for the position of a substring."""
    batch_options: ClassVar[Mapping[str, str]]
    """Options of a statement that limit its batches."""

    def __init__(self, connect: Callable[[], Any], name: str, setup: Sequence[str]) -> None:
        """Connect and execute the statements ``setup``; ``name`` names the database in errors.

        Raises :class:`BadRequestError`, also if the database is not a mediator's.
        """
        try:
            self._connection = connect()
            try:
                for statement in setup:
                    self._execute(statement).close()
                self.table("SELECT no FROM mailbox LIMIT 1")
            except BaseException:
                self._connection.close()
                raise
        except (adbc_driver_manager.dbapi.Error, UnavailableError) as error:
            raise BadRequestError(self.option, f"cannot read {name}: {self._reason(error)}") from None

    @abstractmethod
    def row_range(self) -> RowRange | None:
        """Return all rows of the table of messages; None if they cannot be scanned by position, or there are none."""

    @abstractmethod
    def messages(
        self, columns: Sequence[str], ranges: Sequence[MessageRange], rows: RowRange | None, condition: str
    ) -> Iterator[Any]:
        """Yield Arrow batches of columns of the messages in ``ranges``.

        With ``rows``, scan these rows of the table instead, and yield what belongs to the mailboxes of ``ranges``.
        """

    def table(self, sql: str) -> Any:
        """Return the rows of a query, which must be few, as an Arrow table."""
        with self._execute(sql) as cursor:
            return cursor.fetch_arrow_table()

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _stream(self, sql: str) -> Iterator[Any]:
        """Yield the record batches of a query."""
        with self._execute(sql) as cursor:
            try:
                yield from cursor.fetch_record_batch()
            except (adbc_driver_manager.dbapi.Error, OSError) as error:
                raise UnavailableError(f"{self.option}: {self._reason(error)}") from None

    def _execute(self, sql: str) -> Any:
        cursor = self._connection.cursor()
        try:
            cursor.adbc_statement.set_options(**self.batch_options)
            cursor.execute(sql)
        except adbc_driver_manager.dbapi.Error as error:
            cursor.close()
            raise UnavailableError(f"{self.option}: {self._reason(error)}") from None
        return cursor

    def _reason(self, error: Exception) -> str:
        """Return an error's text in one line, without secrets."""
        return " ".join(str(error).split())


class SqliteDatabase(MailboxDatabase):
    """The SQLite file beside the service that owns it."""

    option = "data.dir"
    position = "instr"
    batch_options = MappingProxyType({"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})

    # The driver infers a column's type from the first rows; from NULLs alone it infers a number.
    _COLUMNS: ClassVar = {
        "key": "COALESCE(key, char(0)) AS key",
        "tags": "COALESCE(tags, char(0)) AS tags",
        "recipient": "COALESCE(recipient, char(0)) AS recipient",
        "extra": "COALESCE(extra, x'') AS extra",
        "payload": _PAYLOAD,
    }
    # In the order of this index, whatever the counters of the tables say.
    _BY_MSG_ID = "message INDEXED BY message_uid"

    def __init__(self, options: ReadOptions) -> None:
        """Open the file; :class:`BadRequestError` names ``data.dir`` if there is none, or it is no such file."""
        # Not needed where the database is PostgreSQL.
        import adbc_driver_sqlite.dbapi

        file = options.file
        if not file.is_file():
            raise BadRequestError(self.option, f"there is no {file.name} in {file.parent}{who_looked()}")
        try:
            self._access = find_read_access(file)
        except UnavailableError as error:
            raise BadRequestError(self.option, f"{error}{who_looked()}") from None
        # Without autocommit the first SELECT begins the snapshot that all others see. If no service runs, the first
        # reader recovers the log of a killed one, and others must wait.
        super().__init__(
            lambda: adbc_driver_sqlite.dbapi.connect(self._access.uri), str(file), ("PRAGMA busy_timeout = 30000",)
        )

    def close(self) -> None:
        """Close the database; raises :class:`UnavailableError` if what was read cannot be relied on."""
        super().close()
        self._access.confirm()

    def row_range(self) -> RowRange | None:
        """Return the rows of the table."""
        row = self.table("SELECT MIN(id) AS first, MAX(id) AS last FROM message").to_pylist()[0]
        return None if row["first"] is None else RowRange(row["first"], row["last"])

    def messages(
        self, columns: Sequence[str], ranges: Sequence[MessageRange], rows: RowRange | None, condition: str
    ) -> Iterator[Any]:
        """Yield batches of at most ``BATCH_ROWS`` messages, and about ``BATCH_BYTES`` where payloads are read."""
        selected = ", ".join(self._COLUMNS.get(column, column) for column in columns)
        large = not {"payload", "extra"}.isdisjoint(columns)
        if rows is not None:
            condition = f"mailbox_no {self._condition_on_mailboxes(ranges)} AND {condition}"
            for part in self._split_rows(rows) if large else [rows]:
                yield from self._stream(f"SELECT {selected} FROM {_message_rows(part)} AND {condition}")
            return
        for start in range(0, len(ranges), MAX_RANGES):
            chunk = ranges[start : start + MAX_RANGES]
            for part_of_chunk in self._split_ranges(chunk, condition) if large else [chunk]:
                yield from self._stream(select_ranges(selected, part_of_chunk, condition, self._BY_MSG_ID))

    def _condition_on_mailboxes(self, ranges: Sequence[MessageRange]) -> str:
        """Return the condition on ``mailbox_no``: a range if possible, since a list takes three times as long."""
        numbers = sorted(each.mailbox_no for each in ranges)
        span = f"BETWEEN {numbers[0]} AND {numbers[-1]}"
        with_messages = self.table(
            f"SELECT no FROM mailbox WHERE no {span} AND EXISTS (SELECT * FROM message WHERE mailbox_no = mailbox.no)"
        )
        if set(with_messages.column("no").to_pylist()) <= set(numbers):
            return span
        return f"IN ({', '.join(map(str, numbers))})"

    # The driver counts the rows of a batch, not its bytes: these two read the sizes first, and cut by them.

    def _split_rows(self, rows: RowRange) -> Iterator[RowRange]:
        for batch in self._stream(f"SELECT id, size FROM {_message_rows(rows)}"):
            ids, sizes = (batch.column(index).to_numpy() for index in range(2))
            for begin, end in _equal_runs(np.cumsum(sizes) // BATCH_BYTES):
                yield RowRange(int(ids[begin]), int(ids[end - 1]))

    def _split_ranges(self, ranges: Sequence[MessageRange], condition: str) -> Iterator[list[MessageRange]]:
        addresses = {each.mailbox_no: each.address for each in ranges}
        for batch in self._stream(select_ranges("mailbox_no, msg_id, size", ranges, condition, self._BY_MSG_ID)):
            numbers, ids, sizes = (batch.column(index).to_numpy() for index in range(3))
            for begin, end in _equal_runs(np.cumsum(sizes) // BATCH_BYTES):
                part = []
                for first, after in _equal_runs(numbers[begin:end]):
                    number = int(numbers[begin + first])
                    msg_ids = int(ids[begin + first]), int(ids[begin + after - 1])
                    part.append(MessageRange(number, addresses[number], *msg_ids))
                yield part


class PostgresDatabase(MailboxDatabase):
    """A PostgreSQL database beside running services, in a read-only transaction."""

    option = "database.url"
    position = "strpos"
    batch_options = MappingProxyType({"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)})

    _CONNECTION: ClassVar = {
        "application_name": "mediator-pipeline",
        "connect_timeout": "10",
        # A dead server is noticed within minutes.
        "keepalives_idle": "30",
        "keepalives_interval": "10",
        "keepalives_count": "3",
    }
    _SETUP = (
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY",
        # So that backslashes in literals are plain characters.
        "SET LOCAL standard_conforming_strings = on",
    )

    def __init__(self, options: ReadOptions) -> None:
        """Connect; :class:`BadRequestError` names ``database.url`` if that fails, or it is no such database."""
        # Not needed where the database is SQLite.
        import adbc_driver_postgresql.dbapi

        assert options.database_url is not None
        parts = urlsplit(options.database_url)
        self._password = parts.password
        url = urlunsplit(parts._replace(query=urlencode(self._CONNECTION | dict(parse_qsl(parts.query)))))
        super().__init__(lambda: adbc_driver_postgresql.dbapi.connect(url), "it", self._SETUP)

    def row_range(self) -> None:
        """Return None: its rows have no stable position."""

    def messages(
        self, columns: Sequence[str], ranges: Sequence[MessageRange], rows: RowRange | None, condition: str
    ) -> Iterator[Any]:
        """Yield batches of about ``BATCH_BYTES``."""
        assert rows is None
        selected = ", ".join(_PAYLOAD if column == "payload" else column for column in columns)
        for start in range(0, len(ranges), MAX_RANGES):
            yield from self._stream(select_ranges(selected, ranges[start : start + MAX_RANGES], condition))

    def _reason(self, error: Exception) -> str:
        text = super()._reason(error)
        return text.replace(self._password, "…") if self._password else text


def open_database(options: ReadOptions) -> MailboxDatabase:
    """Open a snapshot of the database; :class:`BadRequestError` names the option if it cannot be read."""
    return SqliteDatabase(options) if options.database_url is None else PostgresDatabase(options)


def sql_literal(text: str) -> str:
    """Write a text into SQL; drivers stream only statements without parameters. Texts with a zero never get here."""
    return "'" + text.replace("'", "''") + "'"


def select_ranges(columns: str, ranges: Sequence[MessageRange], condition: str, message: str = "message") -> str:
    """Return the SELECT of these ranges, in their order."""
    values = ", ".join(f"({each.mailbox_no}, {each.first}, {each.last})" for each in ranges)
    return (
        f"WITH slice (no, first_id, last_id) AS (VALUES {values}) SELECT {columns} FROM slice CROSS JOIN {message}"
        f" WHERE mailbox_no = slice.no AND msg_id BETWEEN first_id AND last_id AND {condition}"
    )


def _message_rows(rows: RowRange) -> str:
    # By the position of the rows, whichever index there may be for a condition.
    return f"message NOT INDEXED WHERE id BETWEEN {rows.first} AND {rows.last}"


def _equal_runs(values: Any) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    for begin, end in pairwise(edges):
        if begin < end:
            yield begin, end
