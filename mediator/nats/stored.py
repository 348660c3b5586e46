"""Which subjects a subscription finds in the store, and which it may not have at all (E1, E2, E6, E9, E10, N10).

Everything else is NATS's own affair. Pure: gateway and service read a subject here, and so agree.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from mediator.mailboxes.address import MAX_ADDRESS, RESERVED
from mediator.nats import control

ANY: Final = "*"
"""The lane word of a subscription to all lanes of a mailbox."""
MAX_PATTERN: Final = 512
"""Characters of a BROADCAST pattern."""

_VERBS: Final = "$mq9.AI."
_INBOX: Final = "INBOX."
_MSG: Final = "MAILBOX.MSG."
_BROADCAST: Final = "BROADCAST."
BROADCAST: Final = _VERBS + _BROADCAST
"""What the subjects of broadcasts begin with."""
_PUBLIC: Final = "PUBLIC.LIST"
_ADDRESS: Final = re.compile(r"[a-z0-9]+(?:\.[a-z0-9]+)*")
_TOKEN: Final = re.compile(r"[^\s.*>#]+")
_OURS: Final = frozenset({"$mq9", control.ROOT.rstrip(".")})


class Edition(Enum):
    """Which family of subjects a subscription was written in; each has lane words of its own (E1)."""

    FIRST = "INBOX"
    LATER = "MAILBOX.MSG"


WORDS: Final = {
    Edition.FIRST: frozenset({"urgent", "normal", "notify"}),
    Edition.LATER: frozenset({"critical", "high", "urgent", "normal", "low"}),
}
"""The words that, at the end of a subject, are the lane and never part of the address (E2)."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A subject that is none of ours."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The mail of one mailbox; whether it exists, only the service knows."""

    edition: Edition
    address: str
    word: str
    """One of :data:`WORDS`, :data:`ANY`, or empty for the bare address."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Broadcasts; ``pattern`` is the whole subject in NATS's own wildcards, whatever the client wrote for them."""

    pattern: str


@dataclass(frozen=True, slots=True)
class PublicList:
    """The tenant's public mailboxes."""

    subject: str

    @property
    def delivered_on(self) -> str:
        """The subject on which each is delivered; to all lanes they come as messages without a priority do."""
        return self.subject[:-1] + "normal" if self.subject.endswith(".*") else self.subject


@dataclass(frozen=True, slots=True)
class Refused:
    """A subject that nobody may subscribe to; ``text`` is for ``-ERR``."""

    text: str


Subject = Plain | Stored | Broadcast | PublicList | Refused


def classify(subject: str) -> Subject:
    """Say what a client subscribes to. Never raises: what NATS itself would refuse is plain, or refused here."""
    if not subject.startswith(_VERBS):
        return Refused(violation(subject)) if _covers_others(subject) else Plain()
    name = subject[len(_VERBS) :]
    if name == _PUBLIC:
        return PublicList(subject)
    if name.startswith(_MSG):
        return _mailbox(subject, Edition.LATER, name[len(_MSG) :])
    if name.startswith(_INBOX):
        return _mailbox(subject, Edition.FIRST, name[len(_INBOX) :])
    if name.startswith(_BROADCAST):
        return _broadcast(subject, name[len(_BROADCAST) :])
    return Refused(violation(subject))


def delivered_on(subject: str) -> str:
    """Return the pattern, in NATS's own wildcards, that the pushes of a subscription match."""
    found = classify(subject)
    return found.pattern if isinstance(found, Broadcast) else subject


def violation(subject: str) -> str:
    """Word a refusal as nats-server does."""
    return f'Permissions Violation for Subscription to "{subject}"'


def split_word(edition: Edition, rest: str) -> tuple[str, str]:
    """Part what follows the family's name into the address and one trailing lane word, empty if there is none (E2)."""
    address, dot, last = rest.rpartition(".")
    return (address, last) if dot and last in WORDS[edition] else (rest, "")


def overlaps(one: str, other: str) -> bool:
    """Tell whether some subject matches both patterns."""
    ours, theirs = one.split("."), other.split(".")
    for mine, yours in zip(ours, theirs, strict=False):
        if ">" in (mine, yours):
            return True
        if mine != yours and ANY not in (mine, yours):
            return False
    return len(ours) == len(theirs)


def stream_allowed(subject: str) -> bool:
    """Tell whether a JetStream stream may take a subject: no requests, no pushes, nobody's replies."""
    return not any(overlaps(subject, pattern) for pattern in ("$mq9.>", "_INBOX.>", control.ROOT + ">"))


def _mailbox(subject: str, edition: Edition, rest: str) -> Subject:
    address, word = split_word(edition, rest)
    if not word and rest.endswith(".*"):
        address, word = rest[:-2], ANY
    if set(address) & {"*", ">"} or not address:
        return Refused(violation(subject))
    if edition is Edition.LATER and address in RESERVED:
        return PublicList(subject)
    if len(address) > MAX_ADDRESS or not _ADDRESS.fullmatch(address):
        return Refused(f"mailbox {address[:MAX_ADDRESS]} does not exist")
    return Stored(edition, address, word)


def _broadcast(subject: str, rest: str) -> Subject:
    tokens = rest.split(".")
    if tokens[-1] == "#":
        tokens[-1] = ">"
    inner = tokens[:-1] if tokens[-1] == ">" else tokens
    if (
        len(rest) > MAX_PATTERN
        or not rest.isprintable()
        or not all(token == ANY or _TOKEN.fullmatch(token) for token in inner)
    ):
        return Refused(violation(subject))
    return Broadcast(BROADCAST + ".".join(tokens))


def _covers_others(subject: str) -> bool:
    """Whether a pattern takes in our own subjects, or the replies to others, whose names are secrets."""
    first, *rest = subject.split(".")
    second = rest[0] if rest else ""
    if first == ">" or first in _OURS:
        return True
    if first == "_INBOX":
        return second in (ANY, ">")
    return first == ANY and second in (ANY, ">", "AI", "PUSH", *control.SECOND_TOKENS)
