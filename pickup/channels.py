"""Where messages come in and replies may go back: HTTP requests and WebSockets, their return routes and tenants."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from mediator.tenants.directory import TenantDirectory
from pickup.rules.records import Generation

MAX_ROUTES = 64
"""Callers whose return route one channel remembers."""
MAX_THREADS = 8
"""Threads of each, the last ones that it named."""

AfterReply = Callable[[bool], Awaitable[None]]
"""Called once the replies to a message are sent: True when they went out on its channel."""


class ReturnRoutes:
    """Return routes on one channel: of a caller everything, or some threads (RFC 0092, D5); bounded."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, ...] | None] = {}
        """By canonical caller its threads; None: everything."""

    def follow(self, caller: str, thread: str | None) -> None:
        """Return this thread of a caller here besides those before, or everything."""
        if len(self._of) >= MAX_ROUTES and caller not in self._of:
            return
        if thread is None:
            self._of[caller] = None
            return
        threads = [one for one in self._of.get(caller) or () if one != thread]
        self._of[caller] = (*threads, thread)[-MAX_THREADS:]

    def end(self, caller: str) -> None:
        """Return nothing of a caller here any more."""
        self._of.pop(caller, None)

    def lead_here(self, caller: str, thread: str) -> bool:
        """Whether a reply of this thread is returned here."""
        threads = self._of.get(caller, ())
        return threads is None or thread in threads

    def rename(self, before: str, after: str) -> None:
        """Let the routes of a DID be those of the DID that it was rotated to (D14)."""
        if before in self._of:
            self._of[after] = self._of.pop(before)


class TransportChannel(Protocol):
    """Where a message came in, and where replies may go back (D5)."""

    routes: ReturnRoutes
    """Who asked for replies on this channel (RFC 0092, D5)."""

    client: str
    """The product that the peer names as its User-Agent, in short; empty: none."""

    @property
    def persistent(self) -> bool:
        """Whether it can carry live mode: a WebSocket (D6)."""

    async def send(self, envelope: bytes, generation: Generation) -> bool:
        """Send an envelope; False when the peer is gone, or HTTP has had its one reply."""

    async def confirmed(self) -> bool:
        """Wait until the peer has read what was sent, by ping and pong; False when it did not (D7)."""


class TenantSockets:
    """Used on the event loop."""

    def __init__(self, directory: TenantDirectory) -> None:
        self.directory = directory
        """Which tenants there are."""
        self._tenants: dict[TransportChannel, str] = {}

    def enter(self, channel: TransportChannel, tenant: str) -> None:
        """Count a WebSocket for the tenant of the first wallet on it; raises :class:`QuotaExceededError`."""
        if channel not in self._tenants:
            self.directory.enter(tenant)
            self._tenants[channel] = tenant

    def leave(self, channel: TransportChannel) -> None:
        """Count a WebSocket out, if it counts."""
        if (tenant := self._tenants.pop(channel, None)) is not None:
            self.directory.leave(tenant)

    def of_removed(self) -> list[TransportChannel]:
        """Return the WebSockets of removed tenants."""
        return [channel for channel, tenant in self._tenants.items() if self.directory.is_removed(tenant)]
