"""Which migrations a database has had, read without opening it as a store."""

import sqlite3
from contextlib import closing

from mediator.errors import UnavailableError
from mediator.settings import Settings
from mediator.store.opening import database_path

_NAMES = "SELECT name FROM schema_migration ORDER BY id"


def applied(settings: Settings) -> list[str]:
    """Return the names in order; none for a database that is new. Raises :class:`UnavailableError`."""
    if settings.database_url is None:
        return _sqlite(settings)
    import psycopg

    try:
        with psycopg.connect(settings.database_url.get_secret_value(), connect_timeout=5) as connection:
            return [str(name) for (name,) in connection.execute(_NAMES)]
    except psycopg.errors.UndefinedTable:
        return []
    except psycopg.Error as error:
        raise UnavailableError(f"cannot open the database: {error}") from error


def _sqlite(settings: Settings) -> list[str]:
    path = database_path(settings.data_dir)
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            return [str(name) for (name,) in connection.execute(_NAMES)]
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return []
        raise UnavailableError(f"cannot open {path.name}: {error}") from error
