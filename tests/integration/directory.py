"""A registry without a model and without doors, over a store."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from prometheus_client import CollectorRegistry

from mediator.agents.records import Liveness
from mediator.broker import Broker
from mediator.mailboxes.bounds import Bounds
from mediator.store.base import Store
from registry.directory import Directory
from registry.following import Following
from registry.meters import Meters
from registry.requests import Discover, Found
from registry.searching import Searching
from registry.sharing import Announcer

BUDGET = 1 << 20


class Instance:
    """A registry without a model, over a store."""

    def __init__(self, broker: Broker, following: Following, directory: Directory) -> None:
        self.broker = broker
        self.following = following
        self.directory = directory

    async def register(self, name: str, description: str = "", **more: object) -> int:
        card = {"mailbox": f"agent.{name}", "name": name, "description": description, **more}
        done = await self.directory.register("default", orjson.dumps(card))
        return done.agent.no

    async def discover(self, tenant: str = "default", budget: int = BUDGET, **asked: object) -> Found:
        return await self.directory.discover(tenant, Discover(**asked), budget)  # type: ignore[arg-type]

    async def found(self, **asked: object) -> list[str]:
        return [agent.name for agent in (await self.discover(**asked)).agents]  # type: ignore[arg-type]


@asynccontextmanager
async def instance(store: Store, space: str = "", announcer: Announcer | None = None) -> AsyncIterator[Instance]:
    broker = Broker(store, Bounds())
    following = Following(broker, Liveness())
    searching = Searching(broker, Liveness(), following, None, announcer)
    directory = Directory(broker, Liveness(), 0, following, searching, None, Meters(CollectorRegistry()))
    try:
        await searching.open()
        await following.start(space)
        yield Instance(broker, following, directory)
    finally:
        await following.stop()
        searching.close()
        directory.close()
        await broker.close()
