"""The pipeline's connection to the service over NATS: login, requests, and sending batches until all is stored."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import nats
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from mediator.errors import BadRequestError, MessageTooLargeError, SetupError, UnavailableError, UnreachableError
from mediator.login import Login
from pipeline.source.options import LOGIN, read_integer

SUBJECT = "$mq9.AI.MSG."
DEFAULT_SERVER = "nats://127.0.0.1:4222"
DEFAULT_TIMEOUT_SECONDS = 60
MAX_TIMEOUT_SECONDS = 3600
CONNECT_SECONDS = 5.0
REPLY_SECONDS = 5.0
"""How long a reply may take; the longest wait of a FETCH is below it (F2)."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
DEFAULT_IN_FLIGHT = 256
MAX_IN_FLIGHT = 10_000
MAX_BYTES_IN_FLIGHT = 16 * 1024 * 1024
"""Bytes of unconfirmed messages; a single larger message is sent alone."""
BATCH_MESSAGES = 60
"""Messages of a request; the service takes so many whatever its max_payload is."""
BATCH_BYTES = 256 * 1024
"""Bytes of a request of more than one message."""
REQUESTS_IN_FLIGHT = 2
"""Requests that ``maxInFlight`` has room for, if it is not 1."""

_TEMPORARY = ("unavailable:", "quota_exceeded:", "archive_backlog_full:", "copy_refused:")
"""Prefixes of errors after which a request is repeated."""
_NO_RESPONDERS = "unavailable: nobody takes messages there"
_INVALID_REPLY = "unavailable: an answer that is none of the service"


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Servers, login, and how long to retry."""

    login: Login
    timeout_seconds: float
    """Time without success after which to give up."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options ``nats.…`` and ``timeoutSeconds``; :class:`BadRequestError` names a wrong one."""
        return cls(
            login=Login(
                **{"server": DEFAULT_SERVER} | {LOGIN[name]: options[name] for name in LOGIN if options.get(name)}
            ),
            timeout_seconds=read_integer(options, "timeoutSeconds", 1, MAX_TIMEOUT_SECONDS) or DEFAULT_TIMEOUT_SECONDS,
        )


@dataclass(frozen=True, slots=True)
class SinkOptions(ServiceOptions):
    """Server, login, how long to retry, and how many messages are in flight."""

    in_flight: int
    """Maximum of unconfirmed messages."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options of the sink; :class:`BadRequestError` names a wrong one."""
        service = ServiceOptions.of(options)
        in_flight = read_integer(options, "maxInFlight", 1, MAX_IN_FLIGHT) or DEFAULT_IN_FLIGHT
        return cls(service.login, service.timeout_seconds, in_flight)


async def connect(service: ServiceOptions, closed: Callable[[], Awaitable[None]] | None = None) -> Client:
    """Connect once, without reconnecting; ``closed`` is called when the connection breaks.

    Raises :class:`SetupError` when the login is refused or cannot be used, and :class:`UnreachableError` when no
    server answers.
    """
    errors: list[Exception] = []
    login = service.login.nats_options

    async def failed(error: Exception) -> None:
        errors[:] = [error]

    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            return await nats.connect(
                service.login.server.split(","),
                name="mediator pipeline",
                **login,
                connect_timeout=3,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=FIRST_PAUSE,
                error_cb=failed,
                closed_cb=closed,
            )
    except (NatsError, OSError, TimeoutError, ValueError) as error:
        reason = _reason(errors[-1] if errors else error)
        if "authorization violation" in reason.lower():
            raise SetupError(f"nats.{service.login.kind or 'url'}: the server refuses the login, {reason}") from None
        raise UnreachableError(f"cannot connect: {reason}") from None


async def disconnect(client: Client) -> None:
    """Close a connection in any state."""
    with contextlib.suppress(NatsError, OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_SECONDS):
            await client.close()


def request(service: ServiceOptions, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Make a request (``FETCH.orders``) and return its reply; temporary failures are retried.

    Raises :class:`BadRequestError` with the service's error for a permanent refusal, :class:`UnavailableError` after
    ``timeout_seconds`` of failures, and :class:`SetupError` as :func:`connect`.
    """
    return asyncio.run(_request(service, verb, body))


async def _request(service: ServiceOptions, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    begun, pause = _now(), FIRST_PAUSE
    while True:
        try:
            client = await connect(service)
            try:
                return await _request_once(client, verb, body)
            finally:
                await disconnect(client)
        except UnreachableError as error:
            if _now() - begun > service.timeout_seconds:
                raise UnavailableError(f"{verb} was not answered in {service.timeout_seconds:g} s: {error}") from None
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)


async def _request_once(client: Client, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    try:
        reply = await client.request(SUBJECT + verb, orjson.dumps(body), timeout=REPLY_SECONDS)
    except NoRespondersError:
        raise UnreachableError(_NO_RESPONDERS) from None
    except (NatsError, OSError, TimeoutError) as error:
        raise UnreachableError(_reason(error)) from None
    refusal = _refusal(reply)
    if refusal.startswith(_TEMPORARY):
        raise UnreachableError(refusal)
    if refusal:
        raise BadRequestError(verb, refusal)
    content: dict[str, Any] = orjson.loads(reply.data)
    return content


def _refusal(reply: Msg) -> str:
    """Return the error of a reply, "" on success."""
    if not reply.data and (reply.headers or {}).get("Status") == "503":
        return _NO_RESPONDERS
    try:
        error = orjson.loads(reply.data)["error"]
    except (ValueError, KeyError, TypeError):
        return _INVALID_REPLY
    return error if isinstance(error, str) else _INVALID_REPLY


def _reason(error: Exception) -> str:
    """Return an error's text, or its class name."""
    return str(error) or type(error).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class InFlightMessage:
    """An unconfirmed message."""

    row: int
    address: str
    frame: bytes
    """The message as it is written in a batch (S8)."""


@dataclass(slots=True)
class SendBatch:
    """Messages to one mailbox, in order, for one request."""

    messages: list[InFlightMessage] = field(default_factory=list)
    size: int = 0

    def fits(self, message: InFlightMessage, max_bytes: int) -> bool:
        """Whether the message can be added: it is for the same mailbox, and they have at most ``max_bytes``."""
        if not self.messages:
            return True
        return message.address == self.messages[0].address and self.size + len(message.frame) <= max_bytes

    def add(self, message: InFlightMessage) -> None:
        """Append a message."""
        self.messages.append(message)
        self.size += len(message.frame)

    def refusals(self, reply: Msg) -> list[tuple[InFlightMessage, str]]:
        """Return each message with its error, "" if it was stored."""
        refusal = _refusal(reply)
        errors: dict[str, str] = {}
        if not refusal:
            try:
                errors = dict(orjson.loads(reply.data)["errors"])
            except (KeyError, TypeError, ValueError):
                refusal = _INVALID_REPLY
        return [(message, refusal or errors.get(str(index), "")) for index, message in enumerate(self.messages)]


class BatchSender:
    """Sends messages over one connection, in order and in batches, until each is confirmed (S3, S8).

    It is used as ``async with`` by one task. Messages that are refused temporarily, get no reply in time or were in
    flight when the connection broke are sent again, in order and with their dedup ids, with exponential backoff. A
    permanent refusal is raised as :class:`BadRequestError` with the row's number and the service's error;
    :class:`UnavailableError` means that nothing succeeded for ``timeout_seconds``.
    """

    def __init__(self, options: SinkOptions, where: str) -> None:
        """``where`` follows the number of a row in errors."""
        self._options = options
        self._where = where
        self._client: Client | None = None
        self._inbox = ""
        self._in_flight: dict[int, InFlightMessage] = {}
        """All unconfirmed messages, by row."""
        self._bytes_in_flight = 0
        self._batch_messages = min(BATCH_MESSAGES, max(1, options.in_flight // REQUESTS_IN_FLIGHT))
        self._batch_bytes = BATCH_BYTES
        self._next = SendBatch()
        """Messages of the next request."""
        self._requested: dict[int, SendBatch] = {}
        """Batches in flight, by the number of their request."""
        self._requests = 0
        self._changed = asyncio.Event()
        """Set when :meth:`_wait_until` has to look again."""
        self._max_waiting = 0
        """Messages in flight at which :meth:`_wait_until` is satisfied."""
        self._refused: tuple[int, str] | None = None
        """The first row that was refused permanently, and the error."""
        self._problem = ""
        """Why unconfirmed messages must be sent again."""
        self._last_success = 0.0
        self._pause = FIRST_PAUSE

    async def __aenter__(self) -> Self:
        """Connect; :class:`SetupError` when the login is refused."""
        self._last_success = _now()
        try:
            while self._client is None:
                await self._connect()
        except BaseException:
            await self._disconnect()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close the connection without waiting for outstanding replies."""
        await self._disconnect()

    async def send(self, message: InFlightMessage) -> None:
        """Send a message as soon as there is room; rows must come in ascending order."""
        size = len(message.frame)
        no_room = self._in_flight and self._bytes_in_flight + size > MAX_BYTES_IN_FLIGHT
        if no_room or len(self._in_flight) >= self._options.in_flight or self._problem or self._refused is not None:
            await self._wait_until(self._options.in_flight - self._batch_messages, MAX_BYTES_IN_FLIGHT - size)
        if not self._in_flight:
            self._last_success = _now()
        self._in_flight[message.row] = message
        self._bytes_in_flight += size
        await self._add_to_batch(message)

    async def flush(self) -> None:
        """Wait until every message is confirmed."""
        await self._wait_until(0, 0)

    async def _wait_until(self, max_messages: int, max_bytes: int) -> None:
        """Wait until at most so many messages and bytes are unconfirmed, and none must be sent again."""
        self._max_waiting = max_messages
        if not self._problem:
            await self._send_batch()
        while True:
            if self._refused is not None:
                row, reason = self._refused
                raise BadRequestError(f"row {row} {self._where}", reason)
            if self._problem:
                await self._send_again()
                continue
            if not self._in_flight or (len(self._in_flight) <= max_messages and self._bytes_in_flight <= max_bytes):
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(REPLY_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                self._problem = f"no answer within {REPLY_SECONDS:g} s"
                await self._disconnect()

    async def _send_again(self) -> None:
        """Send unconfirmed messages again, in order, after a pause."""
        problem, self._problem = self._problem, ""
        if self._in_flight:
            await self._back_off(problem)
        if self._client is None or self._client.is_closed:
            await self._disconnect()
            await self._connect()
        # Late replies to earlier requests belong to other batches.
        self._requested.clear()
        self._next = SendBatch()
        for message in list(self._in_flight.values()):
            await self._add_to_batch(message)
        await self._send_batch()

    async def _back_off(self, problem: str) -> None:
        """Pause before the next try; :class:`UnavailableError` after too long without success."""
        timeout = self._options.timeout_seconds
        if _now() - self._last_success > timeout:
            row = next(iter(self._in_flight), 0)
            raise UnavailableError(f"row {row} {self._where} was not taken in {timeout:g} s: {problem}")
        await asyncio.sleep(self._pause)
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    async def _add_to_batch(self, message: InFlightMessage) -> None:
        """Add a message to the next request, and send the request when it is full."""
        if not self._next.fits(message, self._batch_bytes):
            await self._send_batch()
        self._next.add(message)
        if len(self._next.messages) >= self._batch_messages:
            await self._send_batch()

    async def _send_batch(self) -> None:
        """Send the next request, if it has messages."""
        batch, self._next = self._next, SendBatch()
        if not batch.messages:
            return
        if self._client is None:
            self._problem = self._problem or "not connected"
            return
        first = batch.messages[0]
        if batch.size > self._client.max_payload:
            # The server would close the connection instead of refusing the message.
            self._refuse(first.row, str(MessageTooLargeError(batch.size, self._client.max_payload)))
            return
        self._requests += 1
        self._requested[self._requests] = batch
        body = b"".join(message.frame for message in batch.messages)
        try:
            await self._client.publish(f"{SUBJECT}BATCH.{first.address}", body, f"{self._inbox}.{self._requests}")
        except (NatsError, OSError) as error:
            self._problem = _reason(error)

    async def _on_reply(self, reply: Msg) -> None:
        batch = self._requested.pop(int(reply.subject.rpartition(".")[2]), None)
        if batch is None:
            return
        for message, reason in batch.refusals(reply):
            if not reason:
                del self._in_flight[message.row]
                self._bytes_in_flight -= len(message.frame)
                self._last_success = _now()
                self._pause = FIRST_PAUSE
            elif reason.startswith(_TEMPORARY):
                self._problem = reason
            else:
                self._refuse(message.row, reason)
        if self._problem or self._refused is not None or len(self._in_flight) <= self._max_waiting:
            self._changed.set()

    def _refuse(self, row: int, reason: str) -> None:
        if self._refused is None or row < self._refused[0]:
            self._refused = (row, reason)
        self._changed.set()

    async def _connect(self) -> None:
        """Try once to connect; on a temporary failure pause and record the problem."""
        try:
            self._client = await connect(self._options, self._on_close)
            self._inbox = self._client.new_inbox()
            self._batch_bytes = min(BATCH_BYTES, self._client.max_payload)
            await self._client.subscribe(self._inbox + ".*", cb=self._on_reply)
        except (UnreachableError, NatsError, OSError) as error:
            await self._disconnect()
            await self._back_off(_reason(error))
            self._problem = _reason(error)

    async def _on_close(self) -> None:
        self._problem = self._problem or "the connection broke"
        self._changed.set()

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await disconnect(client)
