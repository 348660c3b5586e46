"""Reserved room on PostgreSQL's disk, so that ACK, DELETE and the clean-up work when it is full (A9).

Such a server refuses each statement that needs another page, and goes on with all others: an update in place works
while every SEND fails. What is deleted makes room within its table alone, and not before VACUUM.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import psycopg
import structlog
from psycopg import sql
from psycopg.errors import DiskFull, InsufficientPrivilege

from mediator.errors import UnavailableError
from mediator.store.wire import Connection

RESERVE_BYTES = 16 << 20
CHUNK_BYTES = 1 << 20
"""Bytes that are reserved at a time, until the disk has no more."""
LOOK_SECONDS = 5.0
"""How often room is looked for on a full disk."""
GROW_SECONDS = 60.0
"""How often a reserve that is not complete is enlarged otherwise."""
STATEMENT_SECONDS = 60
"""A VACUUM that takes longer is left to the server's own."""

_ROW = 2000
"""Bytes of a row that is kept in the table itself, as small mail is."""
_TOASTED = 32_000
"""Bytes of a row that is kept apart, as large mail is."""
_MAKE = "CREATE UNLOGGED TABLE IF NOT EXISTS disk_reserve (filler BYTEA)"
_SIZE = "SELECT coalesce(pg_relation_size(to_regclass('disk_reserve')), 0)"
_FILL = "INSERT INTO disk_reserve SELECT %s::bytea FROM generate_series(1, %s)"
_GIVE_BACK = "DROP TABLE IF EXISTS disk_reserve"
_DIRTY = (
    "SELECT relname FROM pg_stat_user_tables WHERE schemaname = current_schema() AND n_dead_tup > 0"
    " ORDER BY n_dead_tup DESC"
)
_PROBE = (
    "INSERT INTO message (mailbox_no, msg_id, lane, size, created_at, payload)"
    " SELECT -pg_backend_pid(), number, 2, 0, 0, %s::bytea FROM generate_series(1, %s) AS given (number)"
)

_log = structlog.get_logger("store")


class PostgresReserve:
    """A table that is dropped when the disk is full. Instances share it; each finds out by itself that it is."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        """``connect`` opens a connection that commits each statement."""
        self._connect = connect
        self._kept: Connection | None = None
        """Opened while there is room: a full disk may refuse a new one, for which the server writes a file."""
        self._update_at = 0.0
        self.short = False
        """Whether the disk is full: what would add to the database is refused."""

    def give_back(self) -> None:
        """Let ACK, DELETE and the clean-up have the space."""
        if not self.short:
            _log.error("the disk of the database is full: no mail is accepted until there is room again")
            self.short = True
            self._update_at = time.monotonic() + LOOK_SECONDS
        with _logged_errors():
            self._keep_connection().execute(_GIVE_BACK)

    def update(self) -> None:
        """Reserve what there is room for; on a full disk, first find out whether mail has room again."""
        now = time.monotonic()
        if now < self._update_at:
            return
        self._update_at = now + (LOOK_SECONDS if self.short else GROW_SECONDS)
        with _logged_errors(), closing(self._connect()) as connection:
            self._keep_connection()
            if self.short:
                _vacuum(connection)
            _fill(connection)
            if self.short:
                if _has_room(connection):
                    self.short = False
                    _log.warning("there is room on the disk of the database again")
                else:
                    connection.execute(_GIVE_BACK)

    def close(self) -> None:
        """Close the connection that is kept."""
        if self._kept is not None:
            self._kept.close()

    def _keep_connection(self) -> Connection:
        if self._kept is None or self._kept.closed:
            self._kept = self._connect()
        return self._kept


@contextmanager
def _logged_errors() -> Iterator[None]:
    """Log an error of the database; the next look tries again."""
    try:
        yield
    except (psycopg.Error, UnavailableError) as error:
        _log.warning("the reserve on the disk of the database is as it was", why=type(error).__name__)


def _vacuum(connection: Connection) -> None:
    """Make what was deleted usable again, which the server does for a table that has changed much, once a minute."""
    for (table,) in connection.execute(_DIRTY).fetchall():
        with suppress(psycopg.Error):
            connection.execute(sql.SQL("VACUUM (SKIP_LOCKED) {}").format(sql.Identifier(table)))


def _fill(connection: Connection) -> None:
    """Reserve all the room there is outside of the tables, up to the limit."""
    # A role that may make no tables has no reserve; whether mail has room shows without one.
    with suppress(DiskFull, InsufficientPrivilege):
        connection.execute(_MAKE)
        while connection.execute(_SIZE).fetchall()[0][0] < RESERVE_BYTES:
            connection.execute(_FILL, (bytes(_ROW), CHUNK_BYTES // _ROW))


def _has_room(connection: Connection) -> bool:
    """Store some small or large mail, and take it back."""
    for size, count in ((_ROW, 16), (_TOASTED, 1)):
        with suppress(DiskFull), connection.transaction(force_rollback=True):
            connection.execute(_PROBE, (os.urandom(size), count))
            return True
    return False
