"""Bounds the bytes of incomplete WebSocket messages, over all sockets together.

aiohttp keeps the fragments of a message in memory until the last one comes, which a peer may never send.
"""

import asyncio

MAX_INCOMPLETE = 256 * 1024 * 1024
"""Bytes; above it the socket with the most is dropped."""
CONTROL_BYTES = 6
"""Bytes of a client's ping or pong frame beside its payload."""


class InboundByteLimiter:
    """Counts the incomplete bytes of all sockets."""

    def __init__(self) -> None:
        self._bytes = 0
        self._metrics: set[ByteCounter] = set()

    def watch(self, transport: asyncio.Transport) -> "ByteCounter":
        """Start counting what comes in on a connection."""
        meter = ByteCounter(self, transport)
        self._metrics.add(meter)
        return meter

    def count(self, meter: "ByteCounter", by: int) -> None:
        """Add to what a socket holds, or take off."""
        meter.bytes += by
        self._bytes += by
        if self._bytes > MAX_INCOMPLETE:
            largest = max(self._metrics, key=lambda one: one.bytes)
            self.forget(largest)
            largest.abort()

    def forget(self, meter: "ByteCounter") -> None:
        """Stop counting a connection."""
        if meter in self._metrics:
            self._metrics.discard(meter)
            self._bytes -= meter.bytes


class ByteCounter(asyncio.Protocol):
    """Wraps the protocol of a connection and counts bytes since the last complete message."""

    def __init__(self, limiter: InboundByteLimiter, transport: asyncio.Transport) -> None:
        self.bytes = 0
        self._limiter = limiter
        self._transport = transport
        self._protocol = transport.get_protocol()
        transport.set_protocol(self)

    def complete(self) -> None:
        """Note that a message is complete."""
        self._limiter.count(self, -self.bytes)

    def control(self, size: int) -> None:
        """Note a ping or pong of ``size`` bytes, which may come between the fragments of a message."""
        self._limiter.count(self, -min(self.bytes, size + CONTROL_BYTES))

    def abort(self) -> None:
        """Drop the connection."""
        self._transport.abort()

    def end(self) -> None:
        """Stop counting, and restore the connection's protocol."""
        self._limiter.forget(self)
        if not self._transport.is_closing():
            self._transport.set_protocol(self._protocol)

    # Events of the connection, passed on.

    def data_received(self, data: bytes) -> None:
        """Count, and pass on."""
        self._limiter.count(self, len(data))
        self._protocol.data_received(data)  # type: ignore[attr-defined]

    def eof_received(self) -> bool | None:
        """Pass on."""
        closing: bool | None = self._protocol.eof_received()  # type: ignore[attr-defined]
        return closing

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on."""
        self._limiter.forget(self)
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass on."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass on."""
        self._protocol.resume_writing()
