"""Sends queued mail on to holders that have an endpoint of their own, in order (D10)."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import structlog

from mediator.errors import MediatorError, NotEnrolledError
from mediator.mailboxes.mailbox import MailboxKey
from mediator.mailboxes.rows import StoredMessage
from mediator.store.writer import Committed
from pickup.broker import MediationBroker
from pickup.metrics import DidcommMetrics
from pickup.outbound import DeliveryOutcome, OutboundClient, OutboundMessage, Sleep, is_endpoint
from pickup.rules.granting import is_denied
from pickup.rules.records import Connection

PAUSES = (1.0, 5.0, 30.0, 120.0, 300.0)
"""Seconds before each retry; then the mail waits for new mail, for the holder's next request or for the sweep."""
CONCURRENT = 32
"""Holders served at the same time."""
MAX_WORKERS = 10_000
"""Holders with a running worker."""
BATCH = 10
BATCH_BYTES = 256 * 1024
SWEEP_SECONDS = 600.0
"""How often all holders with endpoints are checked: mail may have waited through a restart or a long outage."""
PAGE = 200
"""Connections, or mailboxes, read at once."""
IDLE_SECONDS = 60.0
"""How long a mailbox without relay is remembered as such."""
MAX_REMEMBERED = 50_000
RETRY_SECONDS = 1.0
"""Wait after a failed read of the store."""

T = TypeVar("T")

log = structlog.get_logger("didcomm.relay")


@dataclass(slots=True, eq=False)
class _Worker:
    task: "asyncio.Task[None] | None" = None
    more: bool = False
    """New mail came meanwhile."""


class EndpointRelay:
    """Runs one worker for each holder with mail. What cannot be delivered stays in the holder's queue."""

    def __init__(
        self,
        mediation: MediationBroker,
        client: OutboundClient,
        metrics: DidcommMetrics,
        *,
        tenants: Sequence[str],
        live: Callable[[int], bool],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """``live`` says whether a connection number has a live session, which gets the mail instead."""
        self._mediation = mediation
        self._client = client
        self._metrics = metrics
        self._tenants = tenants
        self._live = live
        self._sleep = sleep
        self._turns = asyncio.Semaphore(CONCURRENT)
        self._workers: dict[int, _Worker] = {}
        self._woken: dict[MailboxKey, None] = {}
        self._wakeup = asyncio.Event()
        self._idle: set[MailboxKey] = set()
        self._passed: OrderedDict[int, int] = OrderedDict()
        """By mailbox: all mail with a lower msg_id was delivered, or refused and left in the queue."""
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    async def open(self) -> None:
        """Start with what waits already, then follow the commits."""
        self._mediation.broker.listen(self._committed, "woken")
        self._tasks = [
            asyncio.create_task(self._find_mail(), name="relay-finder"),
            asyncio.create_task(self._sweep(), name="relay-sweep"),
        ]

    @property
    def busy(self) -> bool:
        """Whether mail is being looked for or delivered, or waits for another attempt."""
        return bool(self._workers or self._woken)

    @property
    def workers(self) -> int:
        """How many holders are being served."""
        return len(self._workers)

    def deliver_to(self, connection: Connection) -> None:
        """Deliver what waits for a holder that has just made a request, if it has an endpoint."""
        if _has_endpoint(connection):
            self._start(connection.id)

    async def close(self) -> None:
        """Stop; unconfirmed mail stays queued."""
        self._closing = True
        tasks = [*self._tasks, *(worker.task for worker in self._workers.values() if worker.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Finding mail.

    def _committed(self, committed: Committed) -> None:
        new = committed.woken - self._idle
        # Beyond the bound, the next sweep finds the mail.
        if new and not self._closing and len(self._woken) < MAX_REMEMBERED:
            self._woken.update(dict.fromkeys(new))
            self._wakeup.set()

    async def _find_mail(self) -> None:
        """Start workers for the holders of mailboxes in which messages became visible."""
        forget_at = 0.0
        while True:
            await self._wakeup.wait()
            now = asyncio.get_running_loop().time()
            if now >= forget_at or len(self._idle) > MAX_REMEMBERED:
                self._idle.clear()
                forget_at = now + IDLE_SECONDS
            keys = list(islice(self._woken, PAGE))
            for key in keys:
                del self._woken[key]
            if not self._woken:
                self._wakeup.clear()
            holders = await self._try_read(self._mediation.find_relayed(keys))
            if holders is None:
                self._woken.update(dict.fromkeys(keys))
                self._wakeup.set()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            for key in keys:
                holder = holders.get(key)
                if holder is None or not _has_endpoint(holder):
                    self._idle.add(key)
                else:
                    self._start(holder.id)

    async def _sweep(self) -> None:
        while True:
            for tenant in list(self._tenants):
                after: int | None = -1
                while after is not None:
                    page = await self._try_read(self._mediation.list_waiting(tenant, after, PAGE))
                    if page is None:
                        break
                    waiting, after = page
                    for holder in waiting:
                        self.deliver_to(holder)
            await asyncio.sleep(SWEEP_SECONDS)

    async def _try_read(self, reading: Awaitable[T]) -> T | None:
        try:
            return await reading
        except MediatorError as error:
            log.warning("relay: cannot read the store", code=error.code)
        except Exception:
            log.exception("relay: cannot read the store")
        return None

    # Working.

    def _start(self, connection_id: int) -> None:
        worker = self._workers.get(connection_id)
        if worker is not None:
            worker.more = True
        elif not self._closing and len(self._workers) < MAX_WORKERS:
            worker = self._workers[connection_id] = _Worker()
            worker.task = asyncio.create_task(self._work(connection_id, worker), name="relay")

    async def _work(self, connection_id: int, worker: _Worker) -> None:
        try:
            await self._deliver_all(connection_id, worker)
        except Exception:
            log.exception("relay: worker failed", connection=connection_id)
        finally:
            del self._workers[connection_id]

    async def _deliver_all(self, connection_id: int, worker: _Worker) -> None:
        attempts = 0
        while not self._live(connection_id):
            worker.more = False
            async with self._turns:
                settled, outcome = await self._deliver(connection_id)
            if settled:
                attempts = 0
            if outcome is DeliveryOutcome.BARRED:
                return
            if outcome is DeliveryOutcome.FAILED:
                if attempts == len(PAUSES):
                    self._metrics.relayed("gave_up")
                    return
                await self._sleep(PAUSES[attempts])
                attempts += 1
            elif not settled and not worker.more:
                return

    async def _deliver(self, connection_id: int) -> tuple[int, DeliveryOutcome | None]:
        """Deliver one batch; return how many messages are settled, and the outcome that stopped it, if any."""
        settled = 0
        try:
            connection = await self._mediation.get_connection(connection_id)
            if connection is None or not _has_endpoint(connection) or is_denied(self._mediation.rules, connection):
                return 0, None
            cursor = self._passed.get(connection.mailbox_id or 0, 0)
            arrived = await self._mediation.next_arrived(connection, cursor, BATCH, BATCH_BYTES)
            for message in arrived.messages:
                if self._live(connection_id):
                    break
                outcome = await self._client.send(_outbound_message(connection, message))
                self._metrics.relayed(outcome)
                if outcome is DeliveryOutcome.DELIVERED:
                    await self._mediation.confirm(connection, [message.msg_id], in_use=True)
                    self._metrics.delivered("relay", 1)
                elif outcome is not DeliveryOutcome.REFUSED:
                    return settled, outcome
                self._move_on(connection, message)
                settled += 1
        except NotEnrolledError:
            return settled, None
        except MediatorError as error:
            log.warning("relay: delivery failed", connection=connection_id, code=error.code)
            return settled, DeliveryOutcome.FAILED
        return settled, None

    def _move_on(self, connection: Connection, message: StoredMessage) -> None:
        """Continue after a message; a refused one stays in the queue and blocks nothing."""
        assert connection.mailbox_id is not None
        self._passed[connection.mailbox_id] = message.msg_id + 1
        self._passed.move_to_end(connection.mailbox_id)
        if len(self._passed) > MAX_REMEMBERED:
            self._passed.popitem(last=False)


def _has_endpoint(connection: Connection) -> bool:
    return connection.address is not None and is_endpoint(connection.endpoint)


def _outbound_message(connection: Connection, message: StoredMessage) -> OutboundMessage:
    assert connection.endpoint is not None
    to = message.recipient or next(iter(connection.keys), None)
    return OutboundMessage(connection.endpoint, message.payload, connection.generation, to, connection.routing_keys)
