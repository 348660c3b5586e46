"""Trust ping 1.0 (RFC 0048) and 2.0: a sign of life; one that wants no answer asks for implicit pickup (D7)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mediator.mediation.records import Generation
from pickup.dispatch import Call
from pickup.fields import flag
from pickup.message import Reply
from pickup.protocols.handshake import nothing

if TYPE_CHECKING:
    from pickup.dispatch import Dispatcher

FAMILIES = {Generation.V1: ("trust_ping", 1, "ping_response"), Generation.V2: ("trust-ping", 2, "ping-response")}


def register(dispatcher: "Dispatcher") -> None:
    """Join the dispatcher."""
    for generation, (family, major, response) in FAMILIES.items():
        names = {"ping": ping, response: nothing}
        dispatcher.register(family, {(major, 0)}, names, generations={generation}, anonymous=True, once={"ping"})


async def ping(call: Call) -> Sequence[Reply]:
    """Answer, unless no answer is wanted.

    A holder that wants none on a socket, and has all messages for it sent there, is implicitly picking up.
    """
    message, connection = call.message, call.connection
    if flag(message.body, "response_requested", absent=True):
        response = FAMILIES[message.generation][2]
        return [Reply(message.type.named(response), thid=message.thread)]
    enrolled = connection is not None and connection.mailbox_no is not None
    if enrolled and message.return_route == "all" and not call.repeated:
        # Also one that opens nothing here, on HTTP, would open it where a recorder sends it.
        await call.remember()
        await call.office.sessions.implicit(call)
    return ()
