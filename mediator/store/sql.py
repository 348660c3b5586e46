"""The tables of the domain in SQL that SQLite and PostgreSQL share; what differs is in a :class:`Dialect`."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from mediator.mailboxes.bounds import MAX_DEDUP_IDS
from mediator.mailboxes.events import Event, What
from mediator.mailboxes.group import LOOSE, Group, Lease
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Mailbox, NewMailbox
from mediator.mailboxes.message import Delayed, Handle, Message
from mediator.mailboxes.ports import Expired, Filter, LeasePlace, TailRow, Usage
from mediator.store import rows
from mediator.store.rows import KeptMailbox, Row

SHARE_FROM = 4096
"""Bytes from which a payload that one transaction sends to several mailboxes is kept once."""
BACKLOG_SECONDS = 5.0
"""How long a count of the outbox is believed; what is added here is counted meanwhile."""


class Dialect(Protocol):
    """One connection, and what its database does in its own way."""

    ordered: bool
    """Whether a message's ``id`` is above those of all messages that are there when it is kept."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a statement with ``?`` places and return its rows."""

    def many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each row of parameters."""

    def insert_messages(self, values: Sequence[Row]) -> None:
        """Insert rows of the message table, in the order of :data:`MESSAGE_COLUMNS`."""

    def lane_source(self, lane: Lane) -> str:
        """Return the message table as a lane is read from it, by the right index."""

    def budgeted(self, source: str, parameters: Sequence[Any], order: str, limit: int, budget: int) -> Iterator[Row]:
        """Read MESSAGE columns from ``source``, a table with its WHERE; no payloads much beyond the byte budget."""

    def any_of(self, column: str, values: Sequence[int]) -> tuple[str, Sequence[Any]]:
        """Return a condition that holds when the column is one of the values, and its parameters."""

    def has_tag(self) -> str:
        """Return a condition with one place that holds when the column ``tags`` has the tag."""

    def lock(self) -> str:
        """Return what a SELECT of mailboxes ends with to lock them."""

    def settle_counters(self, mailbox: KeptMailbox) -> None:
        """Bring counters that were read from a row up to what the messages are now."""

    def save_mailboxes(self, mailboxes: Sequence[KeptMailbox]) -> None:
        """Write counters of changed mailboxes, those that must be written."""

    def usage(self, tenant: str) -> Row:
        """Return how many messages and bytes all mailboxes of a tenant hold."""


MESSAGE_COLUMNS = "mailbox_no, msg_id, lane, size, created_at, expire_at, key, tags, recipient, extra, payload, body_no"


class Known:
    """Mailboxes that were read, by place and by number; the least recently used are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_place: OrderedDict[tuple[str, str], KeptMailbox] = OrderedDict()
        self._by_no: dict[int, KeptMailbox] = {}

    def at(self, tenant: str, address: str) -> KeptMailbox | None:
        """Return the mailbox at a place."""
        mailbox = self._by_place.get((tenant, address))
        if mailbox is not None:
            self._by_place.move_to_end((tenant, address))
        return mailbox

    def numbered(self, no: int) -> KeptMailbox | None:
        """Return the mailbox with a number."""
        return self._by_no.get(no)

    def add(self, mailbox: KeptMailbox) -> None:
        """Remember a mailbox that has an address."""
        self._by_place[mailbox.tenant, mailbox.address] = mailbox
        self._by_no[mailbox.no] = mailbox

    def forget(self, mailbox: Mailbox) -> None:
        """Forget a mailbox, under whatever place it was known."""
        known = self._by_no.pop(mailbox.no, None)
        if known is not None and self._by_place.get((known.tenant, known.address)) is known:
            del self._by_place[known.tenant, known.address]

    def trim(self) -> None:
        """Forget the least recently used above the capacity; only between transactions."""
        while len(self._by_place) > self._capacity:
            _, mailbox = self._by_place.popitem(last=False)
            self._by_no.pop(mailbox.no, None)


class Backlog:
    """How many copies wait in the outbox: counted now and then, and added to in between."""

    def __init__(self) -> None:
        self.count = 0
        self._counted_at = 0.0

    def read(self, count: Callable[[], int]) -> int:
        """Return the number, counting anew when the last count is old."""
        now = time.monotonic()
        if not self._counted_at or now - self._counted_at > BACKLOG_SECONDS:
            self.count = count()
            self._counted_at = now
        return self.count

    def doubt(self) -> None:
        """Count anew next time."""
        self._counted_at = 0.0


class SqlTransaction:
    """All tables over one connection."""

    def __init__(self, dialect: Dialect, known: Known, backlog: Backlog) -> None:
        self.dialect = dialect
        self.known = known
        self.touched: dict[int, KeptMailbox] = {}
        self.removed = False
        self._unwritten: list[tuple[KeptMailbox, Message]] = []
        self.mailboxes = _Mailboxes(self)
        self.messages = _Messages(self)
        self.delays = _Delays(self, backlog)
        self.dedup_ids = _DedupIds(self)
        self.groups = _Groups(self)
        self.leases = _Leases(self)
        self.outbox = _Outbox(self, backlog)
        self.tail = _Tail(self)
        self.events: list[Event] = []
        self.woken: set[tuple[str, str]] = set()
        self.due: int | None = None

    def beat(self, now: int) -> None:
        """Write the time, to see whether the database takes it."""
        self.dialect.execute(
            "INSERT INTO heartbeat (no, at) VALUES (1, ?) ON CONFLICT (no) DO UPDATE SET at = excluded.at", (now,)
        )

    def touch(self, mailbox: Mailbox) -> KeptMailbox:
        """Return the mailbox as this transaction changes it."""
        assert isinstance(mailbox, KeptMailbox)
        self.touched[mailbox.no] = mailbox
        return mailbox

    def write_later(self, mailbox: KeptMailbox, message: Message) -> None:
        """Keep a message for one insert of many."""
        self._unwritten.append((mailbox, message))

    def unwritten(self, mailbox: Mailbox, key: str) -> bool:
        """Whether a message with the key waits to be inserted."""
        return any(message.key == key and box.no == mailbox.no for box, message in self._unwritten)

    def flush(self) -> None:
        """Insert what waits, so that a SELECT sees it."""
        if not self._unwritten:
            return
        waiting, self._unwritten = self._unwritten, []
        bodies = self._share([message.payload for _, message in waiting])
        self.dialect.insert_messages(
            [
                (
                    mailbox.no,
                    message.msg_id,
                    message.lane.value,
                    message.size,
                    message.created_at,
                    message.expire_at,
                    message.key,
                    rows.join_tags(message.tags),
                    message.recipient,
                    rows.extra(message),
                    None if id(message.payload) in bodies else message.payload,
                    bodies.get(id(message.payload)),
                )
                for mailbox, message in waiting
            ]
        )

    def _share(self, payloads: Sequence[bytes]) -> dict[int, int]:
        """Keep large payloads that are sent more than once in a body of their own; return its number by identity."""
        uses: dict[int, tuple[bytes, int]] = {}
        for payload in payloads:
            if len(payload) >= SHARE_FROM:
                uses[id(payload)] = (payload, uses.get(id(payload), (payload, 0))[1] + 1)
        return {
            identity: self.one("INSERT INTO body (refs, payload) VALUES (?, ?) RETURNING no", (refs, payload))[0]
            for identity, (payload, refs) in uses.items()
            if refs > 1
        }

    def finish(self) -> None:
        """Write what is still held back, right before the commit."""
        self.flush()
        if self.touched:
            self.dialect.save_mailboxes(list(self.touched.values()))
        self.tail.finish()

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> Row:
        """Return the only row of a statement that always has one."""
        return self.dialect.execute(sql, parameters)[0]

    def first(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Return the first row of a statement, if it has any."""
        found = self.dialect.execute(sql, parameters)
        return found[0] if found else None


class _Table:
    def __init__(self, tx: SqlTransaction) -> None:
        self._tx = tx


class _Mailboxes(_Table):
    def find(self, tenant: str, address: str) -> Mailbox | None:
        known = self._tx.known.at(tenant, address)
        if known is not None:
            return known
        sql = f"SELECT {rows.MAILBOX} FROM mailbox WHERE tenant = ? AND address = ? {self._tx.dialect.lock()}"
        row = self._tx.first(sql, (tenant, address))
        return None if row is None else self._take(row)

    def by_no(self, numbers: Iterable[int]) -> dict[int, Mailbox]:
        found: dict[int, Mailbox] = {}
        missing = []
        for no in sorted(numbers):
            known = self._tx.known.numbered(no) or self._tx.touched.get(no)
            if known is None:
                missing.append(no)
            else:
                found[no] = known
        for chunk in _chunks(missing):
            wanted, parameters = self._tx.dialect.any_of("no", chunk)
            sql = f"SELECT {rows.MAILBOX} FROM mailbox WHERE {wanted} ORDER BY no {self._tx.dialect.lock()}"
            for row in self._tx.dialect.execute(sql, parameters):
                mailbox = self._take(row)
                found[mailbox.no] = mailbox
        return found

    def _take(self, row: Row) -> KeptMailbox:
        mailbox = rows.mailbox(row)
        self._tx.dialect.settle_counters(mailbox)
        if mailbox.address:
            self._tx.known.add(mailbox)
        else:
            self._tx.touched[mailbox.no] = mailbox
        return mailbox

    def add(self, new: NewMailbox) -> Mailbox | None:
        row = self._tx.first(
            "INSERT INTO mailbox (tenant, address, created_at, expire_at, description, tags, public, kind, retention,"
            " archive, ack_wait, token_hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT DO NOTHING RETURNING no",
            (
                new.tenant,
                new.address,
                new.created_at,
                new.expire_at,
                new.desc,
                rows.join_tags(new.tags) or "",
                int(new.public),
                new.kind.value,
                new.retention.value,
                int(new.archive),
                new.ack_wait,
                new.token_hash,
            ),
        )
        if row is None:
            return None
        mailbox = KeptMailbox(
            no=row[0],
            tenant=new.tenant,
            address=new.address,
            created_at=new.created_at,
            expire_at=new.expire_at,
            desc=new.desc,
            tags=new.tags,
            public=new.public,
            kind=new.kind,
            retention=new.retention,
            archive=new.archive,
            ack_wait=new.ack_wait,
            token_hash=new.token_hash,
        )
        self._tx.known.add(mailbox)
        self._tx.touch(mailbox)
        return mailbox

    def describe(self, mailbox: Mailbox, desc: str, tags: tuple[str, ...], ack_wait: int | None) -> None:
        kept = self._tx.touch(mailbox)
        kept.desc, kept.tags, kept.ack_wait = desc, tags, ack_wait
        self._tx.dialect.execute(
            "UPDATE mailbox SET description = ?, tags = ?, ack_wait = ? WHERE no = ?",
            (desc, rows.join_tags(tags) or "", ack_wait, mailbox.no),
        )

    def retire(self, mailbox: Mailbox) -> None:
        kept = self._tx.touch(mailbox)
        self._tx.known.forget(kept)
        kept.address = ""
        self._tx.dialect.execute("UPDATE mailbox SET address = NULL WHERE no = ?", (mailbox.no,))

    def expired(self, now: int, limit: int) -> list[Mailbox]:
        found = self._tx.dialect.execute(
            "SELECT no FROM mailbox WHERE expire_at <= ? AND address IS NOT NULL ORDER BY expire_at LIMIT ?",
            (now, limit),
        )
        numbers = [row[0] for row in found]
        mailboxes = self.by_no(numbers)
        # Another instance may have been first while this one waited for the lock.
        return [mailboxes[no] for no in numbers if no in mailboxes and mailboxes[no].address]

    def retired(self, limit: int) -> list[Mailbox]:
        found = self._tx.dialect.execute("SELECT no FROM mailbox WHERE address IS NULL ORDER BY no LIMIT ?", (limit,))
        return list(self.by_no(row[0] for row in found).values())

    def drop(self, mailbox: Mailbox) -> None:
        self._tx.known.forget(mailbox)
        self._tx.touched.pop(mailbox.no, None)
        self._tx.dialect.execute("DELETE FROM held WHERE mailbox_no = ?", (mailbox.no,))
        self._tx.dialect.execute("DELETE FROM mailbox WHERE no = ?", (mailbox.no,))

    def list(self, tenant: str, after: str, limit: int, now: int) -> list[Mailbox]:
        found = self._tx.dialect.execute(
            "SELECT no FROM mailbox WHERE tenant = ? AND address > ? AND (expire_at IS NULL OR expire_at > ?)"
            " ORDER BY address LIMIT ?",
            (tenant, after, now, limit),
        )
        return sorted(self.by_no(row[0] for row in found).values(), key=lambda mailbox: mailbox.address)

    def usage(self, tenant: str) -> Usage:
        self._tx.finish()
        messages, size = self._tx.dialect.usage(tenant)
        return Usage(int(messages), int(size))


class _Messages(_Table):
    def append(self, mailbox: Mailbox, message: Message) -> None:
        kept = self._tx.touch(mailbox)
        kept.next_id = message.msg_id + 1
        kept.messages += 1
        kept.bytes += message.size
        kept.last_at = message.created_at
        self._tx.write_later(kept, message)
        if message.recipient is not None:
            self._hold(kept, message.recipient, 1, message.size)

    def _hold(self, mailbox: Mailbox, recipient: str, messages: int, size: int) -> None:
        self._tx.dialect.execute(
            "INSERT INTO held (mailbox_no, recipient, messages, bytes) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (mailbox_no, recipient)"
            " DO UPDATE SET messages = held.messages + excluded.messages, bytes = held.bytes + excluded.bytes",
            (mailbox.no, recipient, messages, size),
        )

    def handles(self, mailbox: Mailbox, ids: Sequence[int], now: int) -> dict[int, Handle]:
        self._tx.flush()
        found: dict[int, Handle] = {}
        for chunk in _chunks(ids):
            wanted, parameters = self._tx.dialect.any_of("msg_id", chunk)
            sql = (
                f"SELECT {rows.HANDLE} FROM message WHERE mailbox_no = ? AND {wanted}"
                " AND (expire_at IS NULL OR expire_at > ?)"
            )
            for row in self._tx.dialect.execute(sql, (mailbox.no, *parameters, now)):
                found[row[0]] = rows.handle(row)
        return found

    def keyed(self, mailbox: Mailbox, key: str) -> Handle | None:
        if self._tx.unwritten(mailbox, key):
            self._tx.flush()
        row = self._tx.first(f"SELECT {rows.HANDLE} FROM message WHERE mailbox_no = ? AND key = ?", (mailbox.no, key))
        return None if row is None else rows.handle(row)

    def lane(self, mailbox: Mailbox, lane: Lane, after: int, limit: int, budget: int, now: int) -> list[Message]:
        self._tx.flush()
        source = (
            f"{self._tx.dialect.lane_source(lane)}"
            f" WHERE lane = {lane.value} AND mailbox_no = ? AND msg_id > ? AND (expire_at IS NULL OR expire_at > ?)"
        )
        return self._within(source, (mailbox.no, after, now), "msg_id", limit, budget)

    def pick(self, mailbox: Mailbox, ids: Sequence[int], budget: int, now: int) -> list[Message]:
        self._tx.flush()
        found: list[Message] = []
        for chunk in _chunks(sorted(ids)):
            wanted, parameters = self._tx.dialect.any_of("msg_id", chunk)
            source = f"message WHERE mailbox_no = ? AND {wanted} AND (expire_at IS NULL OR expire_at > ?)"
            left = budget - sum(message.size for message in found)
            found += self._within(source, (mailbox.no, *parameters, now), "msg_id", len(chunk), left)
            if sum(message.size for message in found) >= budget:
                break
        return found

    def newest(self, mailbox: Mailbox, wanted: Filter, limit: int, budget: int, now: int) -> list[Message]:
        self._tx.flush()
        where = ["mailbox_no = ?", "(expire_at IS NULL OR expire_at > ?)"]
        parameters: list[Any] = [mailbox.no, now]
        if wanted.key is not None:
            where.append("key = ?")
            parameters.append(wanted.key)
        for tag in wanted.tags:
            where.append(self._tx.dialect.has_tag())
            parameters.append(tag)
        if wanted.since is not None:
            where.append("msg_id >= ?")
            parameters.append(self.first_since(mailbox, wanted.since))
        if wanted.before_id is not None:
            where.append("msg_id < ?")
            parameters.append(wanted.before_id)
        return self._within(f"message WHERE {' AND '.join(where)}", parameters, "msg_id DESC", limit, budget)[::-1]

    def _within(self, source: str, parameters: Sequence[Any], order: str, limit: int, budget: int) -> list[Message]:
        taken: list[Message] = []
        for row in self._tx.dialect.budgeted(source, parameters, order, limit, budget):
            taken.append(rows.message(row))
            budget -= taken[-1].size
            if budget <= 0:
                break
        return taken

    def between(self, mailbox: Mailbox, lane: Lane, after: int, last: int) -> list[Handle]:
        self._tx.flush()
        sql = (
            f"SELECT {rows.HANDLE} FROM {self._tx.dialect.lane_source(lane)}"
            f" WHERE lane = {lane.value} AND mailbox_no = ? AND msg_id > ? AND msg_id <= ? ORDER BY msg_id"
        )
        return [rows.handle(row) for row in self._tx.dialect.execute(sql, (mailbox.no, after, last))]

    def first(self, mailbox: Mailbox, limit: int) -> list[Handle]:
        self._tx.flush()
        sql = f"SELECT {rows.HANDLE} FROM message WHERE mailbox_no = ? ORDER BY msg_id LIMIT ?"
        return [rows.handle(row) for row in self._tx.dialect.execute(sql, (mailbox.no, limit))]

    def first_since(self, mailbox: Mailbox, at: int) -> int:
        """Search by halves: ``created_at`` never goes back while msg_ids grow, so no index on it is needed."""
        self._tx.flush()
        low, high = 0, mailbox.next_id
        while low < high:
            middle = (low + high) // 2
            row = self._tx.first(
                "SELECT msg_id, created_at FROM message WHERE mailbox_no = ? AND msg_id >= ? ORDER BY msg_id LIMIT 1",
                (mailbox.no, middle),
            )
            if row is None or row[0] >= high or row[1] >= at:
                high = middle
            else:
                low = row[0] + 1
        row = self._tx.first(
            "SELECT msg_id FROM message WHERE mailbox_no = ? AND msg_id >= ? ORDER BY msg_id LIMIT 1",
            (mailbox.no, low),
        )
        return mailbox.next_id if row is None else int(row[0])

    def remove(self, mailbox: Mailbox, handles: Sequence[Handle]) -> None:
        self._tx.flush()
        self._tx.removed = True
        kept = self._tx.touch(mailbox)
        kept.dirty = True
        bodies: list[int] = []
        for chunk in _chunks([handle.msg_id for handle in handles]):
            wanted, parameters = self._tx.dialect.any_of("msg_id", chunk)
            removed = self._tx.dialect.execute(
                f"DELETE FROM message WHERE mailbox_no = ? AND {wanted} RETURNING size, recipient, body_no",
                (mailbox.no, *parameters),
            )
            for size, recipient, body_no in removed:
                kept.messages -= 1
                kept.bytes -= size
                if recipient is not None:
                    self._hold(kept, recipient, -1, -size)
                if body_no is not None:
                    bodies.append(body_no)
        for body_no in sorted(bodies):  # in one order everywhere, so that two instances never wait for each other
            self._tx.dialect.execute("UPDATE body SET refs = refs - 1 WHERE no = ?", (body_no,))
            self._tx.dialect.execute("DELETE FROM body WHERE no = ? AND refs <= 0", (body_no,))

    def expired(self, now: int, limit: int) -> list[Expired]:
        self._tx.flush()
        sql = f"SELECT {rows.HANDLE}, mailbox_no FROM message WHERE expire_at <= ? ORDER BY expire_at LIMIT ?"
        return [Expired(row[7], rows.handle(row)) for row in self._tx.dialect.execute(sql, (now, limit))]

    def held_for(self, mailbox: Mailbox, recipient: str) -> Usage:
        row = self._tx.first(
            "SELECT messages, bytes FROM held WHERE mailbox_no = ? AND recipient = ?", (mailbox.no, recipient)
        )
        return Usage(0, 0) if row is None else Usage(row[0], row[1])


class _Delays(_Table):
    def __init__(self, tx: SqlTransaction, backlog: Backlog) -> None:
        super().__init__(tx)
        self._backlog = backlog

    def add(self, delayed: Delayed) -> None:
        message = delayed.message
        self._backlog.count += delayed.archive
        self._tx.dialect.execute(
            "INSERT INTO delayed (mailbox_no, due_at, archive, lane, size, sent_at, expire_at, key, tags, recipient,"
            " extra, payload) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                delayed.mailbox_no,
                delayed.due_at,
                int(delayed.archive),
                message.lane.value,
                message.size,
                message.sent_at,
                message.expire_at,
                message.key,
                rows.join_tags(message.tags),
                message.recipient,
                rows.extra(message),
                message.payload,
            ),
        )

    def due(self, now: int, limit: int) -> list[Delayed]:
        # Locked, so that of two instances only one releases a message.
        sql = (
            f"SELECT {rows.DELAYED} FROM delayed WHERE due_at <= ? ORDER BY due_at, seq LIMIT ?"
            f" {self._tx.dialect.lock()}"
        )
        return [rows.delayed(row) for row in self._tx.dialect.execute(sql, (now, limit))]

    def of(self, mailbox: Mailbox, limit: int) -> list[Delayed]:
        sql = f"SELECT {rows.DELAYED} FROM delayed WHERE mailbox_no = ? LIMIT ?"
        return [rows.delayed(row) for row in self._tx.dialect.execute(sql, (mailbox.no, limit))]

    def usage(self, mailbox: Mailbox) -> Usage:
        row = self._tx.one("SELECT count(*), coalesce(sum(size), 0) FROM delayed WHERE mailbox_no = ?", (mailbox.no,))
        return Usage(int(row[0]), int(row[1]))

    def remove(self, delayed: Sequence[Delayed]) -> None:
        self._backlog.count -= sum(item.archive for item in delayed)
        for chunk in _chunks([item.seq for item in delayed]):
            wanted, parameters = self._tx.dialect.any_of("seq", chunk)
            self._tx.dialect.execute(f"DELETE FROM delayed WHERE {wanted}", parameters)

    def next_due(self) -> int | None:
        row = self._tx.one("SELECT min(due_at) FROM delayed")
        return None if row[0] is None else int(row[0])


class _DedupIds(_Table):
    def find(self, mailbox: Mailbox, dedup_id: str, now: int) -> int | None:
        row = self._tx.first(
            "SELECT msg_id FROM dedup WHERE mailbox_no = ? AND dedup_id = ? AND expire_at > ?",
            (mailbox.no, dedup_id, now),
        )
        return None if row is None else int(row[0])

    def add(self, mailbox: Mailbox, dedup_id: str, msg_id: int, expire_at: int) -> None:
        kept = self._tx.touch(mailbox)
        kept.dirty = True
        kept.dedup_ids += 1 - self._delete("mailbox_no = ? AND dedup_id = ?", (mailbox.no, dedup_id))
        self._tx.dialect.execute(
            "INSERT INTO dedup (mailbox_no, dedup_id, msg_id, expire_at) VALUES (?, ?, ?, ?)",
            (mailbox.no, dedup_id, msg_id, expire_at),
        )
        if kept.dedup_ids > MAX_DEDUP_IDS:
            kept.dedup_ids -= self._delete(
                "seq IN (SELECT seq FROM dedup WHERE mailbox_no = ? ORDER BY seq LIMIT ?)",
                (mailbox.no, kept.dedup_ids - MAX_DEDUP_IDS),
            )

    def settle(self, mailbox: Mailbox, dedup_id: str, msg_id: int) -> None:
        self._tx.dialect.execute(
            "UPDATE dedup SET msg_id = ? WHERE mailbox_no = ? AND dedup_id = ?", (msg_id, mailbox.no, dedup_id)
        )

    def forget(self, mailbox: Mailbox, dedup_id: str) -> None:
        kept = self._tx.touch(mailbox)
        kept.dirty = True
        kept.dedup_ids -= self._delete("mailbox_no = ? AND dedup_id = ?", (mailbox.no, dedup_id))

    def collect(self, now: int, limit: int) -> int:
        ended = self._tx.dialect.execute("SELECT seq, mailbox_no FROM dedup WHERE expire_at <= ? LIMIT ?", (now, limit))
        mailboxes = self._tx.mailboxes.by_no({row[1] for row in ended})
        for chunk in _chunks([row[0] for row in ended]):
            wanted, parameters = self._tx.dialect.any_of("seq", chunk)
            gone = self._tx.dialect.execute(f"DELETE FROM dedup WHERE {wanted} RETURNING mailbox_no", parameters)
            for (no,) in gone:
                if no in mailboxes:
                    kept = self._tx.touch(mailboxes[no])
                    kept.dirty = True
                    kept.dedup_ids -= 1
        return len(ended)

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        return self._delete("seq IN (SELECT seq FROM dedup WHERE mailbox_no = ? LIMIT ?)", (mailbox.no, limit))

    def _delete(self, where: str, parameters: Sequence[Any]) -> int:
        return len(self._tx.dialect.execute(f"DELETE FROM dedup WHERE {where} RETURNING seq", parameters))


class _Groups(_Table):
    def find(self, mailbox: Mailbox, name: str) -> Group | None:
        row = self._tx.first(
            "SELECT no, mailbox_no, name, state FROM consumer WHERE mailbox_no = ? AND name = ?", (mailbox.no, name)
        )
        return None if row is None else rows.group(*row)

    def of(self, mailbox: Mailbox, limit: int) -> list[Group]:
        sql = "SELECT no, mailbox_no, name, state FROM consumer WHERE mailbox_no = ? ORDER BY name LIMIT ?"
        return [rows.group(*row) for row in self._tx.dialect.execute(sql, (mailbox.no, limit))]

    def by_no(self, numbers: Iterable[int]) -> dict[int, Group]:
        found: dict[int, Group] = {}
        for chunk in _chunks(sorted(numbers)):
            wanted, parameters = self._tx.dialect.any_of("no", chunk)
            sql = f"SELECT no, mailbox_no, name, state FROM consumer WHERE {wanted}"
            found |= {row[0]: rows.group(*row) for row in self._tx.dialect.execute(sql, parameters)}
        return found

    def count(self, mailbox: Mailbox) -> int:
        return int(self._tx.one("SELECT count(*) FROM consumer WHERE mailbox_no = ?", (mailbox.no,))[0])

    def add(self, mailbox: Mailbox, name: str) -> Group:
        start = [-1] * len(LANES)
        group = Group(0, mailbox.no, name, start, list(start))
        group.no = self._tx.one(
            "INSERT INTO consumer (mailbox_no, name, state) VALUES (?, ?, ?) RETURNING no",
            (mailbox.no, name, rows.group_state(group)),
        )[0]
        return group

    def save(self, group: Group) -> None:
        self._tx.dialect.execute("UPDATE consumer SET state = ? WHERE no = ?", (rows.group_state(group), group.no))

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        gone = 0
        for (no,) in self._tx.dialect.execute(
            "SELECT no FROM consumer WHERE mailbox_no = ? LIMIT ?", (mailbox.no, limit)
        ):
            gone += len(
                self._tx.dialect.execute(
                    "DELETE FROM lease WHERE group_no = ? AND msg_id IN"
                    " (SELECT msg_id FROM lease WHERE group_no = ? LIMIT ?) RETURNING msg_id",
                    (no, no, limit - gone),
                )
            )
            if gone >= limit:
                break
            self._tx.dialect.execute("DELETE FROM consumer WHERE no = ?", (no,))
            gone += 1
        return gone


class _Leases(_Table):
    def get(self, group: Group, ids: Sequence[int]) -> list[Lease]:
        found: list[Lease] = []
        for chunk in _chunks(ids):
            wanted, parameters = self._tx.dialect.any_of("msg_id", chunk)
            sql = f"{_LEASE} WHERE group_no = ? AND {wanted}"
            found += [_lease(row) for row in self._tx.dialect.execute(sql, (group.no, *parameters))]
        return found

    def put(self, group: Group, leases: Sequence[Lease]) -> None:
        self._tx.dialect.many(
            "INSERT INTO lease (group_no, msg_id, lane, until, deliveries, dead) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (group_no, msg_id)"
            " DO UPDATE SET until = excluded.until, deliveries = excluded.deliveries, dead = excluded.dead",
            [(group.no, x.msg_id, x.lane.value, x.until, x.deliveries, int(x.dead)) for x in leases],
        )

    def remove(self, group: Group, ids: Sequence[int]) -> None:
        for chunk in _chunks(ids):
            wanted, parameters = self._tx.dialect.any_of("msg_id", chunk)
            self._tx.dialect.execute(f"DELETE FROM lease WHERE group_no = ? AND {wanted}", (group.no, *parameters))

    def due(self, group: Group, now: int, limit: int) -> list[Lease]:
        sql = f"{_LEASE} WHERE group_no = ? AND dead = 0 AND until <= ? ORDER BY lane, msg_id LIMIT ?"
        return [_lease(row) for row in self._tx.dialect.execute(sql, (group.no, now, limit))]

    def loose(self, group: Group, lane: Lane, last: int) -> list[int]:
        sql = (
            "SELECT msg_id FROM lease WHERE group_no = ? AND dead = 0 AND until = ? AND lane = ? AND msg_id <= ?"
            " ORDER BY msg_id"
        )
        return [row[0] for row in self._tx.dialect.execute(sql, (group.no, LOOSE, lane.value, last))]

    def dead(self, group: Group, after: int, limit: int) -> list[Lease]:
        sql = f"{_LEASE} WHERE group_no = ? AND dead = 1 AND msg_id > ? ORDER BY msg_id LIMIT ?"
        return [_lease(row) for row in self._tx.dialect.execute(sql, (group.no, after, limit))]

    def count(self, group: Group) -> int:
        return int(self._tx.one("SELECT count(*) FROM lease WHERE group_no = ? AND dead = 0", (group.no,))[0])

    def ended(self, after: LeasePlace, now: int, limit: int) -> list[LeasePlace]:
        sql = (
            "SELECT until, group_no, msg_id FROM lease WHERE dead = 0 AND (until, group_no, msg_id) > (?, ?, ?)"
            " AND until <= ? ORDER BY until, group_no, msg_id LIMIT ?"
        )
        return [LeasePlace(*row) for row in self._tx.dialect.execute(sql, (*after, now, limit))]

    def next_end(self, group: Group, now: int) -> int | None:
        sql = "SELECT min(until) FROM lease WHERE group_no = ? AND dead = 0 AND until > ?"
        row = self._tx.one(sql, (group.no, now))
        return None if row[0] is None else int(row[0])

    def clear(self, group: Group) -> None:
        self._tx.dialect.execute("DELETE FROM lease WHERE group_no = ?", (group.no,))


class _Outbox(_Table):
    def __init__(self, tx: SqlTransaction, backlog: Backlog) -> None:
        super().__init__(tx)
        self._backlog = backlog

    def backlog(self) -> int:
        return self._backlog.read(self._count)

    def _count(self) -> int:
        return int(
            self._tx.one("SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM delayed WHERE archive = 1)")[0]
        )

    def add(self, mailbox: Mailbox, message: Message) -> None:
        self._backlog.count += 1
        self._tx.dialect.execute(
            "INSERT INTO outbox (tenant, address, mailbox_no, msg_id, lane, size, created_at, expire_at, key, tags,"
            " recipient, extra, payload) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                mailbox.tenant,
                mailbox.address,
                mailbox.no,
                message.msg_id,
                message.lane.value,
                message.size,
                message.created_at,
                message.expire_at,
                message.key,
                rows.join_tags(message.tags),
                message.recipient,
                rows.extra(message),
                message.payload,
            ),
        )


class _Tail(_Table):
    def __init__(self, tx: SqlTransaction) -> None:
        super().__init__(tx)
        self.ordered = tx.dialect.ordered
        self._waiting: list[tuple[str, int, bytes]] = []

    @property
    def removed(self) -> bool:
        return self._tx.removed

    def add(self, instance: str, lines: bytes, now: int) -> None:
        self._waiting.append((instance, now, lines))

    def finish(self) -> None:
        """Insert what waits, with the other statements that precede the commit."""
        if self._waiting:
            self._tx.dialect.many(
                "INSERT INTO journal_tail (instance, written_at, lines) VALUES (?, ?, ?)", self._waiting
            )

    def numbers(self, instance: str) -> list[int]:
        return [
            row[0] for row in self._tx.dialect.execute("SELECT seq FROM journal_tail WHERE instance = ?", (instance,))
        ]

    def read(self, after: int, limit: int) -> list[TailRow]:
        sql = "SELECT seq, instance, written_at, lines FROM journal_tail WHERE seq > ? ORDER BY seq LIMIT ?"
        return [TailRow(*row) for row in self._tx.dialect.execute(sql, (after, limit))]

    def remove(self, numbers: Sequence[int]) -> None:
        for chunk in _chunks(numbers):
            condition, values = self._tx.dialect.any_of("seq", chunk)
            self._tx.dialect.execute(f"DELETE FROM journal_tail WHERE {condition}", values)

    def mark(self) -> int:
        self._tx.flush()
        return int(self._tx.one("SELECT coalesce(max(id), 0) FROM message")[0])

    def behind(self, mark: int, limit: int) -> list[tuple[int, Event]]:
        self._tx.flush()
        found = self._tx.dialect.execute(
            "SELECT id, tenant, mailbox_no, lane, msg_id, size, message.created_at FROM message"
            " JOIN mailbox ON mailbox_no = no WHERE id > ? ORDER BY id LIMIT ?",
            (mark, limit),
        )
        return [
            (row[0], Event(What.STORED, row[6], row[1], row[2], LANES[row[3]], row[4], row[5], row[6])) for row in found
        ]


_LEASE = "SELECT msg_id, lane, until, deliveries, dead FROM lease"


def _lease(row: Row) -> Lease:
    return Lease(row[0], LANES[row[1]], row[2], row[3], bool(row[4]))


def _chunks(values: Sequence[int], size: int = 500) -> Iterator[Sequence[int]]:
    """Split parameters so that no statement has too many."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
