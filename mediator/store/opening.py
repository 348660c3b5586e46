"""Opens the store that the settings name."""

from pathlib import Path

from mediator.settings import Settings
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore

DATABASE_FILE = "mediator.db"


def database_path(data_dir: Path) -> Path:
    """Where the SQLite file is."""
    return data_dir / DATABASE_FILE


def open_store(settings: Settings) -> Store:
    """Open PostgreSQL if the settings have a ``database_url``, else the SQLite file in the data directory.

    Raises :class:`StoreHeldError` when another process owns the file, :class:`SchemaError` when a newer program wrote
    it, :class:`SetupError` or :class:`UnavailableError` when the database cannot be used.
    """
    if settings.database_url is None:
        return SqliteStore(database_path(settings.data_dir))
    from mediator.store.postgres import PostgresStore

    return PostgresStore(settings.database_url.get_secret_value())
