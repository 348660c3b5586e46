"""The NATS door: takes requests off the subjects of all editions of the protocol and answers them (N1–N8).

SEND and BATCH are the hot path: read, queued for the group commit and answered by a callback, without a task of their
own. Every other verb may wait, so each is a task.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import structlog
from nats.errors import Error as NatsError

from mediator.broker import Broker
from mediator.errors import BusyError, MediatorError, UnavailableError, UnknownSubjectError
from mediator.fields import Fields, parse_body
from mediator.mailboxes import sending
from mediator.mailboxes.address import DEFAULT_TENANT, parse_address, writable_address
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID
from mediator.mailboxes.sending import Send
from mediator.metrics import OK, Metrics
from mediator.nats import batches, control, pushwire, replies, requests
from mediator.nats.admission import AdmissionPool
from mediator.nats.answers import Answers
from mediator.nats.batches import Batch
from mediator.nats.client import Request
from mediator.nats.connection import Connection, Subscription
from mediator.nats.editions import PUBLISHED, Editions, Verb, broadcasts, python_client
from mediator.nats.tenants import Tenants
from mediator.store.writer import Done

PREFIX = "$mq9.AI."
QUEUE = "mediator"
MAX_ASKED_BYTES = 256 * 1024 * 1024
"""Bytes of the bodies of requests that may wait: counted apart, since what waits for room to answer holds them."""
SELF_TEST = "_SELFTEST"
TRIES = 20
"""Requests, for each instance that answers, until a self-test gives up: any of the queue group may take one."""
SILENT = 2
"""Requests without an answer until a self-test gives up."""

log = structlog.get_logger("nats")

Shape = Callable[[bytes], bytes]
"""Makes an answer what a client of its own kind expects (E11)."""
Named = Callable[[MediatorError], MediatorError]
"""Calls the headers in an error what the sender called them."""
Subscribed = Callable[[str | None, str, Request], None]
"""Takes an OPEN: the account whose pushes need its name, if there are several, the tenant, and the request."""
Further = Callable[[str, bytes, Callable[[], int]], Awaitable[bytes]]
"""A verb from elsewhere: takes the tenant, the body as it came, and what says how large a reply may be."""


class Door:
    """Serves one NATS connection."""

    def __init__(
        self,
        connection: Connection,
        broker: Broker,
        metrics: Metrics,
        tenants: Tenants,
        *,
        accounts: bool,
        instance: str,
        max_pending: int,
        max_waiting: int = 10_000,
        verbs: Mapping[str, tuple[str, Further]] | None = None,
        inbox_ttls: Mapping[Lane, int] | None = None,
        subscribed: Subscribed | None = None,
    ) -> None:
        """``accounts``: requests come on ``mq9.<account>.$mq9.AI.>``, else on ``$mq9.AI.>`` for the default tenant.

        ``max_pending`` bounds the requests under way, ``max_waiting`` the FETCHes, which may wait for mail, apart from
        them; both are shared among tenants and connections.
        ``verbs`` are further ones, by their subject behind the prefix: what each is called, and who does it.
        ``inbox_ttls`` are those of :class:`Editions`. ``subscribed`` serves the subscriptions that gateways open.
        """
        self._connection = connection
        self._broker = broker
        self._metrics = metrics
        self._tenants = tenants
        self._accounts = accounts
        self._instance = instance
        self._work = AdmissionPool(max_pending, "requests")
        self._polls = AdmissionPool(max_waiting, "FETCH requests")
        self._root = "mq9.*." + PREFIX if accounts else PREFIX
        self._subscription: Subscription | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers = Answers(connection, broker.hold_looks)
        self._asked_bytes = 0
        self._editions = Editions(broker, self._answers.room, instance, inbox_ttls or {})
        self._verbs: dict[str, tuple[str, Verb]] = {
            "MAILBOX.CREATE": ("CREATE", self._create),
            "MAILBOX.UPDATE.": ("UPDATE", self._update),
            "MSG.FETCH.": ("FETCH", self._fetch),
            "MSG.ACK.": ("ACK", self._ack),
            "MSG.NACK.": ("NACK", self._nack),
            "MSG.EXTEND.": ("EXTEND", self._extend),
            "MSG.QUERY.": ("QUERY", self._query),
            "MSG.DELETE.": ("DELETE", self._delete),
            **self._editions.verbs,
        }
        self._further = verbs or {}
        self._subscribed = subscribed
        # Asked once: requests are too many to ask for each.
        self._logs_requests = logging.getLogger("nats").isEnabledFor(logging.DEBUG)

    # Opening, watching, closing.

    async def open(self) -> None:
        """Begin to serve."""
        self._answers.open()
        await self._subscribe()

    async def _subscribe(self) -> None:
        self._subscription = await self._connection.subscribe(self._root + ">", QUEUE, self._received)
        # Whoever is told that the service is ready may send at once.
        await self._connection.settle(5)

    async def check(self) -> str | None:
        """Say what is wrong: the connection, or a subscription that takes nothing; the latter is made anew."""
        if not self._connection.connected:
            return "not connected to NATS"
        if await self._hears_itself():
            return None
        log.error("subscription is dead, making it anew")
        try:
            if self._subscription is not None:
                await self._subscription.drop()
            await self._subscribe()
        except (NatsError, TimeoutError) as error:
            return f"the NATS subscription cannot be made anew: {str(error) or type(error).__name__}"
        return None if await self._hears_itself() else "the NATS subscription takes no requests"

    async def _hears_itself(self) -> bool:
        subject = (self._root.replace("*", "_") if self._accounts else self._root) + SELF_TEST
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
            if answer == self._instance.encode():
                return True
            others.add(answer)
        return False

    async def close(self, seconds: float) -> None:
        """Take no more requests; finish, within a time, those that were taken, and send their answers."""
        if self._subscription is not None and self._connection.connected:
            try:
                async with asyncio.timeout(seconds):
                    await self._subscription.drain()
            except (NatsError, TimeoutError) as error:
                log.warning("drain", error=str(error) or type(error).__name__)
        self._broker.stop_waiting()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        try:
            # Requests are committed in the order they came: when this one is, all are.
            async with asyncio.timeout(seconds):
                await self._broker.write(lambda _tx, _now: None, when_full=True)
        except (MediatorError, TimeoutError) as error:
            log.warning("last requests", error=str(error) or type(error).__name__)
        await self._answers.close(seconds)

    # Receiving.

    def _received(self, message: Request) -> None:
        started = time.perf_counter()
        subject = message.subject
        verb = tenant = ""
        try:
            if self._accounts:
                _, account, subject = subject.split(".", 2)
            else:
                account = DEFAULT_TENANT
            name = subject[len(PREFIX) :]
            if name.startswith("MSG.SEND."):
                verb = "SEND"
                self._send(message, tenant := self._tenants.of(account), name[9:], started)
                return
            if name.startswith("MSG.BATCH."):
                verb = "BATCH"
                self._send_batch(message, tenant := self._tenants.of(account), name[10:], started)
                return
            if name.startswith(PUBLISHED):
                verb = "SEND"
                self._publish_older(message, tenant := self._tenants.of(account), name, started)
                return
            if name == pushwire.OPEN and self._subscribed is not None:
                verb = "OPEN"
                self._subscribed(account if self._accounts else None, self._tenants.of(account), message)
                return
            if name == SELF_TEST:
                self._answers.put(message.reply, self._instance.encode())
                return
            speaks_python = python_client.speaks(message)
            verb, work = self._broadcasting(name, message) or self._verb(
                name, self._editions.python_verbs if speaks_python else {}
            )
            tenant = self._tenants.of(account)
            size = len(message.data)
            if self._answers.full or self._asked_bytes + size > MAX_ASKED_BYTES:
                raise BusyError("too many bytes are under way")
            pool, asker = self._polls if verb == "FETCH" else self._work, self._asker(message, tenant)
            pool.enter(tenant, asker, size)
            self._asked_bytes += size
            shape = python_client.reply if speaks_python else _as_it_is
            task = asyncio.create_task(self._do(verb, work, shape, tenant, message, started))
            self._tasks.add(task)
            task.add_done_callback(partial(self._did, pool, tenant, asker, size))
        except MediatorError as error:
            self._refuse(message.reply, verb, tenant, error, started)
        except Exception:
            log.exception("request", verb=verb)
            self._refuse(message.reply, verb, tenant, MediatorError(), started)

    def _asker(self, message: Request, tenant: str) -> Hashable:
        """Name the connection; without accounts by its inbox, since clients could forge the server's header."""
        return (message.asker or tenant) if self._accounts else message.inbox

    def _did(self, pool: AdmissionPool, tenant: str, asker: Hashable, size: int, task: asyncio.Task[None]) -> None:
        pool.leave(tenant, asker, size)
        self._asked_bytes -= size
        self._tasks.discard(task)

    def _verb(
        self, name: str, own: Mapping[str, tuple[str, Verb]]
    ) -> tuple[str, Callable[[str, bytes], Awaitable[bytes]]]:
        """Find who does it; ``own`` are verbs that the client has in a shape of its own."""
        if name in self._further:
            verb, handle = self._further[name]
            return verb, lambda tenant, data: handle(tenant, data, self._answers.room)
        area, _, rest = name.partition(".")
        what, dot, tail = rest.partition(".")
        subject = f"{area}.{what}{dot}"
        known = own.get(subject) or self._verbs.get(subject)
        if known is None:
            raise UnknownSubjectError(PREFIX + name)
        verb, work = known
        if verb == "DELETE":
            # It says all in its subject; SDKs send whatever they like as its body.
            return verb, lambda tenant, _data: work(tenant, tail, Fields({}))
        return verb, lambda tenant, data: work(tenant, tail, parse_body(data))

    async def _do(
        self,
        verb: str,
        work: Callable[[str, bytes], Awaitable[bytes]],
        shape: Shape,
        tenant: str,
        message: Request,
        started: float,
    ) -> None:
        try:
            answer = shape(await work(tenant, message.data))
        except MediatorError as error:
            self._refuse(message.reply, verb, tenant, error, started)
        except Exception:
            log.exception("request", verb=verb)
            self._refuse(message.reply, verb, tenant, MediatorError(), started)
        else:
            self._note(verb, tenant, OK, started)
            self._answers.put(message.reply, answer)

    def _refuse(self, reply: bytes, verb: str, tenant: str, error: MediatorError, started: float) -> None:
        self._note(verb or "UNKNOWN", tenant, error.code, started)
        self._answers.put(reply, replies.failure(verb, error))

    def _note(self, verb: str, tenant: str, result: str, started: float) -> None:
        """Count an answered request, and log it at debug level; not with the address, which is a secret (A7)."""
        seconds = time.perf_counter() - started
        self._metrics.request(verb, result, seconds)
        if self._logs_requests:
            log.debug("request", verb=verb, tenant=tenant, result=result, ms=round(seconds * 1000, 3))

    # The verbs.

    def _send(self, message: Request, tenant: str, address: str, started: float) -> None:
        self._answers.keep_room(len(message.data))
        request = Send(tenant, writable_address(address), requests.draft(message.data, message.headers))
        self._store(message, request, _as_they_are, started)

    def _publish_older(self, message: Request, tenant: str, name: str, started: float) -> None:
        self._answers.keep_room(len(message.data))
        published = self._editions.published(name, message)
        self._store(message, Send(tenant, published.address, published.draft), published.named, started)

    def _send_batch(self, message: Request, tenant: str, address: str, started: float) -> None:
        size = len(message.data)
        self._answers.keep_room(size)
        address = writable_address(address)
        drafts = batches.drafts(message.data, self._answers.budget)
        batch = Batch(drafts, partial(self._sent_batch, message.reply, tenant, size, _shape(message), started))
        asker = self._asker(message, tenant)
        batch.send(lambda draft, done: self._submit_one(Send(tenant, address, draft), asker, done))
        self._answers.hold(size)

    def _sent_batch(
        self, reply: bytes, tenant: str, size: int, shape: Shape, started: float, outcomes: Sequence[Any]
    ) -> None:
        self._answers.hold(-size)
        kept = any(not isinstance(outcome, MediatorError) for outcome in outcomes)
        self._note("BATCH", tenant, OK if kept else outcomes[0].code, started)
        self._answers.put(reply, shape(replies.batch(outcomes)))

    def _store(self, message: Request, request: Send, named: Named, started: float) -> None:
        shape = _shape(message)
        size = len(message.data)
        tenant, asker = request.tenant, self._asker(message, request.tenant)
        self._work.enter(tenant, asker, size)
        try:
            self._broker.send_soon(
                request, partial(self._sent, message.reply, tenant, asker, size, named, shape, started)
            )
        except BaseException:
            self._work.leave(tenant, asker, size)
            raise
        self._answers.hold(size)

    def _sent(
        self,
        reply: bytes,
        tenant: str,
        asker: Hashable,
        size: int,
        named: Named,
        shape: Shape,
        started: float,
        outcome: Any,
    ) -> None:
        self._work.leave(tenant, asker, size)
        self._answers.hold(-size)
        if isinstance(outcome, MediatorError):
            self._refuse(reply, "SEND", tenant, named(outcome), started)
            return
        self._note("SEND", tenant, OK, started)
        self._answers.put(reply, shape(b'{"error":"","msg_id":%d}' % outcome))

    def _submit_one(self, request: Send, asker: Hashable, done: Done) -> None:
        """Hand a message of a batch to the store, counted in on its own; raises :class:`BusyError`."""
        tenant, size = request.tenant, len(request.draft.payload)
        self._work.enter(tenant, asker, size)

        def stored(outcome: Any) -> None:
            self._work.leave(tenant, asker, size)
            done(outcome)

        try:
            self._broker.send_soon(request, stored)
        except BaseException:
            self._work.leave(tenant, asker, size)
            raise

    def _broadcasting(self, name: str, message: Request) -> tuple[str, Callable[[str, bytes], Awaitable[bytes]]] | None:
        if not name.startswith(broadcasts.PUBLISHED):
            return None
        return "BROADCAST", lambda tenant, _data: self._broadcast(tenant, name[len(broadcasts.PUBLISHED) :], message)

    async def _broadcast(self, tenant: str, name: str, message: Request) -> bytes:
        told = broadcasts.read(name, message.data, message.headers)
        if told.kept:
            return replies.success(msg_id=await self._broker.keep_broadcast(tenant, name, told.draft))
        sending.check(told.draft, self._broker.bounds, self._broker.clock())
        try:
            subject = f"{control.CAST}{tenant}.{name}"
            await self._connection.publish([(subject.encode(), self._connection.seal(subject, told.body()))])
        except NatsError as error:
            raise UnavailableError(str(error) or type(error).__name__) from error
        return replies.success(msg_id=HIDDEN_ID)

    async def _create(self, tenant: str, _tail: str, fields: Fields) -> bytes:
        return replies.created(await self._broker.create(requests.create(tenant, fields)))

    async def _update(self, tenant: str, address: str, fields: Fields) -> bytes:
        mailbox = await self._broker.update(requests.update(tenant, parse_address(address), fields))
        return replies.success(mail_address=mailbox.address)

    async def _fetch(self, tenant: str, address: str, fields: Fields) -> bytes:
        text = fields.choice("encoding", requests.ENCODINGS) == "utf8"
        request = requests.fetch(tenant, parse_address(address), fields, self._answers.budget)
        return replies.messages(await self._broker.fetch(request), text=text)

    async def _query(self, tenant: str, address: str, fields: Fields) -> bytes:
        text = fields.choice("encoding", requests.ENCODINGS) == "utf8"
        request = requests.query(tenant, parse_address(address), fields, self._answers.budget)
        return replies.messages(await self._broker.query(request), text=text, headers_only=request.headers_only)

    async def _ack(self, tenant: str, address: str, fields: Fields) -> bytes:
        acknowledged = await self._broker.ack(requests.ack(tenant, parse_address(address), fields))
        return replies.success(acknowledged=acknowledged)

    async def _nack(self, tenant: str, address: str, fields: Fields) -> bytes:
        returned = await self._broker.nack(requests.nack(tenant, parse_address(address), fields))
        return replies.success(returned=returned)

    async def _extend(self, tenant: str, address: str, fields: Fields) -> bytes:
        extended = await self._broker.extend(requests.extend(tenant, parse_address(address), fields))
        return replies.success(extended=extended)

    async def _delete(self, tenant: str, tail: str, _fields: Fields) -> bytes:
        address, msg_id = requests.numbered(tail)
        await self._broker.delete(tenant, address, msg_id)
        return replies.success(deleted=True)


def _shape(message: Request) -> Shape:
    return python_client.reply if python_client.speaks(message) else _as_it_is


def _as_it_is(answer: bytes) -> bytes:
    return answer


def _as_they_are(error: MediatorError) -> MediatorError:
    return error


def limit_of(max_payload: int) -> int:
    """Return the largest message that a server with this ``max_payload`` can hand back in base64 (N7)."""
    return max(0, (max_payload - 64 * 1024) * 3 // 4)


def payload_for(max_message: int) -> int:
    """Return the ``max_payload`` that lets a server carry messages of this size both ways (N7)."""
    return -(-max_message * 4 // 3) + 64 * 1024 + 4
