"""A service without doors: store, broker, scheduler and control socket, with a clock that a test moves."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mediator.agents.records import Liveness
from mediator.broker import Broker, wall_clock
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.message import Draft, Message
from mediator.mailboxes.ports import Filter
from mediator.mailboxes.querying import Query
from mediator.mailboxes.sending import Send
from mediator.mediation.records import Rules
from mediator.metrics import Metrics
from mediator.operators.control import ControlServer, ask
from mediator.scheduler import Scheduler
from mediator.settings import Cleanup
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore

TENANT = "default"
BOX = "task"
SECOND = 1000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
PATIENCE = 20.0
"""Seconds until a test gives up on something that does not come."""
TABLES = ("mailbox", "message", "delayed", "dedup", "consumer", "lease", "held", "body", "outbox")


@dataclass
class Clock:
    """The wall clock, moved ahead as a test says; milliseconds."""

    ahead: int = 0

    def __call__(self) -> int:
        return wall_clock() + self.ahead


@dataclass
class House:
    """The parts of it, and short words for what tests do with them."""

    data_dir: Path
    clock: Clock
    broker: Broker
    metrics: Metrics
    scheduler: Scheduler
    control: ControlServer

    async def create(self, address: str = BOX, **options: Any) -> int:
        created = await self.broker.create(Create(TENANT, address, **options))
        return created.mailbox.no

    async def send(self, payload: bytes = b"x", to: str = BOX, **draft: Any) -> int:
        return await self.broker.send(Send(TENANT, to, Draft(payload, **draft)))

    async def send_many(self, count: int, to: str = BOX, **draft: Any) -> None:
        """Keep many messages and wait for the last."""
        for _ in range(count // 1000):
            await asyncio.gather(*[self.send(to=to, **draft) for _ in range(1000)])

    async def shown(self, box: str = BOX) -> list[Message]:
        return await self.broker.query(Query(TENANT, box, Filter(), 1000, 1 << 26))

    async def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        return await ask(self.data_dir, command, within=PATIENCE, **fields)

    def value(self, name: str, **labels: str) -> float:
        """Return a sample of the metrics; 0 when there is none."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def rows(self, *tables: str) -> int:
        return rows(self.data_dir, *tables)


def rows(data_dir: Path, *tables: str) -> int:
    """Count what these tables, or all, hold on disk."""
    with closing(sqlite3.connect(f"{database_path(data_dir).as_uri()}?mode=ro", uri=True)) as connection:
        counts = [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables or TABLES]
    return sum(counts)


@asynccontextmanager
async def house(data_dir: Path, clock: Clock | None = None, *, enabled: bool = True) -> AsyncIterator[House]:
    """Open a house on a directory; ``enabled``: it cleans up by itself, each second."""
    clock = clock or Clock()
    store = SqliteStore(database_path(data_dir))
    try:
        broker = Broker(store, Bounds(), clock=clock)
        metrics = Metrics()
        control = ControlServer(data_dir)
        cleanup = Cleanup(enabled=enabled, interval_seconds=1)
        scheduler = Scheduler(broker, cleanup, Rules().idle, Liveness(), metrics, control)
        try:
            await scheduler.start()
            await control.start()
            yield House(data_dir, clock, broker, metrics, scheduler, control)
        finally:
            await control.stop()
            await scheduler.stop()
            await broker.close()
    finally:
        store.close()


async def until(condition: Callable[[], Any]) -> Any:
    """Wait until something holds, and return it; a condition may be awaitable."""
    async with asyncio.timeout(PATIENCE):
        while True:
            held = condition()
            if asyncio.iscoroutine(held):
                held = await held
            if held:
                return held
            await asyncio.sleep(0.005)
