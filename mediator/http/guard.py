"""The guard: HTTP to addresses that strangers chose, which must not lead into the operator's own network (D10).

What is checked is the address a socket is about to connect to, whatever name, number or redirect led there: between
the check and the connection nothing is looked up once more.
"""

import asyncio
import io
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from aiohttp import (
    AddrInfoType,
    ClientConnectorError,
    ClientError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    DummyCookieJar,
    TCPConnector,
)
from aiohttp.abc import AbstractResolver
from yarl import URL

from mediator.errors import AddressRefusedError, UnreachableError

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address

MAX_URL = 2048
"""Characters."""
MAX_REDIRECTS = 3
MAX_CONNECTIONS = 256

_HTTP = frozenset({"http", "https"})
_WS = frozenset({"ws", "wss"})
_NO_URL = (ValueError, IndexError)
"""What the library raises for text that is no URL; the second for ``http://[]@``."""
_TEMPORARY_REDIRECT = 307
_LOW_PORTS = frozenset({80, 443})
"""The only ones below 1024 that are web servers; on others HTTP might be taken for mail or the like."""
_NAT64 = IPv6Network("64:ff9b::/96")
_RELAYED = (IPv6Network("2002::/16"), IPv6Network("2001::/32"))
"""6to4 and Teredo: a tunnel to an IPv4 address that is written inside."""
_METADATA = frozenset({IPv4Address("168.63.129.16"), IPv4Address("192.0.0.192")})
"""Public by their numbers, but answered by the host of a virtual machine (Azure, Oracle); others are link-local."""
_NOT_PUBLIC = (IPv4Network("192.88.99.0/24"), IPv6Network("fec0::/10"), IPv6Network("3fff::/20"))
"""Relays of 6to4, site-local and documentation addresses, which the standard library counts as global."""


class Guard:
    """Reaches public addresses, and the private networks an operator allows."""

    def __init__(
        self,
        allow: Sequence[Network] = (),
        *,
        resolver: AbstractResolver | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``resolver`` is asked instead of the system, ``tls`` says whom to trust instead of the system's store."""
        self._allow = tuple(allow)
        self._resolver = resolver
        self._tls = tls
        self._session: ClientSession | None = None

    async def get(self, url: str, max_bytes: int, seconds: float) -> bytes:
        """Return the body of a 200.

        Raises :class:`AddressRefusedError` for an address that is not called, :class:`UnreachableError` for every other
        answer or none: redirects, encoded bodies, more than ``max_bytes``, more than ``seconds`` in all.
        """
        async with (
            _in_time(seconds),
            self._open().get(_checked(url, _HTTP), allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise UnreachableError(f"expected status 200, got {response.status}")
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise UnreachableError("expected a body that is not compressed")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise UnreachableError(f"expected a body of at most {max_bytes} bytes")
            return bytes(body)

    async def post(self, url: str, body: bytes, content_type: str, seconds: float) -> int:
        """Return the status that the server answers within ``seconds``; what else it says is not read.

        Follows three times a 307 that stays within the scheme, as DIDComm asks. Errors as those of :meth:`get`.
        """
        target = _checked(url, _HTTP)
        headers = {"Content-Type": content_type}
        async with _in_time(seconds):
            for _ in range(1 + MAX_REDIRECTS):
                # The library writes raw bytes in one piece, and above 1 MiB warns of that.
                data = io.BytesIO(body)
                async with self._open().post(target, data=data, headers=headers, allow_redirects=False) as response:
                    status, location = response.status, response.headers.get("Location")
                if status != _TEMPORARY_REDIRECT or location is None:
                    return status
                target = _redirected(target, location)
            raise UnreachableError(f"expected at most {MAX_REDIRECTS} redirects")

    async def ws_connect(self, url: str, max_bytes: int, seconds: float) -> ClientWebSocketResponse:
        """Open a WebSocket within ``seconds`` for frames of at most ``max_bytes``; the caller closes it.

        Pings and pongs are the caller's. Errors as those of :meth:`get`.
        """
        async with _in_time(seconds):
            # The library's bound is the first size that is too much.
            return await self._open().ws_connect(_checked(url, _WS), max_msg_size=max_bytes + 1, autoping=False)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> ClientSession:
        if self._session is None:
            connector = TCPConnector(
                resolver=self._resolver,
                use_dns_cache=False,
                socket_factory=self._socket,
                limit=MAX_CONNECTIONS,
                ssl=self._tls or True,
            )
            self._session = ClientSession(
                connector=connector,
                cookie_jar=DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,
                # Every call is bounded as a whole, with the reading of the body.
                timeout=ClientTimeout(total=None),
            )
        return self._session

    def _socket(self, info: AddrInfoType) -> socket.socket:
        family, kind, protocol, _name, target = info
        host, port = target[0], target[1]
        if not isinstance(host, str) or not isinstance(port, int) or not self._may_reach(host, port):
            raise _NotReachedError
        return socket.socket(family, kind, protocol)

    def _may_reach(self, host: str, port: int) -> bool:
        address: Address = ip_address(host.partition("%")[0])
        if isinstance(address, IPv6Address):
            address = _inner(address)
        if any(address in network for network in self._allow):
            return True
        return _is_public(address) and (port in _LOW_PORTS or port >= 1024)


class _NotReachedError(OSError):
    """Raised inside of aiohttp; all alike, so that it comes out as itself when a name has several such addresses."""

    def __init__(self) -> None:
        super().__init__("address refused")


def _inner(address: IPv6Address) -> Address:
    """Return the IPv4 address that an IPv6 one stands for, if it does."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return IPv4Address(address.packed[-4:])
    return address


def _is_public(address: Address) -> bool:
    barred = any(address in network for network in (*_RELAYED, *_NOT_PUBLIC) if network.version == address.version)
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not barred
        and address not in _METADATA
    )


def _checked(url: str, schemes: frozenset[str]) -> URL:
    try:
        if len(url) > MAX_URL or not url.isprintable():
            raise ValueError
        parsed = URL(url)
        # The port is read here so that a bad one is found before anything is looked up.
        whole = parsed.scheme in schemes and bool(parsed.host) and bool(parsed.port)
    except _NO_URL:
        whole = False
    if not whole:
        raise AddressRefusedError(f"expected {' or '.join(sorted(schemes))} with a host, {MAX_URL} characters at most")
    if parsed.user is not None or parsed.password is not None:
        raise AddressRefusedError("expected no user or password in a URL")
    return parsed


def _redirected(origin: URL, location: str) -> URL:
    try:
        target = str(origin.join(URL(location)))
    except _NO_URL:
        raise UnreachableError("expected a redirect to a URL") from None
    return _checked(target, frozenset({origin.scheme}))


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise UnreachableError(f"no answer within {seconds:g} seconds") from None
    except ClientConnectorError as error:
        if isinstance(error.os_error, _NotReachedError):
            raise AddressRefusedError("leads into a private network") from None
        raise UnreachableError("no connection") from None
    # uvloop raises RuntimeError for sockets that are gone, aiohttp ValueError for names that cannot be.
    except (ClientError, OSError, RuntimeError, ValueError):
        raise UnreachableError("no proper answer") from None
