"""What holder and sender share: envelopes with the wallet's keys, a resolver, and the HTTP session."""

from ipaddress import ip_network

import aiohttp

from mediator.http.guard import Guard
from pickup.client.errors import ClientError
from pickup.client.wallet import Wallet
from pickup.dids.document import DidDocument, DidResolver
from pickup.dids.resolver import CachingResolver
from pickup.dids.web import DidWebResolver
from pickup.envelope import Envelopes
from pickup.envelope.library import LibraryEnvelopes
from pickup.envelope.v2 import DidcommMessagingLibrary

MAX_BYTES = 16 * 1024 * 1024
MAX_HOPS = 3
"""DIDs that may follow each other as endpoints."""
EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
"""A client may call what its user names, in private networks too."""


class _NoDids:
    """No DIDs are known in advance: those of a client carry their documents."""

    def document(self, did: str) -> DidDocument | None:
        return None

    async def long_form(self, short: str) -> str | None:
        return None


class ClientResources:
    """Needs a running event loop; its maker closes it."""

    def __init__(self, wallet: Wallet) -> None:
        self.wallet = wallet
        self._guard = Guard(EVERYWHERE)
        self.resolver: DidResolver = CachingResolver(_NoDids(), DidWebResolver(self._guard))
        self.envelopes: Envelopes = LibraryEnvelopes(
            self.resolver, wallet, max_bytes=MAX_BYTES, v2=DidcommMessagingLibrary()
        )
        self.session = aiohttp.ClientSession()

    async def endpoints(self, did: str) -> tuple[str, ...]:
        """Return the URLs of a v2 DID, HTTP before WebSocket; those of its mediator when it names one."""
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
