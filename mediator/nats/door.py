"""The NATS door: takes requests from the subjects of all editions of the protocol and answers them (N1–N8).

SEND, BATCH, ACK and its like, and the publishes of older editions are the hot path: read, queued for the group commit
and answered by a callback, without a task of their own. Each request to another verb is a task.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import structlog
from nats.errors import Error as NatsError

from mediator import request_context
from mediator.broker import Broker
from mediator.errors import BusyError, MediatorError, UnknownSubjectError
from mediator.fields import parse_body
from mediator.mailboxes.address import DEFAULT_TENANT, parse_address, writable_address
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.mailboxes.settling import Ack, Extend, Nack
from mediator.metrics import OK, Metrics
from mediator.nats import batches, replies, requests
from mediator.nats.accounts import AccountMap
from mediator.nats.admission import AdmissionPool
from mediator.nats.batches import PendingBatch
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection, NatsSubscription
from mediator.nats.editions import publishing, python_client
from mediator.nats.editions.publishing import PublishReader
from mediator.nats.editions.verbs import EditionVerbs
from mediator.nats.reply_queue import ReplyQueue
from mediator.nats.subjects import API, SELF_TEST, Edition, split_request
from mediator.nats.verbs import SETTLE_VERBS, ImmediateVerb, MailboxVerbs, SendListener, SettleVerb, Verb, VerbCall
from mediator.request_context import RequestScope
from mediator.store.writer import Done

QUEUE = "mediator"
UNKNOWN = "UNKNOWN"
"""What metrics call requests to no verb."""
MAX_BODY_BYTES = 256 * 1024 * 1024
"""Bytes of the bodies of requests that may wait: counted apart, since requests that wait for reply room hold them."""
TRIES = 20
"""Requests, for each instance that answers, until a self-test gives up: any of the queue group may take one."""
SILENT = 2
"""Requests without an answer until a self-test gives up."""

log = structlog.get_logger("nats")

_Request = TypeVar("_Request", Send, Ack | Nack | Extend)
ErrorMapper = Callable[[MediatorError], MediatorError]
"""Renames the headers in an error as the sender named them."""


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
    """As for :class:`PublishReader`."""


class Door:
    """Serves one NATS connection."""

    def __init__(
        self,
        connection: NatsConnection,
        broker: Broker,
        metrics: Metrics,
        accounts: AccountMap,
        options: DoorOptions,
        verbs: Mapping[str, Verb | ImmediateVerb],
        send_listeners: Sequence[SendListener] = (),
    ) -> None:
        """``verbs`` are those of other packages, by subject behind the prefix; a final dot stands for a tail."""
        self._connection = connection
        self._broker = broker
        self._metrics = metrics
        self._send_listeners = send_listeners
        self._accounts = accounts
        self._options = options
        self._pool = AdmissionPool(options.max_pending, "requests")
        self._fetch_pool = AdmissionPool(options.max_waiting, "FETCH requests")
        self._root = "mq9.*." + API if options.accounts else API
        self.subscription: NatsSubscription | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies = ReplyQueue(connection, broker.pause_reads)
        self._body_bytes = 0
        self._publishes = PublishReader(options.instance, options.inbox_ttls)
        editions = EditionVerbs(broker)
        self._verbs: dict[str, Verb] = {**MailboxVerbs(broker).table, **editions.table}
        self._python_verbs = editions.python_table
        self._immediate: dict[str, ImmediateVerb] = {
            "MSG.SEND.": ImmediateVerb("SEND", self._send, {"msg_id": -1}),
            "MSG.BATCH.": ImmediateVerb("BATCH", self._send_batch, {"msg_ids": [], "errors": {}}),
            **{
                f"MSG.{verb.name}.": ImmediateVerb(verb.name, partial(self._settle, verb), {verb.counted: 0})
                for verb in SETTLE_VERBS
            },
            **{
                subject: ImmediateVerb("SEND", partial(self._publish, edition), {"msg_id": -1})
                for subject, edition in publishing.SUBJECTS.items()
            },
        }
        for subject, verb in verbs.items():
            if isinstance(verb, ImmediateVerb):
                self._immediate[subject] = verb
            else:
                self._verbs[subject] = verb
        # Asked once: requests are too many to ask for each.
        self._logs_requests = logging.getLogger("nats").isEnabledFor(logging.DEBUG)

    @property
    def tasks(self) -> int:
        """How many requests are answered by tasks right now."""
        return len(self._tasks)

    @property
    def held_bytes(self) -> int:
        """Bytes of messages and replies under way (N7)."""
        return self._replies.held

    def hold(self, size: int) -> None:
        """Count bytes under way in, or out if negative."""
        self._replies.hold(size)

    # Opening, watching, closing.

    async def open(self) -> None:
        """Start serving."""
        self._replies.open()
        await self._subscribe()

    async def _subscribe(self) -> None:
        self.subscription = await self._connection.subscribe(self._root + ">", QUEUE, self.receive)
        # A client that learns that the service is ready may send at once.
        await self._connection.settle(5)

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
                    await self.subscription.drain()
            except (NatsError, TimeoutError) as error:
                log.warning("drain failed", error=str(error) or type(error).__name__)
        self._broker.stop_waiting()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        try:
            # Requests are committed in the order they came: when this one is, all are.
            async with asyncio.timeout(seconds):
                await self._broker.settle()
        except (MediatorError, TimeoutError) as error:
            log.warning("last requests not committed", error=str(error) or type(error).__name__)
        await self._replies.close(seconds)

    # Receiving.

    def receive(self, message: Request) -> None:
        """Take a request, from NATS or from the gateway."""
        started = time.perf_counter()
        verb: Verb | ImmediateVerb | None = None
        tenant = ""
        try:
            account, name = split_request(message.subject)
            end = name.find(".", name.find(".") + 1) + 1 or len(name)
            subject, tail = name[:end], name[end:]
            immediate = self._immediate.get(subject)
            if immediate is None:
                area, dot, rest = name.partition(".")
                if (immediate := self._immediate.get(area + dot)) is not None:
                    tail = rest
            if immediate is not None:
                verb = immediate
                tenant = self._accounts.tenant_of(account or DEFAULT_TENANT)
                immediate.handle(tenant, tail, message, started)
            elif name == SELF_TEST:
                self._answer_with(message, self._options.instance.encode())
            else:
                verb, tail = self._find(name, subject, tail, message)
                tenant = self._accounts.tenant_of(account or DEFAULT_TENANT)
                known = self._known_connection(message)
                call = VerbCall(tenant, tail, message, self._replies, self._client(message, tenant), known)
                self._start(verb, call, started)
        except MediatorError as error:
            self._refuse(message, verb, tenant, error, started)
        except Exception as error:
            self._refuse(message, verb, tenant, MediatorError(), started, error)

    def _find(self, name: str, subject: str, tail: str, message: Request) -> tuple[Verb, str]:
        """Return the verb and the tail of a subject."""
        own = self._python_verbs if python_client.speaks(message) else {}
        if (verb := own.get(subject) or self._verbs.get(subject)) is not None:
            return verb, tail
        area, _, rest = name.partition(".")
        if (verb := self._verbs.get(f"{area}.")) is not None:
            return verb, rest
        raise UnknownSubjectError(API + name)

    def _client(self, message: Request, tenant: str) -> Hashable:
        """Identify the connection; without accounts by its inbox, since clients could forge the server's header."""
        return (message.client.connection or tenant) if self._options.accounts else message.inbox

    def _known_connection(self, message: Request) -> str:
        """Return the name of a connection whose end the gateway tells; empty where a client may have forged it."""
        name = message.client.connection
        return name if (self._options.accounts or message.answer is not None) and self._broker.knows(name) else ""

    def _start(self, verb: Verb, call: VerbCall, started: float) -> None:
        """Admit a request and answer it in a task; raises :class:`BusyError`."""
        size = len(call.message.data)
        if self._replies.full or self._body_bytes + size > MAX_BODY_BYTES:
            raise BusyError("too many bytes are under way")
        pool = self._fetch_pool if verb.name == "FETCH" else self._pool
        pool.enter(call.tenant, call.connection, size)
        self._body_bytes += size
        task = asyncio.create_task(self._answer(verb, call, started))
        self._tasks.add(task)
        task.add_done_callback(partial(self._finish, pool, call.tenant, call.connection, size))

    def _finish(self, pool: AdmissionPool, tenant: str, client: Hashable, size: int, task: asyncio.Task[None]) -> None:
        pool.leave(tenant, client, size)
        self._body_bytes -= size
        self._tasks.discard(task)

    async def _answer(self, verb: Verb, call: VerbCall, started: float) -> None:
        message, tenant = call.message, call.tenant
        request_context.scope.set(RequestScope(message.headers))
        try:
            reply = await verb.answer(call)
        except MediatorError as error:
            self._refuse(message, verb, tenant, error, started)
        except Exception as error:
            self._refuse(message, verb, tenant, MediatorError(), started, error)
        else:
            self._reply(message, verb.name, tenant, reply, started)

    def _reply(self, message: Request, verb: str, tenant: str, reply: bytes, started: float, result: str = OK) -> None:
        self._note(message, verb, tenant, result, started)
        self._answer_with(message, python_client.encode_reply(reply) if python_client.speaks(message) else reply)

    def _answer_with(self, message: Request, data: bytes) -> None:
        if message.answer is None:
            self._replies.put(message.reply, data)
        else:
            message.answer(data)

    def _refuse(
        self,
        message: Request,
        verb: Verb | ImmediateVerb | None,
        tenant: str,
        error: MediatorError,
        started: float,
        cause: Exception | None = None,
    ) -> None:
        name, empty = (verb.name, verb.empty) if verb else (UNKNOWN, {})
        if error.code == MediatorError.code:
            # The operator finds the cause by the id that the caller reports.
            request_id = _scope(message).id
            log.error("request failed", verb=name, request_id=request_id, exc_info=cause)
            empty = {"request_id": request_id, **empty}
        self._note(message, name, tenant, error.code, started)
        self._answer_with(message, replies.failure(error, empty))

    def _note(self, message: Request, verb: str, tenant: str, result: str, started: float) -> None:
        """Count an answered request, and log it at debug level; without the address, which is a secret (A7)."""
        seconds = time.perf_counter() - started
        self._metrics.request(verb, result, seconds)
        if self._logs_requests:
            ms = round(seconds * 1000, 3)
            log.debug("request", verb=verb, tenant=tenant, result=result, ms=ms, request_id=_scope(message).id)

    # Storing messages.

    def _send(self, tenant: str, tail: str, message: Request, started: float) -> None:
        self._replies.check_room(len(message.data))
        request = Send(tenant, writable_address(tail), requests.draft(message.data, message.headers))
        self._store(message, request, _unchanged, started)

    def _publish(self, edition: Edition, tenant: str, tail: str, message: Request, started: float) -> None:
        self._replies.check_room(len(message.data))
        published = self._publishes.read(edition, tail, message)
        self._store(message, Send(tenant, published.address, published.draft), published.map_error, started)

    def _store(self, message: Request, request: Send, map_error: ErrorMapper, started: float) -> None:
        size = len(message.data)
        client = self._client(message, request.tenant)
        done = partial(self._stored, message, request, client, map_error, started)
        self._submit(self._broker.send_soon, request, size, client, done)
        self._replies.hold(size)

    def _submit(
        self, use_case: Callable[[_Request, Done], None], request: _Request, size: int, client: Hashable, done: Done
    ) -> None:
        """Admit a request and queue it for the store; ``done`` releases it. Raises :class:`BusyError`."""
        self._pool.enter(request.tenant, client, size)
        try:
            use_case(request, done)
        except BaseException:
            self._pool.leave(request.tenant, client, size)
            raise

    def _stored(
        self, message: Request, request: Send, client: Hashable, map_error: ErrorMapper, started: float, outcome: Any
    ) -> None:
        size, tenant = len(message.data), request.tenant
        self._pool.leave(tenant, client, size)
        self._replies.hold(-size)
        if isinstance(outcome, MediatorError):
            self._refuse(message, self._immediate["MSG.SEND."], tenant, map_error(outcome), started)
        else:
            self._reply(message, "SEND", tenant, b'{"error":"","msg_id":%d}' % outcome, started)
            for heard in self._send_listeners:
                heard(tenant, client, request.address)

    def _send_batch(self, tenant: str, tail: str, message: Request, started: float) -> None:
        size = len(message.data)
        self._replies.check_room(size)
        address = writable_address(tail)
        drafts = batches.drafts(message.data, self._replies.budget)
        client = self._client(message, tenant)
        batch = PendingBatch(drafts, partial(self._stored_batch, message, tenant, started))

        def submit(draft: Draft, done: Done) -> None:
            released = partial(self._release, tenant, client, len(draft.payload), done)
            self._submit(self._broker.send_soon, Send(tenant, address, draft), len(draft.payload), client, released)

        batch.send(submit)
        self._replies.hold(size)

    def _release(self, tenant: str, client: Hashable, size: int, done: Done, outcome: Any) -> None:
        self._pool.leave(tenant, client, size)
        done(outcome)

    def _stored_batch(self, message: Request, tenant: str, started: float, outcomes: Sequence[Any]) -> None:
        self._replies.hold(-len(message.data))
        stored = any(not isinstance(outcome, MediatorError) for outcome in outcomes)
        result = OK if stored else outcomes[0].code
        self._reply(message, "BATCH", tenant, replies.batch(outcomes), started, result)

    # Acknowledging, giving back, lengthening leases.

    def _settle(self, verb: SettleVerb, tenant: str, tail: str, message: Request, started: float) -> None:
        size = len(message.data)
        self._replies.check_room(size)
        known = self._known_connection(message)
        request = verb.read(tenant, parse_address(tail), parse_body(message.data), known)
        client = self._client(message, tenant)
        done = partial(self._settled, verb, message, tenant, client, started)
        self._submit(partial(verb.use_case, self._broker), request, size, client, done)
        self._replies.hold(size)

    def _settled(
        self, verb: SettleVerb, message: Request, tenant: str, client: Hashable, started: float, outcome: Any
    ) -> None:
        size = len(message.data)
        self._pool.leave(tenant, client, size)
        self._replies.hold(-size)
        if isinstance(outcome, MediatorError):
            self._refuse(message, self._immediate[f"MSG.{verb.name}."], tenant, outcome, started)
        else:
            reply = b'{"error":"","%b":%d}' % (verb.counted.encode(), outcome)
            self._reply(message, verb.name, tenant, reply, started)


def _scope(message: Request) -> RequestScope:
    """Return the scope of a request; SEND and its like have none before something is logged."""
    return request_context.scope.get() or RequestScope(message.headers)


def _unchanged(error: MediatorError) -> MediatorError:
    return error
