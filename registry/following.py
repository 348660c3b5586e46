"""Keeps the index of every tenant as the store is: read whole at the start, then change by change."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import structlog

from mediator.agents.ports import Reread
from mediator.agents.records import Liveness
from mediator.broker import Broker
from mediator.errors import BusyError, MediatorError, StorageFullError
from mediator.store.base import Transaction
from registry.changes import View, apply, look
from registry.index import Index

LOOK_SECONDS = 0.5
"""How often it looks for what other instances and the clean-up changed."""
LOAD_SECONDS = 3.0
"""How long a search waits for the first reading before it is asked to come again."""
REACH_SECONDS = 2.0
"""How long a registration waits to be found."""
SETTLE_SECONDS = 5.0
"""How often it looks whether an index has become large."""
TOO_LATE_SECONDS = 12 * 3600.0
"""Whoever has not looked for so long reads all anew: removals are not remembered for ever."""
LONGEST_PAUSE = 60.0
"""Seconds between two tries while something fails that nobody foresaw; the first is after :data:`LOOK_SECONDS`."""

log = structlog.get_logger("registry")


class Following:
    """Follows the store. Used on the event loop; the indexes themselves may be asked from any thread."""

    def __init__(self, broker: Broker, liveness: Liveness) -> None:
        self._broker = broker
        self._liveness = liveness
        self._view = View("")
        self._whole = asyncio.Lock()
        """Held while all is read, and what was read put in place of the former."""
        self._loaded = asyncio.Event()
        self._bell = asyncio.Event()
        self._moved = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._looked_at = 0.0
        """When the last look began that came to its end."""
        self._doubted = False
        """Whether what is known may be wrong, so that all is to be read anew."""
        self._answered = 0
        """The last revision of which somebody was told that it is there."""
        self._problem: str | None = None

    @property
    def space(self) -> str:
        """Whose vectors the indexes hold; "" for none."""
        return self._view.space

    @property
    def agents(self) -> int:
        """How many agents are in all indexes."""
        return len(self._view.known)

    @property
    def embedded(self) -> int:
        """How many of them have vectors."""
        return sum(index.embedded for index in self._view.indexes.values())

    @property
    def loaded(self) -> bool:
        """Whether all that is in the store has been read."""
        return self._loaded.is_set()

    async def start(self, space: str) -> None:
        """Begin to read, with the vectors of a space."""
        self._view = View(space)
        self._tasks = [
            asyncio.create_task(self._follow(), name="registry-index"),
            asyncio.create_task(self._settle(), name="registry-settling"),
        ]

    async def stop(self) -> None:
        """Follow no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def check(self) -> str | None:
        """Say why the indexes are not as the store is."""
        return self._problem

    async def index(self, tenant: str) -> Index:
        """Return the index of a tenant; :class:`BusyError` while all is being read for the first time."""
        if not self._loaded.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOAD_SECONDS):
                    await self._loaded.wait()
        if not self._loaded.is_set():
            raise BusyError("the registry is being read into memory")
        return self._view.indexes.get(tenant) or Index(self._liveness)

    async def reach(self, revision: int) -> None:
        """Wait until the indexes have what a transaction did; not for long, and not for the first reading."""
        self._bell.set()
        self._answered = max(self._answered, revision)
        if not self._loaded.is_set() or self._view.has(revision):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(REACH_SECONDS), self._moved:
                await self._moved.wait_for(lambda: self._view.has(revision))

    async def use(self, space: str) -> None:
        """Go over to the vectors of another space; until they are read the former ones are used."""
        await self._loaded.wait()
        async with self._whole:
            self._view = await self._read_all(space)
        self._bell.set()

    async def _follow(self) -> None:
        pause = LOOK_SECONDS
        while True:
            try:
                await self._look_once()
                self._say(None)
                pause = LOOK_SECONDS
            except MediatorError as error:
                self._say(str(error))
            except Exception as error:
                # Whoever looks after the service has to hear of it; requests go on with the index as it was, which
                # may have been left in the midst of a change.
                self._say(f"failed: {type(error).__name__}", unexpected=True)
                self._doubted = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            async with self._moved:
                self._moved.notify_all()
            # Not wait_for, which may swallow the cancelling of this task when the bell rings at the same time.
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._bell.wait()

    async def _look_once(self) -> None:
        started = time.monotonic()
        if self._doubted or not self._loaded.is_set() or started - self._looked_at > TOO_LATE_SECONDS:
            self._doubted = False
            try:
                async with self._whole:
                    self._view = await self._read_all(self._view.space)
            except BaseException:
                self._doubted = True
                raise
            self._loaded.set()
            if self.agents:
                log.info("index read", agents=self.agents, seconds=round(time.monotonic() - started, 2))
        self._bell.clear()
        await self._catch_up(self._view)
        self._looked_at = started

    async def _settle(self) -> None:
        while True:
            more = False
            try:
                more = await asyncio.to_thread(_settle_some, list(self._view.indexes.values()))
            except Exception:
                # Searches do without, and only take longer.
                log.exception("a large index does not settle")
            if not more:
                await asyncio.sleep(SETTLE_SECONDS)

    def _say(self, problem: str | None, *, unexpected: bool = False) -> None:
        if problem is not None and problem != self._problem:
            log.warning("the index does not follow", why=problem, exc_info=unexpected)
        self._problem = problem

    async def _read_all(self, space: str) -> View:
        view = View(space)
        await self._catch_up(view)
        # What was committed while it was reading may have been answered since, and is looked for in it.
        while not view.has(self._answered):
            before = view.place
            await self._catch_up(view)
            if view.place == before:
                # It is not there any more: the database was set back.
                self._answered = before.revision
        return view

    async def _catch_up(self, view: View) -> None:
        while True:
            revision = await self._broker.glance(lambda tx, _now: tx.agents.revision())
            if view.place.revision > revision:
                # A database that was set back, by a backup or a standby that lagged: what is known of it may be wrong.
                self._doubted, self._answered = True, revision
                return
            if view.has(revision):
                return
            news = await self._broker.read(lambda tx, _now: look(tx, view))
            await asyncio.to_thread(apply, view, news, self._liveness)
            if news.reread:
                # On a full disk they are read anew at the next start as well.
                with suppress(StorageFullError):
                    await self._broker.chore(partial(_keep, news.reread))
            if not news.more:
                return


def _keep(reread: Sequence[Reread], tx: Transaction, _now: int) -> None:
    tx.agents.set_terms(reread)


def _settle_some(indexes: Sequence[Index]) -> bool:
    # Each in its turn, so that none waits for the others' end.
    return sum(index.settle() for index in indexes) > 0
