"""Subscribers that only count messages, each on its own connection, so no client library is measured."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig

from benchmarks.prefill import PAYLOAD
from mediator.system.usage import cpu_seconds

MESSAGE = b"MSG $mq9.AI."
"""Start of every message frame (MSG or HMSG); no payload contains it."""
PING = b"PING\r\n"
_KEPT = max(len(MESSAGE), len(PING)) - 1
PATIENCE = 120
WARM = 10
"""Messages that every subscriber receives before the clock starts."""


class Subscriber(asyncio.Protocol):
    """One connection with one subscription. It answers PINGs, since the service pushes only one unconfirmed window."""

    def __init__(self, subject: str, notify: Callable[[int], None]) -> None:
        """``notify`` is called with the number of messages just received."""
        self._subject = subject.encode()
        self._notify = notify
        self._end = b""
        self._transport: asyncio.Transport | None = None
        self.subscribed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.subscribed.done():
            if data.startswith(b"INFO "):
                self.write(
                    b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\nSUB %b 1\r\nPING\r\n' % self._subject
                )
            if b"PONG\r\n" in data:
                self.subscribed.set_result(None)
        # A token may be split between two chunks.
        before, seen = self._end, self._end + data
        self._end = seen[-_KEPT:]
        if pings := seen.count(PING) - before.count(PING):
            self.write(b"PONG\r\n" * pings)
        if messages := seen.count(MESSAGE):
            self._notify(messages)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.subscribed.done():
            self.subscribed.set_exception(error or ConnectionResetError("the server closed the connection"))

    def write(self, frames: bytes) -> None:
        assert self._transport is not None
        self._transport.write(frames)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class SubscriberGroup:
    """Subscribers whose messages are counted together."""

    def __init__(self, url: str) -> None:
        self.seen = 0
        where = urlsplit(url)
        self._host, self._port = where.hostname or "127.0.0.1", where.port or 4222
        self._wanted = 0
        self._there = asyncio.Event()
        self._places = asyncio.Semaphore(100)
        self._subscribers: list[Subscriber] = []

    async def join(self, subject: str) -> Subscriber:
        """Add a subscriber."""
        async with self._places:
            _, listener = await asyncio.get_running_loop().create_connection(
                lambda: Subscriber(subject, self._count), self._host, self._port
            )
            self._subscribers.append(listener)
            await listener.subscribed
            return listener

    async def until(self, wanted: int) -> None:
        """Wait until all subscribers together have received ``count`` messages."""
        self._wanted = wanted
        self._there.clear()
        if self.seen < wanted:
            await asyncio.wait_for(self._there.wait(), PATIENCE)

    def close(self) -> None:
        for listener in self._subscribers:
            listener.close()

    def _count(self, messages: int) -> None:
        self.seen += messages
        if self.seen >= self._wanted:
            self._there.set()


async def replayed(_client: Client, spec: dict[str, Any]) -> dict[str, Any]:
    """Subscribe to ``subject`` and receive its ``count`` stored messages."""
    group = SubscriberGroup(spec["url"])
    cpu, started = cpu_seconds(spec["pid"]), time.perf_counter()
    await group.join(spec["subject"])
    await group.until(spec["count"])
    return _figures(group, spec, spec["count"], cpu, started)


async def live(_client: Client, spec: dict[str, Any]) -> dict[str, Any]:
    """Publish ``count`` messages to ``subscribers``, with at most ``ahead`` in flight to each."""
    group = SubscriberGroup(spec["url"])
    await asyncio.gather(*(group.join(spec["subject"].replace(".normal", ".*")) for _ in range(spec["subscribers"])))
    return await _publish(group, spec)


async def live_from_stream(client: Client, spec: dict[str, Any]) -> dict[str, Any]:
    """Publish to a stream on files, whose push consumer passes each message on to one subscriber once it is stored."""
    jetstream, group = client.jetstream(), SubscriberGroup(spec["url"])
    await jetstream.add_stream(name="live", subjects=[spec["subject"]])
    await group.join("bench.deliver")
    config = ConsumerConfig(name="live", deliver_subject="bench.deliver", ack_policy=AckPolicy.NONE)
    await jetstream.add_consumer("live", config)
    figures = await _publish(group, spec)
    await jetstream.delete_stream("live")
    return figures


async def _publish(group: SubscriberGroup, spec: dict[str, Any]) -> dict[str, Any]:
    each, ahead = spec["subscribers"], spec["ahead"]
    publisher = await group.join("bench.silent")
    frame = b"PUB %b %d\r\n%b\r\n" % (spec["subject"].encode(), len(PAYLOAD), PAYLOAD)
    publisher.write(frame * WARM)
    await group.until(WARM * each)
    cpu, started = cpu_seconds(spec["pid"]), time.perf_counter()
    step = max(1, ahead // 2)
    for sent in range(step, spec["count"] + 1, step):
        publisher.write(frame * step)
        await group.until((WARM + sent - step) * each)
    pushes = spec["count"] // step * step * each
    await group.until(WARM * each + pushes)
    return _figures(group, spec, pushes, cpu, started)


def _figures(group: SubscriberGroup, spec: dict[str, Any], pushes: int, cpu: float, started: float) -> dict[str, Any]:
    seconds = time.perf_counter() - started
    spent = (cpu_seconds(spec["pid"]) - cpu) / pushes * 1e6
    group.close()
    return {"rate": pushes / seconds, "cpu_us": spent}
