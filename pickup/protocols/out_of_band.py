"""Out-of-band 1.x and 2.0 (RFC 0434): a connected peer reuses its connection for another invitation."""

from collections.abc import Sequence

from mediator.errors import NoSuchInvitationError, NotEnrolledError, UnsupportedMessageError
from pickup.dispatcher import REPORT_NAMES, Dispatcher, InboundRequest
from pickup.message import ReplyMessage
from pickup.protocols.handshake import nothing
from pickup.rules.records import Generation

FAMILY = "out-of-band"


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers."""
    first = {"handshake-reuse": reuse, "invitation": invitation, **dict.fromkeys(REPORT_NAMES, nothing)}
    dispatcher.register(
        FAMILY, {(1, 0), (1, 1)}, first, generations={Generation.V1}, anonymous=True, once={"handshake-reuse"}
    )
    dispatcher.register(FAMILY, {(2, 0)}, {"invitation": invitation}, generations={Generation.V2}, anonymous=True)


async def reuse(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Accept the reuse of a connection for an invitation of ours (RFC 0434 §reuse); it counts as a use."""
    pthid, connection = request.message.pthid, request.connection
    if connection is None:
        raise NotEnrolledError("there is no connection to reuse")
    if pthid is None:
        raise NoSuchInvitationError
    if not request.repeated:
        request.connection = await request.mediation.reuse(connection, pthid)
    return [request.reply("handshake-reuse-accepted", pthid=pthid)]


async def invitation(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Refuse: a mediator accepts no invitations of others."""
    raise UnsupportedMessageError(str(request.message.type))
