"""The post: seals answers, and brings each back the way its sender asked for, or to the sender's endpoint (D5)."""

from collections.abc import Sequence
from typing import Protocol

from mediator.errors import MediatorError, UnresolvedDidError
from mediator.mediation.records import Connection, Generation
from pickup.dids.document import Resolver
from pickup.dids.identities import Identities
from pickup.dids.index import Identity
from pickup.dispatch import Call
from pickup.envelope import Envelopes
from pickup.message import Reply, encode, write
from pickup.outbound import Parcel

PICKUP = frozenset({"messagepickup", "message-pickup"})
MAX_ROUTES = 64
"""Callers one channel remembers."""


class Outbound(Protocol):
    """Delivers to endpoints of others."""

    def send_soon(self, parcel: Parcel) -> None:
        """Deliver beside everything else, with bounded retries; what cannot be delivered is dropped."""


class Post:
    """Answers callers."""

    def __init__(self, envelopes: Envelopes, resolver: Resolver, identities: Identities, outbound: Outbound) -> None:
        self._envelopes = envelopes
        self._resolver = resolver
        self._identities = identities
        self._outbound = outbound

    async def answer(self, call: Call, replies: Sequence[Reply]) -> None:
        """Send the answers to a call, then let its handlers know whether they went out on its channel."""
        here = _comes_back(call)
        all_sent = bool(replies)
        for reply in replies:
            sealed = await self._seal_answer(call, reply)
            sent = here and await call.channel.send(sealed, call.message.generation)
            all_sent = all_sent and sent
            # What pickup answers is for who is there to read it, now (D2).
            if not sent and reply.type.family not in PICKUP:
                await self._elsewhere(call, sealed)
        for told in call.after:
            await told(all_sent)

    async def seal(self, connection: Connection, reply: Reply) -> bytes:
        """Seal a message for a connection, from the identity it knows."""
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
            # The connection was made at another instance, by a name that is new here.
            await self._identities.renew()
            return self._identities.known_as(connection.my_did)

    async def _seal_answer(self, call: Call, reply: Reply) -> bytes:
        assert call.sender is not None, "only who is known is answered"
        if call.message.generation is Generation.V1:
            plaintext = encode(write(reply, Generation.V1, call.me, call.sender))
            return await self._envelopes.seal_v1(plaintext, [call.sender], call.me)
        my_did = call.me.partition("#")[0]
        written = write(reply, Generation.V2, my_did, call.sender)
        return await self._envelopes.seal_v2(written, call.sender, my_did)

    async def _elsewhere(self, call: Call, sealed: bytes) -> None:
        """Send an answer to where its receiver lives, if it lives anywhere."""
        assert call.sender is not None
        connection = call.connection
        if connection is not None and connection.endpoint is not None:
            to = next(iter(connection.keys), None)
            parcel = Parcel(connection.endpoint, sealed, connection.generation, to, connection.routing_keys)
            self._outbound.send_soon(parcel)
        elif call.message.generation is Generation.V2:
            endpoint = await self._published(call.sender)
            if endpoint is not None:
                self._outbound.send_soon(Parcel(endpoint, sealed, Generation.V2))

    async def _published(self, did: str) -> str | None:
        try:
            return (await self._resolver.resolve(did)).endpoint
        except MediatorError:
            return None


def _comes_back(call: Call) -> bool:
    """Whether the sender wants this answer on the channel it used; the channel remembers who wants all there (D5)."""
    message, routes = call.message, call.channel.routes
    match message.return_route:
        case "all":
            if call.caller is not None and len(routes) < MAX_ROUTES:
                routes.add(call.caller)
            return True
        case "thread":
            return True
        case None:
            return message.type.family in PICKUP or call.caller in routes
        case _:
            routes.discard(call.caller or "")
            return False
