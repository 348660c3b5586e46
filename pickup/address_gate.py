"""Decides by its address whether a request may be read: deny lists, and messages a second."""

import math

from aiohttp import web
from multidict import MultiMapping

from mediator.errors import DeniedError, RateLimitedError
from mediator.http.client_address import ClientAddresses
from mediator.http.connections import Address, group
from pickup.access_lists import AccessLists
from pickup.metrics import DidcommMetrics
from pickup.rate_limits import RateLimiter
from pickup.rules.records import Verdict


class AddressGate:
    """The first thing that a POST, a WebSocket and each of its frames pass."""

    def __init__(
        self, addresses: ClientAddresses, access: AccessLists, limiter: RateLimiter | None, metrics: DidcommMetrics
    ) -> None:
        """``limiter``: of messages from one address; allowed networks have no limit."""
        self._addresses = addresses
        self._access = access
        self._limiter = limiter
        self._metrics = metrics

    def admit(self, peer: Address | None, headers: MultiMapping[str]) -> None:
        """Count one message; raises :class:`DeniedError` and :class:`RateLimitedError`."""
        address = self._addresses.of(peer, headers)
        if address is None:
            return
        verdict = self._access.verdict(address)
        if verdict is Verdict.DENY:
            raise DeniedError
        if self._limiter is not None and verdict is None:
            wait = self._limiter.take(group(address))
            if wait:
                self._metrics.limited("address")
                raise RateLimitedError("address", math.ceil(wait))

    def find(self, request: web.Request) -> Address | None:
        """Return the address that a request comes from."""
        return self._addresses.of_request(request)

    def denies(self, address: Address | None) -> bool:
        """Whether the operator denies the address."""
        return address is not None and self._access.verdict(address) is Verdict.DENY

    def reserve(self, address: Address | None) -> float:
        """Count one frame; return the seconds until the next one may be read."""
        if self._limiter is None or address is None or self._access.verdict(address) is not None:
            return 0
        wait = self._limiter.reserve(group(address))
        if wait:
            self._metrics.limited("address")
        return wait
