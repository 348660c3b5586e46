"""Subscribers that only count, each on a connection of its own: the server is measured, not a client's library."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

from nats.aio.client import Client

from benchmarks.filling import PAYLOAD
from benchmarks.servers import cpu_seconds

MESSAGE = b"MSG $mq9.AI."
"""What each message begins with, with headers or without; no payload holds it."""
PING = b"PING\r\n"
_KEPT = max(len(MESSAGE), len(PING)) - 1
PATIENCE = 120
WARM = 10
"""Messages that everybody has had before the clock starts."""


class Listener(asyncio.Protocol):
    """One connection with one subscription. It answers PINGs, since nobody is pushed more than it confirms."""

    def __init__(self, subject: str, told: Callable[[int], None]) -> None:
        """``told`` gets the number of messages that have just come."""
        self._subject = subject.encode()
        self._told = told
        self._end = b""
        self._transport: asyncio.Transport | None = None
        self.subscribed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.subscribed.done():
            if data.startswith(b"INFO "):
                self.write(b'CONNECT {"verbose":false,"headers":true}\r\nSUB %b 1\r\nPING\r\n' % self._subject)
            if b"PONG\r\n" in data:
                self.subscribed.set_result(None)
        # A word may be parted between two chunks.
        before, seen = self._end, self._end + data
        self._end = seen[-_KEPT:]
        if pings := seen.count(PING) - before.count(PING):
            self.write(b"PONG\r\n" * pings)
        if messages := seen.count(MESSAGE):
            self._told(messages)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.subscribed.done():
            self.subscribed.set_exception(error or ConnectionResetError("the server closed the connection"))

    def write(self, frames: bytes) -> None:
        assert self._transport is not None
        self._transport.write(frames)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Crowd:
    """Listeners that are counted together."""

    def __init__(self, url: str) -> None:
        self.seen = 0
        self._where = urlsplit(url)
        self._wanted = 0
        self._there = asyncio.Event()
        self._places = asyncio.Semaphore(100)
        self._listeners: list[Listener] = []

    async def join(self, subject: str) -> Listener:
        """Let one more subscribe."""
        async with self._places:
            _, listener = await asyncio.get_running_loop().create_connection(
                lambda: Listener(subject, self._count), self._where.hostname, self._where.port
            )
            self._listeners.append(listener)
            await listener.subscribed
            return listener

    async def until(self, wanted: int) -> None:
        """Wait until so many messages have come to all of them together."""
        self._wanted = wanted
        self._there.clear()
        if self.seen < wanted:
            await asyncio.wait_for(self._there.wait(), PATIENCE)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _count(self, messages: int) -> None:
        self.seen += messages
        if self.seen >= self._wanted:
            self._there.set()


async def replayed(_client: Client, spec: dict[str, Any]) -> dict[str, Any]:
    """Subscribe to ``subject`` and take the ``count`` messages that are stored."""
    crowd = Crowd(spec["url"])
    cpu, started = _cpu(spec), time.perf_counter()
    await crowd.join(spec["subject"])
    await crowd.until(spec["count"])
    return _figures(crowd, spec, spec["count"], cpu, started)


async def live(_client: Client, spec: dict[str, Any]) -> dict[str, Any]:
    """Publish ``count`` messages to ``subscribers``, with at most ``ahead`` under way to each."""
    crowd = Crowd(spec["url"])
    each, ahead = spec["subscribers"], spec["ahead"]
    await asyncio.gather(*(crowd.join(spec["subject"].replace(".normal", ".*")) for _ in range(each)))
    publisher = await crowd.join("bench.silent")
    frame = b"PUB %b %d\r\n%b\r\n" % (spec["subject"].encode(), len(PAYLOAD), PAYLOAD)
    publisher.write(frame * WARM)
    await crowd.until(WARM * each)
    cpu, started = _cpu(spec), time.perf_counter()
    step = max(1, ahead // 2)
    for sent in range(step, spec["count"] + 1, step):
        publisher.write(frame * step)
        await crowd.until((WARM + sent - step) * each)
    pushes = spec["count"] // step * step * each
    await crowd.until(WARM * each + pushes)
    return _figures(crowd, spec, pushes, cpu, started)


def _cpu(spec: dict[str, Any]) -> list[float]:
    return [cpu_seconds(pid) for pid in spec["pids"]]


def _figures(crowd: Crowd, spec: dict[str, Any], pushes: int, cpu: list[float], started: float) -> dict[str, Any]:
    seconds = time.perf_counter() - started
    spent = [(now - before) / pushes * 1e6 for now, before in zip(_cpu(spec), cpu, strict=True)]
    crowd.close()
    return {"rate": pushes / seconds, "cpu_us": spent}
