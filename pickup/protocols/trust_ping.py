"""Trust ping 1.0 (RFC 0048) and 2.0; one without response turns on implicit pickup (RFC 0212, D7)."""

from collections.abc import Sequence

from pickup.dispatcher import Dispatcher, InboundRequest
from pickup.message import ReplyMessage
from pickup.protocols.handshake import nothing
from pickup.rules.records import Generation

FAMILIES = {Generation.V1: ("trust_ping", 1, "ping_response"), Generation.V2: ("trust-ping", 2, "ping-response")}


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers."""
    for generation, (family, major, response) in FAMILIES.items():
        names = {"ping": ping, response: nothing}
        dispatcher.register(family, {(major, 0)}, names, generations={generation}, anonymous=True, once={"ping"})


async def ping(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Reply, unless no response is requested.

    A holder that requests none, on a WebSocket with return route ``all``, gets its mail pushed from then on.
    """
    message, connection = request.message, request.connection
    if message.fields.flag("response_requested", absent=True):
        return [request.reply(FAMILIES[message.generation][2])]
    enrolled = connection is not None and connection.mailbox_no is not None
    if enrolled and message.return_route == "all" and not request.repeated:
        # Stored even on HTTP, where it starts nothing: a replay of it on a WebSocket must not start a session.
        await request.mediation.remember_envelope()
        await request.context.sessions.implicit(request)
    return ()
