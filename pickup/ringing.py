"""Rings sleeping phones: a webhook is told when mail waits for a holder that registered a device (RFC 0734).

What the webhook gets names the connection, the device and how many messages wait; never mail, keys or DIDs.
"""

import asyncio
import heapq
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import orjson
import structlog
from prometheus_client import CollectorRegistry, Counter

from mediator.broker import Broker
from mediator.errors import MediatorError, NotEnrolledError
from mediator.http.guard import Guard
from mediator.mailboxes.events import What
from mediator.mediation import taking
from mediator.mediation.records import Connection, Device
from mediator.store.base import Transaction
from mediator.store.writer import Committed
from pickup.protocols.push_notification import APNS_PLATFORM

RING_EVERY_SECONDS = 30.0
"""A holder is rung at most once in this time."""
GRACE_SECONDS = 1.0
"""Mail that is fetched within this time rings nobody: the phone is awake."""
MAX_DUE = 100_000
"""Mailboxes that may wait for being looked at; beyond that new mail rings only when there is room again."""
MAX_CALLS = 8
"""Calls of the webhook under way."""
LOOKS = 100
"""Mailboxes looked at in one read."""
CALL_SECONDS = 10.0
RETRY_SECONDS = (1.0, 5.0)
"""Waits before the second and the third attempt, after which a ring is given up."""

_ARRIVED = frozenset({What.STORED, What.RELEASED})

log = structlog.get_logger("didcomm.ringing")


@dataclass(frozen=True, slots=True)
class _Ring:
    mailbox_no: int
    connection_no: int
    device: Device
    messages: int


class Bell:
    """Watches commits, and calls the webhook."""

    def __init__(
        self,
        broker: Broker,
        guard: Guard,
        webhook: str,
        awake: Callable[[int], bool],
        registry: CollectorRegistry,
        *,
        every: float = RING_EVERY_SECONDS,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """``awake`` says of a connection's number whether it has a live session; spans are seconds."""
        self._broker = broker
        self._guard = guard
        self._webhook = webhook
        self._awake = awake
        self._every = every
        self._grace = grace
        self._due: list[tuple[float, int]] = []
        self._waiting: set[int] = set()
        self._looked: dict[int, float] = {}
        """When each mailbox was last looked at, in that order."""
        self._woken = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_CALLS)
        self._task: asyncio.Task[None] | None = None
        self._rings = Counter(
            "mediator_didcomm_rings",
            "Push notifications asked of the webhook, by outcome: rung, failed (after all attempts), or dropped as too "
            "many mailboxes wait.",
            ["outcome"],
            registry=registry,
        )

    async def start(self) -> None:
        """Listen from now on."""
        self._broker.listen(self._committed)
        self._task = asyncio.create_task(self._run(), name="didcomm-ringing")

    async def stop(self) -> None:
        """Ring no more."""
        tasks = [task for task in (self._task, *self._calls) if task is not None]
        self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _committed(self, committed: Committed) -> None:
        if self._task is None:
            return
        for event in committed.events:
            if event.what in _ARRIVED and event.mailbox_no not in self._waiting:
                self._wait(event.mailbox_no)

    def _wait(self, mailbox_no: int) -> None:
        if len(self._waiting) >= MAX_DUE:
            self._rings.labels("dropped").inc()
            return
        now = time.monotonic()
        # Mail that comes soon after a ring is told of when the time for the next has come.
        at = max(now + self._grace, self._looked.get(mailbox_no, now - self._every) + self._every)
        self._waiting.add(mailbox_no)
        heapq.heappush(self._due, (at, mailbox_no))
        self._woken.set()

    async def _run(self) -> None:
        while True:
            await self._until_due()
            numbers = self._taken()
            try:
                rings = await self._broker.read(lambda tx, now: _look(tx, now, numbers))  # noqa: B023
            except MediatorError as error:
                log.warning("cannot look for whom to ring", error=error.code)
                for number in numbers:
                    self._wait(number)
                continue
            for ring in rings:
                if not ring.messages or self._awake(ring.connection_no):
                    # Nobody was rung, so the next mail need not wait.
                    self._looked.pop(ring.mailbox_no, None)
                    continue
                await self._room.acquire()
                call = asyncio.create_task(self._ring(ring), name="didcomm-ring")
                self._calls.add(call)
                call.add_done_callback(self._done)

    async def _until_due(self) -> None:
        while not self._due or self._due[0][0] > time.monotonic():
            self._woken.clear()
            rest = self._due[0][0] - time.monotonic() if self._due else None
            with suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._woken.wait()

    def _taken(self) -> list[int]:
        """Take the mailboxes whose time has come, and forget those that may be rung again anyway."""
        now = time.monotonic()
        numbers: list[int] = []
        while self._due and self._due[0][0] <= now and len(numbers) < LOOKS:
            numbers.append(heapq.heappop(self._due)[1])
        for number in numbers:
            self._waiting.discard(number)
            self._looked.pop(number, None)
            self._looked[number] = now
        while self._looked and next(iter(self._looked.values())) <= now - self._every:
            del self._looked[next(iter(self._looked))]
        return numbers

    def _done(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._room.release()

    async def _ring(self, ring: _Ring) -> None:
        body = orjson.dumps(
            {
                "connection": ring.connection_no,
                "service": "apns" if ring.device.platform == APNS_PLATFORM else "fcm",
                "platform": ring.device.platform,
                "token": ring.device.token,
                "messages": ring.messages,
            }
        )
        problem = ""
        for wait in (0.0, *RETRY_SECONDS):
            await asyncio.sleep(wait)
            try:
                status = await self._guard.post(self._webhook, body, "application/json", CALL_SECONDS)
            except MediatorError as error:
                problem = error.code
                continue
            if 200 <= status < 300:
                self._rings.labels("rung").inc()
                return
            problem = f"status {status}"
        self._rings.labels("failed").inc()
        log.warning("the webhook did not take a ring", problem=problem)


def _look(tx: Transaction, now: int, numbers: list[int]) -> list[_Ring]:
    """Return the holders with a device among these mailboxes, and how many messages wait for each."""
    rings = []
    for number in numbers:
        connection: Connection | None = tx.connections.of_mailbox(number)
        if connection is None or connection.device is None:
            continue
        # The mailbox may have been deleted by an operator.
        with suppress(NotEnrolledError):
            waiting = taking.status(tx, connection, None, now).count
            rings.append(_Ring(number, connection.no, connection.device, waiting))
    return rings
