"""Problem reports of peers (RFC 0035, report-problem 2.0): logged, heeded after a batch, and never answered."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from mediator.mediation import taking
from mediator.mediation.records import Generation
from pickup import problems
from pickup.dispatch import Call
from pickup.message import Reply

if TYPE_CHECKING:
    from pickup.dispatch import Dispatcher

NOTIFICATION = "notification"
"""The family under which RFC 0035 and RFC 0685 show the same message."""
_CODE = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = structlog.get_logger("didcomm.problems")


def register(dispatcher: "Dispatcher") -> None:
    """Join the dispatcher."""
    names = dict.fromkeys(problems.NAMES, note)
    dispatcher.register(problems.FAMILY, {(1, 0)}, names, generations={Generation.V1}, once=problems.NAMES)
    dispatcher.register(problems.FAMILY, {(2, 0)}, names, generations={Generation.V2}, once=problems.NAMES)
    dispatcher.register(NOTIFICATION, {(1, 0)}, names, generations={Generation.V1}, once=problems.NAMES)


async def note(call: Call) -> Sequence[Reply]:
    """Log the code, the only part of a report that is no free text; a batch it is about stays queued (D7)."""
    message, connection = call.message, call.connection
    body = message.body
    description = body.get("description")
    code = description.get("code") if isinstance(description, dict) else body.get("code")
    known = isinstance(code, str) and _CODE.fullmatch(code) is not None
    log.debug(
        "a peer reports a problem",
        problem=code if known else None,
        connection=None if connection is None else connection.no,
    )
    if connection is not None and not call.repeated:
        about = [thread for thread in (message.thid, message.pthid) if thread is not None]
        await call.write(lambda tx, _now: taking.keep_handed(tx, connection, about), when_full=True)
    return ()
