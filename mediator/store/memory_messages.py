"""Mailboxes and messages in memory."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Kind, Mailbox, NewMailbox
from mediator.mailboxes.message import Handle, Message
from mediator.mailboxes.ports import Expired, Filter, Usage
from mediator.store.memory_data import Box, Data, Table, lives
from mediator.store.memory_mediation import Routes
from mediator.store.memory_table import Undo


class Mailboxes(Table):
    """See :class:`mediator.mailboxes.ports.Mailboxes`."""

    def __init__(self, data: Data, undo: Undo, routes: Routes) -> None:
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
        mailbox = Mailbox.made(next(self._data.numbers), new)
        self._set(self._data.boxes, mailbox.no, Box(mailbox))
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

    def tenants(self) -> Sequence[str]:
        return sorted({box.mailbox.tenant for box in self._data.boxes.values() if box.mailbox.address})

    def usage(self, tenant: str, now: int = 0) -> Usage:
        boxes = {
            no: box
            for no, box in self._data.boxes.items()
            if box.mailbox.tenant == tenant and (box.mailbox.expire_at is None or box.mailbox.expire_at > now)
        }
        messages = [message for box in boxes.values() for message in box.messages.values()]
        messages += [entry[2].message for entry in self._data.delayed if entry[2].mailbox_no in boxes]
        sizes = [message.size for message in messages if lives(message, now)]
        return Usage(len(sizes), sum(sizes))


class Messages(Table):
    """See :class:`mediator.mailboxes.ports.Messages`."""

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
        return {i: messages[i].handle for i in ids if i in messages and lives(messages[i], now)}

    def keyed(self, mailbox: Mailbox, key: str) -> Handle | None:
        found = [message for message in self._box(mailbox).messages.values() if message.key == key]
        return found[-1].handle if found else None

    def lane(
        self,
        mailbox: Mailbox,
        lane: Lane,
        after: int,
        limit: int,
        budget: int,
        now: int,
        without: Collection[int] = (),
    ) -> list[Message]:
        found = self._behind(mailbox, after, now, without)
        return _within((message for message in found if message.lane == lane), limit, budget)

    def _behind(self, mailbox: Mailbox, after: int, now: int, without: Collection[int]) -> Iterator[Message]:
        skipped = set(without)
        messages = self._box(mailbox).messages
        return (m for i, m in messages.items() if i > after and i not in skipped and lives(m, now))

    def pick(self, mailbox: Mailbox, ids: Sequence[int], budget: int, now: int) -> list[Message]:
        messages = self._box(mailbox).messages
        wanted = (messages[i] for i in sorted(ids) if i in messages and lives(messages[i], now))
        return _within(wanted, len(ids), budget)

    def newest(self, mailbox: Mailbox, wanted: Filter, limit: int, budget: int, now: int) -> list[Message]:
        found = (
            message
            for message in reversed(self._box(mailbox).messages.values())
            if lives(message, now)
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
        return [m.handle for i, m in messages.items() if after < i <= last and m.lane == lane and lives(m, now)]

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

    def expired_in(self, mailbox: Mailbox, now: int, limit: int) -> list[Handle]:
        gone = [message for message in self._box(mailbox).messages.values() if not lives(message, now)]
        return [message.handle for message in sorted(gone, key=lambda message: message.expire_at or 0)[:limit]]

    def volatile(self, instance: str, limit: int) -> list[Expired]:
        found = (
            Expired(no, message.handle)
            for no, box in self._data.boxes.items()
            for message in box.messages.values()
            if message.volatile == instance
        )
        return list(itertools.islice(found, limit))

    def addressed(
        self,
        mailbox: Mailbox,
        recipient: str,
        after: int,
        limit: int,
        budget: int,
        now: int,
        without: Collection[int] = (),
    ) -> list[Message]:
        found = self._behind(mailbox, after, now, without)
        return _within((message for message in found if message.recipient == recipient), limit, budget)

    def held_for(self, mailbox: Mailbox, recipient: str) -> Usage:
        return self._box(mailbox).held.get(recipient, Usage(0, 0))

    def _hold(self, box: Box, recipient: str | None, messages: int, size: int) -> None:
        if recipient is not None:
            held = box.held.get(recipient, Usage(0, 0))
            self._set(box.held, recipient, Usage(held.messages + messages, held.bytes + size))


def _within(messages: Iterable[Message], limit: int, budget: int) -> list[Message]:
    """Take copies in order until the number or the bytes are reached; one is taken whatever its size."""
    taken: list[Message] = []
    for message in itertools.islice(messages, limit):
        if taken and budget <= 0:
            break
        taken.append(replace(message))
        budget -= message.size
    return taken
