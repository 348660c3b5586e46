"""A service without doors: store, broker, scheduler and control socket, with a clock that a test moves."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mediator.broker import Broker
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.message import Draft, Filter
from mediator.mailboxes.querying import Query
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.sending import Send
from mediator.metrics import Metrics
from mediator.operate.audit import AuditLog
from mediator.operate.control import ControlServer, send_command
from mediator.operate.mailbox_operations import find_address
from mediator.operate.operations import Operations
from mediator.operate.scheduler import Scheduler
from mediator.parts import installed_settings
from mediator.settings.sections import CleanupSettings
from mediator.settings.settings import Settings
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from pickup.maintenance import OldReplays, UnusedConnections
from pickup.rules.records import MediationRules
from registry.maintenance import RemovedAgents, SilentAgents
from registry.records import Liveness
from tests.harness.clock import ShiftedClock
from tests.harness.stores import migrated

TENANT = "default"
BOX = "task"
SECOND = 1000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
PATIENCE = 20.0
"""Seconds until a test gives up on something that does not come."""
TABLES = ("mailbox", "message", "delayed", "dedup", "consumer", "lease", "held", "body", "outbox")


def make_settings(**options: Any) -> Settings:
    """Make settings of the installed parts from these options alone, without the environment and files."""
    return installed_settings()(**options)


@dataclass
class Core:
    """The parts of it, and short words for what tests do with them."""

    data_dir: Path
    clock: ShiftedClock
    broker: Broker
    metrics: Metrics
    scheduler: Scheduler
    operations: Operations

    async def create(self, address: str = BOX, **options: Any) -> int:
        created = await self.broker.create(Create(TENANT, address, **options))
        return created.mailbox.id

    async def send(self, payload: bytes = b"x", to: str = BOX, **draft: Any) -> int:
        return await self.broker.send(Send(TENANT, to, Draft(payload, **draft)))

    async def send_many(self, count: int, to: str = BOX, **draft: Any) -> None:
        """Keep many messages and wait for the last."""
        for _ in range(count // 1000):
            await asyncio.gather(*[self.send(to=to, **draft) for _ in range(1000)])

    async def shown(self, box: str = BOX) -> list[StoredMessage]:
        return await self.broker.query(Query(TENANT, box, Filter(), 1000, 1 << 26))

    async def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        return await send_command(self.data_dir, command, within=PATIENCE, **fields)

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
async def core(
    data_dir: Path, clock: ShiftedClock | None = None, *, enabled: bool = True, audited: bool = False
) -> AsyncIterator[Core]:
    """Open one on a directory; ``enabled``: it cleans up by itself, each second; ``audited``: it keeps acts."""
    clock = clock or ShiftedClock()
    store = SqliteStore(migrated(database_path(data_dir)))
    try:
        broker = Broker(store, Bounds(), clock=clock)
        metrics = Metrics()
        audit = AuditLog(broker, "core")
        operations = Operations(audit.record if audited else None, partial(find_address, broker))
        operations.add_methods(audit)
        control = ControlServer(data_dir, operations)
        cleanup = CleanupSettings(enabled=enabled, interval_seconds=1)
        steps = [UnusedConnections(MediationRules().idle), OldReplays(), SilentAgents(Liveness()), RemovedAgents()]
        scheduler = Scheduler(broker, cleanup, steps, metrics, operations)
        try:
            await scheduler.start()
            await control.start()
            yield Core(data_dir, clock, broker, metrics, scheduler, operations)
        finally:
            await control.stop()
            await scheduler.stop()
            await broker.close()
    finally:
        store.close()
