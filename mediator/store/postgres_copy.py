"""Copies all rows from PostgreSQL into an SQLite file, and from such a file into an empty PostgreSQL database.

Both have the same tables, made by the same migrations; those of SQLite may have columns more, which it fills itself.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from peewee import PeeweeException, PostgresqlDatabase, SqliteDatabase
from psycopg import sql

from mediator.errors import SetupError, UnavailableError
from mediator.mailboxes.rows import Row
from mediator.store.migrate import migrate
from mediator.store.postgres import MIGRATION_LOCK, connection_parameters, describe_error, require_utf8
from mediator.store.sqlite_copy import (
    HISTORY,
    Progress,
    connect,
    count_rows,
    highest_number,
    raise_numbers,
    table_names,
)
from mediator.store.wire import Connection
from mediator.system.private_files import make_file

LOOK_EVERY = 1000
"""Rows after which progress is reported."""

_COLUMNS = """
SELECT column_name, udt_name FROM information_schema.columns
WHERE table_schema = current_schema() AND table_name = %s ORDER BY ordinal_position
"""
_IDENTITIES = """
SELECT table_name, column_name, pg_get_serial_sequence(quote_ident(table_name), column_name)
FROM information_schema.columns WHERE table_schema = current_schema() AND is_identity = 'YES' ORDER BY table_name
"""
_INDEXES = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
_HISTORIES = """
SELECT table_name FROM information_schema.tables
WHERE table_schema = current_schema() AND starts_with(table_name, %s) ORDER BY table_name
"""


def copy_postgres(url: str, target: Path, migrations_of_parts: Mapping[str, Path], on_progress: Progress) -> None:
    """Copy what is committed now in the database at ``url`` into the new SQLite file ``target``, in one snapshot.

    Raises :class:`SetupError` when the database is no mediator's or of another version than this program, and
    :class:`UnavailableError` when it does not answer.
    """
    make_file(target)
    fast = {"auto_vacuum": "incremental", "synchronous": "off", "journal_mode": "off"}
    database = SqliteDatabase(str(target), pragmas=fast)
    parameters = connection_parameters(url)
    with _errors(), closing(psycopg.connect(**parameters, autocommit=True)) as source, database.connection_context():
        migrate(database, migrations_of_parts)
        source.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        _require_same_schema(source, database)
        file = database.connection()
        tables = table_names(file)
        rows = _Rows(sum(int(_one(source, "SELECT count(*) FROM {}", table)) for table in tables), on_progress)
        # To sort all rows in the end costs less than to find the place of each.
        indexes = file.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
        ).fetchall()
        file.execute("BEGIN")
        for name, _ in indexes:
            file.execute(f'DROP INDEX "{name}"')
        for table in tables:
            columns = _columns(source, table)
            names, places = ", ".join(f'"{name}"' for name in columns), ", ".join("?" * len(columns))
            # The migrations fill some tables.
            file.execute(f'DELETE FROM "{table}"')
            file.executemany(
                f'INSERT INTO "{table}" ({names}) VALUES ({places})', rows.counted(_read(source, table, columns))
            )
        for table, _, sequence in source.execute(_IDENTITIES).fetchall():
            # A sequence that gave no number yet has the first one as its last value.
            given = source.execute(f"SELECT last_value - CASE WHEN is_called THEN 0 ELSE 1 END FROM {sequence}")
            raise_numbers(file, table, _only(given))
        for _, statement in indexes:
            file.execute(statement)
        file.execute("COMMIT")


def fill_postgres(url: str, source: Path, migrations_of_parts: Mapping[str, Path], on_progress: Progress) -> None:
    """Copy all rows of an SQLite file of this version into the database at ``url``, which has no tables yet.

    All happens in one transaction. Raises :class:`SetupError` when a mediator's tables are there already or PostgreSQL
    refuses a value, :class:`UnavailableError` when the database does not answer.
    """
    parameters = connection_parameters(url)
    database = PostgresqlDatabase(
        prefer_psycopg3=True, thread_safe=False, database=parameters.get("dbname", ""), **parameters
    )
    with _errors(), closing(connect(source)) as file, database.connection_context():
        target: Connection = database.connection()
        require_utf8(target)
        target.execute("SELECT pg_advisory_lock(%s)", (MIGRATION_LOCK,))
        if _histories(target):
            raise SetupError(
                "the PostgreSQL database has a mediator's tables already; name an empty one: drop this database and "
                "create it anew if nothing in it is needed"
            )
        with database.atomic():
            migrate(database, migrations_of_parts)
            expected = count_rows(file)
            rows = _Rows(sum(expected.values()), on_progress)
            for table, count in expected.items():
                target.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table)))
                columns = _columns(target, table)
                _write(target, table, columns, rows.counted(_select(file, table, columns)))
                there = _one(target, "SELECT count(*) FROM {}", table)
                if there != count:
                    raise UnavailableError(f"table {table}: {there} of {count} rows arrived; nothing was changed")
            for table, column, sequence in target.execute(_IDENTITIES).fetchall():
                highest = max(highest_number(file, table), _highest(file, table, column))
                if highest:
                    target.execute("SELECT setval(%s, %s)", (sequence, highest))
        target.execute("ANALYZE")


class _Rows:
    """Counts rows on their way."""

    def __init__(self, total: int, on_progress: Progress) -> None:
        self._total = total
        self._on_progress = on_progress
        self._done = 0

    def counted(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            yield row
            self._done += 1
            if self._done % LOOK_EVERY == 0 or self._done == self._total:
                self._on_progress("rows", self._done, self._total)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (psycopg.Error, PeeweeException) as error:
        raise UnavailableError(describe_error(error)) from error


def _histories(connection: Connection) -> list[str]:
    return [name for (name,) in connection.execute(_HISTORIES, (HISTORY,))]


def _require_same_schema(source: Connection, database: SqliteDatabase) -> None:
    there = {name: _migrations(source.execute(f'SELECT name FROM "{name}"')) for name in _histories(source)}
    if not there:
        raise SetupError("the PostgreSQL database is no mediator's: it has no tables of one")
    ours = [name for name in database.get_tables() if name.startswith(HISTORY)]
    if there != {name: _migrations(database.execute_sql(f'SELECT name FROM "{name}"')) for name in ours}:
        raise SetupError("the database is of another version: use the `mediator` that serves it, or migrate it first")


def _migrations(rows: Iterable[Row]) -> list[str]:
    return sorted(str(name) for (name,) in rows)


def _columns(connection: Connection, table: str) -> dict[str, str]:
    """Return the columns of a table with the names of their types."""
    return dict(connection.execute(_COLUMNS, (table,)).fetchall())


def _names(columns: Iterable[str]) -> sql.Composable:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def _read(connection: Connection, table: str, columns: dict[str, str]) -> Iterator[Row]:
    copy = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT (FORMAT BINARY)").format(_names(columns), sql.Identifier(table))
    with connection.cursor() as cursor, cursor.copy(copy) as out:
        out.set_types(list(columns.values()))
        yield from out.rows()


def _write(connection: Connection, table: str, columns: dict[str, str], rows: Iterable[Row]) -> None:
    copy = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(sql.Identifier(table), _names(columns))
    try:
        with connection.cursor() as cursor, cursor.copy(copy) as into:
            into.set_types(list(columns.values()))
            for row in rows:
                into.write_row(row)
    except psycopg.DataError as error:
        raise SetupError(f"table {table}: PostgreSQL refuses a value; nothing was changed") from error


def _select(file: Any, table: str, columns: Iterable[str]) -> Iterator[Row]:
    names = ", ".join(f'"{name}"' for name in columns)
    rows: Iterator[Row] = file.execute(f'SELECT {names} FROM "{table}"')
    return rows


def _one(connection: Connection, statement: Any, table: str) -> int:
    return _only(connection.execute(sql.SQL(statement).format(sql.Identifier(table))))


def _only(rows: Iterable[Sequence[Any]]) -> int:
    ((value,),) = rows
    return int(value)


def _highest(file: Any, table: str, column: str) -> int:
    return _only(file.execute(f'SELECT coalesce(max("{column}"), 0) FROM "{table}"'))
