"""Problem reports of peers (RFC 0035, report-problem 2.0): logged, never answered; one about a batch keeps it."""

import re
from collections.abc import Sequence

import structlog

from pickup.dispatcher import REPORT_FAMILY, REPORT_NAMES, Dispatcher, InboundRequest
from pickup.message import ReplyMessage
from pickup.rules.records import Generation

NOTIFICATION = "notification"
"""The family name that the examples of RFC 0035 and RFC 0685 use."""
_CODE = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = structlog.get_logger("didcomm.problems")


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers."""
    names = dict.fromkeys(REPORT_NAMES, note)
    dispatcher.register(REPORT_FAMILY, {(1, 0)}, names, generations={Generation.V1}, once=REPORT_NAMES)
    dispatcher.register(REPORT_FAMILY, {(2, 0)}, names, generations={Generation.V2}, once=REPORT_NAMES)
    dispatcher.register(NOTIFICATION, {(1, 0)}, names, generations={Generation.V1}, once=REPORT_NAMES)


async def note(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Log the code, the only part without free text; a batch that the report is about stays queued (D7)."""
    message, connection = request.message, request.connection
    body = message.body
    description = body.get("description")
    code = description.get("code") if isinstance(description, dict) else body.get("code")
    known = isinstance(code, str) and _CODE.fullmatch(code) is not None
    log.debug(
        "problem report received",
        problem=code if known else None,
        connection=None if connection is None else connection.no,
    )
    if connection is not None and not request.repeated:
        about = [thread for thread in (message.thid, message.pthid) if thread is not None]
        await request.mediation.keep_batch(connection, about)
    return ()
