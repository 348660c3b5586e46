"""Relay: brings mail to holders that have an endpoint of their own, in the order it came (D10)."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import structlog

from mediator.broker import Broker
from mediator.errors import MediatorError, NotEnrolledError
from mediator.mailboxes.mailbox import Kind
from mediator.mailboxes.message import Message
from mediator.mediation import connecting, granting, taking
from mediator.mediation.records import Connection
from mediator.store.base import Place, Transaction
from mediator.store.writer import Committed, Work
from pickup.meters import Meters
from pickup.outbound import Courier, Outcome, Parcel, Sleep, is_endpoint

PAUSES = (1.0, 5.0, 30.0, 120.0, 300.0)
"""Seconds before each further attempt; then the mail waits for more of it, for the holder's next request or a sweep."""
CONCURRENT = 32
"""Holders that are relayed to at the same time."""
MAX_WORKERS = 10_000
"""Holders that have mail under way or wait for another attempt."""
BATCH = 10
BATCH_BYTES = 256 * 1024
SWEEP_SECONDS = 600.0
"""How often all holders with endpoints are looked at: mail may have waited through a restart or a long outage."""
PAGE = 200
"""Connections, and mailboxes, of one look."""
IDLE_SECONDS = 60.0
"""How long it is remembered that mail of a mailbox is not relayed."""
MAX_REMEMBERED = 50_000

TROUBLE_SECONDS = 1.0
"""Until it looks again while the store does not answer."""

T = TypeVar("T")

log = structlog.get_logger("didcomm.relay")


@dataclass(slots=True, eq=False)
class _Worker:
    task: "asyncio.Task[None] | None" = None
    more: bool = False
    """Mail came while it worked."""


class Relay:
    """One worker a holder while it has mail. What a worker does not bring stays in the holder's queue."""

    def __init__(
        self,
        broker: Broker,
        courier: Courier,
        meters: Meters,
        *,
        tenants: Sequence[str],
        live: Callable[[int], bool],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """``live`` says whether the holder with this connection number has a session: it is not relayed to then."""
        self._broker = broker
        self._courier = courier
        self._meters = meters
        self._tenants = tuple(tenants)
        self._live = live
        self._sleep = sleep
        self._turns = asyncio.Semaphore(CONCURRENT)
        self._workers: dict[int, _Worker] = {}
        self._stirred: dict[Place, None] = {}
        self._bell = asyncio.Event()
        self._idle: set[Place] = set()
        self._passed: OrderedDict[int, int] = OrderedDict()
        """By mailbox: all mail with a lower msg_id was brought, or refused and left in the queue."""
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    async def open(self) -> None:
        """Begin: with what waited before the start, then with what comes."""
        self._broker.listen(self._committed)
        self._tasks = [
            asyncio.create_task(self._find(), name="relay-finder"),
            asyncio.create_task(self._sweep(), name="relay-sweep"),
        ]

    def look(self, connection: Connection) -> None:
        """Relay what waits for a holder that has just shown itself, if it has an endpoint."""
        if _has_endpoint(connection):
            self._begin(connection.no)

    async def close(self) -> None:
        """Stop; what was not confirmed stays queued."""
        self._closing = True
        tasks = [*self._tasks, *(worker.task for worker in self._workers.values() if worker.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Finding mail.

    def _committed(self, committed: Committed) -> None:
        new = committed.woken - self._idle
        # What is too much for the finder is found by the next sweep.
        if new and not self._closing and len(self._stirred) < MAX_REMEMBERED:
            self._stirred.update(dict.fromkeys(new))
            self._bell.set()

    async def _find(self) -> None:
        """Begin to work for the holders of mailboxes in which something has become visible."""
        forget_at = 0.0
        while True:
            await self._bell.wait()
            now = asyncio.get_running_loop().time()
            if now >= forget_at or len(self._idle) > MAX_REMEMBERED:
                self._idle.clear()
                forget_at = now + IDLE_SECONDS
            places = list(islice(self._stirred, PAGE))
            for place in places:
                del self._stirred[place]
            if not self._stirred:
                self._bell.clear()
            holders = await self._look_up(partial(_holders, places))
            if holders is None:
                self._stirred.update(dict.fromkeys(places))
                self._bell.set()
                await asyncio.sleep(TROUBLE_SECONDS)
                continue
            for place, no in zip(places, holders, strict=True):
                if no is None:
                    self._idle.add(place)
                else:
                    self._begin(no)

    async def _sweep(self) -> None:
        while True:
            for tenant in self._tenants:
                after = -1
                while (page := await self._look_up(partial(_waiting, tenant, after))) is not None:
                    for no in page.waiting:
                        self._begin(no)
                    if page.last is None:
                        break
                    after = page.last
            await asyncio.sleep(SWEEP_SECONDS)

    async def _look_up(self, work: Work[T]) -> T | None:
        try:
            return await self._broker.read(work)
        except MediatorError as error:
            log.warning("cannot look for mail to relay", code=error.code)
        except Exception:
            log.exception("cannot look for mail to relay")
        return None

    # Working.

    def _begin(self, no: int) -> None:
        worker = self._workers.get(no)
        if worker is not None:
            worker.more = True
        elif not self._closing and len(self._workers) < MAX_WORKERS:
            worker = self._workers[no] = _Worker()
            worker.task = asyncio.create_task(self._work(no, worker), name="relay")

    async def _work(self, no: int, worker: _Worker) -> None:
        try:
            await self._bring_all(no, worker)
        except Exception:
            log.exception("relay stopped", connection=no)
        finally:
            del self._workers[no]

    async def _bring_all(self, no: int, worker: _Worker) -> None:
        attempts = 0
        while not self._live(no):
            worker.more = False
            async with self._turns:
                settled, outcome = await self._bring(no)
            if settled:
                attempts = 0
            if outcome is Outcome.BARRED:
                return
            if outcome is Outcome.FAILED:
                if attempts == len(PAUSES):
                    self._meters.relayed("gave_up")
                    return
                await self._sleep(PAUSES[attempts])
                attempts += 1
            elif not settled and not worker.more:
                return

    async def _bring(self, no: int) -> tuple[int, Outcome | None]:
        """Bring one batch; return how many messages are settled, and what stopped it if anything did."""
        settled = 0
        try:
            connection = await self._broker.read(lambda tx, _now: tx.connections.get(no))
            if connection is None or not _has_endpoint(connection):
                return 0, None
            messages = await self._next(connection)
            for message in messages:
                if self._live(no):
                    break
                outcome = await self._courier.bring(_parcel(connection, message))
                self._meters.relayed(outcome)
                if outcome is Outcome.DELIVERED:
                    await self._confirm(connection, message)
                elif outcome is not Outcome.REFUSED:
                    return settled, outcome
                self._pass(connection, message)
                settled += 1
        except NotEnrolledError:
            return settled, None
        except MediatorError as error:
            log.warning("cannot relay", connection=no, code=error.code)
            return settled, Outcome.FAILED
        return settled, None

    async def _next(self, connection: Connection) -> list[Message]:
        cursor = self._passed.get(connection.mailbox_no or 0, 0)
        messages, _ = await self._broker.write(
            lambda tx, now: taking.arrived(tx, connection, cursor, BATCH, BATCH_BYTES, now),
            connection.place,
            when_full=True,
        )
        return messages

    async def _confirm(self, connection: Connection, message: Message) -> None:
        """Remove exactly what the endpoint took (D7): its holder is there, although it asks for nothing."""

        def confirm(tx: Transaction, now: int) -> None:
            taking.acknowledge(tx, connection, [message.msg_id], now)
            connecting.seen(tx, connection, now)

        await self._broker.write(confirm, connection.place, when_full=True)
        self._meters.delivered("relay", 1)

    def _pass(self, connection: Connection, message: Message) -> None:
        """Go on behind a message; one that was refused stays in the queue and holds up nothing."""
        assert connection.mailbox_no is not None
        self._passed[connection.mailbox_no] = message.msg_id + 1
        self._passed.move_to_end(connection.mailbox_no)
        if len(self._passed) > MAX_REMEMBERED:
            self._passed.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Page:
    waiting: list[int]
    last: int | None
    """Where the next page begins; None: there is none."""


def _has_endpoint(connection: Connection) -> bool:
    return connection.address is not None and is_endpoint(connection.endpoint)


def _holders(places: Sequence[Place], tx: Transaction, _now: int) -> list[int | None]:
    """Return the connections whose mailboxes these are, where they have endpoints."""
    return [_holder(tx, place) for place in places]


def _holder(tx: Transaction, place: Place) -> int | None:
    mailbox = tx.mailboxes.find(*place)
    if mailbox is None or mailbox.kind is not Kind.MEDIATION:
        return None
    connection = tx.connections.of_mailbox(mailbox.no)
    return connection.no if connection is not None and _has_endpoint(connection) else None


def _waiting(tenant: str, after: int, tx: Transaction, now: int) -> _Page:
    """Return holders with endpoints for whom mail waits."""
    page = tx.connections.list(tenant, after, PAGE)
    waiting = [connection.no for connection in page if _has_endpoint(connection) and _has_mail(tx, connection, now)]
    return _Page(waiting, page[-1].no if len(page) == PAGE else None)


def _has_mail(tx: Transaction, connection: Connection, now: int) -> bool:
    mailbox = granting.given(tx, connection, now)
    return mailbox is not None and mailbox.messages > 0


def _parcel(connection: Connection, message: Message) -> Parcel:
    assert connection.endpoint is not None
    to = message.recipient or next(iter(connection.keys), None)
    return Parcel(connection.endpoint, message.payload, connection.generation, to, connection.routing_keys)
