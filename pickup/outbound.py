"""Sends single envelopes to endpoints of peers through the SSRF guard, and replies in the background (D5, D10)."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import orjson
from aiohttp import ClientWebSocketResponse, WSMsgType

from mediator.errors import AddressRefusedError, MediatorError, UnreachableError
from mediator.http.guard import Guard
from pickup.envelope import MEDIA_TYPES, Envelopes
from pickup.message import DIDCOMM, encode
from pickup.metrics import DidcommMetrics
from pickup.rules.names import base58, is_ed25519, verkey
from pickup.rules.records import Generation

POST_SECONDS = 10.0
"""Time for one attempt, DNS and redirects included."""
MAX_ROUTING_KEYS = 10
"""Most mediators in front of an endpoint."""
MAX_ANSWER = 64 * 1024
"""Bytes of a frame that an endpoint's WebSocket may send back; it is ignored."""

_MARK = b"read"
_HTTP = ("http://", "https://")
_WS = ("ws://", "wss://")
# The envelope itself is refused; any other status may be temporary, or a fault of the endpoint.
_REFUSALS = frozenset({400, 413, 415, 422})


Sleep = Callable[[float], Awaitable[object]]
"""Waits so many seconds before the next attempt."""


class DeliveryOutcome(StrEnum):
    """The outcome of an attempt."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    """The endpoint refuses this envelope; a retry does not help."""
    FAILED = "failed"
    """A retry may succeed."""
    BARRED = "barred"
    """The endpoint must never be called: a forbidden address, or not HTTP or WebSocket."""


@dataclass(frozen=True, slots=True)
class OutboundMessage:
    """An envelope and its destination."""

    endpoint: str
    envelope: bytes
    generation: Generation
    to: str | None = None
    """v1: the canonical key it is sealed for; required with ``routing_keys``."""
    routing_keys: Sequence[str] = ()
    """v1: canonical keys of mediators in front of the endpoint, outermost last."""


def is_endpoint(url: str | None) -> bool:
    """Whether envelopes can be sent there; ``didcomm:transport/queue`` (RFC 0092) is no endpoint."""
    return url is not None and url.startswith((*_HTTP, *_WS))


class OutboundClient:
    """Makes one attempt for each call; see :class:`OutboundQueue` and :mod:`.endpoint_relay` for retries."""

    def __init__(self, envelopes: Envelopes, guard: Guard) -> None:
        self._envelopes = envelopes
        self._guard = guard

    async def send(self, message: OutboundMessage) -> DeliveryOutcome:
        """Make one attempt, within :data:`POST_SECONDS`; raises nothing."""
        try:
            envelope = await self._wrap(message)
        except (MediatorError, ValueError):
            return DeliveryOutcome.REFUSED
        try:
            if message.endpoint.startswith(_HTTP):
                return await self._post(message, envelope)
            if message.endpoint.startswith(_WS):
                return await self._send_frame(message.endpoint, envelope)
        except AddressRefusedError:
            return DeliveryOutcome.BARRED
        except UnreachableError:
            return DeliveryOutcome.FAILED
        return DeliveryOutcome.BARRED

    async def _wrap(self, message: OutboundMessage) -> bytes:
        """Wrap the envelope in a forward for each mediator in front of the endpoint (RFC 0094)."""
        envelope, to = message.envelope, message.to or ""
        if message.generation is not Generation.V1 or not message.routing_keys:
            return envelope
        if len(message.routing_keys) > MAX_ROUTING_KEYS or not all(map(is_ed25519, (to, *message.routing_keys))):
            raise UnreachableError("expected an endpoint with few routing keys")
        for key in message.routing_keys:
            forward = {
                "@type": f"{DIDCOMM}routing/1.0/forward",
                "@id": str(uuid.uuid4()),
                # Deployed agents know recipients by the raw base58 key.
                "to": base58(verkey(to)),
                "msg": orjson.loads(envelope),
            }
            envelope = await self._envelopes.seal_v1(encode(forward), [key], None)
            to = key
        return envelope

    async def _post(self, message: OutboundMessage, envelope: bytes) -> DeliveryOutcome:
        status = await self._guard.post(message.endpoint, envelope, MEDIA_TYPES[message.generation], POST_SECONDS)
        if 200 <= status < 300:
            return DeliveryOutcome.DELIVERED
        return DeliveryOutcome.REFUSED if status in _REFUSALS else DeliveryOutcome.FAILED

    async def _send_frame(self, endpoint: str, envelope: bytes) -> DeliveryOutcome:
        try:
            async with asyncio.timeout(POST_SECONDS):
                ws = await self._guard.ws_connect(endpoint, MAX_ANSWER, POST_SECONDS)
                try:
                    await ws.send_bytes(envelope)
                    return DeliveryOutcome.DELIVERED if await _was_read(ws) else DeliveryOutcome.FAILED
                finally:
                    await ws.close()
        except (TimeoutError, OSError):
            return DeliveryOutcome.FAILED


async def _was_read(ws: ClientWebSocketResponse) -> bool:
    """Ping and wait for the pong: the frame before it was read (D7); False when the socket closes first."""
    await ws.ping(_MARK)
    async for frame in ws:
        if frame.type is WSMsgType.PONG and frame.data == _MARK:
            return True
        if frame.type is WSMsgType.PING:
            await ws.pong(frame.data)
    return False


PAUSES = (1.0, 5.0, 25.0)
"""Seconds before each further attempt."""
CONCURRENT = 32
MAX_MESSAGES = 1000
"""Messages in the queue, those that wait for another attempt too; more are dropped."""
MAX_PER_SERVER = 200
"""Messages in the queue for one server, which may be slow or hostile."""
CONCURRENT_PER_SERVER = 8
"""Concurrent attempts at one server."""
MAX_BYTES = 64 * 1024 * 1024
"""Bytes of all messages in the queue."""


@dataclass(slots=True)
class _Server:
    messages: int = 0
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENT_PER_SERVER))


class OutboundQueue:
    """Sends messages in the background. A lost reply is no loss of mail: its sender asks again."""

    def __init__(self, client: OutboundClient, metrics: DidcommMetrics, sleep: Sleep = asyncio.sleep) -> None:
        self._client = client
        self._metrics = metrics
        self._sleep = sleep
        self._turns = asyncio.Semaphore(CONCURRENT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: dict[str, _Server] = {}
        self._messages = 0
        self._bytes = 0
        self._closing = False

    def send_soon(self, message: OutboundMessage) -> None:
        """Queue a message for sending; it is dropped when the queue is full or all attempts fail."""
        size, name = len(message.envelope), _server_of(message.endpoint)
        server = self._servers.get(name) or _Server()
        if (
            self._closing
            or not is_endpoint(message.endpoint)
            or self._messages >= MAX_MESSAGES
            or server.messages >= MAX_PER_SERVER
            or self._bytes + size > MAX_BYTES
        ):
            self._metrics.relayed("dropped")
            return
        self._messages += 1
        self._bytes += size
        server.messages += 1
        self._servers[name] = server
        task = asyncio.create_task(self._send(message, name, server), name="didcomm-outbound")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def usage(self) -> tuple[int, int]:
        """How many messages are in the queue, and their bytes."""
        return self._messages, self._bytes

    @property
    def servers(self) -> list[tuple[str, int]]:
        """The servers that messages are for, with how many, the most first."""
        return sorted(((name, server.messages) for name, server in self._servers.items()), key=lambda each: -each[1])

    async def close(self) -> None:
        """Cancel what is in the queue."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, message: OutboundMessage, name: str, server: _Server) -> None:
        try:
            for pause in (*PAUSES, None):
                async with server.turns, self._turns:
                    outcome = await self._client.send(message)
                self._metrics.relayed(outcome)
                if outcome is not DeliveryOutcome.FAILED:
                    return
                if pause is not None:
                    await self._sleep(pause)
            self._metrics.relayed("gave_up")
        finally:
            # Counted here and not by the tasks: a finished task stays in the set a moment longer.
            self._messages -= 1
            self._bytes -= len(message.envelope)
            server.messages -= 1
            if not server.messages:
                del self._servers[name]


def _server_of(endpoint: str) -> str:
    return endpoint.partition("://")[2].partition("/")[0]
