"""The NATS door: takes requests from the subjects of all editions of the protocol and answers them (N1–N8).

SEND, BATCH, ACK and its like, and the publishes of older editions are the hot path: read, queued for the group commit
and answered by a callback, without a task of their own. Each request to another verb is a task.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

import structlog
from nats.errors import Error as NatsError

from mediator import request_context
from mediator.broker import Broker
from mediator.errors import BusyError, MediatorError, UnknownSubjectError
from mediator.mailboxes.address import DEFAULT_TENANT, writable_address
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.metrics import OK, Metrics
from mediator.nats import protocol
from mediator.nats.accounts import AccountMap
from mediator.nats.admission import AdmissionPool, ReplyQueue
from mediator.nats.client import ClientInfo, Request
from mediator.nats.connection import NatsConnection, NatsSubscription
from mediator.nats.editions import EditionVerbs, encode_python_reply, is_python_client
from mediator.nats.micro import MicroService
from mediator.nats.subjects import API, SELF_TEST, split_request
from mediator.nats.verbs import MailboxVerbs, PendingBatch, PendingRequest, SendListener, StoreVerb, Verb
from mediator.request_context import RequestScope
from mediator.store.writer import Done

QUEUE = "mediator"
MAX_BODY_BYTES = 256 * 1024 * 1024
"""Bytes of the bodies of requests that may wait: counted apart, since requests that wait for reply room hold them."""
TRIES = 20
"""Requests, for each instance that answers, until a self-test gives up: any of the queue group may take one."""
SILENT = 2
"""Requests without an answer until a self-test gives up."""

log = structlog.get_logger("nats")


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """What can be chosen for a door."""

    accounts: bool
    """Whether requests come on ``mq9.<account>.$mq9.AI.>``, else on ``$mq9.AI.>`` for the default tenant."""
    instance: str
    max_pending: int
    """Requests under way, shared among tenants and connections."""
    max_waiting: int = 10_000
    """FETCHes, which may wait for mail, apart from other requests and shared in the same way."""
    inbox_ttls: Mapping[Lane, int] = field(default_factory=dict)
    """As for :class:`EditionVerbs`."""


MAX_RECENT: Final = 10_000
"""Clients of mailboxes that are remembered; beyond that half of them are forgotten, those first that came first."""
MAX_NAME: Final = 256
"""Characters of the name of a client that is remembered."""
RECENT_SECONDS: Final = 600.0
"""What a client did longer ago is not shown."""
_UNKNOWN: Final = ClientInfo()
_ACTIONS: Final = ("sends", "fetches")
_ACTION_OF: Final = {"SEND": 0, "BATCH": 0, "FETCH": 1}
"""What a verb counts as, by place among the actions."""


class RecentRequest(NamedTuple):
    """What a client lately did with a mailbox."""

    action: str
    """``sends`` or ``fetches``."""
    client: ClientInfo
    requests: int
    last: float
    """Seconds of :func:`time.perf_counter`."""


class RecentRequests:
    """Which clients lately sent to each mailbox, or fetched from it: in memory alone, and for a few minutes."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str], tuple[ClientInfo, list[int], list[float]]] = {}
        """By tenant, address and connection: how often it did each, and when last."""

    def record(self, pending: PendingRequest, client: ClientInfo) -> None:
        """Count a request that was done. Every SEND passes here."""
        key = pending.tenant, pending.sent_to or pending.tail, client.connection
        seen = self._seen.get(key)
        if seen is None:
            if len(self._seen) >= MAX_RECENT:
                for old in list(islice(self._seen, MAX_RECENT // 2)):
                    del self._seen[old]
            known = client if len(client.name) <= MAX_NAME else client._replace(name=client.name[:MAX_NAME])
            seen = self._seen[key] = known, [0, 0], [0.0, 0.0]
        action = _ACTION_OF[pending.verb]
        seen[1][action] += 1
        seen[2][action] = pending.started

    def of(self, tenant: str, addresses: Collection[str]) -> list[RecentRequest]:
        """Return what was done with a mailbox, the latest first; ``addresses`` are all that it has (A10)."""
        first = time.perf_counter() - RECENT_SECONDS
        found = [
            RecentRequest(action, client, count, last)
            for (of, address, _), (client, counts, lasts) in self._seen.items()
            if of == tenant and address in addresses
            for action, count, last in zip(_ACTIONS, counts, lasts, strict=True)
            if count and last > first
        ]
        return sorted(found, key=lambda each: -each.last)


class Door:
    """Serves one NATS connection."""

    def __init__(
        self,
        connection: NatsConnection,
        broker: Broker,
        metrics: Metrics,
        accounts: AccountMap,
        options: DoorOptions,
        verbs: Mapping[str, Verb],
        send_listeners: Sequence[SendListener] = (),
    ) -> None:
        """``verbs`` are those of other packages, by subject behind the prefix; a final dot stands for a tail."""
        self._connection = connection
        self._broker = broker
        self._requests = metrics.requests
        self._send_listeners = send_listeners
        self._accounts = accounts
        self._options = options
        self._pool = AdmissionPool(options.max_pending, "requests")
        self._fetch_pool = AdmissionPool(options.max_waiting, "FETCH requests")
        self._root = "mq9.*." + API if options.accounts else API
        self.subscription: NatsSubscription | None = None
        self.recent = RecentRequests()
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies = ReplyQueue(connection, broker.pause_reads)
        self._body_bytes = 0
        current = {**MailboxVerbs(broker).table, **verbs}
        editions = EditionVerbs(broker, options.instance, options.inbox_ttls)
        self._routes: dict[str, tuple[str, Mapping[str, Any], Callable[[PendingRequest], None]]] = {
            "MSG.BATCH.": ("BATCH", {"msg_ids": [], "errors": {}}, self._submit_batch)
        }
        """By subject behind the prefix, as of verbs: the verb's name, the fields of its failed reply, and its start."""
        for subject, verb in {**editions.table, **current}.items():
            start = partial(self._start_task, verb) if isinstance(verb, Verb) else partial(self._submit, verb)
            self._routes[subject] = verb.name, verb.empty, start
        named = {"MSG.BATCH.": "BATCH", **{subject: verb.name for subject, verb in current.items()}}
        self._micro = MicroService(
            connection,
            self._replies,
            self._requests,
            accounts,
            {name: API + subject + (">" if subject.endswith(".") else "") for subject, name in named.items()},
            instance=options.instance,
            prefix=self._root.removesuffix(API),
            queue=QUEUE,
        )
        # Asked once: requests are too many to ask for each.
        self._logs_requests = logging.getLogger("nats").isEnabledFor(logging.DEBUG)

    @property
    def tasks(self) -> int:
        """How many requests are answered by tasks right now."""
        return len(self._tasks)

    @property
    def held_bytes(self) -> int:
        """Bytes of messages and replies under way (N7)."""
        return self._replies.bytes_in_flight

    def add_bytes_in_flight(self, size: int) -> None:
        """Count bytes under way in, or out if negative."""
        self._replies.add_bytes_in_flight(size)

    # Opening, watching, closing.

    async def open(self) -> None:
        """Start serving."""
        self._replies.open()
        await self._subscribe()
        await self._micro.open()

    async def _subscribe(self) -> None:
        self.subscription = await self._connection.subscribe(self._root + ">", QUEUE, self.receive)
        # A client that learns that the service is ready may send at once.
        await self._connection.flush(5)

    async def check(self) -> str | None:
        """Return what is wrong with the connection or the subscription; a dead subscription is made anew."""
        if not self._connection.connected:
            return "not connected to NATS"
        if await self._hears_itself():
            return None
        log.error("subscription is dead, subscribing again")
        try:
            if self.subscription is not None:
                await self.subscription.drop()
            await self._subscribe()
        except (NatsError, TimeoutError) as error:
            return f"the NATS subscription cannot be made anew: {str(error) or type(error).__name__}"
        return None if await self._hears_itself() else "the NATS subscription takes no requests"

    async def _hears_itself(self) -> bool:
        subject = self._root.replace("*", "_") + SELF_TEST
        silent = tries = 0
        others: set[bytes] = set()
        while tries < TRIES * (1 + len(others)):
            tries += 1
            try:
                answer = await self._connection.request(subject, b"", 2)
            except TimeoutError:
                # An instance that was killed takes a request with it; the next one goes to those that live.
                silent += 1
                if silent == SILENT:
                    return False
                continue
            except NatsError:
                return False
            if answer == self._options.instance.encode():
                return True
            others.add(answer)
        return False

    async def close(self, seconds: float) -> None:
        """Take no more requests; finish those that were taken and send their replies, each within ``seconds``."""
        if self.subscription is not None and self._connection.connected:
            try:
                async with asyncio.timeout(seconds):
                    await self._micro.close()
                    await self.subscription.drain()
            except (NatsError, TimeoutError) as error:
                log.warning("drain failed", error=str(error) or type(error).__name__)
        self._broker.stop_waiting()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        try:
            # Requests are committed in the order they came: when this one is, all are.
            async with asyncio.timeout(seconds):
                await self._broker.wait_committed()
        except (MediatorError, TimeoutError) as error:
            log.warning("last requests not committed", error=str(error) or type(error).__name__)
        await self._replies.close(seconds)

    # Receiving.

    def receive(self, message: Request) -> None:
        """Take a request, from NATS or from the gateway."""
        pending = PendingRequest(message, self._replies)
        try:
            account, name = split_request(message.subject)
            end = name.find(".", name.find(".") + 1) + 1 or len(name)
            route, pending.tail = self._routes.get(name[:end]), name[end:]
            if route is None:
                area, dot, pending.tail = name.partition(".")
                route = self._routes.get(area + dot)
            if route is None:
                if name != SELF_TEST:
                    raise UnknownSubjectError(API + name)
                answer = message.answer or partial(self._replies.put, message.reply)
                answer(self._options.instance.encode())
                return
            pending.verb, pending.empty, start = route
            tenant = pending.tenant = self._accounts.tenant_of(account or DEFAULT_TENANT)
            client = message.client.connection
            if self._options.accounts:
                pending.connection, pending.connection_name = client or tenant, client
            else:
                # Clients could forge the server's header, but not what the gateway says.
                pending.connection = message.inbox
                pending.connection_name = client if message.answer is not None else ""
            start(pending)
        except MediatorError as error:
            self._refuse(pending, error)
        except Exception as error:
            self._refuse(pending, MediatorError(), error)

    def _finish(self, pending: PendingRequest, reply: bytes, result: str = OK) -> None:
        """Answer a request, count it, and log it at debug level; without the address, which is a secret (A7)."""
        message, verb = pending.message, pending.verb
        seconds = time.perf_counter() - pending.started
        self._requests.count(pending.tenant, verb, result, seconds)
        if verb in _ACTION_OF and result == OK:
            # Without accounts clients could forge the server's header, but not what the gateway says.
            vouched = self._options.accounts or message.answer is not None
            self.recent.record(pending, message.client if vouched else _UNKNOWN)
        if self._logs_requests:
            ms = round(seconds * 1000, 3)
            log.debug("request", verb=verb, tenant=pending.tenant, result=result, ms=ms, request_id=_scope(message).id)
        if (name := message.client.name) and is_python_client(name):
            reply = encode_python_reply(reply)
        if message.answer is None:
            self._replies.put(message.reply, reply)
        else:
            message.answer(reply)

    def _refuse(self, pending: PendingRequest, error: MediatorError, cause: Exception | None = None) -> None:
        empty = pending.empty
        if error.code == MediatorError.code:
            # The operator finds the cause by the id that the caller reports.
            request_id = _scope(pending.message).id
            log.error("request failed", verb=pending.verb, request_id=request_id, exc_info=cause)
            empty = {"request_id": request_id, **empty}
        self._finish(pending, protocol.encode_failure(error, empty), error.code)

    # Verbs whose requests are tasks.

    def _start_task(self, verb: Verb, pending: PendingRequest) -> None:
        """Admit a request and answer it in a task; raises :class:`BusyError`."""
        self._replies.check_room(0)
        if self._body_bytes + pending.size > MAX_BODY_BYTES:
            raise BusyError("too many bytes are under way")
        if not self._broker.tracks(pending.connection_name):
            pending.connection_name = ""
        pool = self._fetch_pool if verb.name == "FETCH" else self._pool
        pool.enter(pending.tenant, pending.connection, pending.size)
        self._body_bytes += pending.size
        task = asyncio.create_task(self._run(verb, pending))
        self._tasks.add(task)
        task.add_done_callback(partial(self._end_task, pool, pending))

    def _end_task(self, pool: AdmissionPool, pending: PendingRequest, task: asyncio.Task[None]) -> None:
        pool.leave(pending.tenant, pending.connection, pending.size)
        self._body_bytes -= pending.size
        self._tasks.discard(task)

    async def _run(self, verb: Verb, pending: PendingRequest) -> None:
        request_context.scope.set(RequestScope(pending.message.headers))
        try:
            reply = await verb.answer(pending)
        except MediatorError as error:
            self._refuse(pending, error)
        except Exception as error:
            self._refuse(pending, MediatorError(), error)
        else:
            self._finish(pending, reply)

    # Verbs that are stored without a task.

    def _submit(self, verb: StoreVerb, pending: PendingRequest) -> None:
        """Admit a request and queue it for the store; raises :class:`BusyError`."""
        size = pending.size
        self._replies.check_room(size)
        self._pool.enter(pending.tenant, pending.connection, size)
        try:
            verb.submit(pending, partial(self._committed, verb, pending))
        except BaseException:
            self._pool.leave(pending.tenant, pending.connection, size)
            raise
        self._replies.add_bytes_in_flight(size)

    def _committed(self, verb: StoreVerb, pending: PendingRequest, outcome: Any) -> None:
        self._pool.leave(pending.tenant, pending.connection, pending.size)
        self._replies.add_bytes_in_flight(-pending.size)
        if isinstance(outcome, MediatorError):
            self._refuse(pending, outcome)
            return
        self._finish(pending, verb.reply % outcome)
        if pending.sent_to:
            for heard in self._send_listeners:
                heard(pending.tenant, pending.connection, pending.sent_to)

    def _submit_batch(self, pending: PendingRequest) -> None:
        """Queue the messages of a BATCH, each of which is admitted as if it came alone (S8)."""
        self._replies.check_room(pending.size)
        address = writable_address(pending.tail)
        messages = protocol.read_batch(pending.message.data, self._replies.budget)

        def submit(draft: Draft, done: Done) -> None:
            size = len(draft.payload)
            self._pool.enter(pending.tenant, pending.connection, size)
            released = partial(self._release, pending, size, done)
            try:
                self._broker.send_soon(Send(pending.tenant, address, draft), released)
            except BaseException:
                self._pool.leave(pending.tenant, pending.connection, size)
                raise

        PendingBatch(messages, partial(self._batch_committed, pending)).send(submit)
        self._replies.add_bytes_in_flight(pending.size)

    def _release(self, pending: PendingRequest, size: int, done: Done, outcome: Any) -> None:
        self._pool.leave(pending.tenant, pending.connection, size)
        done(outcome)

    def _batch_committed(self, pending: PendingRequest, outcomes: Sequence[Any]) -> None:
        self._replies.add_bytes_in_flight(-pending.size)
        stored = any(not isinstance(outcome, MediatorError) for outcome in outcomes)
        self._finish(pending, protocol.encode_batch(outcomes), OK if stored else outcomes[0].code)


def _scope(message: Request) -> RequestScope:
    """Return the scope of a request; SEND and its like have none before something is logged."""
    return request_context.scope.get() or RequestScope(message.headers)
