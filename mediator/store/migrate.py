"""Migrates a database to the schema of this program and its parts, and refuses one that a newer program wrote."""

from pathlib import Path

from peewee import Database, PeeweeException
from playhouse.migrations import MigrationError, Runner

from mediator.errors import SchemaError
from mediator.parts import find_parts

_SHIPPED = Path(__file__).parent.parent / "_migrations"
_CHECKOUT = Path(__file__).parent.parent.parent / "migrations"


def directory() -> Path:
    """Return the folder of the migrations: inside an installed package, beside it in a checkout."""
    return _SHIPPED if _SHIPPED.is_dir() else _CHECKOUT


def migrate(database: Database) -> list[str]:
    """Apply the missing migrations of the core and of the parts, and return their names.

    The caller holds the lock that keeps others out. Raises :class:`SchemaError` when the schema is newer than this
    program or a migration fails; a failed migration is rolled back completely.
    """
    names = _run(Runner(database, str(directory())))
    for part in find_parts():
        if part.migrations is not None:
            names += _run(Runner(database, str(part.migrations), f"schema_migration_{part.name}"))
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
