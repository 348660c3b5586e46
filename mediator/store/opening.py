"""Opens a store: SQLite in the data directory, or PostgreSQL."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from mediator.errors import SetupError
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore

DATABASE_FILE = "mediator.db"


def database_path(data_dir: Path) -> Path:
    """Return where the SQLite file is."""
    return data_dir / DATABASE_FILE


def make_data_dir(path: Path) -> None:
    """Make the data directory if it is missing; :class:`SetupError` when files cannot be made in it."""
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


def open_store(
    data_dir: Path,
    database_url: str | None,
    migrations_of_parts: Mapping[str, Path],
    sync_interval: float | None = None,
) -> Store:
    """Open PostgreSQL at a URL if there is one, else the SQLite file in the data directory.

    With a ``sync_interval`` commits are synced to the disk after their answers, within so many seconds; PostgreSQL
    chooses the time itself.
    Raises :class:`StoreHeldError` when another process owns the file, :class:`SchemaError` when a newer program wrote
    it, :class:`SetupError` or :class:`UnavailableError` when the database cannot be used.
    """
    make_data_dir(data_dir)
    if database_url is None:
        return SqliteStore(database_path(data_dir), migrations_of_parts, sync_interval)
    from mediator.store.postgres import PostgresStore

    return PostgresStore(database_url, migrations_of_parts, syncs=sync_interval is None)
