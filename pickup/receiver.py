"""Opens what comes in at any transport, identifies its sender, and has it handled and answered."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from mediator.errors import BadRequestError, DeniedError, EnvelopeError, MediatorError, RateLimitedError
from pickup.access_lists import AccessLists
from pickup.context import DidcommContext
from pickup.dispatcher import InboundRequest, TransportChannel
from pickup.envelope import OpenedEnvelope
from pickup.message import DidcommMessage, outline, read
from pickup.problem_reports import is_report
from pickup.rate_limits import RateLimiter
from pickup.reply_sender import PICKUP, ReplySender, returns_here
from pickup.rotation import read_rotation
from pickup.rules.names import canonical
from pickup.rules.records import Connection, DidRotation
from pickup.rules.replays import ReplayedError
from pickup.tenant_sockets import TenantSockets

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
        context = self._context
        opened = await context.envelopes.open(data)
        tenant = await context.identities.tenant_of(opened.recipient)
        if self._tenants is not None:
            self._tenants.check(tenant)
        message, unreadable = self._read(opened)
        context.mediation.broker.trace.annotate("didcomm.message.type", message.type)
        caller = None if opened.sender is None else canonical(opened.sender)
        if opened.sender is not None and caller is None:
            raise EnvelopeError("expected a sender with a DID or a key")
        request = InboundRequest(
            context=context,
            tenant=tenant,
            message=message,
            me=opened.recipient,
            caller=caller,
            sender=opened.sender,
            connection=await self._find_connection(tenant, caller),
            channel=channel,
            mark=opened.mark,
            repeated=opened.mark in self._handled,
        )
        rotation = None
        if unreadable is None:
            try:
                rotation = await read_rotation(request)
            except MediatorError as error:
                if caller is None:
                    raise
                unreadable = error
        prior = None if rotation is None else await self._find_connection(tenant, rotation.prior_did)
        refusal = self._refusal(request, prior or request.connection)
        if refusal is not None:
            # Where a report cannot go back at once, the transport must say that the message was not taken.
            if not channel.persistent or not returns_here(request):
                raise refusal
            await self._post.answer(request, context.dispatcher.refuse(request, refusal))
            return
        if rotation is not None and unreadable is None:
            try:
                request.connection = await self._rotate(request, rotation, prior)
            except MediatorError as error:
                if caller is None:
                    raise
                unreadable = error
        if unreadable is not None:
            await self._post.answer(request, context.dispatcher.refuse(request, unreadable))
            return
        if rotation is not None and rotation.caller is None:
            # Nothing is said any more to a peer that ended its connection.
            return
        if request.connection is not None:
            if self._tenants is not None:
                self._tenants.enter(channel, tenant)
            await self._note(request, request.connection)
        try:
            replies = await context.dispatcher.handle(request)
        except ReplayedError:
            # The first copy of the envelope may have made the connection meanwhile.
            connection = await self._find_connection(tenant, caller)
            request = replace(request, connection=connection, repeated=True, after=[])
            replies = await context.dispatcher.handle(request)
        if caller is not None and not any(is_report(reply.type) for reply in replies):
            # A refused message may be sent again as it is.
            self._remember(opened.mark)
        await self._post.answer(request, replies)

    async def _rotate(
        self, request: InboundRequest, rotation: DidRotation, prior: Connection | None
    ) -> Connection | None:
        """Give the connection of the old DID to the new one, with its session and return route, or end it (D14)."""
        context, routes = self._context, request.channel.routes
        rotated = await context.mediation.rotate_did(prior, rotation)
        if rotated is None:
            if prior is not None:
                context.sessions.end(lambda connection: connection.no == prior.no)
        else:
            context.sessions.rotated(rotated)
            routes.rename(rotation.prior_did, rotation.caller or "")
        return rotated

    @staticmethod
    def _read(opened: OpenedEnvelope) -> tuple[DidcommMessage, MediatorError | None]:
        """Read a message; of one that cannot be read what a report to its sender needs, with the error (D12)."""
        try:
            return read(opened.plaintext, opened.generation), None
        except BadRequestError as error:
            message = None if opened.sender is None else outline(opened.plaintext, opened.generation)
            if message is None:
                raise
            return message, error

    def _refusal(self, request: InboundRequest, connection: Connection | None) -> MediatorError | None:
        if self._access is not None and (
            self._access.denies([request.caller])
            or (connection is not None and self._access.denies_connection(connection))
        ):
            return DeniedError()
        if self._limiter is not None and connection is not None:
            wait = self._limiter.take(connection.no)
            if wait:
                request.context.metrics.limited("connection")
                return RateLimitedError("connection", math.ceil(wait))
        return None

    def _remember(self, mark: bytes) -> None:
        self._handled[mark] = None
        self._handled.move_to_end(mark)
        if len(self._handled) > MAX_REMEMBERED:
            self._handled.popitem(last=False)

    async def _find_connection(self, tenant: str, caller: str | None) -> Connection | None:
        return None if caller is None else await self._context.mediation.find_connection(tenant, caller)

    async def _note(self, request: InboundRequest, connection: Connection) -> None:
        mediation, type = self._context.mediation, request.message.type
        mediation.uses.note(
            connection.no,
            transport="ws" if request.channel.persistent else "http",
            client=request.channel.client,
            pickup=f"{type.major}.{type.minor}" if type.family in PICKUP else "",
        )
        await mediation.note_use(connection)
        if connection.endpoint is not None:
            self._seen(connection)
