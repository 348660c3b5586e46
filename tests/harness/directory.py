"""A registry without a model and without doors, over a store."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
from prometheus_client import CollectorRegistry

from mediator.announcer import Announcer
from mediator.broker import Broker, wall_clock
from mediator.mailboxes.bounds import Bounds
from mediator.store.base import Store
from registry.directory import Directory
from registry.index.updater import IndexUpdater
from registry.metrics import RegistryMetrics
from registry.records import NO_MEMORY, Liveness, MemoryPolicy
from registry.requests import DiscoverRequest, DiscoverResult
from registry.search.feedback import RecentSearches
from registry.search.searcher import Searcher

BUDGET = 1 << 20


class Instance:
    """A registry without a model, over a store."""

    def __init__(
        self, broker: Broker, updater: IndexUpdater, directory: Directory, asked: RecentSearches | None = None
    ) -> None:
        self.broker = broker
        self.asked = asked or RecentSearches()
        self.updater = updater
        self.directory = directory

    async def register(self, name: str, description: str = "", **more: object) -> int:
        card = {"mailbox": f"agent.{name}", "name": name, "description": description, **more}
        done = await self.directory.register("default", orjson.dumps(card))
        return done.agent.id

    async def discover(self, tenant: str = "default", budget: int = BUDGET, **asked: object) -> DiscoverResult:
        return await self.directory.searcher.discover(tenant, DiscoverRequest(**asked), budget)

    async def found(self, **asked: object) -> list[str]:
        return [agent.name for agent in (await self.discover(**asked)).agents]


@asynccontextmanager
async def instance(
    store: Store,
    space: str = "",
    announcer: Announcer | None = None,
    policy: MemoryPolicy = NO_MEMORY,
    asked: RecentSearches | None = None,
    clock: Callable[[], int] = wall_clock,
) -> AsyncIterator[Instance]:
    broker = Broker(store, Bounds(), clock=clock)
    asked = asked or RecentSearches()
    updater = IndexUpdater(broker, Liveness())
    searcher = Searcher(
        broker, Liveness(), updater, None, RegistryMetrics(CollectorRegistry()), announcer, policy, asked
    )
    directory = Directory(broker, Liveness(), 0, updater, searcher, None, policy)
    try:
        await searcher.open()
        await updater.start(space)
        yield Instance(broker, updater, directory, asked)
    finally:
        await updater.stop()
        searcher.close()
        directory.close()
        await broker.close()
