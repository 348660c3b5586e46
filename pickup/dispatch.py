"""Gives every opened message to the handler of its protocol; a new protocol joins by one registration.

A handler is a coroutine ``(Call) -> Sequence[Reply]``. What it raises from the tree of errors is answered with a
problem report when the sender is known (D12).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mediator.mediation.records import Connection, Generation
from pickup.message import Message, Reply

if TYPE_CHECKING:
    from pickup.office import Office


class Channel(Protocol):
    """Where a message came in, and where answers may go back (D5)."""

    routes: set[str]
    """Who asked for answers on this channel for as long as it lasts: canonical callers (D5). Bounded by the post."""

    @property
    def persistent(self) -> bool:
        """Whether it can carry live mode: a WebSocket (D6)."""

    async def send(self, envelope: bytes, generation: Generation) -> bool:
        """Send an envelope; False when it could not be: the peer is gone, or HTTP has had its one answer."""

    async def confirmed(self) -> bool:
        """Wait until the peer has read what was sent, by ping and pong; False when it has not (D7)."""


@dataclass(slots=True)
class Call:
    """One message, who sent it, and what a handler may use."""

    office: "Office"
    tenant: str
    message: Message
    me: str
    """Our DID (v2) or canonical key (v1) that the message was sealed for."""
    caller: str | None
    """Canonical DID (v2) or key (v1) that sealed it; None: anonymous (D8)."""
    sender: str | None
    """The same as it was written, the long form of a did:peer:4: what an answer is sealed for."""
    connection: Connection | None
    channel: Channel
    after: list[Callable[[bool], Awaitable[None]]] = field(default_factory=list)
    """Run once the answers are written: True when they went out on the channel the message came by."""


Handler = Callable[[Call], Awaitable[Sequence[Reply]]]
