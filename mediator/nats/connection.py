"""Our connection to NATS: kept for ever, rebuilt when it breaks, and known to be alive."""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import structlog
from nats.aio.msg import Msg
from nats.errors import BadSubscriptionError
from nats.errors import Error as NatsError

from mediator.errors import SetupError
from mediator.nats.client import Received, Request, SturdyClient
from mediator.nats.control import KEY_BYTES, ControlOpener, ControlRefusedError, ControlSealer

CONNECT_SECONDS = 10
PENDING_BYTES = 64 * 1024 * 1024
"""Replies held while the connection is being rebuilt; their askers may still be there."""

SAY_SECONDS = 60.0
"""Between two lines of the log about control messages that were refused."""

log = structlog.get_logger("nats")


def _uncounted(_reason: str) -> None:
    """Count nothing."""


async def connect(
    urls: Sequence[str],
    name: str,
    *,
    user: str | None = None,
    password: str | None = None,
    control_key: bytes | None = None,
) -> "Connection":
    """Connect to one of ``urls``; raises :class:`SetupError` when none answers.

    ``control_key`` authenticates control messages; without one no other connection's are taken, nor its own by others.
    """
    connection = Connection(control_key or secrets.token_bytes(KEY_BYTES))
    await connection.open(urls, name, user, password)
    return connection


class Connection:
    """One connection to NATS, for the life of the service."""

    def __init__(self, control_key: bytes) -> None:
        self._client = SturdyClient()
        self._told: list[Callable[[], None]] = []
        self._control_key = control_key
        self._sealer = ControlSealer(control_key)
        self._refused: dict[str, int] = {}
        self._refused_said = 0.0
        self.control_refused: Callable[[str], None] = _uncounted
        """Called for each control message that is dropped, with the reason."""

    async def open(self, urls: Sequence[str], name: str, user: str | None, password: str | None) -> None:
        """Connect for the first time."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._client.connect(
                    list(urls),
                    name=name,
                    user=user,
                    password=password,
                    connect_timeout=3,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    ping_interval=10,
                    max_outstanding_pings=2,
                    pending_size=PENDING_BYTES,
                    error_cb=self._failed,
                    disconnected_cb=self._disconnected,
                    reconnected_cb=self._reconnected,
                )
        except (NatsError, OSError, TimeoutError) as error:
            # It tries until the time is up; the reason is what the last attempt met.
            why = self._client.last_error or error
            await self._client.close()
            raise SetupError(f"cannot connect to NATS: {str(why) or type(why).__name__}") from error

    @property
    def connected(self) -> bool:
        """Whether the connection stands right now."""
        return bool(self._client.is_connected)

    @property
    def max_payload(self) -> int:
        """Bytes the server takes in one message."""
        return int(self._client.max_payload)

    async def subscribe(self, subject: str, queue: str, received: Received) -> "Subscription":
        """Take the messages of a subject; ``received`` gets them one after the other and must not wait."""

        async def early(message: Msg) -> None:
            received(Request(message.subject, message.reply.encode(), message.data, message.headers))

        # What comes before the receiver is known takes the library's way.
        subscription = await self._client.subscribe(subject, queue=queue, cb=early)
        self._client.receive(subscription._id, received)
        return Subscription(self._client, subscription)

    def seal(self, subject: str, body: bytes) -> bytes:
        """Return the payload of a control message; publish in the order in which you seal."""
        return self._sealer.seal(subject, body)

    async def subscribe_control(self, subject: str, queue: str, received: Received) -> "Subscription":
        """Take control messages as :meth:`subscribe` does messages, opened; others are counted and dropped."""
        opener = ControlOpener(self._control_key)

        def checked(message: Request) -> None:
            try:
                body = opener.open(message.subject, message.data)
            except ControlRefusedError as error:
                self._refuse(error.reason)
                return
            received(message._replace(data=body))

        return await self.subscribe(subject, queue, checked)

    def _refuse(self, reason: str) -> None:
        self.control_refused(reason)
        self._refused[reason] = self._refused.get(reason, 0) + 1
        now = asyncio.get_running_loop().time()
        if not self._refused_said or now - self._refused_said > SAY_SECONDS:
            log.warning("control messages refused", **self._refused)
            self._refused.clear()
            self._refused_said = now

    async def publish(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        """Send messages, subject and payload each; waits while the server does not take what was sent before."""
        await self._client.send_all(messages)

    async def write(self, frames: Iterable[bytes]) -> None:
        """Send frames of the protocol, as :meth:`publish` sends messages."""
        await self._client.send_frames(frames)

    def after_loss(self, told: Callable[[], None]) -> None:
        """Be told whenever the connection stands again: what was sent before may be lost."""
        self._told.append(told)

    async def request(self, subject: str, data: bytes, seconds: float) -> bytes:
        """Ask and wait for one answer; raises ``nats.errors.Error`` or TimeoutError."""
        answer = await self._client.request(subject, data, timeout=seconds)
        return bytes(answer.data)

    async def settle(self, seconds: float) -> None:
        """Wait until the server has all that was sent."""
        # The first flush may overtake what still waits to be written; the second cannot.
        for _ in range(2):
            await self._client.flush(timeout=max(1, int(seconds)))

    async def close(self) -> None:
        """End the connection."""
        await self._client.close()

    async def _failed(self, error: Exception) -> None:
        log.warning("connection", error=str(error) or type(error).__name__)

    async def _disconnected(self) -> None:
        if not self._client.is_closed:
            log.warning("disconnected")

    async def _reconnected(self) -> None:
        log.info("connected again")
        for told in self._told:
            told()


class Subscription:
    """A subscription that can be ended without losing what has arrived."""

    def __init__(self, client: SturdyClient, subscription: Any) -> None:
        self._client = client
        self._subscription = subscription

    async def drain(self) -> None:
        """Take no more, and wait until all that arrived was handed over."""
        await self._subscription.drain()

    async def drop(self) -> None:
        """End it at once, if it has not ended by itself."""
        self._client.receive(self._subscription._id, None)
        with suppress(BadSubscriptionError):
            await self._subscription.unsubscribe()
