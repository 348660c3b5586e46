"""Keeps the indexes of all tenants up to date with the store: loaded at the start, then change by change."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import structlog

from mediator.broker import Broker
from mediator.errors import BusyError, MediatorError, StorageFullError
from mediator.store.base import Transaction
from registry.agents.ports import UpdatedTerms
from registry.agents.records import Liveness
from registry.index.changes import IndexSet, apply_changes, read_changes
from registry.index.tenant import TenantIndex
from registry.tables import RegistryTables

POLL_SECONDS = 0.5
"""How often it looks for changes by other instances and by the clean-up."""
LOAD_SECONDS = 3.0
"""How long a search waits for the index to be loaded before it is answered with :class:`BusyError`."""
WAIT_SECONDS = 2.0
"""How long a registration waits until the index has it."""
OPTIMIZE_SECONDS = 5.0
"""How often it looks whether an index has become large."""
RELOAD_SECONDS = 12 * 3600.0
"""After so long without a look everything is loaded again: the store remembers removals only for a day."""
LONGEST_PAUSE = 60.0
"""Seconds between two attempts while an unexpected error persists; the first is after :data:`POLL_SECONDS`."""

log = structlog.get_logger("registry")


class IndexUpdater:
    """Reads changes from the store. Used on the event loop; the indexes themselves may be used from any thread."""

    def __init__(self, broker: Broker, liveness: Liveness) -> None:
        self._broker = broker
        self._liveness = liveness
        self._indexes = IndexSet("")
        self._loading = asyncio.Lock()
        """Held while everything is loaded into new indexes, which then replace the former ones."""
        self._loaded = asyncio.Event()
        self._wake = asyncio.Event()
        self._advanced = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._polled_at = 0.0
        """When the last look began that was completed."""
        self._reload = False
        """Whether the indexes may be wrong, so that everything must be loaded again."""
        self._confirmed = 0
        """The highest revision that a caller was told is stored."""
        self._problem: str | None = None

    @property
    def space(self) -> str:
        """The space of the vectors in the indexes; "" for none."""
        return self._indexes.space

    @property
    def agents(self) -> int:
        """How many agents are in all indexes."""
        return len(self._indexes.agents)

    @property
    def embedded(self) -> int:
        """How many of them have vectors."""
        return sum(index.embedded for index in self._indexes.by_tenant.values())

    @property
    def loaded(self) -> bool:
        """Whether the store was read to its end once."""
        return self._loaded.is_set()

    async def start(self, space: str) -> None:
        """Start to load the indexes, with the vectors of a space."""
        self._indexes = IndexSet(space)
        self._tasks = [
            asyncio.create_task(self._run(), name="registry-index"),
            asyncio.create_task(self._optimize(), name="registry-optimizing"),
        ]

    async def stop(self) -> None:
        """Stop the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def check(self) -> str | None:
        """Return why the indexes are not up to date, None when they are; a health check."""
        return self._problem

    async def index(self, tenant: str) -> TenantIndex:
        """Return the index of a tenant; :class:`BusyError` while everything is loaded for the first time."""
        if not self._loaded.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOAD_SECONDS):
                    await self._loaded.wait()
        if not self._loaded.is_set():
            raise BusyError("the registry is being read into memory")
        return self._indexes.by_tenant.get(tenant) or TenantIndex(self._liveness)

    async def wait_for(self, revision: int, *, remembered: bool = False) -> None:
        """Wait until the indexes have a transaction, for :data:`WAIT_SECONDS` at most and not for the first load.

        ``remembered``: with its remembered requests, otherwise with its agents.
        """
        self._wake.set()
        self._confirmed = max(self._confirmed, revision)

        def there() -> bool:
            return self._indexes.remembers(revision) if remembered else self._indexes.has(revision)

        if not self._loaded.is_set() or there():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS), self._advanced:
                await self._advanced.wait_for(there)

    async def switch_space(self, space: str) -> None:
        """Change to the vectors of another space; the former ones are used until these are loaded."""
        await self._loaded.wait()
        async with self._loading:
            self._indexes = await self._load(space)
        self._wake.set()

    async def _run(self) -> None:
        pause = POLL_SECONDS
        while True:
            try:
                await self._poll()
                self._set_problem(None)
                pause = POLL_SECONDS
            except MediatorError as error:
                self._set_problem(str(error))
            except Exception as error:
                # The health check has to show it. Requests continue with the indexes as they are, and since those may
                # have been left half changed, they are loaded again.
                self._set_problem(f"failed: {type(error).__name__}", unexpected=True)
                self._reload = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            async with self._advanced:
                self._advanced.notify_all()
            # wait_for may swallow the cancellation of this task when the event is set at the same time.
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wake.wait()

    async def _poll(self) -> None:
        started = time.monotonic()
        if self._reload or not self._loaded.is_set() or started - self._polled_at > RELOAD_SECONDS:
            self._reload = False
            try:
                async with self._loading:
                    self._indexes = await self._load(self._indexes.space)
            except BaseException:
                self._reload = True
                raise
            self._loaded.set()
            if self.agents:
                log.info("index loaded", agents=self.agents, seconds=round(time.monotonic() - started, 2))
        self._wake.clear()
        await self._catch_up(self._indexes)
        self._polled_at = started

    async def _optimize(self) -> None:
        while True:
            more = False
            try:
                more = await asyncio.to_thread(_optimize_some, list(self._indexes.by_tenant.values()))
            except Exception:
                # Searches work without it, they only take longer.
                log.exception("a large index cannot be optimized")
            if not more:
                await asyncio.sleep(OPTIMIZE_SECONDS)

    def _set_problem(self, problem: str | None, *, unexpected: bool = False) -> None:
        if problem is not None and problem != self._problem:
            log.warning("the index is not up to date", why=problem, exc_info=unexpected)
        self._problem = problem

    async def _load(self, space: str) -> IndexSet:
        # Searches begin with all agents; remembered requests follow.
        indexes = IndexSet(space)
        await self._catch_up(indexes, requests=False)
        # Callers may have been told of commits made meanwhile, and will search for them here.
        while not indexes.has(self._confirmed):
            before = indexes.cursor
            await self._catch_up(indexes, requests=False)
            if indexes.cursor == before:
                # The revision no longer exists: the database was restored from an older state.
                self._confirmed = indexes.cursor.revision
        return indexes

    async def _catch_up(self, indexes: IndexSet, *, requests: bool = True) -> None:
        while True:
            # A caller of wait_for knows that there are changes; otherwise the revision alone is read first.
            if indexes.has(self._confirmed):
                revision = await self._broker.read_inline(lambda tx, _now: tx.table(RegistryTables).agents.revision())
                if indexes.is_at(revision):
                    return
            batch = await self._broker.read(lambda tx, _now: read_changes(tx.table(RegistryTables), indexes))
            if batch.revision < indexes.cursor.revision:
                # The database went back, by a restored backup or a standby that lagged: the indexes may be wrong.
                self._reload, self._confirmed = True, batch.revision
                return
            await asyncio.to_thread(apply_changes, indexes, batch, self._liveness)
            if batch.updated:
                # On a full disk the cards are parsed again at the next start as well.
                with suppress(StorageFullError):
                    await self._broker.write_background(partial(_set_terms, batch.updated))
            async with self._advanced:
                self._advanced.notify_all()
            if not (batch.more_requests if requests else batch.more):
                return


def _set_terms(updated: Sequence[UpdatedTerms], tx: Transaction, _now: int) -> None:
    tx.table(RegistryTables).agents.set_terms(updated)


def _optimize_some(indexes: Sequence[TenantIndex]) -> bool:
    # A step of each, so that none waits until another is done.
    return sum(index.optimize() for index in indexes) > 0
