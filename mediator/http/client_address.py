"""Finds out which address a request came from, behind reverse proxies whose header is believed."""

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, Literal

from aiohttp import web
from multidict import MultiMapping

from mediator.http.connections import Address, HttpConnection

Network = IPv4Network | IPv6Network
ForwardedHeader = Literal["X-Forwarded-For", "Forwarded"]

MAX_PROXIES: Final = 16
"""Addresses of the header that are read, from its end."""


class ClientAddresses:
    """Reads one header of trusted proxies. The client could have written any other, so only this one is read."""

    def __init__(self, trusted: Sequence[Network] = (), header: ForwardedHeader = "X-Forwarded-For") -> None:
        self._trusted = tuple(trusted)
        self._header = header

    def of_request(self, request: web.Request) -> Address | None:
        """Return the address of a request; None for one that came over no connection of ours."""
        connection = request.protocol
        return self.of(connection.address, request.headers) if isinstance(connection, HttpConnection) else None

    def of(self, peer: Address | None, headers: MultiMapping[str]) -> Address | None:
        """Return the last address of the header that no trusted proxy has, or the peer of the connection."""
        if peer is None or not self._trusts(peer):
            return peer
        hops = ",".join(headers.getall(self._header, ())).split(",")[-MAX_PROXIES:]
        for hop in reversed(hops):
            found = parse_address(_for(hop) if self._header == "Forwarded" else hop)
            if found is None:
                # What stands before it is not to be believed either.
                return peer
            peer = found
            if not self._trusts(peer):
                return peer
        return peer

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def _for(element: str) -> str:
    """Return the address of one element of ``Forwarded`` (RFC 7239 §5.2); empty without one."""
    for pair in element.split(";"):
        name, _, value = pair.partition("=")
        if name.strip().lower() == "for":
            return value.strip().strip('"')
    return ""


def parse_address(text: str) -> Address | None:
    """Read an address, with a port behind it or without."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
