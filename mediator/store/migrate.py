"""Migrates a database to the schema of this program and its parts, and refuses one that a newer program wrote."""

from collections.abc import Mapping
from pathlib import Path

from peewee import Database, PeeweeException
from playhouse.migrations import MigrationError, Runner

from mediator.errors import SchemaError
from mediator.system.shipped import shipped_folder

FOLDER = shipped_folder("migrations")
"""Of the core's migrations."""
NO_PARTS: Mapping[str, Path] = {}
"""No part brings tables of its own."""


def migrate(database: Database, of_parts: Mapping[str, Path]) -> list[str]:
    """Apply the missing migrations of the core and of the parts, and return their names.

    ``of_parts`` are the folders of the parts that bring tables of their own, by the part's name. The caller holds the
    lock that keeps others out. Raises :class:`SchemaError` when the schema is newer than this program or a migration
    fails; a failed migration is rolled back completely.
    """
    names = _run(Runner(database, str(FOLDER)))
    for name, folder in of_parts.items():
        names += _run(Runner(database, str(folder), f"schema_migration_{name}"))
    return names


def _run(runner: Runner) -> list[str]:
    known = {migration.name for migration in runner.migrations()}
    newer = sorted(set(runner.applied()) - known)
    if newer:
        raise SchemaError(f"the database is newer than this program, which does not know {', '.join(newer)}")
    try:
        return [str(getattr(step, "name", step)) for step in runner.up() or []]
    except (MigrationError, PeeweeException) as error:
        raise SchemaError(f"migration failed and was rolled back: {error}") from error
