"""The PostgreSQL store: several instances share the mail, and lock rows of mailboxes against each other."""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import structlog
from peewee import PeeweeException, PostgresqlDatabase

from mediator.errors import BusyError, SetupError, UnavailableError, UncertainError
from mediator.mailboxes import rows
from mediator.mailboxes.address import SendOnlyAddresses, is_send_only
from mediator.mailboxes.claims import Claims
from mediator.mailboxes.copy_rule import CopyRuleCache
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.mailbox import MailboxKey
from mediator.mailboxes.rows import KeptMailbox, Row
from mediator.mailboxes.session import (
    EMPTY_LANES,
    MESSAGE_COLUMNS,
    Counts,
    Keys,
    MailboxCache,
    Session,
    UnflushedPositions,
    send_only_addresses,
)
from mediator.store.base import READ_SECONDS, Integrity, Pool, Transaction
from mediator.store.migrate import NO_PARTS, migrate
from mediator.system.extras import install_command

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.errors import (
        DataCorrupted,
        DiskFull,
        FeatureNotSupported,
        IndexCorrupted,
        InsufficientPrivilege,
        LockNotAvailable,
        UndefinedFunction,
    )
except ImportError as error:
    raise SetupError(f"PostgreSQL needs its driver: {install_command('postgres')}") from error

from mediator.store.postgres_reserve import STATEMENT_SECONDS, PostgresReserve
from mediator.store.wire import Array, BigInts, Blobs, Connection, Texts, Wire

READERS = 4
LOCK_SECONDS = 5
"""How long a transaction waits for what another instance has locked."""
HOLDER_SECONDS = 2
"""Who holds a lock that the writer waits for, and waits itself for its client for so long, is ended."""
STALLED_SECONDS = 30
"""A migration that stops within a transaction loses it, and its locks, after this long."""
MIGRATION_SECONDS = 60
"""How long an instance waits at its start while another migrates the schema."""
POOLER_TURNS = 10
MIGRATION_LOCK = 0x6D65_6469_6174_6F72
"""The advisory lock held during a migration."""

_log = structlog.get_logger("store")

_DEFAULTS: dict[str, Any] = {
    "application_name": "mediator",
    "connect_timeout": 3,
    # Of several hosts, connect to the one that takes writes, also after a failover.
    "target_session_attrs": "read-write",
    # Notice a server that disappeared while requests still wait for it.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
_SESSION = {
    # Every query is meant to follow an index in its order. A plan made before a table grew takes seconds: it reads and
    # sorts a whole mailbox for a hundred messages.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    # It does not start in pipeline mode, where the session counts as active.
    "idle_in_transaction_session_timeout": f"{STALLED_SECONDS}s",
    # The server notices an instance whose machine lost power, and frees its locks.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10s",
}
_WRITING = "BEGIN ISOLATION LEVEL READ COMMITTED"
_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_HOLDERS = (
    "SELECT holder.pid, holder.state_change::text, holder.usename = current_user"
    " AND holder.application_name = current_setting('application_name')"
    " AND holder.wait_event IN ('ClientRead', 'ClientWrite')"
    " FROM unnest(pg_blocking_pids(?::int)) AS blocking (pid) JOIN pg_stat_activity AS holder USING (pid)"
)
_END_HOLDER = "SELECT pg_terminate_backend(pid)::text FROM pg_stat_activity WHERE pid = ? AND state_change::text = ?"
_COPY_REVISION = "(SELECT revision FROM copy_revision WHERE copy_revision.no = 1)"
"""Read with the mailboxes, so that it costs no question of its own."""
_PREFETCH = (
    f"SELECT {', '.join(f'mailbox.{column}' for column in rows.MAILBOX.split(', '))}, {_COPY_REVISION}"
    " FROM unnest(?, ?) AS place (tenant, address)"
    " JOIN mailbox ON mailbox.tenant = place.tenant AND mailbox.address = place.address"
    " WHERE mailbox.address IS NOT NULL ORDER BY mailbox.no FOR UPDATE OF mailbox"
)
_PREFETCH_ONE = f"SELECT {rows.MAILBOX}, {_COPY_REVISION} FROM mailbox WHERE tenant = ? AND address = ? FOR UPDATE"
# By numbers where send-only addresses are among them.
_PREFETCH_NUMBER = (
    f"SELECT {rows.MAILBOX}, {_COPY_REVISION} FROM mailbox WHERE no = ? AND address IS NOT NULL FOR UPDATE"
)
_PREFETCH_MIXED = (
    f"SELECT {rows.MAILBOX}, {_COPY_REVISION} FROM mailbox WHERE address IS NOT NULL AND no IN (SELECT held.no"
    " FROM unnest(?, ?) AS place (tenant, address)"
    " JOIN mailbox AS held ON held.tenant = place.tenant AND held.address = place.address"
    " WHERE held.address IS NOT NULL"
    " UNION ALL SELECT unnest(?)) ORDER BY no FOR UPDATE OF mailbox"
)
_INSERT = f"INSERT INTO message ({MESSAGE_COLUMNS}) SELECT * FROM unnest({', '.join(['?'] * 13)})"
_INSERT_ONE = f"INSERT INTO message ({MESSAGE_COLUMNS}) VALUES ({', '.join(['?'] * 13)})"
_ARRAYS = (BigInts,) * 6 + (Texts,) * 3 + (Blobs,) * 2 + (BigInts, Texts)
_HOLD = (
    "INSERT INTO held (mailbox_no, recipient, messages, bytes) SELECT * FROM unnest(?, ?, ?, ?)"
    " ON CONFLICT (mailbox_no, recipient)"
    " DO UPDATE SET messages = held.messages + excluded.messages, bytes = held.bytes + excluded.bytes"
)
_LET_GO = (
    "DELETE FROM held USING unnest(?, ?) AS changed (mailbox_no, recipient)"
    " WHERE held.mailbox_no = changed.mailbox_no AND held.recipient = changed.recipient AND messages <= 0"
)
_SAVE = (
    "UPDATE mailbox SET next_id = new.next_id, messages = new.messages, bytes = new.bytes, last_at = new.last_at,"
    " dedup_ids = new.dedup_ids FROM unnest(?, ?, ?, ?, ?, ?)"
    " AS new (next_id, messages, bytes, last_at, dedup_ids, no) WHERE mailbox.no = new.no"
)
_SAVE_ONE = "UPDATE mailbox SET next_id = ?, messages = ?, bytes = ?, last_at = ?, dedup_ids = ? WHERE no = ?"
_ABSENCES = ", NOT EXISTS (SELECT 1 FROM lease WHERE group_no = consumer.no)" + "".join(
    f", NOT EXISTS (SELECT 1 FROM message WHERE mailbox_no = consumer.mailbox_no AND lane = {lane.value})"
    for lane in EMPTY_LANES
)
_INNER = rows.MESSAGE.replace(rows.BODY, f"{rows.BODY} AS payload")
_OUTER = rows.MESSAGE.replace(rows.BODY, "payload")


class PostgresStore:
    """Mailboxes in a PostgreSQL database. Opening it migrates the schema."""

    quick = False
    commits_fast = False

    def __init__(self, url: str, migrations_of_parts: Mapping[str, Path] = NO_PARTS, *, syncs: bool = True) -> None:
        """Open the database at ``url``; :class:`SetupError` when that is no PostgreSQL URL.

        ``syncs``: whether a commit waits for the disk.
        Raises :class:`UnavailableError` when the database does not answer.
        """
        parameters = connection_parameters(url)
        self._database = PostgresqlDatabase(
            prefer_psycopg3=True, thread_safe=False, database=parameters.get("dbname", ""), **parameters
        )
        self._syncs = syncs
        self._timeline = ""
        self._process = 0
        self._holders: dict[tuple[int, str], float] = {}
        """Sessions that hold a lock that the writer waits for, with when they were first seen waiting for a client."""
        self.waits_for: str | None = None
        self._writer = PostgresDialect(Wire(self._connect, self._look_at_holders), "FOR UPDATE")

        def connect_to_read() -> Connection:
            connection = psycopg.connect(**parameters, autocommit=True)
            self._refuse_former_primary(connection)
            _configure(connection, _SESSION | {"statement_timeout": f"{READ_SECONDS}s"})
            return connection

        def connect_to_keep() -> Connection:
            connection = psycopg.connect(**parameters, autocommit=True)
            self._refuse_former_primary(connection)
            limits = {"statement_timeout": f"{STATEMENT_SECONDS}s", "lock_timeout": f"{LOCK_SECONDS}s"}
            _configure(connection, _SESSION | limits)
            return connection

        self._reserve = PostgresReserve(connect_to_keep)
        self._readers = Pool(lambda: PostgresDialect(Wire(connect_to_read), ""), READERS, READ_SECONDS)
        self._counts = Counts(time.monotonic)
        self.claims = Claims()
        self.copy_rules = CopyRuleCache()
        try:
            _require_session_pooling(parameters)
            self.migrated = self._migrate(migrations_of_parts)
        except (psycopg.Error, PeeweeException) as error:
            raise UnavailableError(f"cannot open the database: {error}") from error
        finally:
            self._database.close()

    def _connect(self) -> Connection:
        self._database.close()
        self._database.connect()
        connection: Connection = self._database.connection()
        self._refuse_former_primary(connection)
        # The operator's default in the database must not weaken durability; a stronger one stays.
        connection.execute(
            "SELECT set_config('synchronous_commit', %s, false)"
            " WHERE %s = 'off' OR current_setting('synchronous_commit') <> 'remote_apply'",
            (synced := "on" if self._syncs else "off", synced),
        )
        # Statements on arrays seem cheaper with few values than with ten, so the server would plan each of them anew:
        # for a small batch that costs more than to run them.
        limits = {"plan_cache_mode": "force_generic_plan", "lock_timeout": f"{LOCK_SECONDS}s"}
        _configure(connection, _SESSION | limits)
        self._process = _server_process(connection)
        return connection

    def _refuse_former_primary(self, connection: Connection) -> None:
        """Raise :class:`UnavailableError` for a server whose standby, promoted since, this store has already used.

        A primary that comes back after its failover takes writes, and shows the mail as it was when it went.
        """
        timeline = ""
        # Not every relative of PostgreSQL has timelines.
        with suppress(FeatureNotSupported, InsufficientPrivilege, UndefinedFunction):
            for row in connection.execute("SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)"):
                timeline = str(row[0])
        if timeline < self._timeline:
            connection.close()
            raise UnavailableError("the server that answers is a former primary of the database and must be stopped")
        self._timeline = timeline

    def _migrate(self, of_parts: Mapping[str, Path]) -> list[str]:
        connection = self._connect()
        require_utf8(connection)
        _configure(connection, {"lock_timeout": f"{MIGRATION_SECONDS}s"})
        connection.execute("SELECT pg_advisory_lock(%s)", (MIGRATION_LOCK,))
        return migrate(self._database, of_parts)

    def _look_at_holders(self) -> None:
        """Say who holds the lock that the writer waits for, and end a session of ours whose instance is frozen (A9).

        In pipeline mode a session that waits for its client in a transaction counts as active, so no time limit of the
        server ends it. An instance that runs answers the server within milliseconds.
        """
        # The writer goes on to wait where the server answers nobody.
        with suppress(UnavailableError, BusyError), self._readers.borrow() as reader, _transaction(reader):
            reader.begin(_READING)
            found = reader.execute(_HOLDERS, (self._process,))
            now = time.monotonic()
            idle = {(pid, since): self._holders.get((pid, since), now) for pid, since, idle in found if idle}
            self._holders = idle
            if found:
                self.waits_for = _held_by(found[0][0])
            for (pid, since), seen in idle.items():
                if now - seen >= HOLDER_SECONDS and reader.execute(_END_HOLDER, (pid, since)) == [("true",)]:
                    _log.warning("ended a session of the database whose instance is frozen: it held a lock", pid=pid)

    @property
    def full(self) -> bool:
        """See :class:`mediator.store.base.Store`."""
        return self._reserve.short

    @contextmanager
    def transaction(self, keys: Sequence[MailboxKey] = ()) -> Iterator[Transaction]:
        """Open a transaction; see :class:`mediator.store.base.Store`."""
        try:
            with self._transaction(keys) as tx:
                yield tx
        except UnavailableError as error:
            if isinstance(error.__cause__, LockNotAvailable):
                raise UnavailableError(self.waits_for or _held_by(None)) from error.__cause__
            if isinstance(error.__cause__, DiskFull):
                # The writer tries again, and refuses what adds to the database.
                self._reserve.give_back()
                raise UnavailableError("the disk of the database is full") from error.__cause__
            raise
        finally:
            self.waits_for = None

    @contextmanager
    def _transaction(self, keys: Sequence[MailboxKey]) -> Iterator[Transaction]:
        dialect = self._writer
        with _transaction(dialect):
            # Together with the mailboxes that get copies: all instances lock in one order.
            mailboxes = dialect.begin(_WRITING, {*keys, *self.copy_rules.targets(keys)})
            locked = MailboxCache(len(mailboxes))
            for mailbox in mailboxes:
                locked.add(mailbox)
            session = Session(
                dialect,
                locked,
                UnflushedPositions(0),
                self._counts,
                self.claims,
                copy_rules=self.copy_rules,
                copy_revision=dialect.copy_revision,
                full=self._reserve.short,
            )
            committing = False
            try:
                yield Transaction(session)
                committing = True
                session.finish()
                dialect.commit()
            except BaseException as error:
                session.roll_back()
                # Unless the server says that the transaction failed, it may have been committed.
                if committing and isinstance(error, psycopg.Error) and not dialect.wire.failed:
                    raise UncertainError from error
                raise

    damage = None

    def find_damage(self, seconds: float) -> Integrity:
        """PostgreSQL has its own tools for that."""
        del seconds
        return Integrity()

    @contextmanager
    def reading(self, max_seconds: float = READ_SECONDS) -> Iterator[Transaction]:
        """Open a snapshot; see :class:`mediator.store.base.Store`."""
        del max_seconds
        with self._readers.borrow() as dialect, _transaction(dialect):
            dialect.begin(_READING)
            yield Transaction(Session(dialect, MailboxCache(0), UnflushedPositions(0), Counts(time.monotonic)))

    def checkpoint(self) -> None:
        """The server does that itself; keep room on its disk, or look for it."""
        self._reserve.update()

    def scrub(self, rewrite: bool) -> bool:
        """The server's VACUUM does that, and its log is its own."""
        return False

    def upkeep(self, busy: bool) -> None:
        """Autovacuum does that."""

    def renew(self) -> None:
        """Close connections that nobody uses; opening others checks that the server is still the primary."""
        self._readers.close()
        self._writer.close()

    def close(self) -> None:
        """Close all connections."""
        self._readers.close()
        self._writer.close()
        self._reserve.close()
        self._database.close()


class PostgresDialect:
    """One connection to PostgreSQL."""

    ordered = False
    """Another instance may have taken a lower number and commit later."""
    absences = _ABSENCES
    lane_sources = ("message",) * len(LANES)
    """The planner chooses the partial index."""

    def __init__(self, wire: Wire, lock: str) -> None:
        self.wire = wire
        self._lock = lock
        self._tell = wire.tell
        self.send_only: SendOnlyAddresses | None = None
        self.copy_revision: int | None = None
        """That of the rules by which mail is copied, as of the beginning of the transaction; None: it was not read."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a statement and return its rows; a change without any waits for the next question or the commit."""
        if _is_change(sql):
            self._tell(sql, parameters)
            return []
        return self.wire.ask(sql, parameters)

    def first(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Run a statement and return its first row, if it has any."""
        found = self.execute(sql, parameters)
        return found[0] if found else None

    def many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each row of parameters, an INSERT of several rows as one of arrays."""
        arrays = _as_arrays(sql) if len(parameters) > 1 and None not in parameters[0] else None
        if arrays is None:
            for row in parameters:
                self._tell(sql, row)
        else:
            self._tell(arrays, [_array(column) for column in zip(*parameters, strict=True)])

    def begin(self, sql: str, wanted: Set[MailboxKey] = frozenset()) -> list[KeptMailbox]:
        """Begin, and lock the mailboxes of these keys in the order that all instances use."""
        self.wire.begin(sql)
        self.copy_revision = None
        if not wanted:
            return []
        numbers = self._numbers(wanted)
        if numbers and len(wanted) == 1:
            found = self.wire.ask(_PREFETCH_NUMBER, numbers)
        elif numbers:
            tenants, addresses = zip(*wanted, strict=True)
            found = self.wire.ask(_PREFETCH_MIXED, (Texts(tenants), Texts(addresses), BigInts(numbers)))
        elif len(wanted) == 1:
            found = self.wire.ask(_PREFETCH_ONE, next(iter(wanted)))
        else:
            tenants, addresses = zip(*wanted, strict=True)
            found = self.wire.ask(_PREFETCH, (Texts(tenants), Texts(addresses)))
        if found:
            self.copy_revision = found[0][-1]
        return [rows.mailbox(row) for row in found]

    def _numbers(self, keys: Collection[MailboxKey]) -> list[int]:
        """Return which mailboxes the send-only addresses among these keys may be of."""
        found = [address for _, address in keys if is_send_only(address)]
        return [no for address in found if (no := send_only_addresses(self).number(address)) is not None]

    def commit(self) -> None:
        """Raise :class:`UnavailableError` if the server answers ROLLBACK, as it does when the transaction failed.

        Raises :class:`UncertainError` if it warns: a COMMIT that is cancelled while it waits for a synchronous standby
        succeeds with a warning, and is lost when that standby is promoted.
        """
        if not self.wire.commit():
            raise UnavailableError("transaction rolled back")
        if self.wire.warned:
            raise UncertainError

    def close(self) -> None:
        """Close the connection."""
        self.wire.close()

    def insert_messages(self, values: Sequence[Row]) -> None:
        """Insert all with one statement; a row alone costs a third less than arrays of one."""
        if len(values) == 1:
            self._tell(_INSERT_ONE, values[0])
        else:
            columns = zip(*values, strict=True)
            self._tell(_INSERT, [array(column) for array, column in zip(_ARRAYS, columns, strict=True)])

    def budgeted(self, source: str, parameters: Sequence[Any], order: str, limit: int, budget: int) -> Iterator[Row]:
        """Sum sizes before reading large payloads, which are stored apart from the rows."""
        sql = (
            f"SELECT {_OUTER} FROM (SELECT {_INNER},"
            f" sum(size) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) - size AS before"
            f" FROM {source} ORDER BY {order} LIMIT ?) AS weighed WHERE before < ? ORDER BY {order}"
        )
        yield from self.execute(sql, (*parameters, limit, max(budget, 1)))

    def any_of(self, column: str, values: Keys) -> tuple[str, Sequence[Any]]:
        """Compare with an array."""
        return f"{column} = ANY(?)", (_array(values),)

    def has_tag(self) -> str:
        """Search for the tag between commas."""
        return "strpos(',' || tags || ',', ',' || ? || ',') > 0"

    def lock(self) -> str:
        """Lock rows until the end of the transaction."""
        return self._lock

    def settle_counters(self, mailbox: KeptMailbox) -> None:
        """Counters are always written, since every instance needs them."""

    def save_recipient_counts(self, changed: Sequence[Row]) -> None:
        """Add with one statement."""
        numbers, recipients, messages, sizes = zip(*changed, strict=True)
        self._tell(_HOLD, [BigInts(numbers), Texts(recipients), BigInts(messages), BigInts(sizes)])
        if min(messages) <= 0:
            self._tell(_LET_GO, [BigInts(numbers), Texts(recipients)])

    def save_mailboxes(self, mailboxes: Sequence[KeptMailbox]) -> None:
        """Write the counters of all changed mailboxes with one statement."""
        changed = [m for m in mailboxes if m.dirty or m.next_id != m.stored_id]
        if not changed:
            return
        counters = [(m.next_id, m.messages, m.bytes, m.last_at, m.dedup_ids, m.id) for m in changed]
        if len(counters) == 1:
            self._tell(_SAVE_ONE, counters[0])
        else:
            self._tell(_SAVE, [BigInts(column) for column in zip(*counters, strict=True)])
        for mailbox in changed:
            mailbox.stored_id, mailbox.dirty = mailbox.next_id, False

    def overwrite_removed(self, on: bool) -> None:
        """The server cannot."""

    def usage(self, tenant: str, now: int) -> Row:
        """Sum the rows."""
        return self.execute(
            "SELECT coalesce(sum(messages), 0)::bigint, coalesce(sum(bytes), 0)::bigint FROM mailbox WHERE tenant = ?"
            " AND (expire_at IS NULL OR expire_at > ?)",
            (tenant, now),
        )[0]

    def clock(self) -> int | None:
        """Ask the server."""
        return int(self.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")[0][0])

    def size(self) -> int:
        """Ask the server."""
        return int(self.execute("SELECT pg_database_size(current_database())")[0][0])

    def uncounted(self, mailboxes: str, parameters: Sequence[Any]) -> list[Row]:
        """Find nothing: counters are written with each message."""
        return []


class PostgresSnapshots:
    """A connection that only reads; see :class:`mediator.store.snapshots.Snapshots`."""

    shared = True

    def __init__(self, url: str) -> None:
        """Raises as :class:`PostgresStore`."""
        parameters = connection_parameters(url) | {"target_session_attrs": "any"}
        self._dialect = PostgresDialect(Wire(lambda: psycopg.connect(**parameters, autocommit=True)), "")
        with self.open() as ask:
            found = ask("SELECT count(*) FROM pg_extension WHERE extname = 'amcheck'", ())
        self._checks_indexes = bool(found[0][0])

    @contextmanager
    def open(self) -> Iterator[Callable[[str, Sequence[Any]], list[Row]]]:
        """See :class:`mediator.store.snapshots.Snapshots`."""
        with _transaction(self._dialect):
            self._dialect.begin(_READING)
            yield self._dialect.execute

    def columns(self) -> set[tuple[str, str]]:
        """See :class:`mediator.store.snapshots.Snapshots`."""
        with self.open() as ask:
            found = ask(
                "SELECT table_name::text, column_name::text FROM information_schema.columns"
                " WHERE table_schema = current_schema()",
                (),
            )
        return {(row[0], row[1]) for row in found}

    def indexes(self) -> set[str]:
        """See :class:`mediator.store.snapshots.Snapshots`."""
        with self.open() as ask:
            found = ask("SELECT indexname::text FROM pg_indexes WHERE schemaname = current_schema()", ())
        return {row[0] for row in found}

    def foreign_objects(self, migrations_of_parts: Mapping[str, Path]) -> list[str]:
        """See :class:`mediator.store.snapshots.Snapshots`; other tables and views of the schema may be its owner's."""
        with self.open() as ask:
            found = ask(
                "SELECT 'trigger ' || tgname || ' of ' || relname"
                " FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid"
                " WHERE NOT tgisinternal AND relnamespace = current_schema()::regnamespace"
                " UNION ALL SELECT 'rule ' || rulename || ' of ' || tablename FROM pg_rules"
                " WHERE schemaname = current_schema() ORDER BY 1",
                (),
            )
        return [row[0] for row in found]

    def check_pages(self, table: str) -> list[str]:
        """Compare the indexes with the table, where the extension amcheck is installed in the database."""
        if not self._checks_indexes:
            return []
        try:
            with self.open() as ask:
                ask(
                    "SELECT bt_index_check(indexrelid, true)::text FROM pg_index"
                    " JOIN pg_class ON pg_class.oid = indexrelid JOIN pg_am ON pg_am.oid = relam"
                    " WHERE amname = 'btree' AND indrelid = (quote_ident(current_schema()) || '.' || ?)::regclass",
                    (table,),
                )
        except UnavailableError as error:
            # Not every role may run the check.
            if isinstance(error.__cause__, IndexCorrupted | DataCorrupted):
                return [str(error)]
        return []

    def close(self) -> None:
        """See :class:`mediator.store.snapshots.Snapshots`."""
        self._dialect.close()


@contextmanager
def _transaction(dialect: PostgresDialect) -> Iterator[None]:
    """Roll back what is not committed at the end of the block.

    Raises :class:`UnavailableError` for all errors of the database.
    """
    try:
        try:
            yield
        finally:
            if dialect.wire.open:
                dialect.wire.roll_back()
    except (psycopg.Error, PeeweeException) as error:
        raise UnavailableError(describe_error(error)) from error


def _held_by(pid: int | None) -> str:
    process = "" if pid is None else f" (process {pid} of the server)"
    return f"another session of the database{process} holds a lock that the service waits for"


def connection_parameters(url: str) -> dict[str, Any]:
    """Read a URL of PostgreSQL, and add how the service connects; :class:`SetupError` when it is none."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # The driver's message may quote part of the password.
        raise SetupError("not a URL of PostgreSQL: expected postgresql://user:password@host:port/database") from None
    return {**_DEFAULTS, **given, "client_encoding": "UTF8"}


def require_utf8(connection: Connection) -> None:
    """Raise :class:`SetupError` for a database that cannot keep every text."""
    if connection.info.parameter_status("server_encoding") != "UTF8":
        raise SetupError("the PostgreSQL database must have the encoding UTF8")


def _require_session_pooling(parameters: dict[str, Any]) -> None:
    """Raise :class:`SetupError` when a pooler between us and the server lends out a session for less than a connection.

    A pooler gives a client another process number than the server's, for cancelling. Whether two connections keep a
    server's session each shows when they take turns.
    """
    with closing(psycopg.connect(**parameters, autocommit=True)) as first:
        if _server_process(first) == first.info.backend_pid:
            return
        with closing(psycopg.connect(**parameters, autocommit=True)) as second:
            # Not in strict turns, which could meet those of the pooler.
            turns = [[_server_process(one) for one in (first, first, second)] for _ in range(POOLER_TURNS)]
    if any(turn != turns[0] for turn in turns) or turns[0][0] != turns[0][1] or turns[0][0] == turns[0][2]:
        raise SetupError(
            "database_url: a pooler gives each transaction another session of PostgreSQL, but the service keeps "
            "settings, prepared statements and a lock in its sessions; set pool_mode = session in pgbouncer for this "
            "database, or connect to PostgreSQL directly"
        )


def _server_process(connection: Connection) -> int:
    row = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
    return 0 if row is None else int(row[0])


def _configure(connection: Connection, settings: Mapping[str, str]) -> None:
    connection.execute(
        "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS setting (name, value)",
        (list(settings), list(settings.values())),
    )


@cache
def _is_change(sql: str) -> bool:
    return sql.startswith(("INSERT", "UPDATE", "DELETE")) and " RETURNING " not in sql


@cache
def _as_arrays(sql: str) -> str | None:
    """Write an INSERT of one row of values as one of arrays."""
    return re.sub(r"VALUES \(([?, ]+)\)", r"SELECT * FROM unnest(\1)", sql) if sql.startswith("INSERT") else None


def _array(column: Sequence[Any]) -> Array:
    match column[0]:
        case int():
            return BigInts(column)
        case str():
            return Texts(column)
    return Blobs(column)


def describe_error(error: Exception) -> str:
    """Describe an error without the server's message, which may quote stored data."""
    if isinstance(error, psycopg.errors.QueryCanceled):
        return "the query took too long; narrow it with since or before_id"
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return f"database error {type(error).__name__} ({error.sqlstate})"
    return "the database does not answer"
