"""The checks of the database as a whole: its pages, and whether it has the tables of this version."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from peewee import SqliteDatabase

from mediator.ops.verify.checks import Damage, DamageKind, Place, Progress, VerifyCheck
from mediator.store.migrate import migrate
from mediator.store.snapshots import Snapshots, SqliteSnapshots

PAGES = DamageKind(
    "database_pages",
    "Pages of the database are damaged, or an index differs from its table.",
    "Stop the service, copy mediator.db, -wal and -shm aside, and restore a backup, or what `sqlite3 mediator.db "
    ".recover` saves. Check the disk.",
)
SCHEMA = DamageKind(
    "schema",
    "Tables, columns or indexes of this version are missing.",
    "After an update, run `mediator migrate`. Otherwise something else changed the database: restore a backup.",
)


FOREIGN = DamageKind(
    "schema_foreign",
    "The database has triggers, views, tables or indexes that no migration made; they may change what is stored.",
    "Find out who made them: nobody but the service should be able to. Drop them with the service stopped, or restore a"
    " backup.",
)


class Pages(VerifyCheck):
    """Reads every page of every table and its indexes; PostgreSQL only with the extension amcheck."""

    title = PAGES.code
    kinds = (PAGES,)

    def run(self, place: Place, progress: Progress) -> Iterator[Damage]:
        """See :class:`VerifyCheck`."""
        tables = sorted({table for table, _ in place.database.columns()})
        for number, table in enumerate(tables):
            progress(number / len(tables))
            problems = place.database.check_pages(table)
            if problems:
                found = Damage(PAGES)
                found.add(len(problems), [f"{table}: {problem}" for problem in problems])
                yield found


class Schema(VerifyCheck):
    """Compares the schema with that of an empty database which this version migrated."""

    title = SCHEMA.code
    kinds = (SCHEMA, FOREIGN)

    def __init__(self, migrations_of_parts: Mapping[str, Path]) -> None:
        """``migrations_of_parts`` are those of :func:`mediator.store.migrate.migrate`."""
        self._migrations = migrations_of_parts

    def run(self, place: Place, progress: Progress) -> Iterator[Damage]:
        """See :class:`VerifyCheck`."""
        missing = _find_missing(place.database, self._migrations)
        if missing:
            found = Damage(SCHEMA)
            found.add(len(missing), missing)
            yield found
        foreign = place.database.foreign_objects(self._migrations)
        if foreign:
            found = Damage(FOREIGN)
            found.add(len(foreign), foreign)
            yield found


def _find_missing(database: Snapshots, migrations_of_parts: Mapping[str, Path]) -> list[str]:
    """Return which tables, columns and indexes of this version a database lacks."""
    empty = SqliteDatabase(":memory:")
    with empty:
        migrate(empty, migrations_of_parts)
        wanted = SqliteSnapshots(empty.connection())
        columns, indexes = wanted.columns(), wanted.indexes()
    # SQLite keeps numbers of its own; PostgreSQL has no column for a row's place.
    own = {"sqlite_sequence"}
    has = database.columns()
    tables = {table for table, _ in has}
    lacking = {(table, column) for table, column in columns - has if table not in own}
    if database.shared:
        lacking.discard(("message", "id"))
    return [
        *sorted({f"table {table}" for table, _ in lacking if table not in tables}),
        *sorted(f"column {table}.{column}" for table, column in lacking if table in tables),
        *sorted(f"index {name}" for name in indexes - database.indexes()),
    ]
