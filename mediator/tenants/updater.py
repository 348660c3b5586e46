"""Changes tenants in the database, and brings this instance and the others on the database up to date."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from mediator.announcer import Announcer
from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.mailboxes import creating
from mediator.store.base import Transaction
from mediator.tenants.directory import TenantDirectory
from mediator.tenants.records import Tenant
from mediator.tenants.rules import KeptTenants
from mediator.tenants.table import TenantTables

LOOK_SECONDS: Final = 5
"""Between two looks for changes that no announcement told of, and for passwords that end."""
SLICE: Final = 100
"""Mailboxes that are deleted in one transaction."""

log = structlog.get_logger("tenants")


class TenantUpdater:
    """Used on the event loop."""

    def __init__(
        self,
        broker: Broker,
        directory: TenantDirectory,
        apply: Callable[[], Awaitable[None]] | None,
        announcements: Announcer | None,
    ) -> None:
        """``apply`` brings the NATS server up to date with the directory; it may raise :class:`UnavailableError`."""
        self._broker = broker
        self._directory = directory
        self._apply = apply
        self._announcements = announcements
        self._looking: asyncio.Task[None] | None = None
        self._again = False

    async def open(self) -> None:
        """Listen to the other instances."""
        if self._announcements is not None:
            await self._announcements.listen(lambda _data: self._look_soon())

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def change(self, rule: Callable[[KeptTenants, int], Tenant]) -> Tenant:
        """Store what ``rule`` makes of the tenants and the time; return when it holds at this instance.

        Raises what ``rule`` raises, and :class:`UnavailableError` when the NATS server does not follow: the change is
        stored then, and tried again every few seconds.
        """

        def work(tx: Transaction, now: int) -> tuple[int, KeptTenants, Tenant]:
            tenants = tx.table(TenantTables).tenants
            tenants.lock()
            kept = tenants.all()
            made = rule(kept, now)
            tenants.save(made)
            return tenants.revise(), {**kept, made.name: made}, made

        revision, kept, made = await self._broker.write(work, when_full=True)
        self._directory.take(revision, kept)
        if self._announcements is not None:
            await self._announcements.publish(b"")
        if self._apply is not None:
            await self._apply()
        return made

    async def delete_mail(self, tenant: str) -> int:
        """Delete all mailboxes of a tenant that was removed, some at a time; return how many.

        It ends when the tenant is added again.
        """

        def work(tx: Transaction, now: int) -> int:
            removed = tx.table(TenantTables).tenants.is_removed(tenant)
            return creating.delete_all(tx, tenant, SLICE, now) if removed else 0

        total = 0
        while count := await self._broker.write_background(work, when_full=True):
            total += count
        return total

    async def look(self) -> None:
        """Take over what has changed in the database, and what time has changed."""
        try:
            if not self._broker.alone:
                self._directory.take(*await self._broker.read(self._read))
            if self._apply is not None:
                await self._apply()
        except MediatorError as error:
            log.warning("tenants are not up to date, trying again", error=str(error))

    def _read(self, tx: Transaction, _now: int) -> tuple[int, KeptTenants]:
        tenants = tx.table(TenantTables).tenants
        revision = tenants.revision()
        return revision, tenants.all() if revision > self._directory.revision else {}

    def _look_soon(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_until_done(), name="tenants-look")
        else:
            self._again = True

    async def _look_until_done(self) -> None:
        await self.look()
        while self._again:
            self._again = False
            await self.look()
