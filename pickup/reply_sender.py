"""Seals replies and sends each by the sender's return route (RFC 0092), or to the sender's endpoint (D5)."""

from collections.abc import Sequence
from typing import Protocol

from mediator.errors import MediatorError, UnresolvedDidError
from pickup.dids.document import DidResolver
from pickup.dids.identities import OwnIdentities
from pickup.dids.own_dids import Identity
from pickup.dispatcher import InboundRequest
from pickup.envelope import Envelopes
from pickup.message import ReplyMessage, encode, write
from pickup.outbound import OutboundMessage
from pickup.rules.records import Connection, Generation

PICKUP = frozenset({"messagepickup", "message-pickup"})


class EnvelopeSender(Protocol):
    """Sends to endpoints of peers; :class:`~pickup.outbound_queue.OutboundQueue` does."""

    def send_soon(self, message: OutboundMessage) -> None:
        """Send in the background, with bounded retries; what cannot be sent is dropped."""


class ReplySender:
    """Sends replies of handlers, and seals what sessions push."""

    def __init__(
        self, envelopes: Envelopes, resolver: DidResolver, identities: OwnIdentities, outbound: EnvelopeSender
    ) -> None:
        self._envelopes = envelopes
        self._resolver = resolver
        self._identities = identities
        self._outbound = outbound

    async def answer(self, request: InboundRequest, replies: Sequence[ReplyMessage]) -> None:
        """Send the replies to a request, then run its callbacks: True when all went out on its channel."""
        here = returns_here(request)
        all_sent = bool(replies)
        for reply in replies:
            sealed = await self._seal_answer(request, reply)
            sent = here and await request.channel.send(sealed, request.message.generation)
            all_sent = all_sent and sent
            # Replies of pickup are only for a holder that reads them now (D2).
            if not sent and reply.type.family not in PICKUP:
                await self._send_to_endpoint(request, sealed)
        for notify in request.after:
            await notify(all_sent)

    async def seal(self, connection: Connection, reply: ReplyMessage) -> bytes:
        """Seal a message for a connection, from the identity it knows us by."""
        me = await self._known_to(connection)
        if connection.generation is Generation.V1:
            plaintext = encode(write(reply, Generation.V1, connection.my_did, connection.their_did))
            return await self._envelopes.seal_v1(plaintext, connection.keys, me.key)
        written = write(reply, Generation.V2, connection.my_did, connection.their_did)
        return await self._envelopes.seal_v2(written, connection.their_did, connection.my_did)

    async def _known_to(self, connection: Connection) -> Identity:
        try:
            return self._identities.known_as(connection.my_did)
        except UnresolvedDidError:
            # The connection was made at another instance, which made the identity too.
            await self._identities.renew()
            return self._identities.known_as(connection.my_did)

    async def _seal_answer(self, request: InboundRequest, reply: ReplyMessage) -> bytes:
        assert request.sender is not None, "only who is known is answered"
        if request.message.generation is Generation.V1:
            plaintext = encode(write(reply, Generation.V1, request.me, request.sender))
            return await self._envelopes.seal_v1(plaintext, [request.sender], request.me)
        my_did = request.me.partition("#")[0]
        written = write(reply, Generation.V2, my_did, request.sender)
        return await self._envelopes.seal_v2(written, request.sender, my_did)

    async def _send_to_endpoint(self, request: InboundRequest, sealed: bytes) -> None:
        """Send a reply to the endpoint of its receiver, if it has one."""
        assert request.sender is not None
        connection = request.connection
        if connection is not None and connection.endpoint is not None:
            to = next(iter(connection.keys), None)
            message = OutboundMessage(connection.endpoint, sealed, connection.generation, to, connection.routing_keys)
            self._outbound.send_soon(message)
        elif request.message.generation is Generation.V2:
            endpoint = await self._find_endpoint(request.sender)
            if endpoint is not None:
                self._outbound.send_soon(OutboundMessage(endpoint, sealed, Generation.V2))

    async def _find_endpoint(self, did: str) -> str | None:
        try:
            return (await self._resolver.resolve(did)).endpoint
        except MediatorError:
            return None


def returns_here(request: InboundRequest) -> bool:
    """Whether the replies to a request go back on its channel, by a return route, which is remembered (RFC 0092, D5).

    They are all in the thread of the request.
    """
    message, routes, caller = request.message, request.channel.routes, request.caller or ""
    match message.return_route:
        case "all":
            if caller:
                routes.follow(caller, None)
            return True
        case "thread":
            thread = message.return_route_thread or message.thread
            if caller:
                routes.follow(caller, thread)
            return thread == message.thread
        case None:
            return message.type.family in PICKUP or routes.lead_here(caller, message.thread)
        case _:
            routes.end(caller)
            return False
