"""What holder and sender share: the envelope library with the wallet's keys, a resolver, and the HTTP session."""

import aiohttp

from pickup.client.errors import ClientError
from pickup.client.wallet import Wallet
from pickup.dids.document import Resolver
from pickup.dids.resolver import CachingResolver
from pickup.envelope import Envelopes
from pickup.envelope.opener import LibraryEnvelopes

MAX_BYTES = 16 * 1024 * 1024
MAX_HOPS = 3
"""DIDs that may stand as endpoints of one another."""


class Tools:
    """Made inside a running event loop, and closed by whoever made it."""

    def __init__(self, wallet: Wallet) -> None:
        self.wallet = wallet
        self.resolver: Resolver = CachingResolver()
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
        await self.session.close()
