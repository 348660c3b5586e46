"""Visible messages in SQL, and how far they were pushed."""

from collections.abc import Collection, Sequence
from typing import Any

from mediator.mailboxes import rows
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import MAX_EXPIRED, Expired, Filter, Message, MessageRef, Usage
from mediator.mailboxes.rows import StoredMessage, decode_row
from mediator.mailboxes.session import Table, chunks

EXPIRED = "SELECT mailbox_no, msg_id, size FROM message WHERE expire_at <= ? ORDER BY expire_at LIMIT ?"
"""Which messages expired first, of all mailboxes; the index alone answers it."""


class Messages(Table):
    """Visible messages. Expired ones count as gone wherever ``now`` is given."""

    def append(self, mailbox: Mailbox, message: Message) -> None:
        """Keep a message and count it; ``message.msg_id`` is ``mailbox.next_id``, which moves up by one."""
        kept = self._session.mark_changed(mailbox)
        kept.next_id = message.msg_id + 1
        kept.messages += 1
        kept.bytes += message.size
        kept.last_at = message.created_at
        self._session.write_later(kept, message)
        if message.recipient is not None:
            self._session.add_recipient_count(kept, message.recipient, 1, message.size)

    def refs(self, mailbox: Mailbox, ids: Sequence[int], now: int) -> dict[int, MessageRef]:
        """Return references to those of these messages that exist."""
        if not ids:
            return {}
        if self._session.unwritten:
            self._session.flush()
        sql = (
            f"SELECT {rows.REF} FROM message WHERE mailbox_no = ? AND {{among}}"
            " AND (expire_at IS NULL OR expire_at > ?)"
        )
        found = self._for_each(sql, "msg_id", ids, (mailbox.id,), (now,))
        return {row[0]: rows.ref(row) for row in found}

    def keyed(self, mailbox: Mailbox, key: str) -> MessageRef | None:
        """Return the message that has the key, expired or not (S2)."""
        if self._session.is_unwritten(mailbox, key):
            self._session.flush()
        row = self._dialect.first(f"SELECT {rows.REF} FROM message WHERE mailbox_no = ? AND key = ?", (mailbox.id, key))
        return None if row is None else rows.ref(row)

    def lane(
        self,
        mailbox: Mailbox,
        lane: Lane,
        after: int,
        limit: int,
        budget: int,
        now: int,
        without: Collection[int] = (),
        damaged: list[int] | None = None,
    ) -> list[StoredMessage]:
        """Return messages of a lane behind msg_id ``after``, in order; stops behind ``budget`` bytes of size.

        Those whose msg_id is in ``without`` are passed over unread. Rows that cannot be decoded raise an error, or are
        left out, and ``damaged`` gets their msg_ids.
        """
        if (mailbox.id, lane) in self._session.empty_lanes:
            return []
        others, parameters = self._others(without) if without else ("", ())
        source = (
            f"{self._dialect.lane_sources[lane]} WHERE lane = {lane.value} AND mailbox_no = ? AND msg_id > ?"
            f" AND (expire_at IS NULL OR expire_at > ?){others}"
        )
        return self._within(source, (mailbox.id, after, now, *parameters), "msg_id", limit, budget, damaged)

    def _others(self, without: Collection[int]) -> tuple[str, Sequence[Any]]:
        """Return what a condition ends with to pass messages over, and its parameters."""
        if not without:
            return "", ()
        among, parameters = self._dialect.any_of("msg_id", list(without))
        return f" AND NOT ({among})", parameters

    def pick(self, mailbox: Mailbox, ids: Sequence[int], budget: int, now: int) -> list[StoredMessage]:
        """Return these messages in order of msg_id, those that are there; stops behind ``budget`` bytes of size."""
        found: list[StoredMessage] = []
        for chunk in chunks(sorted(ids)):
            wanted, parameters = self._dialect.any_of("msg_id", chunk)
            source = f"message WHERE mailbox_no = ? AND {wanted} AND (expire_at IS NULL OR expire_at > ?)"
            left = budget - sum(message.size for message in found)
            found += self._within(source, (mailbox.id, *parameters, now), "msg_id", len(chunk), left)
            if sum(message.size for message in found) >= budget:
                break
        return found

    def newest(self, mailbox: Mailbox, wanted: Filter, limit: int, budget: int, now: int) -> list[StoredMessage]:
        """Return the newest messages that fit the filter, in ascending msg_id (Q1)."""
        source, parameters = self._wanted(mailbox, wanted, now)
        return self._within(source, parameters, "msg_id DESC", limit, budget)[::-1]

    def heads(self, mailbox: Mailbox, wanted: Filter, limit: int, now: int) -> list[StoredMessage]:
        """Do as :meth:`newest` and leave the payloads unread: each is empty."""
        source, parameters = self._wanted(mailbox, wanted, now)
        sql = f"SELECT {rows.HEAD} FROM {source} ORDER BY msg_id DESC LIMIT ?"
        found = self._execute(sql, (*parameters, limit))
        return [decode_row((*row, b"", 0)) for row in found][::-1]

    def _wanted(self, mailbox: Mailbox, wanted: Filter, now: int) -> tuple[str, list[Any]]:
        self._session.flush()
        where = ["mailbox_no = ?", "(expire_at IS NULL OR expire_at > ?)"]
        parameters: list[Any] = [mailbox.id, now]
        if wanted.key is not None:
            where.append("key = ?")
            parameters.append(wanted.key)
        for tag in wanted.tags:
            where.append(self._dialect.has_tag())
            parameters.append(tag)
        if wanted.recipient is not None:
            where.append("recipient = ?")
            parameters.append(wanted.recipient)
        if wanted.since is not None:
            where.append("msg_id >= ?")
            parameters.append(self.first_since(mailbox, wanted.since))
        if wanted.before_id is not None:
            where.append("msg_id < ?")
            parameters.append(wanted.before_id)
        return f"message WHERE {' AND '.join(where)}", parameters

    def _within(
        self,
        source: str,
        parameters: Sequence[Any],
        order: str,
        limit: int,
        budget: int,
        damaged: list[int] | None = None,
    ) -> list[StoredMessage]:
        if self._session.unwritten:
            self._session.flush()
        taken: list[StoredMessage] = []
        for message in map(decode_row, self._dialect.budgeted(source, parameters, order, limit, budget)):
            if message.extra is not None:
                # A damaged row is to fail here, before anything is noted as handed out.
                try:
                    message.check_extra()
                except (ValueError, AttributeError):
                    if damaged is None:
                        raise
                    damaged.append(message.msg_id)
                    continue
            taken.append(message)
            budget -= message.size
            if budget <= 0:
                break
        return taken

    def between(self, mailbox: Mailbox, lane: Lane, after: int, last: int, now: int) -> list[MessageRef]:
        """Return a lane's living messages behind ``after`` up to and with ``last``."""
        if self._session.unwritten:
            self._session.flush()
        sql = (
            f"SELECT {rows.REF} FROM {self._dialect.lane_sources[lane]}"
            f" WHERE lane = {lane.value} AND mailbox_no = ? AND msg_id > ? AND msg_id <= ?"
            " AND (expire_at IS NULL OR expire_at > ?) ORDER BY msg_id"
        )
        return [rows.ref(row) for row in self._execute(sql, (mailbox.id, after, last, now))]

    def first(self, mailbox: Mailbox, limit: int) -> list[MessageRef]:
        """Return the oldest messages of a mailbox, expired or not."""
        self._session.flush()
        sql = f"SELECT {rows.REF} FROM message WHERE mailbox_no = ? ORDER BY msg_id LIMIT ?"
        return [rows.ref(row) for row in self._execute(sql, (mailbox.id, limit))]

    def first_since(self, mailbox: Mailbox, at: int) -> int:
        """Search by halves: ``created_at`` never goes back while msg_ids grow, so no index on it is needed."""
        self._session.flush()
        low, high = 0, mailbox.next_id
        while low < high:
            middle = (low + high) // 2
            row = self._dialect.first(
                "SELECT msg_id, created_at FROM message WHERE mailbox_no = ? AND msg_id >= ? ORDER BY msg_id LIMIT 1",
                (mailbox.id, middle),
            )
            if row is None or row[0] >= high or row[1] >= at:
                high = middle
            else:
                low = row[0] + 1
        row = self._dialect.first(
            "SELECT msg_id FROM message WHERE mailbox_no = ? AND msg_id >= ? ORDER BY msg_id LIMIT 1",
            (mailbox.id, low),
        )
        return mailbox.next_id if row is None else int(row[0])

    def origins(self, mailbox: Mailbox, header: str, after: int, limit: int) -> list[tuple[int, str, str]]:
        """Return the next messages behind a msg_id that may be copies, each with its source and a header.

        Both are empty for what is no copy.
        """
        self._session.flush()
        sql = "SELECT msg_id, extra FROM message WHERE mailbox_no = ? AND msg_id > ? AND extra IS NOT NULL"
        found = self._execute(f"{sql} ORDER BY msg_id LIMIT ?", (mailbox.id, after, limit))
        return [(msg_id, rows.copied_from(extra), rows.headers(extra).get(header, "")) for msg_id, extra in found]

    def remove(self, mailbox: Mailbox, refs: Sequence[MessageRef]) -> None:
        """Remove messages and take them from the counters."""
        self._session.flush()
        self._session.removed = True
        kept = self._session.mark_changed(mailbox)
        kept.dirty = True
        bodies: list[int] = []
        sql = "DELETE FROM message WHERE mailbox_no = ? AND {among} RETURNING size, recipient, body_no"
        removed = self._for_each(sql, "msg_id", [ref.msg_id for ref in refs], (mailbox.id,))
        for size, recipient, body_no in removed:
            kept.messages -= 1
            kept.bytes -= size
            if recipient is not None:
                self._session.add_recipient_count(kept, recipient, -1, -size)
            if body_no is not None:
                bodies.append(body_no)
        for body_no in sorted(bodies):  # in one order everywhere, so that two instances never wait for each other
            self._execute("UPDATE body SET refs = refs - 1 WHERE no = ?", (body_no,))
            self._execute("DELETE FROM body WHERE no = ? AND refs <= 0", (body_no,))

    def expired(self, now: int, limit: int) -> list[Expired]:
        """Return messages whose TTL is over, oldest expiry first."""
        self._session.flush()
        sql = f"SELECT {rows.REF}, mailbox_no FROM message WHERE expire_at <= ? ORDER BY expire_at LIMIT ?"
        return [Expired(row[6], rows.ref(row)) for row in self._execute(sql, (now, limit))]

    def expired_in(self, mailbox: Mailbox, now: int, limit: int) -> list[MessageRef]:
        """Return messages of one mailbox whose TTL is over, of the first :data:`MAX_EXPIRED` messages that expired."""
        self._session.flush()
        sql = f"SELECT msg_id FROM ({EXPIRED}) AS gone WHERE mailbox_no = ? LIMIT ?"
        found = self._execute(sql, (now, MAX_EXPIRED, mailbox.id, limit))
        # At the beginning of time nothing has expired.
        return list(self.refs(mailbox, [row[0] for row in found], 0).values())

    def kept_until_start(self, instance: str, limit: int) -> list[Expired]:
        """Return messages that the next start of a service removes (E5)."""
        self._session.flush()
        sql = f"SELECT {rows.REF}, mailbox_no FROM message WHERE volatile = ? LIMIT ?"
        return [Expired(row[6], rows.ref(row)) for row in self._execute(sql, (instance, limit))]

    def addressed(
        self,
        mailbox: Mailbox,
        recipient: str,
        after: int,
        limit: int,
        budget: int,
        now: int,
        without: Collection[int] = (),
    ) -> list[StoredMessage]:
        """Return messages for one recipient key behind msg_id ``after``, as :meth:`lane` does (D3)."""
        others, parameters = self._others(without)
        source = (
            "message WHERE mailbox_no = ? AND recipient = ? AND msg_id > ?"
            f" AND (expire_at IS NULL OR expire_at > ?){others}"
        )
        return self._within(source, (mailbox.id, recipient, after, now, *parameters), "msg_id", limit, budget)

    def recipient_usage(self, mailbox: Mailbox, recipient: str) -> Usage:
        """Return what is kept for one recipient key, without a scan (D1)."""
        self._session.flush_recipient_counts()
        row = self._dialect.first(
            "SELECT messages, bytes FROM held WHERE mailbox_no = ? AND recipient = ?", (mailbox.id, recipient)
        )
        return Usage(0, 0) if row is None else Usage(row[0], row[1])


class Pushed(Table):
    """How far the mail of each mailbox was pushed, and confirmed by whom it was pushed to (E4)."""

    def raise_to(self, mailbox: Mailbox, marks: Sequence[int]) -> None:
        """Note the highest confirmed msg_id of each lane, -1 for none; a mark never goes back."""
        self._dialect.many(
            "INSERT INTO pushed (mailbox_no, lane, msg_id) VALUES (?, ?, ?) ON CONFLICT (mailbox_no, lane)"
            " DO UPDATE SET msg_id = excluded.msg_id WHERE excluded.msg_id > pushed.msg_id",
            [(mailbox.id, lane.value, mark) for lane, mark in zip(LANES, marks, strict=True) if mark >= 0],
        )

    def marks(self, mailbox: Mailbox) -> list[int]:
        """Return the marks, by lane."""
        found = self._execute("SELECT lane, msg_id FROM pushed WHERE mailbox_no = ?", (mailbox.id,))
        marks = {int(lane): int(msg_id) for lane, msg_id in found}
        return [marks.get(lane.value, -1) for lane in LANES]

    def unread(self, mailbox: Mailbox, now: int) -> int:
        """Return how many live messages stand behind the marks."""
        self._session.flush()
        total = 0
        for lane, mark in zip(LANES, self.marks(mailbox), strict=True):
            sql = (
                f"SELECT count(*) FROM {self._dialect.lane_sources[lane]} WHERE lane = {lane.value}"
                " AND mailbox_no = ? AND msg_id > ? AND (expire_at IS NULL OR expire_at > ?)"
            )
            total += int(self._session.one(sql, (mailbox.id, mark, now))[0])
        return total
