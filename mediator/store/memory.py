"""The in-memory twin: the same promises without a disk, for tests and for learning the rules."""

import bisect
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

from mediator.mailboxes.bounds import MAX_DEDUP_IDS
from mediator.mailboxes.events import Event
from mediator.mailboxes.group import LOOSE, Group, Lease
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Kind, Mailbox, NewMailbox
from mediator.mailboxes.message import Delayed, Handle, Message
from mediator.mailboxes.ports import Copy, Expired, Filter, LeasePlace, TailRow, Usage
from mediator.store.base import Place, Transaction
from mediator.store.memory_agents import Agents, Registry, Vectors
from mediator.store.memory_mediation import Connections, Identities, Invitations, Mediation, Routes
from mediator.store.memory_runs import History, Runs
from mediator.store.memory_table import Undo, Undoable


@dataclass
class _Box:
    """Everything one mailbox holds."""

    mailbox: Mailbox
    messages: dict[int, Message] = field(default_factory=dict)
    """In ascending msg_id, since ids only grow."""
    dedup_ids: dict[str, tuple[int, int]] = field(default_factory=dict)
    groups: dict[tuple[str, bool], Group] = field(default_factory=dict)
    """By name and whether mail is pushed to it."""
    pushed: dict[Lane, int] = field(default_factory=dict)
    held: dict[str, Usage] = field(default_factory=dict)


@dataclass
class _Data:
    boxes: dict[int, _Box] = field(default_factory=dict)
    addresses: dict[Place, int] = field(default_factory=dict)
    delayed: list[tuple[int, int, Delayed]] = field(default_factory=list)
    leases: dict[int, dict[int, Lease]] = field(default_factory=dict)
    outbox: dict[int, tuple[Copy, Message]] = field(default_factory=dict)
    copies: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """The numbers of what goes into the outbox."""
    tail: dict[int, TailRow] = field(default_factory=dict)
    mediation: Mediation = field(default_factory=Mediation)
    registry: Registry = field(default_factory=Registry)
    history: History = field(default_factory=History)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class MemoryStore:
    """A store that forgets when the process ends."""

    quick = True

    def __init__(self) -> None:
        self._data = _Data()
        self._lock = threading.RLock()

    @contextmanager
    def transaction(self, places: Sequence[Place] = ()) -> Iterator[Transaction]:
        """Open a transaction; see :class:`mediator.store.base.Store`."""
        del places
        undo: Undo = []
        with self._lock:
            try:
                yield MemoryTransaction(self._data, undo)
            except BaseException:
                for step in reversed(undo):
                    step()
                raise

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """Open a snapshot; see :class:`mediator.store.base.Store`."""
        with self._lock:
            yield MemoryTransaction(self._data, [])

    def checkpoint(self) -> None:
        """Memory has one place only."""

    def upkeep(self, busy: bool) -> None:
        """Memory needs none."""

    def close(self) -> None:
        """Nothing to let go of."""

    def archived(self) -> list[Message]:
        """Return what the outbox holds, for tests."""
        with self._lock:
            return [message for _, message in self._data.outbox.values()]


class MemoryTransaction:
    """All tables over one set of dictionaries."""

    def __init__(self, data: _Data, undo: Undo) -> None:
        self.connections = Connections(data.mediation, undo)
        self.routes = Routes(data.mediation, undo)
        self.invitations = Invitations(data.mediation, undo)
        self.identities = Identities(data.mediation, undo)
        self.agents = Agents(data.registry, undo)
        self.vectors = Vectors(data.registry, undo, self.agents)
        self.runs = Runs(data.history, undo)
        self.mailboxes = _Mailboxes(data, undo, self.routes)
        self.messages = _Messages(data, undo)
        self.delays = _Delays(data, undo)
        self.dedup_ids = _DedupIds(data, undo)
        self.groups = _Groups(data, undo)
        self.leases = _Leases(data, undo)
        self.pushed = _Pushed(data, undo)
        self.outbox = _Outbox(data, undo)
        self.tail = _Tail(data, undo)
        self.events: list[Event] = []
        self.woken: set[tuple[str, str]] = set()
        self.due: int | None = None

    def beat(self, now: int) -> None:
        """Memory always takes what is written."""


class _Table(Undoable):
    def __init__(self, data: _Data, undo: Undo) -> None:
        super().__init__(undo)
        self._data = data

    def _box(self, mailbox: Mailbox) -> _Box:
        return self._data.boxes[mailbox.no]

    def _change(self, mailbox: Mailbox, **fields: object) -> None:
        kept = self._box(mailbox).mailbox
        for name, value in fields.items():
            self._undo.append(partial(setattr, kept, name, getattr(kept, name)))
            setattr(kept, name, value)


class _Mailboxes(_Table):
    def __init__(self, data: _Data, undo: Undo, routes: Routes) -> None:
        super().__init__(data, undo)
        self._routes = routes

    def find(self, tenant: str, address: str) -> Mailbox | None:
        no = self._data.addresses.get((tenant, address))
        return None if no is None else self._data.boxes[no].mailbox

    def by_no(self, numbers: Iterable[int]) -> dict[int, Mailbox]:
        return {no: self._data.boxes[no].mailbox for no in sorted(numbers) if no in self._data.boxes}

    def add(self, new: NewMailbox) -> Mailbox | None:
        if (new.tenant, new.address) in self._data.addresses:
            return None
        mailbox = Mailbox(
            no=next(self._data.numbers),
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
        self._set(self._data.boxes, mailbox.no, _Box(mailbox))
        self._set(self._data.addresses, (new.tenant, new.address), mailbox.no)
        return mailbox

    def describe(self, mailbox: Mailbox, desc: str, tags: tuple[str, ...], ack_wait: int | None) -> None:
        self._change(mailbox, desc=desc, tags=tags, ack_wait=ack_wait)

    def retire(self, mailbox: Mailbox) -> None:
        self._pop(self._data.addresses, (mailbox.tenant, mailbox.address))
        self._change(mailbox, address="")

    def expired(self, now: int, limit: int) -> list[Mailbox]:
        gone = [box.mailbox for box in self._data.boxes.values() if box.mailbox.address and not box.mailbox.lives(now)]
        return sorted(gone, key=lambda mailbox: mailbox.expire_at or 0)[:limit]

    def retired(self, limit: int) -> list[Mailbox]:
        return [box.mailbox for box in self._data.boxes.values() if not box.mailbox.address][:limit]

    def drop(self, mailbox: Mailbox) -> None:
        self._routes.detach(mailbox.no)
        self._pop(self._data.boxes, mailbox.no)

    def public(self, tenant: str, after: str, tags: Sequence[str], skip: int, limit: int, now: int) -> list[Mailbox]:
        found = self.list(tenant, after, len(self._data.boxes), now)
        return [box for box in found if box.public and set(tags) <= set(box.tags)][skip : skip + limit]

    def list(self, tenant: str, after: str, limit: int, now: int) -> list[Mailbox]:
        found = [
            box.mailbox
            for box in self._data.boxes.values()
            if box.mailbox.tenant == tenant
            and box.mailbox.lives(now)
            and box.mailbox.address > after
            and box.mailbox.kind is not Kind.BROADCAST
        ]
        return sorted(found, key=lambda mailbox: mailbox.address)[:limit]

    def usage(self, tenant: str) -> Usage:
        boxes = {no: box.mailbox for no, box in self._data.boxes.items() if box.mailbox.tenant == tenant}
        waiting = [entry[2].message.size for entry in self._data.delayed if entry[2].mailbox_no in boxes]
        return Usage(
            sum(box.messages for box in boxes.values()) + len(waiting),
            sum(box.bytes for box in boxes.values()) + sum(waiting),
        )


class _Messages(_Table):
    def append(self, mailbox: Mailbox, message: Message) -> None:
        box = self._box(mailbox)
        self._set(box.messages, message.msg_id, replace(message))
        self._change(
            mailbox,
            next_id=message.msg_id + 1,
            messages=mailbox.messages + 1,
            bytes=mailbox.bytes + message.size,
            last_at=message.created_at,
        )
        self._hold(box, message.recipient, 1, message.size)

    def handles(self, mailbox: Mailbox, ids: Sequence[int], now: int) -> dict[int, Handle]:
        messages = self._box(mailbox).messages
        return {i: messages[i].handle for i in ids if i in messages and _lives(messages[i], now)}

    def keyed(self, mailbox: Mailbox, key: str) -> Handle | None:
        found = [message for message in self._box(mailbox).messages.values() if message.key == key]
        return found[-1].handle if found else None

    def lane(self, mailbox: Mailbox, lane: Lane, after: int, limit: int, budget: int, now: int) -> list[Message]:
        messages = self._box(mailbox).messages
        wanted = (m for i, m in messages.items() if i > after and m.lane == lane and _lives(m, now))
        return _within(wanted, limit, budget)

    def pick(self, mailbox: Mailbox, ids: Sequence[int], budget: int, now: int) -> list[Message]:
        messages = self._box(mailbox).messages
        wanted = (messages[i] for i in sorted(ids) if i in messages and _lives(messages[i], now))
        return _within(wanted, len(ids), budget)

    def newest(self, mailbox: Mailbox, wanted: Filter, limit: int, budget: int, now: int) -> list[Message]:
        found = (
            message
            for message in reversed(self._box(mailbox).messages.values())
            if _lives(message, now)
            and (wanted.key is None or message.key == wanted.key)
            and set(wanted.tags) <= set(message.tags)
            and (wanted.since is None or message.created_at >= wanted.since)
            and (wanted.before_id is None or message.msg_id < wanted.before_id)
            and (wanted.recipient is None or message.recipient == wanted.recipient)
        )
        return _within(found, limit, budget)[::-1]

    def heads(self, mailbox: Mailbox, wanted: Filter, limit: int, now: int) -> list[Message]:
        found = self.newest(mailbox, wanted, limit, mailbox.bytes + 1, now)
        return [replace(message, payload=b"") for message in found]

    def between(self, mailbox: Mailbox, lane: Lane, after: int, last: int, now: int) -> list[Handle]:
        messages = self._box(mailbox).messages
        return [m.handle for i, m in messages.items() if after < i <= last and m.lane == lane and _lives(m, now)]

    def first(self, mailbox: Mailbox, limit: int) -> list[Handle]:
        return [message.handle for message in itertools.islice(self._box(mailbox).messages.values(), limit)]

    def first_since(self, mailbox: Mailbox, at: int) -> int:
        found = (i for i, message in self._box(mailbox).messages.items() if message.created_at >= at)
        return next(found, mailbox.next_id)

    def remove(self, mailbox: Mailbox, handles: Sequence[Handle]) -> None:
        box = self._box(mailbox)
        for handle in handles:
            self._pop(box.messages, handle.msg_id)
            self._change(mailbox, messages=mailbox.messages - 1, bytes=mailbox.bytes - handle.size)
            self._hold(box, handle.recipient, -1, -handle.size)

    def expired(self, now: int, limit: int) -> list[Expired]:
        gone = [
            (message.expire_at, no, message.handle)
            for no, box in self._data.boxes.items()
            for message in box.messages.values()
            if message.expire_at is not None and message.expire_at <= now
        ]
        gone.sort(key=lambda item: (item[0], item[1], item[2].msg_id))
        return [Expired(no, handle) for _, no, handle in gone[:limit]]

    def volatile(self, instance: str, limit: int) -> list[Expired]:
        found = (
            Expired(no, message.handle)
            for no, box in self._data.boxes.items()
            for message in box.messages.values()
            if message.volatile == instance
        )
        return list(itertools.islice(found, limit))

    def addressed(
        self, mailbox: Mailbox, recipient: str, after: int, limit: int, budget: int, now: int
    ) -> list[Message]:
        messages = self._box(mailbox).messages
        wanted = (m for i, m in messages.items() if i > after and m.recipient == recipient and _lives(m, now))
        return _within(wanted, limit, budget)

    def held_for(self, mailbox: Mailbox, recipient: str) -> Usage:
        return self._box(mailbox).held.get(recipient, Usage(0, 0))

    def _hold(self, box: _Box, recipient: str | None, messages: int, size: int) -> None:
        if recipient is not None:
            held = box.held.get(recipient, Usage(0, 0))
            self._set(box.held, recipient, Usage(held.messages + messages, held.bytes + size))


class _Delays(_Table):
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

    def usage(self, mailbox: Mailbox) -> Usage:
        found = [entry[2].message.size for entry in self._data.delayed if entry[2].mailbox_no == mailbox.no]
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


class _DedupIds(_Table):
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


class _Groups(_Table):
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


class _Leases(_Table):
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


class _Pushed(_Table):
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
        return sum(1 for i, m in box.messages.items() if i > box.pushed.get(m.lane, -1) and _lives(m, now))


class _Outbox(_Table):
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


class _Tail(_Table):
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


def _lives(message: Message, now: int) -> bool:
    return message.expire_at is None or message.expire_at > now


def _copy(delayed: Delayed) -> Delayed:
    return replace(delayed, message=replace(delayed.message))


def _within(messages: Iterable[Message], limit: int, budget: int) -> list[Message]:
    """Take copies in order until the number or the bytes are reached; one is taken whatever its size."""
    taken: list[Message] = []
    for message in itertools.islice(messages, limit):
        if taken and budget <= 0:
            break
        taken.append(replace(message))
        budget -= message.size
    return taken
