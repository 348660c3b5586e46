"""The operations ``activity`` and ``activity-history``: what instances do now, and what this one did for an hour."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import orjson
from prometheus_client import CollectorRegistry

from mediator import __version__
from mediator.announcer import Announcer
from mediator.broker import Broker
from mediator.http.health import Health
from mediator.journal import FOLDER as JOURNAL_FOLDER
from mediator.ops.operations import Answer, OperationRequest, Operations, Right, operation
from mediator.ops.sampling import COLUMNS, KEPT, LOOKED_AT, Sample, Sampler
from mediator.ops.schemas import ADDRESS, COUNT, FLAG, TEXT, TIME, about, many, obj, or_null, table
from mediator.settings.settings import Settings
from mediator.store.opening import database_path

TOPIC: Final = "seen"
FORGET_SECONDS: Final = 600.0
"""An instance that was not heard of for so long is no longer shown."""
MAX_INSTANCES: Final = 100
_SAMPLE: Final = table(or_null({"type": "number"}))
_INSTANCE: Final = obj(
    instance=TEXT,
    version=TEXT,
    since=TIME,
    heard_at=TIME,
    ready=FLAG,
    checks=table(TEXT),
    sample=about(_SAMPLE, "Its last seconds, with the names of activity-history."),
    sockets=about(table(COUNT), "Open connections, and subscriptions to stored mail."),
    pending=COUNT,
    waiting=COUNT,
)


class Activity:
    """Takes samples, tells the other instances of them, and answers the operations."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        health: Health,
        registry: CollectorRegistry,
        announcer: Announcer | None,
    ) -> None:
        self.listener: Callable[[Sample], Awaitable[None]] | None = None
        """Called with each sample; the console's live pages follow it."""
        self._broker = broker
        self._settings = settings
        self._health = health
        self._announcer = announcer
        self._sampler = Sampler(broker, registry)
        self._since = time.time()
        self._others: dict[str, Answer] = {}

    async def open(self, operations: Operations) -> None:
        """Register the operations, and listen to the other instances."""
        operations.add_methods(self)
        if self._announcer is not None:
            await self._announcer.listen(self._hear)

    async def tick(self) -> None:
        """Take a sample and pass it on; to be called each :data:`mediator.ops.sampling.PERIOD`."""
        sample = await self._sampler.take()
        if self._announcer is not None:
            await self._announcer.publish(orjson.dumps(await self._self()))
        if self.listener is not None:
            await self.listener(sample)

    def _hear(self, data: bytes) -> None:
        told: Answer = orjson.loads(data)
        now = time.time()
        known = {name: each for name, each in self._others.items() if now - each["heard_at"] < FORGET_SECONDS}
        if told["instance"] != self._settings.instance and len(known) < MAX_INSTANCES:
            known[told["instance"]] = told | {"heard_at": now}
        self._others = known

    async def _self(self) -> Answer:
        report = await self._health.report()
        samples = self._sampler.samples
        return {
            "instance": self._settings.instance,
            "version": __version__,
            "since": self._since,
            "heard_at": time.time(),
            "ready": report.ready,
            "checks": report.checks,
            "sample": samples[-1] if samples else dict.fromkeys(COLUMNS, None),
            "sockets": self._sampler.sockets,
            "pending": self._broker.pending,
            "waiting": self._broker.waiting,
        }

    @operation(
        "activity",
        Right.READ,
        "What the instances did in the last seconds, and what is stored",
        obj(
            instance=about(TEXT, "The instance that answers; the others share its database."),
            instances=many(_INSTANCE),
            database=TEXT,
            depth=obj(messages=COUNT, bytes=COUNT),
            oldest=about(
                or_null(obj(tenant=TEXT, mail_address=ADDRESS, number=COUNT, created_at=TIME)),
                "The oldest message that waits for an ACK which removes it, among the first "
                f"{LOOKED_AT} mailboxes of each tenant.",
            ),
            storage=about(table(COUNT), "Bytes on disk."),
        ),
        path="/activity",
    )
    async def _now(self, _request: OperationRequest) -> Answer:
        usage, oldest = self._sampler.stored
        return {
            "instance": self._settings.instance,
            "instances": [await self._self(), *(self._others[name] for name in sorted(self._others))],
            "database": "sqlite" if self._settings.database_url is None else "postgresql",
            "depth": {"messages": usage.messages, "bytes": usage.bytes},
            "oldest": oldest
            and {
                "tenant": oldest.tenant,
                "mail_address": oldest.address,
                "number": oldest.no,
                "created_at": (oldest.oldest_at or 0) / 1000,
            },
            "storage": {
                "database": await self._broker.read(lambda tx, _now: tx.session.dialect.size()),
                **await asyncio.to_thread(self._files),
            },
        }

    def _files(self) -> dict[str, int]:
        """Return the bytes of what lies beside the database."""
        folder = self._settings.data_dir
        log = database_path(folder)
        files = {"log": [log.with_name(f"{log.name}-wal")], "journal": (folder / JOURNAL_FOLDER).glob("*")}
        return {name: sum(path.stat().st_size for path in paths if path.is_file()) for name, paths in files.items()}

    @operation(
        "activity-history",
        Right.READ,
        "What this instance did in the last hour, a row for each few seconds",
        obj(kept=about(COUNT, "Rows that are kept."), columns=table(many(or_null({"type": "number"})))),
        path="/activity/history",
    )
    async def _history(self, _request: OperationRequest) -> Answer:
        samples = list(self._sampler.samples)
        return {"kept": KEPT, "columns": {name: [each[name] for each in samples] for name in ("at", *COLUMNS)}}
