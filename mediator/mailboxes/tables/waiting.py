"""What waits in SQL: delayed messages, copies for the archive, lines of the journal; and dedup ids."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mediator.mailboxes import rows
from mediator.mailboxes.bounds import MAX_DEDUP_IDS
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import HIDDEN_ID, Delayed, DelayedRow, Expired, Message, MessageRef, OutboxKey, Usage
from mediator.mailboxes.session import Session, Table
from mediator.mailboxes.tables.mailboxes import Mailboxes

OUTBOX = "outbox"
"""What the copies that wait in the outbox, or will, are counted under."""


class Delays(Table):
    """Messages that are not yet visible (S4)."""

    def add(self, delayed: Delayed) -> None:
        """Keep a delayed message; the store gives it its ``seq``."""
        message = delayed.message
        self._count_copies(delayed.archive)
        self._execute(
            "INSERT INTO delayed (mailbox_no, due_at, archive, lane, size, sent_at, expire_at, key, tags, recipient,"
            " extra, payload, volatile) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                delayed.mailbox_id,
                delayed.due_at,
                int(delayed.archive),
                message.lane.value,
                message.size,
                message.sent_at,
                *rows.detail_columns(message),
                message.payload,
                message.kept_until_start_of,
            ),
        )

    def due(self, now: int, limit: int, budget: int) -> list[Delayed]:
        """Return what is due, by time and then in order of arrival; stops behind ``budget`` bytes of size."""
        # Locked, so that of two instances only one releases a message; weighed before any payload is read.
        sql = f"SELECT seq, size FROM delayed WHERE due_at <= ? ORDER BY due_at, seq LIMIT ? {self._dialect.lock()}"
        chosen: list[int] = []
        for seq, size in self._execute(sql, (now, limit)):
            if budget <= 0:
                break
            chosen.append(seq)
            budget -= size
        sql = f"SELECT {rows.DELAYED} FROM delayed WHERE {{among}} ORDER BY due_at, seq"
        return [rows.delayed(row) for row in self._for_each(sql, "seq", chosen)]

    def of(self, mailbox: Mailbox, limit: int) -> list[Delayed]:
        """Return what waits for one mailbox."""
        sql = f"SELECT {rows.DELAYED} FROM delayed WHERE mailbox_no = ? LIMIT ?"
        return [rows.delayed(row) for row in self._execute(sql, (mailbox.id, limit))]

    def soonest(self, mailbox: Mailbox, among: int, limit: int) -> Sequence[DelayedRow]:
        """Return what of it falls due first, of so many messages in no order, without payloads."""
        sql = (
            "SELECT due_at, lane, size, sent_at FROM"
            " (SELECT due_at, lane, size, sent_at FROM delayed WHERE mailbox_no = ? LIMIT ?) AS soon"
            " ORDER BY due_at LIMIT ?"
        )
        found = self._execute(sql, (mailbox.id, among, limit))
        return [DelayedRow(due_at, Lane(lane), size, sent_at) for due_at, lane, size, sent_at in found]

    def usage(self, mailbox: Mailbox, now: int = 0) -> Usage:
        """Return how much waits for one mailbox and has not expired by ``now``."""
        row = self._session.one(
            "SELECT count(*), coalesce(sum(size), 0) FROM delayed WHERE mailbox_no = ?"
            " AND (expire_at IS NULL OR expire_at > ?)",
            (mailbox.id, now),
        )
        return Usage(int(row[0]), int(row[1]))

    def remove(self, delayed: Sequence[Delayed]) -> None:
        """Forget delayed messages that were released."""
        self._count_copies(-sum(item.archive for item in delayed))
        self._for_each("DELETE FROM delayed WHERE {among}", "seq", [item.seq for item in delayed])

    def drop_kept_until_start(self, instance: str, limit: int) -> list[Expired]:
        """Remove, unread, what the next start of a service removes, and return what it was (E5)."""
        return self._drop("volatile = ?", (instance,), limit)

    def last(self) -> int:
        """Return the ``seq`` of the latest, 0 if there is none."""
        return int(self._session.one("SELECT coalesce(max(seq), 0) FROM delayed")[0])

    def drop(self, mailbox: Mailbox, last: int, limit: int) -> list[MessageRef]:
        """Remove, unread, what waits for one mailbox up to a ``seq``, and return what it was."""
        return [each.ref for each in self._drop("mailbox_no = ? AND seq <= ?", (mailbox.id, last), limit)]

    def _drop(self, condition: str, parameters: Sequence[str | int], limit: int) -> list[Expired]:
        gone = self._execute(
            f"DELETE FROM delayed WHERE seq IN (SELECT seq FROM delayed WHERE {condition} LIMIT ?)"
            f" RETURNING {HIDDEN_ID}, lane, size, sent_at, recipient, extra, mailbox_no, archive",
            (*parameters, limit),
        )
        self._count_copies(-sum(row[7] for row in gone))
        return [Expired(row[6], rows.ref(row)) for row in gone]

    def next_due(self) -> int | None:
        """Return when the next message falls due."""
        row = self._session.one("SELECT min(due_at) FROM delayed")
        return None if row[0] is None else int(row[0])

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        """Remove what waits for a retired mailbox, unread; return how many."""
        gone = self._execute(
            "DELETE FROM delayed WHERE seq IN (SELECT seq FROM delayed WHERE mailbox_no = ? LIMIT ?) RETURNING archive",
            (mailbox.id, limit),
        )
        self._count_copies(-sum(archive for (archive,) in gone))
        return len(gone)

    def _count_copies(self, by: int) -> None:
        """Note how many more will need a copy in the outbox."""
        if by:
            self._session.add_count(OUTBOX, by)


class DedupIds(Table):
    """Which dedup ids a mailbox has seen (S3)."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._mailboxes = session.table(Mailboxes)

    def find(self, mailbox: Mailbox, dedup_id: str, now: int) -> int | None:
        """Return the msg_id that was answered for it, None when it is new or its time is over."""
        row = self._dialect.first(
            "SELECT msg_id FROM dedup WHERE mailbox_no = ? AND dedup_id = ? AND expire_at > ?",
            (mailbox.id, dedup_id, now),
        )
        return None if row is None else int(row[0])

    def add(self, mailbox: Mailbox, dedup_id: str, msg_id: int, expire_at: int) -> None:
        """Keep an id; beyond the bound of a mailbox the oldest are forgotten."""
        kept = self._session.mark_changed(mailbox)
        kept.dirty = True
        kept.dedup_ids += 1 - self._delete("mailbox_no = ? AND dedup_id = ?", (mailbox.id, dedup_id))
        self._execute(
            "INSERT INTO dedup (mailbox_no, dedup_id, msg_id, expire_at) VALUES (?, ?, ?, ?)",
            (mailbox.id, dedup_id, msg_id, expire_at),
        )
        if kept.dedup_ids > MAX_DEDUP_IDS:
            kept.dedup_ids -= self._delete(
                "seq IN (SELECT seq FROM dedup WHERE mailbox_no = ? ORDER BY seq LIMIT ?)",
                (mailbox.id, kept.dedup_ids - MAX_DEDUP_IDS),
            )

    def settle(self, mailbox: Mailbox, dedup_id: str, msg_id: int) -> None:
        """Set the msg_id of a delayed message that became visible."""
        self._execute(
            "UPDATE dedup SET msg_id = ? WHERE mailbox_no = ? AND dedup_id = ?", (msg_id, mailbox.id, dedup_id)
        )

    def forget(self, mailbox: Mailbox, dedup_id: str) -> None:
        """End an id with its message."""
        kept = self._session.mark_changed(mailbox)
        kept.dirty = True
        kept.dedup_ids -= self._delete("mailbox_no = ? AND dedup_id = ?", (mailbox.id, dedup_id))

    def collect(self, now: int, limit: int) -> int:
        """Remove ids whose time is over; return how many."""
        ended = self._execute("SELECT seq, mailbox_no FROM dedup WHERE expire_at <= ? LIMIT ?", (now, limit))
        mailboxes = self._mailboxes.by_id({row[1] for row in ended})
        gone = self._for_each("DELETE FROM dedup WHERE {among} RETURNING mailbox_no", "seq", [row[0] for row in ended])
        for (mailbox_id,) in gone:
            if mailbox_id in mailboxes:
                kept = self._session.mark_changed(mailboxes[mailbox_id])
                kept.dirty = True
                kept.dedup_ids -= 1
        return len(ended)

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        """Remove ids of a retired mailbox; return how many."""
        return self._delete("seq IN (SELECT seq FROM dedup WHERE mailbox_no = ? LIMIT ?)", (mailbox.id, limit))

    def _delete(self, where: str, parameters: Sequence[Any]) -> int:
        return len(self._execute(f"DELETE FROM dedup WHERE {where} RETURNING seq", parameters))


class Outbox(Table):
    """Copies that wait for the archive (S6), each under a number above those of all that came before."""

    def backlog(self) -> int:
        """Return how many copies wait, delayed messages that will need one included."""
        return self._session.count(OUTBOX, self._count)

    def _count(self) -> int:
        # The oldest go first, so the numbers say it; counting a million rows would hold up senders.
        sql = (
            "SELECT (SELECT coalesce(max(seq) - min(seq) + 1, 0) FROM outbox)"
            " + (SELECT count(*) FROM delayed WHERE archive = 1)"
        )
        return int(self._session.one(sql)[0])

    def add(self, mailbox: Mailbox, message: Message) -> None:
        """Copy a message."""
        self._session.add_count(OUTBOX, 1)
        self._execute(
            "INSERT INTO outbox (tenant, address, mailbox_no, msg_id, lane, size, created_at, expire_at, key, tags,"
            " recipient, extra, payload) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                mailbox.tenant,
                mailbox.address,
                mailbox.id,
                message.msg_id,
                message.lane.value,
                message.size,
                message.created_at,
                *rows.detail_columns(message),
                message.payload,
            ),
        )

    def forget(self, tenant: str, address: str, after: int, limit: int) -> tuple[int, int | None]:
        """Take out the copies of an address among the next ``limit`` behind a number.

        Returns how many there were, and the number to go on behind; None at the end.
        """
        sql = "SELECT seq FROM outbox WHERE seq > ? ORDER BY seq LIMIT 1 OFFSET ?"
        end = self._dialect.first(sql, (after, limit))
        last = None if end is None else int(end[0])
        within = "seq > ?" if last is None else "seq > ? AND seq <= ?"
        gone = self._execute(
            f"DELETE FROM outbox WHERE {within} AND tenant = ? AND address = ? RETURNING seq",
            (after, *([] if last is None else [last]), tenant, address),
        )
        if gone:
            self._session.add_count(OUTBOX, -len(gone))
        return len(gone), last

    def remove(self, copies: Sequence[OutboxKey]) -> int:
        """Take out copies that the archive has, and return how many of them were there."""
        named = set(copies)
        sql = "SELECT seq, mailbox_no, msg_id, created_at FROM outbox WHERE {among}"
        found = self._for_each(sql, "seq", [copy.seq for copy in copies])
        there = [row[0] for row in found if OutboxKey(*row) in named]
        gone = len(self._for_each("DELETE FROM outbox WHERE {among} RETURNING seq", "seq", there))
        if gone:
            self._session.add_count(OUTBOX, -gone)
        return gone


class TailRow(NamedTuple):
    """Lines of the journal that may not be in its files yet."""

    id: int
    instance: str
    """Which service wrote it."""
    written_at: int
    lines: bytes


class Tail(Table):
    """Lines of the journal that are committed with a transaction until they are in its files."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.ordered = session.dialect.ordered
        self._waiting: list[tuple[str, int, bytes]] = []

    def add(self, instance: str, lines: bytes, now: int) -> None:
        """Keep lines with this transaction, in a row behind all others of the instance."""
        if not self._waiting:
            self._session.before_commit.append(self._insert)
        self._waiting.append((instance, now, lines))

    def _insert(self) -> None:
        self._dialect.many("INSERT INTO journal_tail (instance, written_at, lines) VALUES (?, ?, ?)", self._waiting)

    def numbers(self, instance: str) -> list[int]:
        """Return which rows the instance has."""
        return [row[0] for row in self._execute("SELECT seq FROM journal_tail WHERE instance = ?", (instance,))]

    def read(self, after: int, limit: int) -> list[TailRow]:
        """Return rows of all instances behind a number, in order of their numbers."""
        sql = "SELECT seq, instance, written_at, lines FROM journal_tail WHERE seq > ? ORDER BY seq LIMIT ?"
        return [TailRow(*row) for row in self._execute(sql, (after, limit))]

    def remove(self, numbers: Sequence[int]) -> None:
        """Forget rows whose lines are in files."""
        self._for_each("DELETE FROM journal_tail WHERE {among}", "seq", numbers)

    def mark(self) -> int:
        """Return the place of the last message, 0 when there is none."""
        if self._session.unwritten:
            self._session.flush()
        [(last,)] = self._execute("SELECT coalesce(max(id), 0) FROM message")
        return int(last)

    def behind(self, mark: int, limit: int) -> list[tuple[int, Event]]:
        """Return what the messages behind a place tell of their storing, each with its own place, in order."""
        self._session.flush()
        found = self._execute(
            "SELECT id, tenant, mailbox_no, lane, msg_id, size, message.created_at FROM message"
            " JOIN mailbox ON mailbox_no = no WHERE id > ? ORDER BY id LIMIT ?",
            (mark, limit),
        )
        return [
            (row[0], Event(EventType.STORED, row[6], row[1], row[2], LANES[row[3]], row[4], row[5], row[6]))
            for row in found
        ]
