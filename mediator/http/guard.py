"""Calls URLs that strangers chose, without reaching into the operator's own network (D10).

The check is made on the address that a socket is about to connect to, whatever name, number or redirect led there, so
no second look-up can change it.
"""

import asyncio
import io
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
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
from mediator.http.bodies import read_body
from mediator.http.resolver import ThreadedResolver

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address

MAX_URL = 2048
"""Characters."""
MAX_REDIRECTS = 3
MAX_CONNECTIONS = 256

_HTTP = frozenset({"http", "https"})
_WS = frozenset({"ws", "wss"})
_NO_URL = (ValueError, IndexError)
"""What yarl raises for text that is no URL; the second for ``http://[]@``."""
_TEMPORARY_REDIRECT = 307
_LOW_PORTS = frozenset({80, 443})
"""The only web ports below 1024; other servers might take HTTP for their own protocol."""
_NAT64 = IPv6Network("64:ff9b::/96")
_RELAYED = (IPv6Network("2002::/16"), IPv6Network("2001::/32"))
"""6to4 and Teredo: tunnels to an IPv4 address that is part of the IPv6 one."""
_METADATA = frozenset({IPv4Address("168.63.129.16"), IPv4Address("192.0.0.192")})
"""Public addresses that the host of a virtual machine answers (Azure, Oracle); those of others are link-local."""
_NOT_PUBLIC = (IPv4Network("192.88.99.0/24"), IPv6Network("fec0::/10"), IPv6Network("3fff::/20"))
"""Relays of 6to4, site-local and documentation addresses, which the standard library counts as global."""


class Guard:
    """An HTTP client that reaches public addresses, and the private networks that an operator allows."""

    def __init__(
        self,
        allow: Sequence[Network] = (),
        *,
        resolver: AbstractResolver | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``resolver`` replaces that of the system, ``tls`` the system's store of trusted certificates."""
        self._allow = tuple(allow)
        self._resolver = resolver
        self._tls = tls
        self._session: ClientSession | None = None

    async def get(self, url: str, max_bytes: int, seconds: float) -> bytes:
        """Return the body of a 200.

        Raises :class:`AddressRefusedError` for an address that must not be called, :class:`UnreachableError` for any
        other outcome: redirects, encoded bodies, more than ``max_bytes``, more than ``seconds`` in all.
        """
        async with (
            _in_time(seconds),
            self._open().get(_checked(url, _HTTP), allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise UnreachableError(f"expected status 200, got {response.status}")
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise UnreachableError("expected a body that is not compressed")
            body = await read_body(response, max_bytes + 1)
            if len(body) > max_bytes:
                raise UnreachableError(f"expected a body of at most {max_bytes} bytes")
            return body

    async def post(self, url: str, body: bytes, content_type: str, seconds: float) -> int:
        """Return the status of the response within ``seconds``; its body is not read.

        Follows up to three redirects with status 307 to the same scheme, as DIDComm asks. Raises as :meth:`get`.
        """
        target = _checked(url, _HTTP)
        headers = {"Content-Type": content_type}
        async with _in_time(seconds):
            for _ in range(1 + MAX_REDIRECTS):
                # aiohttp writes raw bytes in one piece, and warns of that above 1 MiB.
                data = io.BytesIO(body)
                async with self._open().post(target, data=data, headers=headers, allow_redirects=False) as response:
                    status, location = response.status, response.headers.get("Location")
                if status != _TEMPORARY_REDIRECT or location is None:
                    return status
                target = _redirected(target, location)
            raise UnreachableError(f"expected at most {MAX_REDIRECTS} redirects")

    async def post_once(self, url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> int:
        """Return the status of the response within ``seconds``; no redirect is followed. Raises as :meth:`get`."""
        target, data = _checked(url, _HTTP), io.BytesIO(body)
        async with (
            _in_time(seconds),
            self._open().post(target, data=data, headers=headers, allow_redirects=False) as response,
        ):
            return response.status

    async def ws_connect(self, url: str, max_bytes: int, seconds: float) -> ClientWebSocketResponse:
        """Open a WebSocket within ``seconds`` for frames of at most ``max_bytes``; the caller closes it.

        Pings and pongs are the caller's. Raises as :meth:`get`.
        """
        async with _in_time(seconds):
            # aiohttp's limit is the first size that is too large.
            return await self._open().ws_connect(_checked(url, _WS), max_msg_size=max_bytes + 1, autoping=False)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> ClientSession:
        if self._session is None:
            connector = TCPConnector(
                resolver=self._resolver or ThreadedResolver(),
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
                # Every call has a time limit for the whole, with the reading of the body.
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
    """Raised inside aiohttp; always equal, so aiohttp does not merge the errors of several addresses into another."""

    def __init__(self) -> None:
        super().__init__("address refused")


def _inner(address: IPv6Address) -> Address:
    """Return the IPv4 address that an IPv6 address embeds, if it does."""
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
        # Read the port here, so a bad one is found before the name is resolved.
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
    # uvloop raises RuntimeError for closed sockets, aiohttp ValueError for impossible names.
    except (ClientError, OSError, RuntimeError, ValueError):
        raise UnreachableError("no proper answer") from None
