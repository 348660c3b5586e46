"""Problem reports (RFC 0035, report-problem 2.0): the reply to a known sender whose message was refused (D12)."""

from mediator.errors import MediatorError
from pickup.message import DidcommMessage, Json, MessageType, ReplyMessage
from pickup.rules.records import Generation

FAMILY = "report-problem"
REPORT = "problem-report"
NAMES = frozenset({REPORT, "problem_report"})
"""The second is written by older agents."""
_FIELD = "{1}: {2}"
COMMENTS = {
    "e.m.live-mode-not-supported": "Connection does not support Live Delivery",
    "e.p.did": "The DID is unusable: {1}",
    "e.p.me": "Internal error: {1}",
    "e.p.me.res": "A required resource is unavailable: {1}",
    "e.p.me.res.net": "A server of somebody else cannot be reached: {1}",
    "e.p.me.res.rate": "Too many messages: {1}",
    "e.p.me.res.storage": "There is no room: {1}",
    "e.p.me.res.storage.message_too_big": _FIELD,
    "e.p.msg": _FIELD,
    "e.p.msg.unsupported": _FIELD,
    "e.p.req.denied": "The request is denied: {1}",
    "e.p.req.invitation": "An open invitation is needed: {1}",
    "e.p.trust.crypto": _FIELD,
    "e.p.trust.not-enrolled": "The sender is not enrolled: {1}",
}
"""The comment of each code, the same each time, so that peers can translate it (DIDComm v2.1 §problem-reports).

``{1}`` and ``{2}`` are the field with what is wrong about it, ``{1}`` alone is the reason.
"""


def is_report(type: MessageType) -> bool:
    """Whether a message is a problem report of any protocol; reports are never answered."""
    return type.name in NAMES


def report(message: DidcommMessage, error: MediatorError) -> ReplyMessage:
    """Write the report for a refused message, in the form of its generation."""
    prefix = message.type.prefix
    if message.generation is Generation.V1:
        type = MessageType(prefix, FAMILY, 1, 0, REPORT)
        body = {"description": {"code": error.problem, "en": str(error)}}
        return ReplyMessage(type, body, thid=message.thread, pthid=message.id)
    type = MessageType(prefix, FAMILY, 2, 0, REPORT)
    return ReplyMessage(type, explain(error), pthid=message.thread, ack=[message.id])


def explain(error: MediatorError) -> Json:
    """Return code, comment and args of an error as v2 writes them."""
    comment = COMMENTS[error.problem]
    if comment == _FIELD:
        field, _, problem = str(error).partition(": ")
        return {"code": error.problem, "comment": comment, "args": [field, problem]}
    if "{1}" in comment:
        return {"code": error.problem, "comment": comment, "args": [str(error)]}
    return {"code": error.problem, "comment": comment}
