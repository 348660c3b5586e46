"""Outbound: brings one envelope to the endpoint of a peer, over HTTP or WebSocket, through the guard (D10)."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import orjson
from aiohttp import ClientWebSocketResponse, WSMsgType

from mediator.errors import AddressRefusedError, MediatorError, UnreachableError
from mediator.http.guard import Guard
from mediator.mediation.names import base58, is_ed25519, verkey
from mediator.mediation.records import Generation
from pickup import media
from pickup.envelope import Envelopes
from pickup.message import DIDCOMM, encode

POST_SECONDS = 10.0
"""Time for one attempt, names and redirects included."""
MAX_ROUTING_KEYS = 10
"""Mediators in front of an endpoint."""
MAX_ANSWER = 64 * 1024
"""Bytes of a frame that an endpoint's WebSocket may send back; it is not read."""

_MARK = b"read"
_HTTP = ("http://", "https://")
_WS = ("ws://", "wss://")
# What is wrong with this one envelope; everything else may be wrong with the endpoint, or pass.
_REFUSALS = frozenset({400, 413, 415, 422})


Sleep = Callable[[float], Awaitable[object]]
"""Waits so many seconds before another attempt."""


class Outcome(StrEnum):
    """What became of an attempt."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    """The endpoint does not want this envelope: trying again is of no use."""
    FAILED = "failed"
    """It may succeed later."""
    BARRED = "barred"
    """The endpoint is none that is ever called."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """An envelope and where it goes."""

    endpoint: str
    envelope: bytes
    generation: Generation
    to: str | None = None
    """v1: the canonical key that it is sealed for; needed with ``routing_keys``."""
    routing_keys: Sequence[str] = ()
    """v1: canonical keys of mediators in front of the endpoint, outermost last."""


def is_endpoint(url: str | None) -> bool:
    """Whether anything can be brought there: ``didcomm:transport/queue`` and the like are no endpoints."""
    return url is not None and url.startswith((*_HTTP, *_WS))


class Courier:
    """Makes one attempt at a time."""

    def __init__(self, envelopes: Envelopes, guard: Guard) -> None:
        self._envelopes = envelopes
        self._guard = guard

    async def bring(self, parcel: Parcel) -> Outcome:
        """Make one attempt, within :data:`POST_SECONDS`."""
        try:
            envelope = await self._wrapped(parcel)
        except (MediatorError, ValueError):
            return Outcome.REFUSED
        try:
            if parcel.endpoint.startswith(_HTTP):
                return await self._post(parcel, envelope)
            if parcel.endpoint.startswith(_WS):
                return await self._send(parcel.endpoint, envelope)
        except AddressRefusedError:
            return Outcome.BARRED
        except UnreachableError:
            return Outcome.FAILED
        return Outcome.BARRED

    async def _wrapped(self, parcel: Parcel) -> bytes:
        """Put the envelope into a forward for each mediator in front of the endpoint (RFC 0094)."""
        envelope, to = parcel.envelope, parcel.to or ""
        if parcel.generation is not Generation.V1 or not parcel.routing_keys:
            return envelope
        if len(parcel.routing_keys) > MAX_ROUTING_KEYS or not all(map(is_ed25519, (to, *parcel.routing_keys))):
            raise UnreachableError("expected an endpoint with few routing keys")
        for key in parcel.routing_keys:
            forward = {
                "@type": f"{DIDCOMM}routing/1.0/forward",
                "@id": str(uuid.uuid4()),
                # Agents in the field know recipients by the bare key.
                "to": base58(verkey(to)),
                "msg": orjson.loads(envelope),
            }
            envelope = await self._envelopes.seal_v1(encode(forward), [key], None)
            to = key
        return envelope

    async def _post(self, parcel: Parcel, envelope: bytes) -> Outcome:
        status = await self._guard.post(parcel.endpoint, envelope, media.WRITTEN[parcel.generation], POST_SECONDS)
        if 200 <= status < 300:
            return Outcome.DELIVERED
        return Outcome.REFUSED if status in _REFUSALS else Outcome.FAILED

    async def _send(self, endpoint: str, envelope: bytes) -> Outcome:
        try:
            async with asyncio.timeout(POST_SECONDS):
                ws = await self._guard.ws_connect(endpoint, MAX_ANSWER, POST_SECONDS)
                try:
                    await ws.send_bytes(envelope)
                    return Outcome.DELIVERED if await _was_read(ws) else Outcome.FAILED
                finally:
                    await ws.close()
        except (TimeoutError, OSError):
            return Outcome.FAILED


async def _was_read(ws: ClientWebSocketResponse) -> bool:
    """Wait for the pong of a ping that follows what was sent; False when the socket ends before (D7)."""
    await ws.ping(_MARK)
    async for frame in ws:
        if frame.type is WSMsgType.PONG and frame.data == _MARK:
            return True
        if frame.type is WSMsgType.PING:
            await ws.pong(frame.data)
    return False
