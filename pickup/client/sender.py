"""A sender: seals messages for somebody behind mediators, wraps a forward for each, and brings them there."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import orjson

from mediator.errors import MediatorError
from mediator.mediation import names
from mediator.mediation.records import Generation
from pickup.client import transport
from pickup.client.errors import ClientError
from pickup.client.plain import Json, write
from pickup.client.tools import Tools
from pickup.client.wallet import Wallet
from pickup.message import encode

V1, V2 = Generation.V1, Generation.V2


class Sender:
    """Sends from a key (v1) and a DID (v2) of its own; used as ``async with Sender() as sender``."""

    def __init__(self, wallet: Wallet | None = None, *, seconds: float = 10.0) -> None:
        """``seconds``: how long a delivery may take."""
        self._wallet = wallet or Wallet()
        self._seconds = seconds
        self._opened: Tools | None = None
        self.key = self._wallet.new_key()
        """Whom v1 messages come from."""
        self.did = self._wallet.new_did()
        """Whom v2 messages come from."""

    async def __aenter__(self) -> Self:
        """Make ready to send."""
        self._opened = Tools(self._wallet)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self._tools.close()

    @property
    def _tools(self) -> Tools:
        if self._opened is None:
            raise ClientError("a Sender is used as `async with Sender() as sender`")
        return self._opened

    async def send_v1(
        self, to_key: str, routing_keys: Sequence[str], endpoint: str, message: Mapping[str, Any]
    ) -> None:
        """Send a plaintext to a key. ``routing_keys``: keys of the mediators, the innermost first.

        Raises :class:`RefusedError` or :class:`NoAnswerError` when the endpoint did not take it.
        """
        await self.bring(await self.pack_v1(to_key, routing_keys, message), endpoint, V1)

    async def send_v2(self, to_did: str, routing_did: str | None, endpoint: str, message: Mapping[str, Any]) -> None:
        """Send a plaintext to a DID, through a mediator when one is named. ``from`` and ``to`` are filled in."""
        await self.bring(await self.pack_v2(to_did, routing_did, message), endpoint, V2)

    async def pack_v1(self, to_key: str, routing_keys: Sequence[str], message: Mapping[str, Any]) -> bytes:
        """Seal a plaintext for a key, and a forward around it for each mediator."""
        try:
            envelope = await self._tools.envelopes.seal_v1(encode(message), [_key(to_key)], self.key)
            to = to_key
            for routing_key in routing_keys:
                # Mediators in use look for the key in base58 here and nothing else.
                forward = forward_v1(names.base58(names.verkey(_key(to))), envelope)
                envelope = await self._tools.envelopes.seal_v1(encode(forward), [_key(routing_key)], None)
                to = routing_key
        except MediatorError as error:
            raise ClientError(f"the message cannot be sealed: {error}") from error
        return envelope

    async def pack_v2(self, to_did: str, routing_did: str | None, message: Mapping[str, Any]) -> bytes:
        """Seal a plaintext for a DID, and a forward around it for the mediator."""
        addressed = {"typ": "application/didcomm-plain+json", **message, "from": self.did, "to": [to_did]}
        try:
            envelope = await self._tools.envelopes.seal_v2(addressed, to_did, self.did)
            if routing_did is None:
                return envelope
            forward = forward_v2(to_did, [envelope], routing_did)
            return await self._tools.envelopes.seal_v2(forward, routing_did, None)
        except MediatorError as error:
            raise ClientError(f"the message cannot be sealed: {error}") from error

    async def bring(self, envelope: bytes, endpoint: str, generation: Generation) -> None:
        """Bring an envelope to an endpoint, over HTTP or a WebSocket."""
        if endpoint.startswith(("ws://", "wss://")):
            socket = await transport.Socket.connect(self._tools.session, endpoint, self._seconds)
            try:
                await socket.send(envelope)
            finally:
                await socket.close()
            return
        await transport.post(self._tools.session, endpoint, envelope, generation, self._seconds)


def forward_v1(to: str, envelope: bytes) -> Json:
    """Write the plaintext of a forward 1.0; ``to`` is written as it is given."""
    return write(V1, "routing/1.0/forward", {"to": to, "msg": orjson.loads(envelope)})


def forward_v2(to: str, envelopes: Sequence[bytes], routing_did: str, **headers: Any) -> Json:
    """Write the plaintext of a forward 2.0; ``headers`` such as ``expires_time``."""
    attached = [{"data": {"json": orjson.loads(envelope)}} for envelope in envelopes]
    message = write(V2, "routing/2.0/forward", {"next": to}, attachments=attached)
    return {**message, "to": [routing_did], **headers}


def _key(text: str) -> str:
    key = names.canonical(text)
    if key is None:
        raise ClientError(f"expected a key, got {text!r}")
    return key
