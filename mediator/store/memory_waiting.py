"""Delayed messages, dedup ids, the archive outbox and the tail of the journal in memory."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import replace

from mediator.mailboxes.bounds import MAX_DEDUP_IDS
from mediator.mailboxes.events import Event
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Delayed, Message
from mediator.mailboxes.ports import Copy, Expired, TailRow, Usage
from mediator.store.memory_data import Table, lives


class Delays(Table):
    """See :class:`mediator.mailboxes.ports.Delays`."""

    def add(self, delayed: Delayed) -> None:
        seq = next(self._data.numbers)
        kept = replace(delayed, seq=seq, message=replace(delayed.message))
        entry = (kept.due_at, seq, kept)
        bisect.insort(self._data.delayed, entry)
        self._undo.append(lambda: self._data.delayed.remove(entry))

    def due(self, now: int, limit: int, budget: int) -> list[Delayed]:
        found: list[Delayed] = []
        for due_at, _, delayed in itertools.islice(self._data.delayed, limit):
            if due_at > now or budget <= 0:
                break
            found.append(_copy(delayed))
            budget -= delayed.message.size
        return found

    def of(self, mailbox: Mailbox, limit: int) -> list[Delayed]:
        found = (entry[2] for entry in self._data.delayed if entry[2].mailbox_no == mailbox.no)
        return [_copy(delayed) for delayed in itertools.islice(found, limit)]

    def usage(self, mailbox: Mailbox, now: int = 0) -> Usage:
        waiting = [entry[2].message for entry in self._data.delayed if entry[2].mailbox_no == mailbox.no]
        found = [message.size for message in waiting if lives(message, now)]
        return Usage(len(found), sum(found))

    def remove(self, delayed: Sequence[Delayed]) -> None:
        gone = {item.seq for item in delayed}
        before = self._data.delayed
        self._undo.append(lambda: setattr(self._data, "delayed", before))
        self._data.delayed = [entry for entry in before if entry[1] not in gone]

    def drop_volatile(self, instance: str, limit: int) -> list[Expired]:
        found = [entry[2] for entry in self._data.delayed if entry[2].message.volatile == instance][:limit]
        self.remove(found)
        return [Expired(delayed.mailbox_no, delayed.message.handle) for delayed in found]

    def next_due(self) -> int | None:
        return self._data.delayed[0][0] if self._data.delayed else None

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        waiting = self.of(mailbox, limit)
        self.remove(waiting)
        return len(waiting)


class DedupIds(Table):
    """See :class:`mediator.mailboxes.ports.DedupIds`."""

    def find(self, mailbox: Mailbox, dedup_id: str, now: int) -> int | None:
        msg_id, expire_at = self._box(mailbox).dedup_ids.get(dedup_id, (0, 0))
        return msg_id if expire_at > now else None

    def add(self, mailbox: Mailbox, dedup_id: str, msg_id: int, expire_at: int) -> None:
        seen = self._box(mailbox).dedup_ids
        if dedup_id in seen:
            self._pop(seen, dedup_id)
        self._set(seen, dedup_id, (msg_id, expire_at))
        if len(seen) > MAX_DEDUP_IDS:
            self._pop(seen, next(iter(seen)))

    def settle(self, mailbox: Mailbox, dedup_id: str, msg_id: int) -> None:
        seen = self._box(mailbox).dedup_ids
        if dedup_id in seen:
            self._set(seen, dedup_id, (msg_id, seen[dedup_id][1]))

    def forget(self, mailbox: Mailbox, dedup_id: str) -> None:
        if dedup_id in self._box(mailbox).dedup_ids:
            self._pop(self._box(mailbox).dedup_ids, dedup_id)

    def collect(self, now: int, limit: int) -> int:
        gone = [
            (box.dedup_ids, dedup_id)
            for box in self._data.boxes.values()
            for dedup_id, (_, expire_at) in box.dedup_ids.items()
            if expire_at <= now
        ][:limit]
        for seen, dedup_id in gone:
            self._pop(seen, dedup_id)
        return len(gone)

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        seen = self._box(mailbox).dedup_ids
        gone = list(itertools.islice(seen, limit))
        for dedup_id in gone:
            self._pop(seen, dedup_id)
        return len(gone)


class Outbox(Table):
    """See :class:`mediator.mailboxes.ports.Outbox`."""

    def backlog(self) -> int:
        return len(self._data.outbox) + sum(1 for entry in self._data.delayed if entry[2].archive)

    def add(self, mailbox: Mailbox, message: Message) -> None:
        copy = Copy(next(self._data.copies), mailbox.no, message.msg_id, message.created_at)
        self._set(self._data.outbox, copy.seq, (copy, replace(message)))

    def remove(self, copies: Sequence[Copy]) -> int:
        there = [copy for copy in copies if copy.seq in self._data.outbox and self._data.outbox[copy.seq][0] == copy]
        for copy in there:
            self._pop(self._data.outbox, copy.seq)
        return len(there)


class Tail(Table):
    """See :class:`mediator.mailboxes.ports.Tail`."""

    ordered = False
    removed = False

    def add(self, instance: str, lines: bytes, now: int) -> None:
        no = next(self._data.numbers)
        self._set(self._data.tail, no, TailRow(no, instance, now, lines))

    def numbers(self, instance: str) -> list[int]:
        return [no for no, row in self._data.tail.items() if row.instance == instance]

    def read(self, after: int, limit: int) -> list[TailRow]:
        return [row for no, row in self._data.tail.items() if no > after][:limit]

    def remove(self, numbers: Sequence[int]) -> None:
        for no in numbers:
            if no in self._data.tail:
                self._pop(self._data.tail, no)

    def mark(self) -> int:
        return 0

    def behind(self, mark: int, limit: int) -> list[tuple[int, Event]]:
        return []


def _copy(delayed: Delayed) -> Delayed:
    return replace(delayed, message=replace(delayed.message))
