"""Problem reports: what is told to a known sender whose message was refused, in the form of its generation (D12)."""

from mediator.errors import MediatorError
from mediator.mediation.records import Generation
from pickup.message import Message, MessageType, Reply

FAMILY = "report-problem"
REPORT = "problem-report"
NAMES = frozenset({REPORT, "problem_report"})
"""Old agents write the second."""


def is_report(type: MessageType) -> bool:
    """Whether a message tells of a problem, in whichever protocol: such are never answered."""
    return type.name in NAMES


def report(message: Message, error: MediatorError) -> Reply:
    """Tell the sender of a message why it was refused (RFC 0035; for v2 report-problem 2.0)."""
    code, text = error.problem, str(error)
    prefix = message.type.prefix
    if message.generation is Generation.V1:
        type = MessageType(prefix, FAMILY, 1, 0, REPORT)
        body = {"description": {"code": code, "en": text}}
        return Reply(type, body, thid=message.thread, pthid=message.id)
    return Reply(MessageType(prefix, FAMILY, 2, 0, REPORT), {"code": code, "comment": text}, pthid=message.thread)
