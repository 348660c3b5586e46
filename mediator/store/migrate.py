"""Brings a database's schema up to this program's, and refuses one that a newer program wrote."""

from pathlib import Path

from peewee import Database, PeeweeException
from playhouse.migrations import MigrationError, Runner

from mediator.errors import SchemaError

_SHIPPED = Path(__file__).parent.parent / "_migrations"
_CHECKOUT = Path(__file__).parent.parent.parent / "migrations"


def directory() -> Path:
    """Return the folder of the migrations: inside an installed package, beside it in a checkout."""
    return _SHIPPED if _SHIPPED.is_dir() else _CHECKOUT


def migrate(database: Database) -> list[str]:
    """Apply what is missing and return its names. The caller holds the lock that keeps others out.

    Raises :class:`SchemaError` when the schema is newer than this program or a migration fails; a failing
    migration is taken back whole.
    """
    runner = Runner(database, str(directory()))
    known = {migration.name for migration in runner.migrations()}
    newer = sorted(set(runner.applied()) - known)
    if newer:
        raise SchemaError(f"the database is newer than this program, which does not know {', '.join(newer)}")
    try:
        return [str(getattr(step, "name", step)) for step in runner.up() or []]
    except (MigrationError, PeeweeException) as error:
        raise SchemaError(f"migration failed and was taken back: {error}") from error
