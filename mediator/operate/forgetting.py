"""Forgets a mailbox: what the database has of its address, and the bytes that removed rows leave in its file."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from getpass import getuser

from mediator.broker import Broker
from mediator.cleanup.collector import CleanupStep
from mediator.errors import BadRequestError
from mediator.mailboxes import collecting, copying, creating
from mediator.mailboxes.address import PUBLIC, is_send_only, writable_address
from mediator.mailboxes.appending import remove
from mediator.mailboxes.events import EventType
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import HIDDEN_ID
from mediator.operate.audit import AuditLog
from mediator.operate.mailbox_operations import read_place
from mediator.operate.operations import (
    ADDRESS,
    COUNT,
    PLACE,
    TEXTS,
    Actor,
    Answer,
    OperationRequest,
    Operations,
    Right,
    about,
    object_schema,
    operation,
    table,
)
from mediator.operate.store_access import open_broker
from mediator.settings.settings import Settings
from mediator.store.base import Transaction

FORGET_SECONDS = 3600.0
_SLICE = 500
"""Rows of one transaction."""
_COPIES = 5_000
"""Copies in the outbox that one transaction looks at."""
_LOG = (
    "the write-ahead log, since somebody reads the database for long; run the command again, or stop the service: a "
    "normal stop empties the log"
)
_PAGES = (
    "unused space inside pages of mediator.db, if the mailbox had mail that was removed before: run the command again "
    "while the service is stopped, which rewrites the file"
)
_SERVER = (
    "PostgreSQL keeps removed rows until its VACUUM, and in its write-ahead log and backups: run `VACUUM FULL message, "
    "body, delayed, outbox` to rewrite the tables, which locks them"
)


ForgetAddress = Callable[[Transaction, str, str, int], Mapping[str, int]]
"""Removes what a part keeps of an address, for a tenant, address and time; returns how much by kind."""


class Forgetting:
    """Removes all that a store has of an address. Used on the event loop."""

    def __init__(self, broker: Broker, steps: Sequence[CleanupStep], of_parts: Sequence[ForgetAddress]) -> None:
        """``steps`` clean up what parts keep of a mailbox, ``of_parts`` remove what they keep of an address."""
        self._broker = broker
        self._steps = steps
        self._of_parts = of_parts
        self._forgetting = asyncio.Lock()
        """What is removed is overwritten as long as one forgets, so one after the other does."""

    async def forget(self, tenant: str, address: str, *, alone: bool = False) -> Answer:
        """Remove the mailbox and all that is kept of its address; return what was removed, and what may be left.

        ``alone``: no service uses the database, so that its file may be written anew. May be repeated at any time.
        Raises :class:`BadRequestError` for an address that nobody can have.
        """
        writable_address(address)
        if is_send_only(address):
            raise BadRequestError("mail_address", "expected the mailbox's own address, got its send-only address")
        async with self._forgetting:
            return await self._remove_all(tenant, address, alone)

    async def _remove_all(self, tenant: str, address: str, alone: bool) -> Answer:
        broker = self._broker
        removed: Counter[str] = Counter()
        await broker.write(lambda tx, _now: tx.session.dialect.overwrite_removed(True), even_when_full=True)
        try:
            names = {address, await broker.read(lambda tx, _now: self._send_only(tx, tenant, address))}
            ended, number = await broker.write(
                lambda tx, now: self._end(tx, tenant, address, now), (tenant, address), even_when_full=True
            )
            removed.update(ended)
            while number is not None:
                slice_of = await broker.write_background(lambda tx, _now: self._empty(tx, number), even_when_full=True)
                if slice_of is None:
                    break
                removed.update(slice_of)
            await self._collect_retired()
            after: int | None = 0
            while after is not None:
                start = after
                copies, after = await broker.write_background(
                    lambda tx, _now: tx.outbox.forget(tenant, address, start, _COPIES),  # noqa: B023
                    even_when_full=True,
                )
                removed["archive_copies"] += copies
            removed["copies"] += await self.forget_copies(tenant, names)
        finally:
            await broker.write(lambda tx, _now: tx.session.dialect.overwrite_removed(False), even_when_full=True)
        scrubbed = await broker.scrub(rewrite=alone and broker.alone)
        left = [_SERVER] if not broker.alone else [] if scrubbed else [_LOG]
        if broker.alone and not alone:
            left.append(_PAGES)
        return {"mail_address": address, "removed": {k: n for k, n in sorted(removed.items()) if n}, "left": left}

    def _end(self, tx: Transaction, tenant: str, address: str, now: int) -> tuple[Counter[str], int | None]:
        """End the mailbox and what the parts have of it; return what went, and the mailbox's number."""
        removed: Counter[str] = Counter()
        mailbox = tx.mailboxes.find(tenant, address)
        number = None if mailbox is None else mailbox.id
        removed["copy_rules"] += copying.forget_rules(tx, tenant, address)
        for forget_address in self._of_parts:
            removed.update(forget_address(tx, tenant, address, now))
        # A part may have ended the mailbox.
        if tx.mailboxes.find(tenant, address) is not None:
            assert mailbox is not None
            creating.delete(tx, tenant, address, now) if mailbox.is_live(now) else creating.expire(tx, mailbox, now)
        public = tx.mailboxes.find(tenant, PUBLIC)
        entry = None if public is None else tx.messages.keyed(public, address)
        if public is not None and entry is not None:
            remove(tx, public, [entry], now, EventType.EXPIRED)
            removed["board_entries"] += 1
        return removed, number

    def _empty(self, tx: Transaction, number: int) -> dict[str, int] | None:
        """Remove some rows of the mailbox; None when nothing is left of it."""
        mailbox = tx.mailboxes.by_id([number]).get(number)
        if mailbox is None:
            return None
        gone = collecting.empty(tx, mailbox, _SLICE, lambda mailbox: self._forget(tx, mailbox))
        return {
            "mailboxes": gone.mailboxes,
            "messages": gone.messages,
            "delayed": gone.delayed,
            "dedup_ids": gone.dedup_ids,
            # Dead letters are leases.
            "groups_and_leases": gone.groups + gone.leases,
        }

    def _forget(self, tx: Transaction, mailbox: Mailbox) -> None:
        for step in self._steps:
            step.forget_mailbox(tx, mailbox)

    def _send_only(self, tx: Transaction, tenant: str, address: str) -> str:
        """Return the send-only address of a mailbox that is still there, else its address."""
        mailbox = tx.mailboxes.find(tenant, address)
        return address if mailbox is None else tx.mailboxes.send_only(mailbox)

    async def forget_copies(self, tenant: str, names: Collection[str]) -> int:
        """Remove the copies that rules made of the mailbox's messages, wherever in the tenant they are now (C6)."""
        broker, count, last = self._broker, 0, ""
        while addresses := await broker.read(
            lambda tx, now: [(each.address, each.id) for each in tx.mailboxes.list(tenant, last, _SLICE, now)]  # noqa: B023
        ):
            for last, number in addresses:  # noqa: B007
                after: int | None = HIDDEN_ID
                while after is not None:
                    start = after
                    found, after = await broker.read(
                        lambda tx, _now: copying.find_copies(tx, number, names, start)  # noqa: B023
                    )
                    if found:
                        count += await broker.write_background(
                            lambda tx, now: copying.forget_copies(tx, number, found, now),  # noqa: B023
                            even_when_full=True,
                        )
        return count

    async def _collect_retired(self) -> None:
        """Remove what is left of mailboxes that ended before, among them perhaps earlier ones of this address."""

        def work(tx: Transaction, now: int) -> int:
            return collecting.retired_mailboxes(tx, now, _SLICE, lambda mailbox: self._forget(tx, mailbox)).total

        while await self._broker.write_background(work, even_when_full=True):
            pass


class ForgetOperations:
    """The operation ``mailbox-forget``."""

    def __init__(self, forgetting: Forgetting, *, alone: bool = False) -> None:
        """``alone`` is that of :meth:`Forgetting.forget`."""
        self._forgetting = forgetting
        self._alone = alone

    @operation(
        "mailbox-forget",
        Right.ADMIN,
        "Remove a mailbox and all that the database has of its address, and overwrite it",
        object_schema(
            mail_address=ADDRESS,
            removed=about(table(COUNT), "How much, by kind."),
            left=about(TEXTS, "Where bytes of it may still be, and what to do."),
        ),
        fields=PLACE,
        required=("mail_address",),
        method="POST",
        path="/mailboxes/{mail_address}/forget",
        within=FORGET_SECONDS,
    )
    async def _forget(self, request: OperationRequest) -> Answer:
        return await self._forgetting.forget(*read_place(request), alone=self._alone)


async def forget_offline(
    settings: Settings, steps: Sequence[CleanupStep], of_parts: Sequence[ForgetAddress], fields: OperationRequest
) -> Answer:
    """Run the operation on the store itself, where no service runs."""
    async with open_broker(settings, "forget") as broker:
        operations = Operations(AuditLog(broker, settings.instance).record)
        operations.add_methods(ForgetOperations(Forgetting(broker, steps, of_parts), alone=broker.alone))
        return await operations.run(Actor(getuser(), frozenset(Right), "command"), "mailbox-forget", fields)
