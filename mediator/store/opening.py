"""Opens the store that the settings name."""

import tempfile
from pathlib import Path

from mediator.errors import SetupError
from mediator.settings import Settings
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore

DATABASE_FILE = "mediator.db"


def database_path(data_dir: Path) -> Path:
    """Where the SQLite file is."""
    return data_dir / DATABASE_FILE


def make_data_dir(path: Path) -> None:
    """Make the data directory, if it is not there; raises :class:`SetupError` when files cannot be made in it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = "there is a file of this name" if isinstance(error, FileExistsError) else error.strerror or str(error)
        raise SetupError(
            f"data_dir: cannot write to {path}: {reason}; choose another directory with --data-dir, or make this one "
            "writable for the user that runs the command"
        ) from None


def open_store(settings: Settings) -> Store:
    """Open PostgreSQL if the settings have a ``database_url``, else the SQLite file in the data directory.

    Raises :class:`StoreHeldError` when another process owns the file, :class:`SchemaError` when a newer program wrote
    it, :class:`SetupError` or :class:`UnavailableError` when the database cannot be used.
    """
    make_data_dir(settings.data_dir)
    if settings.database_url is None:
        return SqliteStore(database_path(settings.data_dir))
    from mediator.store.postgres import PostgresStore

    return PostgresStore(settings.database_url.get_secret_value())
