"""Opens what comes in at any transport, identifies its sender, has it handled, and sends the replies."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mediator.errors import (
    BadRequestError,
    DeniedError,
    EnvelopeError,
    MediatorError,
    RateLimitedError,
    TenantRefusedError,
    UnresolvedDidError,
)
from mediator.fields import whole_number
from pickup.access import AccessLists, RateLimiter
from pickup.channels import TenantSockets, TransportChannel
from pickup.dids.document import DidResolver
from pickup.dids.identities import OwnIdentities
from pickup.dids.own_dids import Identity
from pickup.dispatcher import REPORT_NAMES, DidcommContext, InboundRequest, check_expiry
from pickup.envelope import Envelopes, OpenedEnvelope
from pickup.envelope.reading import read_jwt
from pickup.message import ReplyMessage, encode, outline, read, write
from pickup.outbound import OutboundMessage
from pickup.rules.connecting import FROM_PRIOR
from pickup.rules.names import canonical
from pickup.rules.records import Connection, DidRotation, Generation
from pickup.rules.replays import CLOCK_SKEW, ReplayedError


async def read_rotation(request: InboundRequest) -> DidRotation | None:
    """Return the verified rotation of a message with a ``from_prior``; None when it repeats the connection's last one.

    Raises :class:`BadRequestError` naming ``from_prior``, and :class:`UnresolvedDidError` for an old DID without a
    document.
    """
    caller = request.caller
    check_expiry(request)
    try:
        jws, claims = read_jwt(request.message.from_prior or "")
        prior_did = _did(claims, "iss")
        if request.connection is not None and request.connection.prior_did == prior_did:
            # It is repeated until the peer hears from us; by then the document of the old DID may be gone.
            return None
        signed_by = canonical(await request.context.envelopes.verify(jws))
    except UnresolvedDidError as error:
        raise UnresolvedDidError(f"{FROM_PRIOR}: {error}") from None
    except EnvelopeError as error:
        raise BadRequestError(FROM_PRIOR, str(error).partition(": ")[2]) from None
    if signed_by != prior_did:
        raise BadRequestError(FROM_PRIOR, "expected the signature of a key of its iss")
    signed_at, now = whole_number(claims.get("iat")), request.mediation.clock()
    if signed_at is None or not 0 <= signed_at * 1000 <= now + CLOCK_SKEW:
        raise BadRequestError(FROM_PRIOR, f"expected Unix seconds that are past as its iat; it is {now // 1000} here")
    ends = claims.get("sub") is None
    if ends and caller != prior_did and canonical(request.envelope.recipient) not in _audience(claims):
        # Nothing else in an anonymous ending says whom it is for: whoever was ever told one could repeat it here.
        raise BadRequestError(FROM_PRIOR, "an ending has to be sealed by its iss, or to have our DID as its aud")
    if not ends and (caller is None or caller != _did(claims, "sub") or caller == prior_did):
        raise BadRequestError(FROM_PRIOR, "expected a sub that is the new DID, which sealed the message, and no iss")
    sender = request.envelope.sender or ""
    return DidRotation(
        tenant=request.tenant,
        prior_did=prior_did,
        caller=None if ends else caller,
        their_did=sender,
        my_did=request.envelope.my_did,
        # The document is in the cache: the envelope was opened with it.
        endpoint=None if ends else (await request.context.resolver.resolve(sender)).endpoint,
        signed_at=signed_at * 1000,
        digest=hashlib.blake2b(f"{jws.protected}.{jws.payload}".encode(), digest_size=16).digest(),
    )


def _did(claims: Mapping[str, Any], name: str) -> str:
    value = claims.get(name)
    did = canonical(value) if isinstance(value, str) and value.startswith("did:") else None
    if did is None:
        raise BadRequestError(FROM_PRIOR, f"expected a DID as its {name}")
    return did


def _audience(claims: Mapping[str, Any]) -> set[str | None]:
    """Return whom a JWT is for (RFC 7519 §4.1.3), a text or a list."""
    written = claims.get("aud")
    named = written if isinstance(written, list) else [written]
    return {canonical(one) for one in named if isinstance(one, str)}


PICKUP = frozenset({"messagepickup", "message-pickup"})


class EnvelopeSender(Protocol):
    """Sends to endpoints of peers; :class:`~pickup.outbound.OutboundQueue` does."""

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
        # A forward has neither a reply nor a route.
        asked = request.message.return_route is not None
        here = (bool(replies) or asked) and returns_here(request)
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
        envelope = request.envelope
        assert envelope.sender is not None, "only who is known is answered"
        if envelope.generation is Generation.V1:
            plaintext = encode(write(reply, Generation.V1, envelope.recipient, envelope.sender))
            return await self._envelopes.seal_v1(plaintext, [envelope.sender], envelope.recipient)
        my_did = envelope.my_did
        written = write(reply, Generation.V2, my_did, envelope.sender)
        return await self._envelopes.seal_v2(written, envelope.sender, my_did)

    async def _send_to_endpoint(self, request: InboundRequest, sealed: bytes) -> None:
        """Send a reply to the endpoint of its receiver, if it has one."""
        connection, sender = request.connection, request.envelope.sender
        if connection is not None and connection.endpoint is not None:
            to = next(iter(connection.keys), None)
            message = OutboundMessage(connection.endpoint, sealed, connection.generation, to, connection.routing_keys)
            self._outbound.send_soon(message)
        elif sender is not None and request.envelope.generation is Generation.V2:
            endpoint = await self._find_endpoint(sender)
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


MAX_REMEMBERED = 100_000
"""Envelopes of known senders that this instance recognises when they come again.

Those that may be handled only once are stored too, for all instances (D13).
"""


class MessageReceiver:
    """Handles envelopes from the transports."""

    def __init__(
        self,
        context: DidcommContext,
        post: ReplySender,
        seen: Callable[[Connection], None],
        access: AccessLists | None = None,
        limiter: RateLimiter | None = None,
        tenants: TenantSockets | None = None,
    ) -> None:
        """``seen`` is called with each connection that makes a request and has an endpoint (D10).

        ``access`` says whose messages are refused, ``limiter`` how many a second each connection may send, ``tenants``
        which tenants there are no more, and how many sockets each may have.
        """
        self._tenants = tenants
        self._context = context
        self._post = post
        self._seen = seen
        self._access = access
        self._limiter = limiter
        self._handled: OrderedDict[bytes, None] = OrderedDict()

    async def receive(self, data: bytes, channel: TransportChannel) -> None:
        """Handle one envelope; the reply goes out on ``channel`` or to the sender's endpoint (D5).

        Returns after everything is committed. Raises :class:`EnvelopeError` and :class:`UnresolvedDidError`, and for
        anonymous senders any :class:`MediatorError`; other errors are answered by a problem report (D12).
        """
        request, error = await self._identify(await self._context.envelopes.open(data), channel)
        rotation = prior = None
        if error is None and request.message.from_prior is not None and request.message.type.name != "forward":
            rotation, error = await self._read_rotation(request)
        if rotation is not None:
            prior = await request.mediation.find_connection(request.tenant, rotation.prior_did)
        refusal = self._refusal(request, prior or request.connection)
        if refusal is not None:
            # Where a report cannot go back at once, the transport must say that the message was not taken.
            if not channel.persistent or not returns_here(request):
                raise refusal
            error = refusal
        elif rotation is not None:
            error = await self._rotate(request, rotation, prior)
        if error is not None:
            replies = self._context.dispatcher.refuse(request, error)
        elif rotation is not None and rotation.caller is None:
            # Nothing is said any more to a peer that ended its connection.
            return
        else:
            replies = await self._handle(request)
        await self._post.answer(request, replies)

    async def _identify(
        self, opened: OpenedEnvelope, channel: TransportChannel
    ) -> tuple[InboundRequest, MediatorError | None]:
        """Find out for whom and from whom a message is; of one that cannot be read, also what is wrong (D8, D12)."""
        context = self._context
        tenant = await context.identities.tenant_of(opened.recipient)
        if self._tenants is not None and self._tenants.directory.is_removed(tenant):
            raise TenantRefusedError
        message, unreadable = None, None
        try:
            message = read(opened.plaintext, opened.generation)
        except BadRequestError as error:
            if opened.sender is not None:
                # What a report to the sender needs.
                message, unreadable = outline(opened.plaintext, opened.generation), error
            if message is None:
                raise
        context.mediation.broker.trace.annotate("didcomm.message.type", message.type)
        caller = None if opened.sender is None else canonical(opened.sender)
        if opened.sender is not None and caller is None:
            raise EnvelopeError("expected a sender with a DID or a key")
        request = InboundRequest(
            context=context,
            tenant=tenant,
            envelope=opened,
            message=message,
            caller=caller,
            connection=None if caller is None else await context.mediation.find_connection(tenant, caller),
            channel=channel,
            mediation=context.mediation,
            repeated=opened.digest in self._handled,
        )
        return request, unreadable

    @staticmethod
    async def _read_rotation(request: InboundRequest) -> tuple[DidRotation | None, MediatorError | None]:
        """Return the rotation that a message brings, or why it is refused (D14)."""
        try:
            return await read_rotation(request), None
        except MediatorError as error:
            if request.caller is None:
                raise
            return None, error

    async def _rotate(
        self, request: InboundRequest, rotation: DidRotation, prior: Connection | None
    ) -> MediatorError | None:
        """Give the connection of the old DID to the new one, with its session and return route, or end it (D14)."""
        sessions = self._context.sessions
        try:
            rotated = request.connection = await request.mediation.rotate_did(prior, rotation)
        except MediatorError as error:
            if request.caller is None:
                raise
            return error
        if rotated is not None:
            sessions.rotated(rotated)
            request.channel.routes.rename(rotation.prior_did, rotation.caller or "")
        elif prior is not None:
            sessions.end(lambda connection: connection.id == prior.id)
        return None

    async def _handle(self, request: InboundRequest) -> list[ReplyMessage]:
        """Have a message handled, once more without its changes when its envelope turns out to be a replay (D13)."""
        dispatcher = self._context.dispatcher
        if request.connection is not None:
            if self._tenants is not None and request.channel.persistent:
                self._tenants.enter(request.channel, request.tenant)
            await self._record_use(request, request.connection)
        try:
            replies = await dispatcher.handle(request)
        except ReplayedError:
            request.mediation, request.repeated, request.after = self._context.mediation, True, []
            if request.caller is not None:
                # The first copy of the envelope may have made the connection meanwhile.
                request.connection = await request.mediation.find_connection(request.tenant, request.caller)
            replies = await dispatcher.handle(request)
        if request.caller is not None and not any(reply.type.name in REPORT_NAMES for reply in replies):
            # A refused message may be sent again as it is.
            self._handled[request.envelope.digest] = None
            self._handled.move_to_end(request.envelope.digest)
            if len(self._handled) > MAX_REMEMBERED:
                self._handled.popitem(last=False)
        return replies

    def _refusal(self, request: InboundRequest, connection: Connection | None) -> MediatorError | None:
        if self._access is not None and self._access.denies(request.caller, connection):
            return DeniedError()
        if self._limiter is not None and connection is not None:
            wait = self._limiter.acquire(connection.id)
            if wait:
                request.context.metrics.limited("connection")
                return RateLimitedError("connection", math.ceil(wait))
        return None

    async def _record_use(self, request: InboundRequest, connection: Connection) -> None:
        type = request.message.type
        await request.mediation.record_use(
            connection,
            transport="ws" if request.channel.persistent else "http",
            client=request.channel.client,
            pickup=f"{type.major}.{type.minor}" if type.family in PICKUP else "",
        )
        if connection.endpoint is not None:
            self._seen(connection)
