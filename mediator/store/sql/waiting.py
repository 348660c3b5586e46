"""Delayed messages, dedup ids and the archive outbox in SQL."""

from collections.abc import Sequence
from typing import Any

from mediator.mailboxes.bounds import MAX_DEDUP_IDS
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import HIDDEN_ID, Delayed, Message
from mediator.mailboxes.ports import Copy, Expired, Usage
from mediator.store import rows
from mediator.store.sql.dialect import chunks
from mediator.store.sql.known import Counted
from mediator.store.sql.mailboxes import Mailboxes
from mediator.store.sql.session import Session, Table


class Delays(Table):
    """See :class:`mediator.mailboxes.ports.Delays`."""

    def __init__(self, session: Session, backlog: Counted) -> None:
        super().__init__(session)
        self._backlog = backlog

    def add(self, delayed: Delayed) -> None:
        message = delayed.message
        self._backlog.add(delayed.archive)
        self._session.dialect.execute(
            "INSERT INTO delayed (mailbox_no, due_at, archive, lane, size, sent_at, expire_at, key, tags, recipient,"
            " extra, payload, volatile) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                delayed.mailbox_no,
                delayed.due_at,
                int(delayed.archive),
                message.lane.value,
                message.size,
                message.sent_at,
                *rows.particulars(message),
                message.payload,
                message.volatile,
            ),
        )

    def due(self, now: int, limit: int, budget: int) -> list[Delayed]:
        # Locked, so that of two instances only one releases a message; weighed before any payload is read.
        sql = (
            "SELECT seq, size FROM delayed WHERE due_at <= ? ORDER BY due_at, seq LIMIT ?"
            f" {self._session.dialect.lock()}"
        )
        chosen: list[int] = []
        for seq, size in self._session.dialect.execute(sql, (now, limit)):
            if budget <= 0:
                break
            chosen.append(seq)
            budget -= size
        found: list[Delayed] = []
        for chunk in chunks(chosen):
            wanted, parameters = self._session.dialect.any_of("seq", chunk)
            sql = f"SELECT {rows.DELAYED} FROM delayed WHERE {wanted} ORDER BY due_at, seq"
            found += [rows.delayed(row) for row in self._session.dialect.execute(sql, parameters)]
        return found

    def of(self, mailbox: Mailbox, limit: int) -> list[Delayed]:
        sql = f"SELECT {rows.DELAYED} FROM delayed WHERE mailbox_no = ? LIMIT ?"
        return [rows.delayed(row) for row in self._session.dialect.execute(sql, (mailbox.no, limit))]

    def usage(self, mailbox: Mailbox, now: int = 0) -> Usage:
        row = self._session.one(
            "SELECT count(*), coalesce(sum(size), 0) FROM delayed WHERE mailbox_no = ?"
            " AND (expire_at IS NULL OR expire_at > ?)",
            (mailbox.no, now),
        )
        return Usage(int(row[0]), int(row[1]))

    def remove(self, delayed: Sequence[Delayed]) -> None:
        self._backlog.add(-sum(item.archive for item in delayed))
        for chunk in chunks([item.seq for item in delayed]):
            wanted, parameters = self._session.dialect.any_of("seq", chunk)
            self._session.dialect.execute(f"DELETE FROM delayed WHERE {wanted}", parameters)

    def drop_volatile(self, instance: str, limit: int) -> list[Expired]:
        gone = self._session.dialect.execute(
            "DELETE FROM delayed WHERE seq IN (SELECT seq FROM delayed WHERE volatile = ? LIMIT ?)"
            f" RETURNING {HIDDEN_ID}, lane, size, sent_at, recipient, extra, mailbox_no, archive",
            (instance, limit),
        )
        self._backlog.add(-sum(row[7] for row in gone))
        return [Expired(row[6], rows.handle(row)) for row in gone]

    def next_due(self) -> int | None:
        row = self._session.one("SELECT min(due_at) FROM delayed")
        return None if row[0] is None else int(row[0])

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        gone = self._session.dialect.execute(
            "DELETE FROM delayed WHERE seq IN (SELECT seq FROM delayed WHERE mailbox_no = ? LIMIT ?) RETURNING archive",
            (mailbox.no, limit),
        )
        self._backlog.add(-sum(archive for (archive,) in gone))
        return len(gone)


class DedupIds(Table):
    """See :class:`mediator.mailboxes.ports.DedupIds`."""

    def __init__(self, session: Session, mailboxes: Mailboxes) -> None:
        super().__init__(session)
        self._mailboxes = mailboxes

    def find(self, mailbox: Mailbox, dedup_id: str, now: int) -> int | None:
        row = self._session.first(
            "SELECT msg_id FROM dedup WHERE mailbox_no = ? AND dedup_id = ? AND expire_at > ?",
            (mailbox.no, dedup_id, now),
        )
        return None if row is None else int(row[0])

    def add(self, mailbox: Mailbox, dedup_id: str, msg_id: int, expire_at: int) -> None:
        kept = self._session.touch(mailbox)
        kept.dirty = True
        kept.dedup_ids += 1 - self._delete("mailbox_no = ? AND dedup_id = ?", (mailbox.no, dedup_id))
        self._session.dialect.execute(
            "INSERT INTO dedup (mailbox_no, dedup_id, msg_id, expire_at) VALUES (?, ?, ?, ?)",
            (mailbox.no, dedup_id, msg_id, expire_at),
        )
        if kept.dedup_ids > MAX_DEDUP_IDS:
            kept.dedup_ids -= self._delete(
                "seq IN (SELECT seq FROM dedup WHERE mailbox_no = ? ORDER BY seq LIMIT ?)",
                (mailbox.no, kept.dedup_ids - MAX_DEDUP_IDS),
            )

    def settle(self, mailbox: Mailbox, dedup_id: str, msg_id: int) -> None:
        self._session.dialect.execute(
            "UPDATE dedup SET msg_id = ? WHERE mailbox_no = ? AND dedup_id = ?", (msg_id, mailbox.no, dedup_id)
        )

    def forget(self, mailbox: Mailbox, dedup_id: str) -> None:
        kept = self._session.touch(mailbox)
        kept.dirty = True
        kept.dedup_ids -= self._delete("mailbox_no = ? AND dedup_id = ?", (mailbox.no, dedup_id))

    def collect(self, now: int, limit: int) -> int:
        ended = self._session.dialect.execute(
            "SELECT seq, mailbox_no FROM dedup WHERE expire_at <= ? LIMIT ?", (now, limit)
        )
        mailboxes = self._mailboxes.by_no({row[1] for row in ended})
        for chunk in chunks([row[0] for row in ended]):
            wanted, parameters = self._session.dialect.any_of("seq", chunk)
            gone = self._session.dialect.execute(f"DELETE FROM dedup WHERE {wanted} RETURNING mailbox_no", parameters)
            for (no,) in gone:
                if no in mailboxes:
                    kept = self._session.touch(mailboxes[no])
                    kept.dirty = True
                    kept.dedup_ids -= 1
        return len(ended)

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        return self._delete("seq IN (SELECT seq FROM dedup WHERE mailbox_no = ? LIMIT ?)", (mailbox.no, limit))

    def _delete(self, where: str, parameters: Sequence[Any]) -> int:
        return len(self._session.dialect.execute(f"DELETE FROM dedup WHERE {where} RETURNING seq", parameters))


class Outbox(Table):
    """See :class:`mediator.mailboxes.ports.Outbox`."""

    def __init__(self, session: Session, backlog: Counted) -> None:
        super().__init__(session)
        self._backlog = backlog

    def backlog(self) -> int:
        return self._backlog.read(self._count)

    def _count(self) -> int:
        # The oldest go first, so the numbers say it; counting a million rows would hold up senders.
        sql = (
            "SELECT (SELECT coalesce(max(seq) - min(seq) + 1, 0) FROM outbox)"
            " + (SELECT count(*) FROM delayed WHERE archive = 1)"
        )
        return int(self._session.one(sql)[0])

    def add(self, mailbox: Mailbox, message: Message) -> None:
        self._backlog.add(1)
        self._session.dialect.execute(
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
                *rows.particulars(message),
                message.payload,
            ),
        )

    def remove(self, copies: Sequence[Copy]) -> int:
        execute, any_of = self._session.dialect.execute, self._session.dialect.any_of
        named = set(copies)
        gone = 0
        for chunk in chunks([copy.seq for copy in copies]):
            wanted, parameters = any_of("seq", chunk)
            found = execute(f"SELECT seq, mailbox_no, msg_id, created_at FROM outbox WHERE {wanted}", parameters)
            there = [row[0] for row in found if Copy(*row) in named]
            if there:
                wanted, parameters = any_of("seq", there)
                gone += len(execute(f"DELETE FROM outbox WHERE {wanted} RETURNING seq", parameters))
        self._backlog.add(-gone)
        return gone
