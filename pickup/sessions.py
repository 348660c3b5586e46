"""Sessions: mail pushed to holders over their sockets, live mode and implicit pickup (D6, D7)."""

from collections.abc import Callable
from typing import Protocol

from mediator.broker import Broker
from mediator.mediation.records import Connection
from mediator.mediation.taking import Status
from pickup.dispatch import Call, Channel
from pickup.message import Reply
from pickup.meters import Meters


class Sealer(Protocol):
    """Seals what is pushed; the post does."""

    async def seal(self, connection: Connection, reply: Reply) -> bytes:
        """Seal a message for a connection, from the identity it knows."""


class Announcer(Protocol):
    """Tells the instances that share a database; what is lost is not repeated."""

    async def publish(self, data: bytes) -> None:
        """Tell all instances."""

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        """Call ``heard`` with what is told, on the event loop."""


class Sessions:
    """At most one session a holder; the newest wins, on this instance and on others."""

    def __init__(
        self, broker: Broker, sealer: Sealer, meters: Meters, *, instance: str, announcer: Announcer | None = None
    ) -> None:
        raise NotImplementedError

    async def open(self) -> None:
        """Listen to the other instances."""
        raise NotImplementedError

    async def live(self, call: Call, on: bool) -> Status:
        """Turn live mode on or off for the caller's channel and return what waits, for the ``status`` (D6).

        Pushing begins when the answer has gone out on the channel, in the version and prefix of the call's message.
        Raises :class:`LiveModeError` where the channel cannot carry it, :class:`NotEnrolledError` without mediation.
        """
        raise NotImplementedError

    async def implicit(self, call: Call) -> None:
        """Push bare envelopes, the backlog first, for as long as the channel lives (D7); nothing on HTTP."""
        raise NotImplementedError

    def pushes_to(self, connection: Connection, channel: Channel) -> bool:
        """Whether live mode is on for the holder on this channel: ``live_delivery`` of a ``status``."""
        raise NotImplementedError

    def has(self, connection_no: int) -> bool:
        """Whether the holder has a session on this instance, on whatever channel."""
        raise NotImplementedError

    async def left(self, channel: Channel) -> None:
        """End what runs on a channel that is gone."""
        raise NotImplementedError

    async def close(self) -> None:
        """End all sessions; what was pushed and not acknowledged stays queued."""
        raise NotImplementedError
