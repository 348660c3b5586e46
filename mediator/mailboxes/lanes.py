"""The four lanes of a mailbox and the words for them (A2, S1, N9)."""

from enum import IntEnum

from mediator.errors import BadRequestError


class Lane(IntEnum):
    """A priority; the smaller number is delivered first."""

    CRITICAL = 0
    URGENT = 1
    NORMAL = 2
    LOW = 3

    @property
    def shown(self) -> str:
        """The word for the lane in the current protocol, which has none for low (N9)."""
        return _SHOWN[self]


LANES = tuple(Lane)
_SHOWN = ("critical", "urgent", "normal", "normal")
_WORDS = {
    "": Lane.NORMAL,
    "critical": Lane.CRITICAL,
    "high": Lane.CRITICAL,
    "urgent": Lane.URGENT,
    "normal": Lane.NORMAL,
    "low": Lane.LOW,
}


def parse_lane(word: str, field: str) -> Lane:
    """Return the lane a sender's word means, in any case (S1); another word is refused."""
    lane = _WORDS.get(word.strip().lower())
    if lane is None:
        raise BadRequestError(field, f"expected critical, high, urgent, normal or low, got {word[:40]!r}")
    return lane
