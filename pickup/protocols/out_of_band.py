"""Out-of-band 1.x and 2.0 (RFC 0434): who is connected already says so, instead of shaking hands again."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mediator.errors import NoSuchInvitationError, NotEnrolledError, UnsupportedMessageError
from mediator.mediation import connecting
from mediator.mediation.records import Generation
from pickup.dispatch import Call
from pickup.message import Reply
from pickup.protocols.handshake import nothing

if TYPE_CHECKING:
    from pickup.dispatch import Dispatcher

FAMILY = "out-of-band"


def register(dispatcher: "Dispatcher") -> None:
    """Join the dispatcher."""
    first = {
        "handshake-reuse": reuse,
        "invitation": invitation,
        "problem-report": nothing,
        "problem_report": nothing,
    }
    dispatcher.register(
        FAMILY, {(1, 0), (1, 1)}, first, generations={Generation.V1}, anonymous=True, once={"handshake-reuse"}
    )
    dispatcher.register(FAMILY, {(2, 0)}, {"invitation": invitation}, generations={Generation.V2}, anonymous=True)


async def reuse(call: Call) -> Sequence[Reply]:
    """Accept that a connection is used for an invitation of ours; it counts as having come by that invitation."""
    pthid, connection = call.message.pthid, call.connection
    if connection is None:
        raise NotEnrolledError("there is no connection to use again")
    if pthid is None:
        raise NoSuchInvitationError
    if not call.repeated:
        call.connection = await call.write(lambda tx, now: connecting.reuse(tx, connection, pthid, now))
    return [Reply(call.message.type.named("handshake-reuse-accepted"), thid=call.message.thread, pthid=pthid)]


async def invitation(call: Call) -> Sequence[Reply]:
    """Refuse: a mediator follows nobody's invitation."""
    raise UnsupportedMessageError(str(call.message.type))
