"""Migrations only expand: an instance of the version before goes on with the schema that a newer one made."""

from contextlib import closing
from itertools import pairwise

import pytest
from peewee import SqliteDatabase
from playhouse.migrations import Runner

from mediator.store import migrate

NAMES = [path.stem for path in sorted(migrate.FOLDER.glob("[0-9]*.py"))]
Schema = dict[str, dict[str, tuple[str, bool, bool]]]
"""For each table its columns: type, whether it must have a value, and whether an INSERT without it gives one."""
Unique = dict[str, set[frozenset[str]]]
"""For each table the columns of its unique indexes."""


def schema_of(database: SqliteDatabase) -> tuple[Schema, Unique]:
    tables = [
        name
        for (name,) in database.execute_sql("SELECT name FROM sqlite_master WHERE type = 'table'")
        if not name.startswith(("sqlite_", "schema_migration"))
    ]
    columns: Schema = {}
    unique: Unique = {}
    for table in tables:
        columns[table] = {
            name: (kind, bool(required), default is not None or bool(key and kind == "INTEGER"))
            for _, name, kind, required, default, key in database.execute_sql(f'PRAGMA table_info("{table}")')
        }
        indexes = database.execute_sql(f'PRAGMA index_list("{table}")').fetchall()
        unique[table] = {
            frozenset(column for _, _, column in database.execute_sql(f'PRAGMA index_info("{index[1]}")'))
            for index in indexes
            if index[2]
        }
    return columns, unique


def contractions(before: tuple[Schema, Unique], after: tuple[Schema, Unique]) -> list[str]:
    """Return what a program that knows ``before`` cannot do any more with ``after``."""
    found = []
    for table, columns in before[0].items():
        now = after[0].get(table)
        if now is None:
            found.append(f"table {table} is gone")
            continue
        for name, column in columns.items():
            if name not in now:
                found.append(f"column {table}.{name} is gone")
            elif now[name] != column:
                found.append(f"column {table}.{name} changed from {column} to {now[name]}")
        for name in now.keys() - columns.keys():
            _, required, given = now[name]
            if required and not given:
                found.append(f"column {table}.{name} must be given, and an older program does not")
        for index in after[1][table]:
            # Wider than one before, it refuses nothing that that one took.
            if not any(former <= index for former in before[1][table]):
                found.append(f"table {table} refuses rows that are equal in {', '.join(sorted(index))}")
    return found


@pytest.fixture(scope="module")
def schemas() -> dict[str, tuple[Schema, Unique]]:
    """The schema after each migration."""
    found = {}
    with closing(SqliteDatabase(":memory:")) as database:
        runner = Runner(database, str(migrate.FOLDER))
        for name in NAMES:
            runner.up(name)
            found[name] = schema_of(database)
    return found


def test_every_migration_only_expands(schemas):
    wrong = {new: contractions(schemas[old], schemas[new]) for old, new in pairwise(NAMES)}
    assert not {name: found for name, found in wrong.items() if found}


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE held",
        "ALTER TABLE message DROP COLUMN tags",
        "ALTER TABLE message RENAME COLUMN size TO bytes",
        "CREATE UNIQUE INDEX narrow ON message (mailbox_no, lane)",
    ],
)
def test_a_migration_that_takes_something_away_is_noticed(schemas, change: str):
    with closing(SqliteDatabase(":memory:")) as database:
        Runner(database, str(migrate.FOLDER)).up()
        database.execute_sql(change)
        assert len(contractions(schemas[NAMES[-1]], schema_of(database))) >= 1


def test_what_may_be_added_is_no_contraction(schemas):
    with closing(SqliteDatabase(":memory:")) as database:
        Runner(database, str(migrate.FOLDER)).up()
        for change in (
            "CREATE TABLE another (no INTEGER PRIMARY KEY, text TEXT NOT NULL)",
            "ALTER TABLE message ADD COLUMN another TEXT",
            "ALTER TABLE message ADD COLUMN number BIGINT NOT NULL DEFAULT 0",
            "CREATE INDEX another_message ON message (another)",
            "CREATE UNIQUE INDEX wider ON message (mailbox_no, msg_id, another)",
        ):
            database.execute_sql(change)
        assert contractions(schemas[NAMES[-1]], schema_of(database)) == []
