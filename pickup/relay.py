"""Relay: brings mail and answers to peers that have an endpoint of their own (D10)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from mediator.broker import Broker
from mediator.http.guard import Guard
from mediator.mediation.records import Connection, Generation
from pickup.envelope import Envelopes
from pickup.meters import Meters


class Relay:
    """One worker a holder while it has mail; answers are posted beside them."""

    def __init__(
        self,
        broker: Broker,
        envelopes: Envelopes,
        guard: Guard,
        meters: Meters,
        *,
        tenants: Sequence[str],
        live: Callable[[int], bool],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """``live`` says whether the holder with this connection number has a session: it is not relayed to then."""
        raise NotImplementedError

    async def open(self) -> None:
        """Begin: with what waited before the start, then with what comes."""
        raise NotImplementedError

    def look(self, connection: Connection) -> None:
        """Relay what waits for a holder, if it has an endpoint: it is there again, or mail came."""
        raise NotImplementedError

    def send_soon(
        self,
        endpoint: str,
        envelope: bytes,
        generation: Generation,
        *,
        to: str | None = None,
        routing_keys: Sequence[str] = (),
    ) -> None:
        """Deliver one envelope beside everything else, with bounded retries; what cannot be delivered is dropped.

        v1: with ``routing_keys``, mediators in front of the endpoint, ``to`` is the key the envelope is for.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Stop; what was not confirmed stays queued."""
        raise NotImplementedError
