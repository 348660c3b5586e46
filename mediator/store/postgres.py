"""The PostgreSQL store: several instances share the mail, and lock rows of mailboxes against each other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

from peewee import PeeweeException, PostgresqlDatabase

from mediator.errors import SetupError, UnavailableError, UncertainError
from mediator.mailboxes.lanes import Lane
from mediator.store import rows
from mediator.store.base import Integrity, Place, Transaction
from mediator.store.caches import Counted, Counts, MailboxCache, UnflushedPositions
from mediator.store.dialect import MESSAGE_COLUMNS
from mediator.store.migrate import migrate
from mediator.store.pool import Pool
from mediator.store.rows import KeptMailbox, Row
from mediator.store.session import Session

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.pq import TransactionStatus
    from psycopg.types.numeric import Int8BinaryDumper
except ImportError as error:
    raise SetupError("PostgreSQL needs its driver: pip install 'agent-mediator[postgres]'") from error

from mediator.store.arrays import BigInts, Blobs, Texts, teach

READERS = 4
READ_SECONDS = 4
"""A SELECT beside the writer is cancelled after this long."""
LOCK_SECONDS = 5
"""How long a transaction waits for what another instance has locked."""
STALLED_SECONDS = 30
"""An instance that stops within a transaction loses it, and its locks, after this long."""
MIGRATION_SECONDS = 60
"""How long an instance waits at its start while another migrates the schema."""
MIGRATION_LOCK = 0x6D65_6469_6174_6F72
"""The advisory lock held during a migration."""

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
    "idle_in_transaction_session_timeout": f"{STALLED_SECONDS}s",
}
_WRITING = "BEGIN ISOLATION LEVEL READ COMMITTED"
_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_PREFETCH = (
    f"SELECT {', '.join(f'mailbox.{column}' for column in rows.MAILBOX.split(', '))}"
    " FROM unnest(%b, %b) AS place (tenant, address)"
    " JOIN mailbox ON mailbox.tenant = place.tenant AND mailbox.address = place.address"
    " WHERE mailbox.address IS NOT NULL ORDER BY mailbox.no FOR UPDATE OF mailbox"
)
_INSERT = f"INSERT INTO message ({MESSAGE_COLUMNS}) SELECT * FROM unnest({', '.join(['%b'] * 13)})"
_ARRAYS = (BigInts,) * 6 + (Texts,) * 3 + (Blobs,) * 2 + (BigInts, Texts)
_HOLD = (
    "INSERT INTO held (mailbox_no, recipient, messages, bytes) SELECT * FROM unnest(%b, %b, %b, %b)"
    " ON CONFLICT (mailbox_no, recipient)"
    " DO UPDATE SET messages = held.messages + excluded.messages, bytes = held.bytes + excluded.bytes"
)
_LET_GO = (
    "DELETE FROM held USING unnest(%b, %b) AS changed (mailbox_no, recipient)"
    " WHERE held.mailbox_no = changed.mailbox_no AND held.recipient = changed.recipient AND messages <= 0"
)
_SAVE = (
    "UPDATE mailbox SET next_id = new.next_id, messages = new.messages, bytes = new.bytes, last_at = new.last_at,"
    " dedup_ids = new.dedup_ids FROM unnest(%b, %b, %b, %b, %b, %b)"
    " AS new (no, next_id, messages, bytes, last_at, dedup_ids) WHERE mailbox.no = new.no"
)
_INNER = rows.MESSAGE.replace(rows.BODY, f"{rows.BODY} AS payload")
_OUTER = rows.MESSAGE.replace(rows.BODY, "payload")

Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"


class PostgresStore:
    """Mailboxes in a PostgreSQL database. Opening it migrates the schema."""

    quick = False
    commits_fast = False

    def __init__(self, url: str) -> None:
        """Open the database at ``url``; :class:`SetupError` when that is no PostgreSQL URL.

        Raises :class:`UnavailableError` when the database does not answer.
        """
        parameters = _parameters(url)
        self._database = PostgresqlDatabase(
            prefer_psycopg3=True, thread_safe=False, database=parameters.get("dbname", ""), **parameters
        )
        self._writer = _Link(self._connect, _WRITING, "FOR UPDATE")

        def connect_to_read() -> Connection:
            connection = psycopg.connect(**parameters, autocommit=True)
            _configure(connection, _SESSION | {"statement_timeout": f"{READ_SECONDS}s"})
            return connection

        self._readers = Pool(lambda: _Link(connect_to_read, _READING, ""), READERS, READ_SECONDS)
        self._counts = Counts(Counted)
        try:
            self.migrated = self._migrate()
        except (psycopg.Error, PeeweeException) as error:
            raise UnavailableError(f"cannot open the database: {error}") from error
        finally:
            self._database.close()

    def _connect(self) -> Connection:
        self._database.close()
        self._database.connect()
        connection: Connection = self._database.connection()
        # The operator's default must not weaken durability; a stronger one stays.
        connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false)"
            " WHERE current_setting('synchronous_commit') <> 'remote_apply'"
        )
        _configure(connection, _SESSION | {"lock_timeout": f"{LOCK_SECONDS}s"})
        return connection

    def _migrate(self) -> list[str]:
        connection = self._connect()
        if connection.info.parameter_status("server_encoding") != "UTF8":
            raise SetupError("the PostgreSQL database must have the encoding UTF8")
        _configure(connection, {"lock_timeout": f"{MIGRATION_SECONDS}s"})
        connection.execute("SELECT pg_advisory_lock(%s)", (MIGRATION_LOCK,))
        return migrate(self._database)

    @contextmanager
    def transaction(self, places: Sequence[Place] = ()) -> Iterator[Transaction]:
        """Open a transaction; see :class:`mediator.store.base.Store`."""
        with self._writer.transaction(places) as (dialect, mailboxes):
            locked = MailboxCache(len(mailboxes))
            for mailbox in mailboxes:
                locked.add(mailbox)
            session = Session(dialect, locked, UnflushedPositions(0), self._counts)
            committing = False
            try:
                yield Transaction(session)
                committing = True
                with dialect.together():
                    session.finish()
                    dialect.commit()
                dialect.committed()
            except BaseException as error:
                session.roll_back()
                # Unless the server says that the transaction failed, it may have been committed.
                failed = dialect.connection.info.transaction_status == TransactionStatus.INERROR
                if committing and isinstance(error, psycopg.Error) and not failed:
                    raise UncertainError from error
                raise

    damage = None

    def find_damage(self, seconds: float) -> Integrity:
        """PostgreSQL has its own tools for that."""
        del seconds
        return Integrity()

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """Open a snapshot; see :class:`mediator.store.base.Store`."""
        with self._readers.take() as link, link.transaction() as (dialect, _):
            yield Transaction(Session(dialect, MailboxCache(0), UnflushedPositions(0), Counts(Counted)))

    def checkpoint(self) -> None:
        """The server does that itself."""

    def upkeep(self, busy: bool) -> None:
        """Autovacuum does that."""

    def close(self) -> None:
        """Close all connections."""
        self._readers.close()
        self._writer.close()
        self._database.close()


class PostgresDialect:
    """One connection to PostgreSQL."""

    ordered = False
    """Another instance may have taken a lower number and commit later."""

    def __init__(self, connection: Connection, lock: str) -> None:
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        teach(connection.adapters)
        self.connection = connection
        self._asking = connection.cursor(binary=True)
        self._telling = connection.cursor(binary=True)
        self._framing = connection.cursor()
        self._pipeline: psycopg.Pipeline | None = None
        self._lock = lock
        self._warned = False
        connection.add_notice_handler(self._take_notice)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a statement and return its rows."""
        cursor = self._asking
        cursor.execute(_translated(sql), parameters)
        if self._pipeline is not None:
            self._pipeline.sync()
        return list(cursor.fetchall()) if cursor.description is not None else []

    def many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each row of parameters, in one round trip."""
        self._telling.executemany(_translated(sql), parameters)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send all statements of this block in one round trip."""
        with self.connection.pipeline() as pipeline:
            self._pipeline = pipeline
            try:
                yield
            finally:
                self._pipeline = None

    def begin(self, sql: str, places: Sequence[Place]) -> list[KeptMailbox]:
        """Begin, and lock the mailboxes at these places in the order that all instances use."""
        if not places:
            self._framing.execute(sql)
            return []
        tenants, addresses = zip(*set(places), strict=True)
        with self.together():
            self._framing.execute(sql)
            self._asking.execute(_PREFETCH, (Texts(tenants), Texts(addresses)))
        return [rows.mailbox(row) for row in self._asking.fetchall()]

    def commit(self) -> None:
        """Send COMMIT; see :meth:`committed`."""
        self._warned = False
        self._framing.execute("COMMIT")

    def committed(self) -> None:
        """Raise :class:`UnavailableError` if the server answered ROLLBACK, as it does when the transaction failed.

        Raises :class:`UncertainError` if it warned: a COMMIT that is cancelled while it waits for a synchronous standby
        succeeds with a warning, and is lost when that standby is promoted.
        """
        if self._framing.statusmessage != "COMMIT":
            raise UnavailableError("transaction rolled back")
        if self._warned:
            raise UncertainError

    def _take_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        self._warned = self._warned or notice.severity_nonlocalized == "WARNING"

    def roll_back(self) -> None:
        """Roll the transaction back."""
        self._framing.execute("ROLLBACK")

    def insert_messages(self, values: Sequence[Row]) -> None:
        """Insert all with one statement."""
        columns = zip(*values, strict=True)
        self._telling.execute(_INSERT, [array(column) for array, column in zip(_ARRAYS, columns, strict=True)])

    def lane_source(self, lane: Lane) -> str:
        """Name the table; the planner chooses the partial index."""
        del lane
        return "message"

    def budgeted(self, source: str, parameters: Sequence[Any], order: str, limit: int, budget: int) -> Iterator[Row]:
        """Sum sizes before reading large payloads, which are stored apart from the rows."""
        sql = (
            f"SELECT {_OUTER} FROM (SELECT {_INNER},"
            f" sum(size) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) - size AS before"
            f" FROM {source} ORDER BY {order} LIMIT ?) AS weighed WHERE before < ? ORDER BY {order}"
        )
        yield from self.execute(sql, (*parameters, limit, max(budget, 1)))

    def any_of(self, column: str, values: Sequence[int]) -> tuple[str, Sequence[Any]]:
        """Compare with an array."""
        return f"{column} = ANY(?)", (BigInts(values),)

    def has_tag(self) -> str:
        """Search for the tag between commas."""
        return "strpos(',' || tags || ',', ',' || ? || ',') > 0"

    def lock(self) -> str:
        """Lock rows until the end of the transaction."""
        return self._lock

    def settle_counters(self, mailbox: KeptMailbox) -> None:
        """Counters are always written, since every instance needs them."""

    def save_held(self, changed: Sequence[Row]) -> None:
        """Add with one statement."""
        numbers, recipients, messages, sizes = zip(*changed, strict=True)
        self._telling.execute(_HOLD, [BigInts(numbers), Texts(recipients), BigInts(messages), BigInts(sizes)])
        if min(messages) <= 0:
            self._telling.execute(_LET_GO, [BigInts(numbers), Texts(recipients)])

    def save_mailboxes(self, mailboxes: Sequence[KeptMailbox]) -> None:
        """Write the counters of all changed mailboxes with one statement."""
        changed = [m for m in mailboxes if m.dirty or m.next_id != m.stored_id]
        if not changed:
            return
        columns = zip(*[(m.no, m.next_id, m.messages, m.bytes, m.last_at, m.dedup_ids) for m in changed], strict=True)
        self._telling.execute(_SAVE, [BigInts(column) for column in columns])
        for mailbox in changed:
            mailbox.stored_id, mailbox.dirty = mailbox.next_id, False

    def usage(self, tenant: str, now: int) -> Row:
        """Sum the rows."""
        return self.execute(
            "SELECT coalesce(sum(messages), 0)::bigint, coalesce(sum(bytes), 0)::bigint FROM mailbox WHERE tenant = ?"
            " AND (expire_at IS NULL OR expire_at > ?)",
            (tenant, now),
        )[0]


class _Link:
    """A connection that is opened when first used, and again after it broke."""

    def __init__(self, connect: Callable[[], Connection], begin: str, lock: str) -> None:
        self._connect = connect
        self._begin_sql = begin
        self._lock = lock
        self._dialect: PostgresDialect | None = None

    @contextmanager
    def transaction(self, places: Sequence[Place] = ()) -> Iterator[tuple[PostgresDialect, list[KeptMailbox]]]:
        """Open a transaction; what is not committed at its end is rolled back.

        Raises :class:`UnavailableError` for all errors of the database.
        """
        try:
            try:
                yield self._begin(places)
            finally:
                self._end()
        except (psycopg.Error, PeeweeException) as error:
            raise UnavailableError(_reason(error)) from error

    def _begin(self, places: Sequence[Place]) -> tuple[PostgresDialect, list[KeptMailbox]]:
        if self._dialect is not None:
            try:
                return self._dialect, self._dialect.begin(self._begin_sql, places)
            except psycopg.Error:
                if not self._dialect.connection.closed:
                    raise
        # The first use, or the server was restarted: nothing was done yet, so connect and try again.
        self._dialect = PostgresDialect(self._connect(), self._lock)
        return self._dialect, self._dialect.begin(self._begin_sql, places)

    def _end(self) -> None:
        if self._dialect is None or self._dialect.connection.info.transaction_status == TransactionStatus.IDLE:
            return
        try:
            self._dialect.roll_back()
        except psycopg.Error:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._dialect is not None:
            self._dialect.connection.close()
            self._dialect = None


def _parameters(url: str) -> dict[str, Any]:
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # The driver's message may quote part of the password.
        raise SetupError("not a URL of PostgreSQL: expected postgresql://user:password@host:port/database") from None
    return {**_DEFAULTS, **given, "client_encoding": "UTF8"}


def _configure(connection: Connection, settings: Mapping[str, str]) -> None:
    connection.execute(
        "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS setting (name, value)",
        (list(settings), list(settings.values())),
    )


@cache
def _translated(sql: str) -> bytes:
    """Translate ``?`` into the driver's placeholder; there are few statements, since lists are arrays."""
    return sql.replace("%", "%%").replace("?", "%b").encode()


def _reason(error: Exception) -> str:
    """Describe an error without the server's message, which may quote stored data."""
    if isinstance(error, psycopg.errors.QueryCanceled):
        return "the query took too long; narrow it with since or before_id"
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return f"database error {type(error).__name__} ({error.sqlstate})"
    return "the database does not answer"
