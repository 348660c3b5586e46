"""Which lanes a subscription wants, and the word each has on the subjects of its pushes (E1)."""

from collections.abc import Mapping
from typing import Final

from mediator.mailboxes.lanes import LANES, Lane
from mediator.nats.editions import questions
from mediator.nats.stored import ANY, Edition, Stored

_FIRST: Final = ("urgent", "urgent", "normal", "notify")
_SECOND: Final = ("critical", "urgent")
_ALL: Final = ("critical", "urgent", "normal", "low")
"""To all lanes both later editions subscribe alike; each knows these words, or takes them for what they say."""


def lanes_of(wanted: Stored, *, python: bool) -> Mapping[Lane, str]:
    """Return the lanes, highest first, with their words; ``python``: as ``robustmq-mq9-python`` has them (E11).

    No word: the push bears the bare address.
    """
    if not wanted.word:
        return {Lane.NORMAL: "", Lane.LOW: ""}
    if wanted.edition is Edition.FIRST:
        words: tuple[str, ...] = _FIRST
    elif wanted.word == ANY:
        words = questions.SHOWN if python else _ALL
    else:
        words = _SECOND if wanted.word in _SECOND else questions.SHOWN
    lanes = dict(zip(LANES, words, strict=False))
    return {lane: word for lane, word in lanes.items() if wanted.word in (ANY, word)}
