"""Consumer groups, leases, and how far mail was pushed, in memory."""

import itertools
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace

from mediator.mailboxes.group import LOOSE, Group, Lease
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Message
from mediator.mailboxes.ports import LeasePlace, LivingLeases
from mediator.store.memory_data import Table, lives


class Groups(Table):
    """See :class:`mediator.mailboxes.ports.Groups`."""

    def find(self, mailbox: Mailbox, name: str, *, push: bool = False) -> Group | None:
        return deepcopy(self._box(mailbox).groups.get((name, push)))

    def of(self, mailbox: Mailbox, limit: int) -> list[Group]:
        groups = self._box(mailbox).groups
        return [deepcopy(groups[key]) for key in sorted(groups)[:limit]]

    def by_no(self, numbers: Iterable[int]) -> dict[int, Group]:
        wanted = set(numbers)
        groups = (group for box in self._data.boxes.values() for group in box.groups.values())
        return {group.no: deepcopy(group) for group in groups if group.no in wanted}

    def count(self, mailbox: Mailbox) -> int:
        return len(self._box(mailbox).groups)

    def add(self, mailbox: Mailbox, name: str, *, push: bool = False) -> Group:
        start = [-1] * len(LANES)
        group = Group(next(self._data.numbers), mailbox.no, name, start, list(start), push=push)
        self._set(self._box(mailbox).groups, (name, push), deepcopy(group))
        return group

    def save(self, group: Group) -> None:
        self._set(self._data.boxes[group.mailbox_no].groups, (group.name, group.push), deepcopy(group))

    def remember(self, group: Group) -> None:
        self.save(group)

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        groups = self._box(mailbox).groups
        gone = list(itertools.islice(groups.values(), limit))
        for group in gone:
            self.drop(group)
        return len(gone)

    def see(self, group: Group, now: int) -> None:
        group.seen_at = now
        kept = self._data.boxes[group.mailbox_no].groups[group.name, group.push]
        self._set(self._data.boxes[group.mailbox_no].groups, (group.name, group.push), replace(kept, seen_at=now))

    def unseen(self, before: int, limit: int) -> list[Group]:
        groups = (group for box in self._data.boxes.values() for group in box.groups.values())
        found = [deepcopy(group) for group in groups if group.push and group.seen_at < before]
        return sorted(found, key=lambda group: group.seen_at)[:limit]

    def drop(self, group: Group) -> None:
        self._pop(self._data.boxes[group.mailbox_no].groups, (group.name, group.push))
        if group.no in self._data.leases:
            self._pop(self._data.leases, group.no)


class Leases(Table):
    """See :class:`mediator.mailboxes.ports.Leases`."""

    def _of(self, group: Group) -> dict[int, Lease]:
        return self._data.leases.get(group.no, {})

    def get(self, group: Group, ids: Sequence[int]) -> list[Lease]:
        leases = self._of(group)
        return [replace(leases[msg_id]) for msg_id in dict.fromkeys(ids) if msg_id in leases]

    def put(self, group: Group, leases: Sequence[Lease]) -> None:
        if group.no not in self._data.leases:
            self._set(self._data.leases, group.no, {})
        for lease in leases:
            self._set(self._data.leases[group.no], lease.msg_id, replace(lease))

    def remove(self, group: Group, ids: Sequence[int]) -> None:
        leases = self._of(group)
        for msg_id in set(ids):
            if msg_id in leases:
                self._pop(leases, msg_id)

    def due(self, group: Group, now: int, limit: int) -> list[Lease]:
        found = [lease for lease in self._of(group).values() if not lease.dead and lease.until <= now]
        return [replace(lease) for lease in sorted(found, key=lambda lease: (lease.lane, lease.msg_id))[:limit]]

    def loose(self, group: Group, lane: Lane, last: int) -> list[int]:
        return sorted(
            lease.msg_id
            for lease in self._of(group).values()
            if lease.lane == lane and lease.msg_id <= last and lease.until == LOOSE and not lease.dead
        )

    def dead(self, group: Group, after: int, limit: int) -> list[Lease]:
        found = [lease for lease in self._of(group).values() if lease.dead and lease.msg_id > after]
        return [replace(lease) for lease in sorted(found, key=lambda lease: lease.msg_id)[:limit]]

    def count(self, group: Group) -> int:
        return sum(1 for lease in self._of(group).values() if not lease.dead)

    def living(self, mailbox: Mailbox, group: Group, now: int) -> LivingLeases:
        there = [message for message in self._leased(mailbox, group).values() if message and lives(message, now)]
        ends = [message.expire_at for message in there if message.expire_at is not None]
        return LivingLeases(len(there), min(ends, default=None))

    def end_gone(self, mailbox: Mailbox, group: Group, now: int) -> None:
        leased = self._leased(mailbox, group)
        self.remove(group, [msg_id for msg_id, message in leased.items() if not (message and lives(message, now))])

    def _leased(self, mailbox: Mailbox, group: Group) -> dict[int, Message | None]:
        messages = self._box(mailbox).messages
        return {lease.msg_id: messages.get(lease.msg_id) for lease in self._of(group).values() if not lease.dead}

    def ended(self, after: LeasePlace, now: int, limit: int) -> list[LeasePlace]:
        ended = [
            LeasePlace(lease.until, no, lease.msg_id)
            for no, leases in self._data.leases.items()
            for lease in leases.values()
            if lease.until <= now
        ]
        return sorted(place for place in ended if place > after)[:limit]

    def next_end(self, group: Group, now: int) -> int | None:
        ends = [lease.until for lease in self._of(group).values() if not lease.dead and lease.until > now]
        return min(ends, default=None)

    def clear(self, group: Group) -> None:
        if group.no in self._data.leases:
            self._pop(self._data.leases, group.no)


class Pushed(Table):
    """See :class:`mediator.mailboxes.ports.Pushed`."""

    def raise_to(self, mailbox: Mailbox, marks: Sequence[int]) -> None:
        pushed = self._box(mailbox).pushed
        for lane, mark in zip(LANES, marks, strict=True):
            if mark > pushed.get(lane, -1):
                self._set(pushed, lane, mark)

    def marks(self, mailbox: Mailbox) -> list[int]:
        pushed = self._box(mailbox).pushed
        return [pushed.get(lane, -1) for lane in LANES]

    def unread(self, mailbox: Mailbox, now: int) -> int:
        box = self._box(mailbox)
        return sum(1 for i, m in box.messages.items() if i > box.pushed.get(m.lane, -1) and lives(m, now))
