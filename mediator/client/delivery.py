"""A message under a lease, and what keeps its lease: it is extended while the message is worked on."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mediator.client.message import Message, message_fields
from mediator.errors import MediatorError

if TYPE_CHECKING:
    from mediator.client.client import Mailbox

LONGEST_RETRY = 60.0
"""Seconds for which a message that failed stays hidden at most: 1 after the first time, doubled each time."""

log = logging.getLogger("mediator.client")


@dataclass(frozen=True)
class Delivery(Message):
    """A message that is leased to this client until it is acknowledged or given back.

    As a block, ``async with message:``, it is acknowledged when the block succeeds and given back when the block
    raises, and its lease is extended while the block runs. Blocks may run at the same time, in tasks of their own.
    """

    leases: "ConsumerLeases" = field(repr=False, compare=False)

    @classmethod
    def read(cls, item: Mapping[str, Any], leases: "ConsumerLeases") -> Self:
        """Read an item of a FETCH."""
        return cls(**message_fields(item), leases=leases)

    async def ack(self) -> None:
        """Acknowledge the message: it is done. This counts also after the lease ended (K3)."""
        await self.leases.mailbox.ack(self, group=self.leases.group)
        self.leases.settled(self.msg_id)

    async def nack(self, delay: float = 0) -> None:
        """Give the message back: a member of the group gets it after ``delay`` seconds (F6)."""
        await self.leases.mailbox.nack(self, group=self.leases.group, delay=delay)
        self.leases.settled(self.msg_id)

    async def extend(self, lease: float) -> None:
        """Lengthen the lease to this many seconds from now; a block does so by itself."""
        await self.leases.mailbox.extend(self, group=self.leases.group, lease=lease)

    async def __aenter__(self) -> Self:
        self.leases.keep(self.msg_id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            if not self.leases.is_open(self.msg_id):
                return
            if error is None:
                await self.ack()
                return
            # A failure is tried again later and later; what is only interrupted, at once.
            failed = isinstance(error, Exception)
            try:
                await self.nack(min(2.0 ** max(self.deliveries - 1, 0), LONGEST_RETRY) if failed else 0)
            except MediatorError as why:
                log.warning("message %d was not given back, its lease will end by itself: %s", self.msg_id, why)
        finally:
            self.leases.release(self.msg_id)


class ConsumerLeases:
    """The leases that one consumer holds."""

    def __init__(self, mailbox: "Mailbox", group: str, lease: float) -> None:
        """``lease``: seconds."""
        self.mailbox = mailbox
        self.group = group
        self._lease = lease
        self._waiting: dict[int, Delivery] = {}
        self._open: set[int] = set()
        self._kept: set[int] = set()
        self._extending: asyncio.Task[None] | None = None

    def add(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Take the messages of a FETCH; each is extended until it is taken by :meth:`next`."""
        for item in items:
            delivery = Delivery.read(item, self)
            self._waiting[delivery.msg_id] = delivery
            self._open.add(delivery.msg_id)
            if len(items) > 1:
                self.keep(delivery.msg_id)

    def next(self) -> Delivery | None:
        """Return the next message that nobody has taken; its lease then runs until a block takes it."""
        if not self._waiting:
            return None
        delivery = self._waiting.pop(next(iter(self._waiting)))
        self.release(delivery.msg_id)
        return delivery

    def is_open(self, msg_id: int) -> bool:
        """Whether the message was neither acknowledged nor given back."""
        return msg_id in self._open

    def settled(self, msg_id: int) -> None:
        """Forget a message that was acknowledged or given back."""
        self._open.discard(msg_id)
        self._kept.discard(msg_id)

    def keep(self, msg_id: int) -> None:
        """Extend the lease of a message until :meth:`release`."""
        self._kept.add(msg_id)
        if self._extending is None:
            self._extending = asyncio.create_task(self._extend())

    def release(self, msg_id: int) -> None:
        """Extend the lease of a message no more."""
        self._kept.discard(msg_id)

    async def close(self) -> None:
        """Give back the messages that nobody has taken."""
        waiting, self._waiting = tuple(self._waiting.values()), {}
        if waiting:
            try:
                await self.mailbox.nack(*waiting, group=self.group)
            except MediatorError as why:
                log.warning("%d messages were not given back, their leases will end: %s", len(waiting), why)
            for delivery in waiting:
                self.settled(delivery.msg_id)

    async def _extend(self) -> None:
        """Lengthen the leases three times within each, while there are any."""
        try:
            while True:
                await asyncio.sleep(self._lease / 3)
                if not self._kept:
                    return
                try:
                    await self.mailbox.extend(*self._kept, group=self.group, lease=self._lease)
                except MediatorError as why:
                    log.warning("leases of %d messages were not extended: %s", len(self._kept), why)
        finally:
            self._extending = None
