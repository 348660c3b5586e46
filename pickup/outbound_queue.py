"""Sends single envelopes to endpoints of peers in the background, with bounded retries (D5)."""

import asyncio
from dataclasses import dataclass, field

from pickup.metrics import DidcommMetrics
from pickup.outbound import DeliveryOutcome, OutboundClient, OutboundMessage, Sleep, is_endpoint

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
