"""The four lanes of a mailbox and the words for them (A2, S1, N9)."""

from difflib import get_close_matches
from enum import IntEnum

from mediator.errors import BadRequestError
from mediator.fields import printable


class Lane(IntEnum):
    """A priority; the smaller number is delivered first."""

    CRITICAL = 0
    URGENT = 1
    NORMAL = 2
    LOW = 3


LANES = tuple(Lane)
SHOWN = ("critical", "urgent", "normal", "normal")
"""The word for each lane in the current protocol, which has none for low (N9)."""
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
        near = get_close_matches(word.strip().lower(), filter(None, _WORDS), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadRequestError(field, f'expected critical, high, urgent, normal or low, got "{printable(word)}"{hint}')
    return lane
