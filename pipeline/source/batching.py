"""The batches in which messages are sent: which go together, and what an answer says of each (S8)."""

from dataclasses import dataclass, field

import orjson
from nats.aio.msg import Msg

from pipeline.source.asking import STRANGE, refusal

MAX_MESSAGES = 60
"""Messages of a batch; the service takes so many whatever its max_payload is."""
MAX_BYTES = 256 * 1024
"""Bytes of a batch of more than one message."""


@dataclass(slots=True)
class Open:
    """A message without receipt, as it stands in a batch."""

    row: int
    address: str
    frame: bytes


@dataclass(slots=True)
class Batch:
    """Messages to one mailbox, in their order, that go in one request."""

    most: int
    """Messages it may have."""
    messages: list[Open] = field(default_factory=list)
    size: int = 0

    @property
    def full(self) -> bool:
        """Whether it has as many messages as it may."""
        return len(self.messages) >= self.most

    def takes(self, message: Open, room: int) -> bool:
        """Whether a message may go with those that are there, in so many bytes."""
        if not self.messages:
            return True
        return message.address == self.messages[0].address and self.size + len(message.frame) <= room

    def add(self, message: Open) -> None:
        """Put a message at the end."""
        self.messages.append(message)
        self.size += len(message.frame)

    def refusals(self, answer: Msg) -> list[tuple[Open, str]]:
        """Return each message with why it was not taken, "" where it was."""
        said = refusal(answer)
        errors: dict[str, str] = {}
        if not said:
            try:
                errors = dict(orjson.loads(answer.data)["errors"])
            except (KeyError, TypeError, ValueError):
                said = STRANGE
        return [(message, said or errors.get(str(no), "")) for no, message in enumerate(self.messages)]
