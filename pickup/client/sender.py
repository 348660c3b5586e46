"""A sender: seals messages for a recipient behind mediators, wraps a forward for each, and delivers them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import orjson

from mediator.errors import MediatorError
from pickup.client import conversation
from pickup.client.conversation import ClientResources
from pickup.client.holder import Holder
from pickup.client.plaintext import ClientError, Grant, Json, write
from pickup.client.wallet import Wallet
from pickup.message import encode
from pickup.rules import names
from pickup.rules.records import Generation

V1, V2 = Generation.V1, Generation.V2
TRY_LABEL = "mediator try"
TRY_TEXT = "hello from mediator try"
TRY_STEPS = ("connected", "granted", "registered", "sent", "waiting", "picked up", "acknowledged", "removed")
"""What :func:`attempt` tells of, in order."""


class Sender:
    """Sends from a key (v1) and a DID (v2) of its own; used as ``async with Sender() as sender``."""

    def __init__(self, wallet: Wallet | None = None, *, seconds: float = 10.0) -> None:
        self._wallet = wallet or Wallet()
        self.seconds = seconds
        """The timeout of a delivery."""
        self._opened: ClientResources | None = None
        self.key = self._wallet.new_key()
        """The sender of v1 messages."""
        self.did = self._wallet.new_did()
        """The sender of v2 messages."""

    async def __aenter__(self) -> Self:
        """Open the connections."""
        self._opened = ClientResources(self._wallet)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close the connections."""
        await self.resources.close()

    @property
    def resources(self) -> ClientResources:
        """The wallet, the resolver, the envelopes and the HTTP session."""
        if self._opened is None:
            raise ClientError("a Sender is used as `async with Sender() as sender`")
        return self._opened

    async def send_v1(
        self, to_key: str, routing_keys: Sequence[str], endpoint: str, message: Mapping[str, Any]
    ) -> None:
        """Send a plaintext to a key. ``routing_keys``: keys of the mediators, the innermost first.

        Raises :class:`HttpStatusError` or :class:`NoAnswerError` when the endpoint did not accept it.
        """
        await self.deliver(await self.pack_v1(to_key, routing_keys, message), endpoint, V1)

    async def send_v2(self, to_did: str, routing_did: str | None, endpoint: str, message: Mapping[str, Any]) -> None:
        """Send a plaintext to a DID, through a mediator when one is named. ``from`` and ``to`` are filled in."""
        await self.deliver(await self.pack_v2(to_did, routing_did, message), endpoint, V2)

    async def pack_v1(self, to_key: str, routing_keys: Sequence[str], message: Mapping[str, Any]) -> bytes:
        """Seal a plaintext for a key, and a forward around it for each mediator."""
        try:
            envelope = await self.resources.envelopes.seal_v1(encode(message), [_key(to_key)], self.key)
            to = to_key
            for routing_key in routing_keys:
                # Deployed mediators expect the key in base58 here.
                forward = forward_v1(names.base58(names.verkey(_key(to))), envelope)
                envelope = await self.resources.envelopes.seal_v1(encode(forward), [_key(routing_key)], None)
                to = routing_key
        except MediatorError as error:
            raise ClientError(f"the message cannot be sealed: {error}") from error
        return envelope

    async def pack_v2(self, to_did: str, routing_did: str | None, message: Mapping[str, Any]) -> bytes:
        """Seal a plaintext for a DID, and a forward around it for the mediator."""
        addressed = {"typ": "application/didcomm-plain+json", **message, "from": self.did, "to": [to_did]}
        try:
            envelope = await self.resources.envelopes.seal_v2(addressed, to_did, self.did)
            if routing_did is None:
                return envelope
            forward = forward_v2(to_did, [envelope], routing_did)
            return await self.resources.envelopes.seal_v2(forward, routing_did, None)
        except MediatorError as error:
            raise ClientError(f"the message cannot be sealed: {error}") from error

    async def deliver(self, envelope: bytes, endpoint: str, generation: Generation) -> None:
        """Send an envelope to an endpoint, over HTTP or a WebSocket."""
        if endpoint.startswith(("ws://", "wss://")):
            socket = await conversation.ClientSocket.connect(self.resources.session, endpoint, self.seconds)
            try:
                await socket.send(envelope)
            finally:
                await socket.close()
            return
        await conversation.post(self.resources.session, endpoint, envelope, generation, self.seconds)


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


async def attempt(
    invitation: str, done: Callable[[str, str], None], *, wallet: Wallet | None = None, seconds: float = 10.0
) -> None:
    """Try the mediator of an invitation; ``done`` is called after each of :data:`TRY_STEPS`, with what came of it.

    ``seconds`` is the timeout of each answer. Raises :class:`ClientError` at the step that fails; the mediator keeps
    the connection, without keys or mail unless it failed.
    """
    async with await Holder.connect(invitation, wallet=wallet, label=TRY_LABEL, seconds=seconds) as holder:
        done("connected", f"by DIDComm {holder.generation} to {holder.link.endpoints[0]}")
        grant = await holder.mediate()
        done("granted", f"mediation: others send the wallet's mail to {grant.endpoint}")
        key = await holder.add_key()
        done("registered", f"the wallet's key {_short(key)}")
        await _send(holder, grant, key, seconds)
        done("sent", f'"{TRY_TEXT}", sealed for that key, by another wallet')
        status = await holder.status()
        done("waiting", f"{status.count} message at the mediator")
        mails = await holder.fetch()
        if not mails:
            raise ClientError("the message did not come back")
        letter = await holder.open(mails[0])
        message = letter.message
        content = message["content"] if "content" in message else message["body"]["content"]
        done("picked up", f'"{content}" from {_short(letter.sender or "nobody")}')
        status = await holder.received([mail.id for mail in mails])
        if status.count:
            raise ClientError("the message did not leave the queue")
        done("acknowledged", f"{status.count} messages left")
        await holder.remove_key(key)
        done("removed", "the wallet's key")


async def _send(holder: Holder, grant: Grant, key: str, seconds: float) -> None:
    async with Sender(seconds=seconds) as sender:
        if holder.generation is Generation.V1:
            type = "https://didcomm.org/basicmessage/1.0/message"
            message = {"@type": type, "@id": "hello", "content": TRY_TEXT}
            await sender.send_v1(key, grant.routing, grant.endpoint, message)
        else:
            type = "https://didcomm.org/basicmessage/2.0/message"
            body = {"content": TRY_TEXT}
            await sender.send_v2(key, grant.routing[0], grant.endpoint, {"id": "hello", "type": type, "body": body})


def _short(name: str) -> str:
    return name if len(name) <= 64 else f"{name[:56]}…"
