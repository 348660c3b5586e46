"""What holder and sender share: the envelope library with the wallet's keys, a resolver, and the HTTP session."""

from ipaddress import ip_network

import aiohttp

from mediator.http.guard import Guard
from pickup.client.errors import ClientError
from pickup.client.wallet import Wallet
from pickup.dids.document import Document, Resolver
from pickup.dids.resolver import CachingResolver
from pickup.dids.web import WebDids
from pickup.envelope import Envelopes
from pickup.envelope.opener import LibraryEnvelopes

MAX_BYTES = 16 * 1024 * 1024
MAX_HOPS = 3
"""DIDs that may stand as endpoints of one another."""
EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
"""A client reaches what its user names, in private networks too."""


class _Nobody:
    """The DIDs that a client knows by heart: none, since those it makes say everything themselves."""

    def document(self, did: str) -> Document | None:
        return None

    async def long_form(self, short: str) -> str | None:
        return None


class Tools:
    """Made inside a running event loop, and closed by whoever made it."""

    def __init__(self, wallet: Wallet) -> None:
        self.wallet = wallet
        self._guard = Guard(EVERYWHERE)
        self.resolver: Resolver = CachingResolver(_Nobody(), WebDids(self._guard))
        self.envelopes: Envelopes = LibraryEnvelopes(self.resolver, wallet, max_bytes=MAX_BYTES)
        self.session = aiohttp.ClientSession()

    async def endpoints(self, did: str) -> tuple[str, ...]:
        """Return the URLs where a v2 DID is reached, HTTP before WebSocket, also those of a mediator before it."""
        for _ in range(MAX_HOPS):
            services = (await self.resolver.resolve(did.partition("#")[0])).services
            urls = [service.endpoint for service in services if not service.endpoint.startswith("did:")]
            if urls:
                return tuple(sorted(urls, key=lambda url: not url.startswith("http")))
            if not services:
                break
            did = services[0].endpoint
        raise ClientError("the DID's document names no endpoint")

    async def close(self) -> None:
        """Close all connections."""
        await self._guard.close()
        await self.session.close()
