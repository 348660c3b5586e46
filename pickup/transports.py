"""Transports: HTTP POST and WebSocket at ``/didcomm``, what is accepted on them and how answers go back (D5, D9)."""

from typing import Protocol

from aiohttp import web

from pickup.dispatch import Channel
from pickup.meters import Meters

PATH = "/didcomm"


class Receiver(Protocol):
    """Handles what comes in; the reception does."""

    async def receive(self, data: bytes, channel: Channel) -> None:
        """Handle one envelope, raising from the tree of errors what cannot be told to a known sender (D12)."""


class Leaving(Protocol):
    """Is told of sockets that are gone; the sessions are."""

    async def left(self, channel: Channel) -> None:
        """End what runs on the channel."""


class Transports:
    """The routes of the door."""

    def __init__(
        self,
        receiver: Receiver,
        sessions: Leaving,
        meters: Meters,
        *,
        max_message: int,
        max_sockets: int,
        rate: int,
    ) -> None:
        """``max_message`` is the limit of one envelope in bytes, ``rate`` messages a second from one socket."""
        raise NotImplementedError

    def add_routes(self, app: web.Application) -> None:
        """Serve the door with this application; its shutdown closes the sockets with 1001."""
        raise NotImplementedError
