"""The checks of the database: its pages and tables, and the mailboxes' own counters, numbers and rows."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from peewee import SqliteDatabase

from mediator.mailboxes import rows
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.message import HIDDEN_ID
from mediator.mailboxes.rows import Row, StoredMessage
from mediator.store.migrate import migrate
from mediator.store.snapshots import Snapshots, SqliteSnapshots
from mediator.store.sqlite import STORE_EVERY
from mediator.verify.checks import RECOUNT, Damage, DamageKind, Installation, Progress, RowCheck, VerifyCheck, orphans

COUNTERS = DamageKind("mailbox_counters", "Counters of mailboxes do not match their messages or bytes.", RECOUNT)
DEDUP_COUNT = DamageKind("dedup_count", "Counters of mailboxes do not match their deduplication ids.", RECOUNT)
HELD = DamageKind("held_counters", "The messages counted for a wallet's key differ from those that wait.", RECOUNT)
NEXT_ID = DamageKind("next_id", "The next msg_id of mailboxes does not follow their messages.")
ID_AHEAD = DamageKind("id_ahead", "Rows name a msg_id that their mailbox has not given yet: messages were lost.")
ORPHANS = DamageKind(
    "orphan_rows",
    "Rows belong to a mailbox or group that does not exist: nobody reaches them, and nothing removes them.",
    "A row of a mailbox or group was lost: restore a backup.",
)
VALUES = DamageKind("message_values", "Messages have an impossible lane, number or time.")
PAYLOAD = DamageKind("payload_missing", "Messages have no payload.")
SIZE = DamageKind("payload_size", "Messages are larger or smaller than their row says: their content was changed.")
EXTRA = DamageKind("message_details", "Headers or details of messages cannot be read, or have another size.")
ORDER = DamageKind("message_order", "Messages have an earlier time than one before them: FETCH by time misses some.")
BODIES = DamageKind("shared_payloads", "Payloads that messages share are counted wrong: some may be lost, or stay.")
GROUP = DamageKind("group_state", "The position of consumer groups cannot be read, or contradicts itself.")
LEASE = DamageKind("lease_values", "Leases or dead letters contradict their message, or have impossible values.")
KEYS = DamageKind("secret_rows", "A row that exists once in every database is missing or damaged.")

_NO_PARTS = "extra IS NULL AND key IS NULL AND tags IS NULL"
_HIGHEST = "coalesce((SELECT max(msg_id) FROM message WHERE message.mailbox_no = mailbox.no), -1)"
_MESSAGE = "message {1} of mailbox {0}"
PAGES = DamageKind(
    "database_pages",
    "Pages of the database are damaged, or an index differs from its table.",
    "Stop the service, copy mediator.db, -wal and -shm aside, and restore a backup, or what `sqlite3 mediator.db "
    ".recover` saves. Check the disk.",
)
SCHEMA = DamageKind(
    "schema",
    "Tables, columns or indexes of this version are missing.",
    "After an update, run `mediator migrate`. Otherwise something else changed the database: restore a backup.",
)


FOREIGN = DamageKind(
    "schema_foreign",
    "The database has triggers, views, tables or indexes that no migration made; they may change what is stored.",
    "Find out who made them: nobody but the service should be able to. Drop them with the service stopped, or restore a"
    " backup.",
)


def mailbox_checks() -> list[VerifyCheck]:
    """Return the checks, the quick ones first."""
    return [
        SingleRows(),
        *(
            orphans(ORPHANS, table, "mailbox_no", "mailbox")
            for table in ("message", "held", "delayed", "dedup", "consumer", "pushed")
        ),
        orphans(ORPHANS, "lease", "group_no", "consumer"),
        RowCheck(
            COUNTERS,
            "mailbox.no message.mailbox_no",
            "SELECT no, messages, bytes, there, size FROM (SELECT no, messages, bytes, count(message.msg_id) AS there,"
            " coalesce(sum(message.size), 0) AS size FROM mailbox"
            " LEFT JOIN message ON message.mailbox_no = no AND message.msg_id < next_id"
            " WHERE {no} GROUP BY no) AS counted WHERE messages <> there OR bytes <> size",
            "mailbox {0} counts {1} messages of {2} bytes, and holds {3} of {4}",
        ),
        NextIds(),
        RowCheck(
            DEDUP_COUNT,
            "mailbox.no dedup.mailbox_no",
            "SELECT no, dedup_ids, there FROM (SELECT no, dedup_ids, count(seq) AS there FROM mailbox"
            " LEFT JOIN dedup ON dedup.mailbox_no = no WHERE address IS NOT NULL AND {no} GROUP BY no) AS counted"
            " WHERE dedup_ids <> there",
            "mailbox {0} counts {1}, and has {2}",
        ),
        RowCheck(
            HELD,
            "message.mailbox_no held.mailbox_no",
            "SELECT mailbox_no, sum(messages), sum(bytes) FROM (SELECT mailbox_no, recipient, messages, bytes FROM held"
            " WHERE {mailbox_no} UNION ALL SELECT mailbox_no, recipient, -1, -size FROM message"
            " WHERE recipient IS NOT NULL AND {mailbox_no}) AS counted GROUP BY mailbox_no, recipient"
            " HAVING sum(messages) <> 0 OR sum(bytes) <> 0",
            "mailbox {0} counts {1} messages and {2} bytes too many",
        ),
        *(_ahead(table) for table in ("dedup", "pushed")),
        RowCheck(
            ID_AHEAD,
            "lease.group_no",
            "SELECT mailbox.no, lease.msg_id FROM lease JOIN consumer ON consumer.no = group_no"
            " JOIN mailbox ON mailbox.no = mailbox_no WHERE {group_no}"
            f" AND msg_id >= next_id AND msg_id > {_HIGHEST}",
            "lease: " + _MESSAGE,
        ),
        RowCheck(
            VALUES,
            "message.mailbox_no",
            f"SELECT mailbox_no, msg_id FROM message WHERE {{mailbox_no}} AND (lane NOT BETWEEN 0 AND {LANES[-1].value}"
            " OR msg_id < 0 OR size < 0 OR created_at < 0 OR expire_at < 0)",
            _MESSAGE,
        ),
        RowCheck(
            VALUES,
            "delayed.seq",
            f"SELECT mailbox_no, seq FROM delayed WHERE {{seq}} AND (lane NOT BETWEEN 0 AND {LANES[-1].value}"
            " OR size < 0 OR due_at < sent_at OR expire_at < 0)",
            "delayed message {1} of mailbox {0}",
        ),
        RowCheck(
            PAYLOAD,
            "message.mailbox_no",
            "SELECT mailbox_no, msg_id FROM message WHERE {mailbox_no} AND payload IS NULL"
            " AND NOT EXISTS (SELECT 1 FROM body WHERE body.no = body_no)",
            _MESSAGE,
        ),
        _sizes("message", "mailbox_no", "msg_id", rows.BODY),
        _sizes("delayed", "seq", "seq", "payload"),
        _sizes("outbox", "seq", "msg_id", "payload"),
        *(
            RowCheck(
                EXTRA,
                f"{table}.{column}",
                f"SELECT mailbox_no, {name}, size, key, tags, extra, length({payload}) FROM {table}"
                f" WHERE {{{column}}} AND NOT ({_NO_PARTS})",
                f"{table} {{1}} of mailbox {{0}}",
                judge=_is_unreadable,
                slice_rows=2000,
            )
            for table, column, name, payload in (
                ("message", "mailbox_no", "msg_id", rows.BODY),
                ("delayed", "seq", "seq", "payload"),
                ("outbox", "seq", "msg_id", "payload"),
            )
        ),
        RowCheck(
            ORDER,
            "message.mailbox_no",
            "SELECT mailbox_no, msg_id FROM (SELECT mailbox_no, msg_id, created_at, lag(created_at) OVER"
            " (PARTITION BY mailbox_no ORDER BY msg_id) AS previous FROM message WHERE {mailbox_no}) AS followed"
            " WHERE previous > created_at",
            _MESSAGE,
        ),
        RowCheck(
            BODIES,
            "body.no",
            # The whole table of messages has no index for this; where nothing is shared, it is not read.
            "SELECT no, refs, coalesce(used, 0) FROM body LEFT JOIN (SELECT body_no, count(*) AS used FROM message"
            " WHERE body_no IS NOT NULL GROUP BY body_no) AS uses ON body_no = no WHERE {no}"
            " AND refs <> coalesce(used, 0)",
            "payload {0} counts {1} messages, and {2} share it",
            slice_rows=10_000_000,
        ),
        RowCheck(
            GROUP,
            "consumer.mailbox_no",
            "SELECT mailbox_no, no, state FROM consumer WHERE {mailbox_no}",
            "group {1} of mailbox {0}",
            judge=_contradicts,
        ),
        RowCheck(
            LEASE,
            "lease.group_no",
            "SELECT consumer.mailbox_no, lease.msg_id FROM lease JOIN consumer ON consumer.no = group_no"
            " LEFT JOIN message ON message.mailbox_no = consumer.mailbox_no AND message.msg_id = lease.msg_id"
            " WHERE {group_no} AND (lease.lane <> message.lane OR deliveries < dead OR until < 0"
            f" OR dead NOT IN (0, 1) OR delayed NOT IN (0, 1) OR lease.lane NOT BETWEEN 0 AND {LANES[-1].value})",
            _MESSAGE,
        ),
    ]


def _ahead(table: str) -> RowCheck:
    return RowCheck(
        ID_AHEAD,
        f"{table}.mailbox_no",
        f"SELECT mailbox_no, msg_id FROM {table} JOIN mailbox ON mailbox.no = mailbox_no WHERE {{mailbox_no}}"
        f" AND msg_id >= next_id AND msg_id > {_HIGHEST}",
        f"{table}: {_MESSAGE}",
    )


def _sizes(table: str, column: str, name: str, payload: str) -> RowCheck:
    return RowCheck(
        SIZE,
        f"{table}.{column}",
        f"SELECT mailbox_no, {name}, size, length FROM (SELECT mailbox_no, {name}, size, length({payload}) AS length"
        f" FROM {table} WHERE {{{column}}} AND {_NO_PARTS}) AS sized WHERE size <> length",
        f"{table} {{1}} of mailbox {{0}} should have {{2}} bytes, and has {{3}}",
    )


def _is_unreadable(row: Row) -> bool:
    """Whether a message's details cannot be read, or do not add up to its size."""
    *_, size, key, tags, extra, length = row
    try:
        payload_size = StoredMessage(HIDDEN_ID, 0, size, 0, None, key, tags, None, extra, b"", 0).payload_size
        return length is not None and payload_size != length
    except (ValueError, AttributeError, TypeError, KeyError):
        return True


def _contradicts(row: Row) -> bool:
    """Whether a group's position cannot be read, or it settled what was not delivered."""
    try:
        group = rows.group((row[1], row[0], "", b"", 0, 0), row[2])
        marks = list(zip(group.settled, group.delivered, strict=True))
        return len(marks) != len(LANES) or any(not -1 <= settled <= delivered for settled, delivered in marks)
    except (ValueError, TypeError):
        return True


class NextIds(RowCheck):
    """Looks for messages whose numbers do not fit those that their mailbox gives next.

    On PostgreSQL the row of the mailbox is always current. SQLite's lags behind by less than :data:`STORE_EVERY`
    messages, and nothing was removed of these.
    """

    def __init__(self) -> None:
        super().__init__(
            NEXT_ID,
            "mailbox.no message.mailbox_no",
            "SELECT no, next_id, count(*), max(msg_id) FROM mailbox JOIN message ON message.mailbox_no = no"
            " AND msg_id >= next_id WHERE {no} GROUP BY no",
            "mailbox {0} would give {1} or later next, and has {2} messages from there up to {3}",
            judge=_skips,
        )

    def run(self, installation: Installation, progress: Progress) -> Iterator[Damage]:
        """See :class:`VerifyCheck`."""
        if installation.database.shared:
            self._judge = None
        yield from super().run(installation, progress)


def _skips(row: Row) -> bool:
    _, next_id, count, last = row
    return bool(last + 1 - next_id != count or count >= STORE_EVERY)


class SingleRows(VerifyCheck):
    """Looks for the rows that a database has from its first migration on."""

    title = "secret_rows"
    kinds = (KEYS,)

    def run(self, installation: Installation, progress: Progress) -> Iterator[Damage]:
        """See :class:`VerifyCheck`."""
        with installation.database.open() as ask:
            found = ask("SELECT count(*) FROM send_only_key WHERE length(key) = 32", ())
        if found[0][0] != 1:
            damage = Damage(KEYS)
            damage.add(1, ["send_only_key: no send-only address is accepted any more"])
            yield damage


class Pages(VerifyCheck):
    """Reads every page of every table and its indexes; PostgreSQL only with the extension amcheck."""

    title = PAGES.code
    kinds = (PAGES,)

    def run(self, installation: Installation, progress: Progress) -> Iterator[Damage]:
        """See :class:`VerifyCheck`."""
        tables = sorted({table for table, _ in installation.database.columns()})
        for number, table in enumerate(tables):
            progress(number / len(tables))
            problems = installation.database.check_pages(table)
            if problems:
                found = Damage(PAGES)
                found.add(len(problems), [f"{table}: {problem}" for problem in problems])
                yield found


class Schema(VerifyCheck):
    """Compares the schema with that of an empty database which this version migrated."""

    title = SCHEMA.code
    kinds = (SCHEMA, FOREIGN)

    def __init__(self, migrations_of_parts: Mapping[str, Path]) -> None:
        """``migrations_of_parts`` are those of :func:`mediator.store.migrate.migrate`."""
        self._migrations = migrations_of_parts

    def run(self, installation: Installation, progress: Progress) -> Iterator[Damage]:
        """See :class:`VerifyCheck`."""
        missing = _find_missing(installation.database, self._migrations)
        if missing:
            found = Damage(SCHEMA)
            found.add(len(missing), missing)
            yield found
        foreign = installation.database.foreign_objects(self._migrations)
        if foreign:
            found = Damage(FOREIGN)
            found.add(len(foreign), foreign)
            yield found


def _find_missing(database: Snapshots, migrations_of_parts: Mapping[str, Path]) -> list[str]:
    """Return which tables, columns and indexes of this version a database lacks."""
    empty = SqliteDatabase(":memory:")
    with empty:
        migrate(empty, migrations_of_parts)
        wanted = SqliteSnapshots(empty.connection())
        columns, indexes = wanted.columns(), wanted.indexes()
    # sqlite_sequence is SQLite's own table; message.id does not exist on PostgreSQL.
    own = {"sqlite_sequence"}
    has = database.columns()
    tables = {table for table, _ in has}
    lacking = {(table, column) for table, column in columns - has if table not in own}
    if database.shared:
        lacking.discard(("message", "id"))
    return [
        *sorted({f"table {table}" for table, _ in lacking if table not in tables}),
        *sorted(f"column {table}.{column}" for table, column in lacking if table in tables),
        *sorted(f"index {name}" for name in indexes - database.indexes()),
    ]
