"""The service's connection to NATS: rebuilt when it breaks, for the life of the service."""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
from nats.aio.msg import Msg
from nats.errors import BadSubscriptionError
from nats.errors import Error as NatsError

from mediator.errors import SetupError
from mediator.login import Login
from mediator.nats.client import MessageHandler, NatsClient, Request
from mediator.nats.control_messages import KEY_BYTES, ControlOpener, ControlRefusedError, ControlSealer
from mediator.nats.tls import TlsFiles

CONNECT_SECONDS = 10
PENDING_BYTES = 64 * 1024 * 1024
"""Replies held while the connection is being rebuilt; the clients may still be waiting."""

LOG_SECONDS = 60.0
"""Between two log lines about refused control messages."""

log = structlog.get_logger("nats")


def _uncounted(_reason: str) -> None:
    """Count nothing."""


@dataclass(frozen=True, slots=True)
class Upstreams:
    """The NATS servers, and the service's own login there; it may be in the URLs."""

    urls: Sequence[str]
    login: Login = Login("")
    """The login and the files for TLS; its server is not used."""
    control_key: bytes | None = field(default=None, repr=False)
    """The key that authenticates control messages; without one, a connection accepts only its own."""

    def tls(self) -> TlsFiles:
        """Return what the files for TLS say, now and later; raises :class:`SetupError`."""
        login = self.login
        return TlsFiles(lambda: login.tls, (login.tls_ca, login.tls_cert, login.tls_key))


async def connect(upstreams: Upstreams, name: str) -> "NatsConnection":
    """Connect to one of the servers; raises :class:`SetupError` when none answers."""
    connection = NatsConnection(upstreams.control_key or secrets.token_bytes(KEY_BYTES))
    await connection.open(upstreams, name)
    return connection


class NatsConnection:
    """One connection to NATS, for the life of the service."""

    def __init__(self, control_key: bytes) -> None:
        self.client = NatsClient()
        """The client below, for what only nats-py can do."""
        self._reconnect_handlers: list[Callable[[], None]] = []
        self._control_key = control_key
        self._sealer = ControlSealer(control_key)
        self._refused: dict[str, int] = {}
        self._refused_logged = 0.0
        self.control_refused: Callable[[str], None] = _uncounted
        """Called for each control message that is dropped, with the reason."""

    async def open(self, upstreams: Upstreams, name: str) -> None:
        """Connect for the first time; raises :class:`SetupError`."""
        self._loop = asyncio.get_running_loop()
        credentials, self.client.tls_files = upstreams.login.credentials, upstreams.tls()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self.client.connect(
                    list(upstreams.urls),
                    name=name,
                    **credentials,
                    connect_timeout=3,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    pending_size=PENDING_BYTES,
                    error_cb=self._failed,
                    disconnected_cb=self._disconnected,
                    reconnected_cb=self._reconnected,
                )
        except (NatsError, OSError, TimeoutError) as error:
            # It tries until the time is up; the reason is the error of the last attempt.
            why = self.client.last_error or error
            await self.client.close()
            raise SetupError(f"cannot connect to NATS: {str(why) or type(why).__name__}") from error

    @property
    def connected(self) -> bool:
        """Whether the connection is up."""
        return bool(self.client.is_connected)

    @property
    def max_payload(self) -> int:
        """Bytes that the server takes in one message."""
        return int(self.client.max_payload)

    async def subscribe(self, subject: str, queue: str, handler: MessageHandler) -> "NatsSubscription":
        """Subscribe to a subject; ``handler`` is called with each message, in order, and must not wait."""

        async def early(message: Msg) -> None:
            handler(Request(message.subject, message.reply.encode(), message.data, message.headers))

        # Messages that come before the handler is registered take the library's way.
        subscription = await self.client.subscribe(subject, queue=queue, cb=early)
        self.client.receive(subscription._id, handler)
        return NatsSubscription(self.client, subscription)

    def seal(self, subject: str, body: bytes) -> tuple[bytes, bytes]:
        """Return subject and payload of a control message; publish in the order in which you seal."""
        return subject.encode(), self._sealer.seal(subject, body)

    async def subscribe_control(self, subject: str, queue: str, handler: MessageHandler) -> "NatsSubscription":
        """Subscribe to control messages; ``handler`` gets them opened. Refused ones are counted and dropped."""
        opener = ControlOpener(self._control_key)

        def checked(message: Request) -> None:
            try:
                body = opener.open(message.subject, message.data)
            except ControlRefusedError as error:
                self._refuse(error.reason)
                return
            handler(message._replace(data=body))

        return await self.subscribe(subject, queue, checked)

    def _refuse(self, reason: str) -> None:
        self.control_refused(reason)
        self._refused[reason] = self._refused.get(reason, 0) + 1
        now = asyncio.get_running_loop().time()
        if not self._refused_logged or now - self._refused_logged > LOG_SECONDS:
            log.warning("control messages refused", **self._refused)
            self._refused.clear()
            self._refused_logged = now

    async def publish(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        """Send messages, subject and payload each; waits while the server is not reading."""
        await self.client.send_all(messages)

    async def write(self, frames: Iterable[bytes]) -> None:
        """Send frames; waits as :meth:`publish` does."""
        await self.client.send_frames(frames)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever the connection was rebuilt: what was sent before may be lost."""
        self._reconnect_handlers.append(handler)

    def reconnect(self) -> None:
        """Connect anew: what the server has sent and nobody has read is lost. From any thread."""
        asyncio.run_coroutine_threadsafe(self.client.force_reconnect(), self._loop)

    async def request(self, subject: str, data: bytes, seconds: float) -> bytes:
        """Send a request and return the first reply; raises ``nats.errors.Error`` or TimeoutError."""
        answer = await self.client.request(subject, data, timeout=seconds)
        return bytes(answer.data)

    async def flush(self, seconds: float) -> None:
        """Wait until the server has read all that was sent."""
        # The first flush may overtake what still waits to be written; the second cannot.
        for _ in range(2):
            await self.client.flush(timeout=max(1, int(seconds)))

    async def close(self) -> None:
        """Close the connection."""
        await self.client.close()

    async def _failed(self, error: Exception) -> None:
        log.warning("connection error", error=str(error) or type(error).__name__)

    async def _disconnected(self) -> None:
        if not self.client.is_closed:
            log.warning("disconnected")

    async def _reconnected(self) -> None:
        log.info("reconnected")
        for handler in self._reconnect_handlers:
            handler()


class NatsSubscription:
    """A subscription of the service."""

    def __init__(self, client: NatsClient, subscription: Any) -> None:
        self._client = client
        self._subscription = subscription

    @property
    def sid(self) -> int:
        """Its number on the connection, as frames name it."""
        return int(self._subscription._id)

    async def drain(self) -> None:
        """Unsubscribe, and wait until all messages that arrived were handled."""
        await self._subscription.drain()
        # Its own flush may overtake the command to unsubscribe, which still waits to be written; this one cannot.
        await self._client.flush()

    async def drop(self) -> None:
        """Unsubscribe at once; does nothing if it has ended by itself."""
        self._client.receive(self.sid, None)
        with suppress(BadSubscriptionError):
            await self._subscription.unsubscribe()


class Announcements:
    """One control subject on which instances that share a database hear each other; what is lost is not repeated."""

    def __init__(self, connection: NatsConnection, subject: str) -> None:
        self._connection = connection
        self._subject = subject

    async def publish(self, data: bytes) -> None:
        """Publish to all instances."""
        sealed = self._connection.seal(self._subject, data)
        if (size := len(sealed[1])) > self._connection.max_payload:
            # The server would close the connection.
            log.warning("announcement too large for the server", size=size)
            return
        try:
            await self._connection.publish([sealed])
        except NatsError as error:
            log.warning("announcement not sent", error=str(error) or type(error).__name__)

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        """Call ``heard`` with each announcement, on the event loop."""

        def received(message: Request) -> None:
            heard(message.data)

        await self._connection.subscribe_control(self._subject, "", received)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever announcements may have been lost."""
        self._connection.on_reconnect(handler)
