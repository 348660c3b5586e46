"""Arriving: WebSocket messages that have begun and are not whole yet, bounded in bytes for all sockets together.

The library keeps their parts in memory until the last has come, which a peer may never send.
"""

import asyncio

MAX_ARRIVING = 256 * 1024 * 1024
"""Bytes; above it the socket with the most of them is dropped."""
CONTROL_BYTES = 6
"""Of a ping or pong of a client, beside what it carries."""


class Arriving:
    """What all sockets hold."""

    def __init__(self) -> None:
        self._bytes = 0
        self._meters: set[Meter] = set()

    def watch(self, transport: asyncio.Transport) -> "Meter":
        """Count what comes in on a connection from now on."""
        meter = Meter(self, transport)
        self._meters.add(meter)
        return meter

    def count(self, meter: "Meter", by: int) -> None:
        """Note that a socket holds more, or less."""
        meter.bytes += by
        self._bytes += by
        if self._bytes > MAX_ARRIVING:
            largest = max(self._meters, key=lambda one: one.bytes)
            self.forget(largest)
            largest.abort()

    def forget(self, meter: "Meter") -> None:
        """Count a connection no more."""
        if meter in self._meters:
            self._meters.discard(meter)
            self._bytes -= meter.bytes


class Meter(asyncio.Protocol):
    """Stands before the protocol of a connection, and counts bytes since the last message that was whole."""

    def __init__(self, arriving: Arriving, transport: asyncio.Transport) -> None:
        self.bytes = 0
        self._arriving = arriving
        self._transport = transport
        self._protocol = transport.get_protocol()
        transport.set_protocol(self)

    def whole(self) -> None:
        """Note that a message came to its end."""
        self._arriving.count(self, -self.bytes)

    def control(self, size: int) -> None:
        """Note a ping or pong that carried ``size`` bytes: one may stand between the parts of a message."""
        self._arriving.count(self, -min(self.bytes, size + CONTROL_BYTES))

    def abort(self) -> None:
        """Drop the connection."""
        self._transport.abort()

    def end(self) -> None:
        """Count no more, and leave the connection as it was."""
        self._arriving.forget(self)
        if not self._transport.is_closing():
            self._transport.set_protocol(self._protocol)

    # What the connection says, handed on.

    def data_received(self, data: bytes) -> None:
        """Count, and hand on."""
        self._arriving.count(self, len(data))
        self._protocol.data_received(data)  # type: ignore[attr-defined]

    def eof_received(self) -> bool | None:
        """Hand on."""
        closing: bool | None = self._protocol.eof_received()  # type: ignore[attr-defined]
        return closing

    def connection_lost(self, exc: Exception | None) -> None:
        """Hand on."""
        self._arriving.forget(self)
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Hand on."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Hand on."""
        self._protocol.resume_writing()
