"""Snapshots of a database for commands that only read, beside a running service or without one."""

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from mediator.errors import SetupError
from mediator.mailboxes.rows import Row
from mediator.mailboxes.session import Dialect
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteDialect
from mediator.store.sqlite_copy import foreign_objects
from mediator.store.sqlite_file import MAX_PROBLEMS, connect_to_read, describe_damage, translate

Ask = Callable[[str, Sequence[Any]], list[Row]]
"""Runs a SELECT with ``?`` places in a snapshot and returns its rows."""

_COLUMNS = (
    "SELECT master.name, columns.name FROM sqlite_master AS master, pragma_table_info(master.name) AS columns"
    " WHERE master.type = 'table'"
)
_INDEXES = "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"


class Snapshots(Protocol):
    """A database that is only read. Every snapshot should be short: it holds up the clean-up of old row versions."""

    shared: bool
    """Whether several instances may write to it (PostgreSQL)."""

    def open(self) -> AbstractContextManager[Ask]:
        """Open a snapshot of what is committed.

        Raises :class:`StoreDamagedError` for a damaged page, :class:`UnavailableError` when it cannot be read.
        """

    def columns(self) -> set[tuple[str, str]]:
        """Return all tables with their columns."""

    def indexes(self) -> set[str]:
        """Return the names of all indexes that migrations made."""

    def foreign_objects(self, migrations_of_parts: Mapping[str, Path]) -> list[str]:
        """Return what no migration made and may change what is stored: triggers, and in a file anything else too."""

    def check_pages(self, table: str) -> list[str]:
        """Return what is wrong with the pages of a table and its indexes; nothing where the server does that."""

    def close(self) -> None:
        """Close it."""


def open_snapshots(data_dir: Path, database_url: str | None) -> Snapshots:
    """Open the database of an installation for reading.

    Raises :class:`SetupError` when there is none, :class:`UnavailableError` when it does not answer.
    """
    if database_url is not None:
        from mediator.store.postgres import PostgresSnapshots

        return PostgresSnapshots(database_url)
    path = database_path(data_dir)
    if not path.exists():
        raise SetupError(f"data_dir: no database in {data_dir}")
    return SqliteSnapshots(connect_to_read(path))


class SqliteSnapshots:
    """A connection to SQLite; see :class:`Snapshots`."""

    shared = False

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._dialect: Dialect = SqliteDialect(connection)

    @contextmanager
    def open(self) -> Iterator[Ask]:
        """See :class:`Snapshots`."""
        with _errors():
            self._connection.execute("BEGIN")
            try:
                yield self._dialect.execute
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def columns(self) -> set[tuple[str, str]]:
        """See :class:`Snapshots`."""
        with _errors():
            return {(row[0], row[1]) for row in self._dialect.execute(_COLUMNS)}

    def indexes(self) -> set[str]:
        """See :class:`Snapshots`."""
        with _errors():
            return {row[0] for row in self._dialect.execute(_INDEXES)}

    def foreign_objects(self, migrations_of_parts: Mapping[str, Path]) -> list[str]:
        """See :class:`Snapshots`."""
        with _errors():
            return foreign_objects(self._connection, migrations_of_parts)

    def check_pages(self, table: str) -> list[str]:
        """See :class:`Snapshots`."""
        with _errors():
            try:
                rows = self._connection.execute(f'PRAGMA integrity_check("{table}")').fetchmany(MAX_PROBLEMS)
            except sqlite3.Error as error:
                rows = [(describe_damage(error),)]
        return [row[0] for row in rows if row[0] != "ok"]

    def close(self) -> None:
        """See :class:`Snapshots`."""
        self._connection.close()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error) from error
