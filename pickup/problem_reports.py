"""Problem reports (RFC 0035, report-problem 2.0): the reply to a known sender whose message was refused (D12)."""

from mediator.errors import MediatorError
from pickup.mediation.records import Generation
from pickup.message import DidcommMessage, MessageType, ReplyMessage

FAMILY = "report-problem"
REPORT = "problem-report"
NAMES = frozenset({REPORT, "problem_report"})
"""The second is written by older agents."""


def is_report(type: MessageType) -> bool:
    """Whether a message is a problem report of any protocol; reports are never answered."""
    return type.name in NAMES


def report(message: DidcommMessage, error: MediatorError) -> ReplyMessage:
    """Write the report for a refused message, in the form of its generation."""
    code, text = error.problem, str(error)
    prefix = message.type.prefix
    if message.generation is Generation.V1:
        type = MessageType(prefix, FAMILY, 1, 0, REPORT)
        body = {"description": {"code": code, "en": text}}
        return ReplyMessage(type, body, thid=message.thread, pthid=message.id)
    return ReplyMessage(
        MessageType(prefix, FAMILY, 2, 0, REPORT), {"code": code, "comment": text}, pthid=message.thread
    )
