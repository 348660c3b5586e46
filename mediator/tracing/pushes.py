"""Records the pushes of messages that have a trace."""

from mediator.gateway.subscription import EncodedMessage, MessageEncoder
from mediator.mailboxes.message import Message
from mediator.nats.subjects import MailboxSubject, classify
from mediator.tracing.spans import Tracing


class TracedMessage(EncodedMessage):
    """The frames of one message, each of which is a delivery."""

    shared = False

    def __init__(self, tracing: Tracing, message: Message) -> None:
        super().__init__(message)
        self._tracing = tracing

    def frame(self, subject: bytes, sid: bytes, *, python: bool, bare: bool = False) -> bytes:
        """Return the frame for one subscriber, and record that it is pushed."""
        to = classify(subject.decode())
        self._tracing.delivered([self.message], to.address if isinstance(to, MailboxSubject) else "", "push")
        return super().frame(subject, sid, python=python, bare=bare)


def traced_encoder(tracing: Tracing) -> MessageEncoder:
    """Return what encodes pushes and records those of messages with headers."""
    return lambda message: TracedMessage(tracing, message) if message.headers else EncodedMessage(message)
