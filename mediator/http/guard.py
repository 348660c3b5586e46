"""The guard: HTTP to addresses that strangers chose, which must not lead into the operator's own network (D10)."""

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network

from aiohttp import ClientWebSocketResponse
from aiohttp.abc import AbstractResolver

Network = IPv4Network | IPv6Network


class Guard:
    """Reaches public addresses, and the private networks an operator allows."""

    def __init__(self, allow: Sequence[Network] = (), *, resolver: AbstractResolver | None = None) -> None:
        raise NotImplementedError

    async def get(self, url: str, max_bytes: int, seconds: float) -> bytes:
        """Return the body of a 200; :class:`UnreachableError` for everything else. No redirects."""
        raise NotImplementedError

    async def post(self, url: str, body: bytes, content_type: str, seconds: float) -> int:
        """Return the status; follows up to three 307 within the scheme. :class:`UnreachableError` without an answer."""
        raise NotImplementedError

    async def ws_connect(self, url: str, max_bytes: int, seconds: float) -> ClientWebSocketResponse:
        """Open a WebSocket, which the caller closes; :class:`UnreachableError` when it does not come about."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close all connections."""
        raise NotImplementedError
