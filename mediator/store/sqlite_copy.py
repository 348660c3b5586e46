"""Copies an SQLite database while it is written, and prepares a copy for a new life.

Such a file is also the form in which a backup holds the rows of a PostgreSQL database.
"""

import sqlite3
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path

from peewee import SqliteDatabase

from mediator.errors import SetupError, StoreDamagedError
from mediator.store.migrate import migrate
from mediator.store.sqlite_file import connect_to_read, translate
from mediator.system.gentle_copy import GentleCopy
from mediator.system.private_files import make_file

PAGES = 256
"""Pages (of 4 kB) that are copied in one piece."""
HISTORY = "schema_migration"
"""The beginning of the names of the tables that tell which migrations were applied."""

_FURTHER = ("sqlite_stat", HISTORY)
"""How tables are named that ANALYZE makes, and the histories of parts from elsewhere."""

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it is, and how much there is to do."""

# Counters of a mailbox are written now and then only; see SqliteDialect.save_mailboxes.
_SETTLE = """
UPDATE mailbox SET (messages, bytes, next_id, last_at) = (
    SELECT mailbox.messages + count(*), mailbox.bytes + sum(size), max(msg_id) + 1,
        max(mailbox.last_at, max(created_at))
    FROM message WHERE mailbox_no = mailbox.no AND msg_id >= mailbox.next_id
) WHERE EXISTS (SELECT 1 FROM message WHERE mailbox_no = mailbox.no AND msg_id >= mailbox.next_id)
"""


def copy_sqlite(source: Path, target: Path, on_progress: Progress) -> None:
    """Copy what is committed now into the new file ``target``, while another process goes on writing.

    The whole copy happens within one read transaction: otherwise SQLite would begin anew with each commit. Raises
    :class:`StoreDamagedError` for a damaged database, :class:`UnavailableError` when a file cannot be read or written.
    """
    make_file(target)
    try:
        # The last connection that might write removes the log which the first one made; another user's would be in the
        # way of the service.
        with closing(connect_to_read(source, "rw")) as reading, closing(connect(target)) as writing:
            writing.execute("PRAGMA synchronous = off")
            writing.execute("PRAGMA journal_mode = off")
            reading.execute("BEGIN")
            page_bytes = reading.execute("PRAGMA page_size").fetchone()[0]
            reading.execute("SELECT count(*) FROM sqlite_master").fetchone()
            with target.open("r+b") as file:
                gentle = GentleCopy(file.fileno())

                def stepped(_status: int, left: int, pages: int) -> None:
                    gentle.written(PAGES * page_bytes)
                    on_progress("copied", (pages - left) * page_bytes, pages * page_bytes)

                reading.backup(writing, pages=PAGES, progress=stepped, sleep=0)
            reading.execute("ROLLBACK")
    except sqlite3.Error as error:
        raise translate(error, source.name) from error


def check_sqlite(path: Path) -> None:
    """Read the whole file, which nobody writes; :class:`StoreDamagedError` when it is damaged."""
    try:
        with closing(connect(path)) as connection:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        raise translate(error, path.name) from error
    if found != "ok":
        raise StoreDamagedError(found)


def connect(path: Path) -> sqlite3.Connection:
    """Connect to a database file that exists and that nobody else uses."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None)


def table_names(connection: sqlite3.Connection) -> list[str]:
    """Return the tables that hold data, in order."""
    found = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
    )
    return [name for (name,) in found if not name.startswith(HISTORY)]


def count_rows(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the number of rows of each table."""
    return {
        name: connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in table_names(connection)
    }


def foreign_objects(connection: sqlite3.Connection, migrations_of_parts: Mapping[str, Path]) -> list[str]:
    """Return what no migration of this program makes: triggers and views, tables and indexes that it does not know.

    Triggers and views run when others write and read; they could be made to change what is restored.
    """
    known = {(kind, name, table) for kind, name, table, _ in _schema(migrations_of_parts)}
    return [
        f"{kind} {name[:80]}"
        for kind, name, table, page in connection.execute(
            "SELECT type, name, tbl_name, rootpage FROM sqlite_master ORDER BY name"
        )
        # A virtual table has no page of its own.
        if not page or not ((kind, name, table) in known or (kind == "table" and name.startswith(_FURTHER)))
    ]


def altered_objects(connection: sqlite3.Connection, migrations_of_parts: Mapping[str, Path]) -> list[str]:
    """Return the tables and indexes of a migrated database that are declared otherwise than migrations do.

    ``ON CONFLICT IGNORE``, a CHECK, a default or a key with a cascade change what is stored as a trigger does.
    """
    known = {(kind, name): sql for kind, name, _, sql in _schema(migrations_of_parts)}
    return [
        f"{kind} {name}"
        for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name")
        if known.get((kind, name), sql) != sql
    ]


def _schema(migrations_of_parts: Mapping[str, Path]) -> list[tuple[str, str, str, str]]:
    """Return type, name, table and declaration of everything that migrations make."""
    with SqliteDatabase(":memory:") as empty:
        migrate(empty, migrations_of_parts)
        return list(empty.execute_sql("SELECT type, name, tbl_name, sql FROM sqlite_master"))


def highest_number(connection: sqlite3.Connection, table: str) -> int:
    """Return the highest number that a table ever gave, 0 if it gave none."""
    found = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
    return 0 if found is None else int(found[0])


def raise_numbers(connection: sqlite3.Connection, table: str, highest: int) -> None:
    """Let a table give only numbers above ``highest`` from now on."""
    if highest > highest_number(connection, table):
        connection.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, highest))


def prepare(path: Path, migrations_of_parts: Mapping[str, Path], skip: int, numbered: Collection[str]) -> None:
    """Migrate a database that nobody else uses, and complete the counters of its mailboxes.

    The next msg_id of each mailbox, and the next number of each of the tables ``numbered``, is ``skip`` higher than it
    would be. Raises :class:`SchemaError` when a newer program wrote the file, :class:`UnavailableError` or
    :class:`StoreDamagedError` when it cannot be used.
    """
    database = SqliteDatabase(str(path), pragmas={"synchronous": "full"})
    try:
        with database.connection_context():
            if not database.table_exists(HISTORY):
                raise SetupError(f"{path.name} is no database of a mediator")
            migrate(database, migrations_of_parts)
            connection: sqlite3.Connection = database.connection()
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_SETTLE)
            if skip:
                connection.execute("UPDATE mailbox SET next_id = next_id + ?", (skip,))
                for table in numbered:
                    raise_numbers(connection, table, highest_number(connection, table) + skip)
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise translate(error, path.name) from error
