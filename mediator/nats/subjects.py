"""Classifies subjects: subscriptions served from the store, and what is refused (E1, E2, E6, E9, E10, N2, N10).

All others are left to NATS. Pure; gateway and service both use it, and so agree.
"""

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from mediator.mailboxes.address import MAX_ADDRESS, RESERVED, bare_address
from mediator.nats import control_messages

API: Final = "$mq9.AI."
"""The prefix of the subjects of all verbs."""
OPEN: Final = "PUSH.OPEN"
"""The verb, behind :data:`API`, with which a gateway asks on a client's connection who the client is."""
SELF_TEST: Final = "_SELFTEST"
"""The verb, behind :data:`API`, that the service answers with the name of its instance."""
PUSH: Final = "$mq9.PUSH."
"""What the subjects begin with on which the gateway asks nats-server whether a client may subscribe to mail."""
MICRO_NAME: Final = "mq9"
"""What NATS's own tools call the service."""
MICRO_SUBJECTS: Final = ("$SRV.*", f"$SRV.*.{MICRO_NAME}", f"$SRV.*.{MICRO_NAME}.*")
"""On which they ask for it (NATS ADR-32). Not ``$SRV.>``: who asks for a service that is not there is told at once."""
ANY: Final = "*"
"""The wildcard for one token; as a lane word, all lanes of a mailbox."""
MAX_PATTERN: Final = 512
"""Characters of a BROADCAST pattern."""

_INBOX: Final = "INBOX."
_MSG: Final = "MAILBOX.MSG."
_BROADCAST: Final = "BROADCAST."
BROADCAST: Final = API + _BROADCAST
"""The prefix of the subjects of broadcasts."""
_PUBLIC: Final = "PUBLIC.LIST"
_ADDRESS: Final = re.compile(r"[a-z0-9]+(?:\.[a-z0-9]+)*")
_TOKEN: Final = re.compile(r"[^\s.*>#]+")
_OURS: Final = frozenset({"$mq9", control_messages.ROOT.rstrip(".")})
_API_BYTES: Final = API.encode()
_STREAM_VERBS: Final = ("API.STREAM.CREATE.", "API.STREAM.UPDATE.", "API.STREAM.RESTORE.")
_NOT_FOR_CLIENTS: Final = (
    b"$mq9.AI.PUSH.",
    # nats-server answers some of these for the account of the client, with everything its clients subscribe to.
    b"$SYS.",
    *(each.encode() for each in (PUSH, control_messages.ROOT)),
)


class Edition(Enum):
    """The family of subjects of a subscription; each has lane words of its own (E1)."""

    FIRST = "INBOX"
    LATER = "MAILBOX.MSG"


WORDS: Final = {
    Edition.FIRST: frozenset({"urgent", "normal", "notify"}),
    Edition.LATER: frozenset({"critical", "high", "urgent", "normal", "low"}),
}
"""The words that are the lane at the end of a subject, and never part of the address (E2)."""


@dataclass(frozen=True, slots=True)
class PlainSubject:
    """A subject that is left to NATS."""


@dataclass(frozen=True, slots=True)
class MailboxSubject:
    """The mail of one mailbox, which may not exist."""

    edition: Edition
    address: str
    word: str
    """One of :data:`WORDS`, :data:`ANY`, or empty for the bare address."""


@dataclass(frozen=True, slots=True)
class BroadcastSubject:
    """Broadcasts; ``pattern`` is the whole subject, with NATS's wildcards whatever the client wrote."""

    pattern: str


@dataclass(frozen=True, slots=True)
class PublicListSubject:
    """The tenant's public mailboxes."""

    subject: str

    @property
    def delivered_on(self) -> str:
        """The subject of each push; with a wildcard for the lane, that of normal messages."""
        return self.subject[:-1] + "normal" if self.subject.endswith(".*") else self.subject


@dataclass(frozen=True, slots=True)
class RefusedSubject:
    """A subject that nobody may subscribe to; ``text`` goes into ``-ERR``."""

    text: str


Subject = PlainSubject | MailboxSubject | BroadcastSubject | PublicListSubject | RefusedSubject


def split_request(subject: str) -> tuple[str | None, str]:
    """Split the subject of a request into the NATS account it came from, None without accounts, and the rest."""
    if subject.startswith(API):
        return None, subject[len(API) :]
    _, account, rest = subject.split(".", 2)
    return account, rest[len(API) :]


def classify(subject: str) -> Subject:
    """Classify the subject of a SUB. Never raises: what NATS would refuse is plain, or refused here."""
    if not subject.startswith(API):
        return RefusedSubject(violation(subject)) if _covers_others(subject) else PlainSubject()
    name = subject[len(API) :]
    if name == _PUBLIC:
        return PublicListSubject(subject)
    if name.startswith(_MSG):
        return _mailbox(subject, Edition.LATER, name[len(_MSG) :])
    if name.startswith(_INBOX):
        return _mailbox(subject, Edition.FIRST, name[len(_INBOX) :])
    if name.startswith(_BROADCAST):
        return _broadcast(subject, name[len(_BROADCAST) :])
    return RefusedSubject(violation(subject))


def violation(subject: str, reason: str = "") -> str:
    """Word the refusal of a subscription as nats-server does: any other beginning makes clients disconnect (N10)."""
    text = f'Permissions Violation for Subscription to "{subject}"'
    return f"{text}: {reason}" if reason else text


def split_word(edition: Edition, rest: str) -> tuple[str, str]:
    """Split what follows the family's name into the address and a trailing lane word, empty if there is none (E2)."""
    address, dot, last = rest.rpartition(".")
    return (address, last) if dot and last in WORDS[edition] else (rest, "")


def overlaps(one: str, other: str) -> bool:
    """Return whether some subject matches both patterns."""
    ours, theirs = one.split("."), other.split(".")
    for mine, yours in zip(ours, theirs, strict=False):
        if ">" in (mine, yours):
            return True
        if mine != yours and ANY not in (mine, yours):
            return False
    return len(ours) == len(theirs)


def stream_allowed(subject: str) -> bool:
    """Return whether a JetStream stream may have a subject: no requests, pushes or replies."""
    return not any(overlaps(subject, pattern) for pattern in ("$mq9.>", "_INBOX.>", control_messages.ROOT + ">"))


def is_for_clients(subject: bytes) -> bool:
    """Return whether clients may publish to a subject, or name it for the reply."""
    return not subject.startswith(_NOT_FOR_CLIENTS)


def can_be_answered(subject: bytes, reply: bytes) -> bool:
    """Return whether a publish to this subject may name that one for the reply.

    With a wildcard in it, nats-server forgets other clients' requests to the service when the answer comes.
    """
    return not (subject.startswith(_API_BYTES) and {b"*", b">"}.intersection(reply.split(b".")))


def without_empty_tokens(subject: bytes) -> bytes:
    """Return a request's subject as nats-server delivers it, though it has empty tokens (N2).

    The server would answer these with its own 503; what stands in their place is in no address and no verb.
    """
    if not subject.startswith(_API_BYTES) or not (b".." in subject or subject.endswith(b".")):
        return subject
    return subject.partition(b"..")[0].removesuffix(b".") + b".#"


def makes_stream(subject: bytes) -> bool:
    """Return whether a request to this subject asks JetStream, in any domain, for a stream."""
    words = subject.decode("utf-8", "replace").split(".", 2)
    if words[0] != "$JS" or len(words) < 3:
        return False
    return any(rest.startswith(_STREAM_VERBS) for rest in (f"{words[1]}.{words[2]}", words[2]))


def is_stream_config_allowed(body: bytes) -> bool:
    """Return whether a stream's configuration is valid and has no subjects of requests, pushes or replies."""
    found = _stream_subjects(body)
    return found is not None and all(isinstance(each, str) and stream_allowed(each) for each in found)


def _stream_subjects(body: bytes) -> list[object] | None:
    """Return all subjects that nats-server may find in a stream's configuration; None if that is unknown.

    The server accepts names in any case, merges repeated ones, and reads bytes that are not UTF-8.
    """
    found: list[object] = []

    def collect(pairs: list[tuple[str, object]]) -> None:
        for name, value in pairs:
            if name.casefold() == "subjects":
                found.extend(value if isinstance(value, list) else [value])

    try:
        json.loads(body.decode("utf-8", "replace"), object_pairs_hook=collect)
    except (ValueError, RecursionError):
        return None
    return [each for each in found if each is not None]


def _mailbox(subject: str, edition: Edition, rest: str) -> Subject:
    address, word = split_word(edition, rest)
    if not word and rest.endswith(".*"):
        address, word = rest[:-2], ANY
    address = bare_address(address)
    if set(address) & {"*", ">"} or not address:
        return RefusedSubject(violation(subject))
    if edition is Edition.LATER and address in RESERVED:
        return PublicListSubject(subject)
    if len(address) > MAX_ADDRESS or not _ADDRESS.fullmatch(address):
        return RefusedSubject(violation(subject, f"mailbox {address[:MAX_ADDRESS]} does not exist"))
    return MailboxSubject(edition, address, word)


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
        return RefusedSubject(violation(subject))
    return BroadcastSubject(BROADCAST + ".".join(tokens))


def _covers_others(subject: str) -> bool:
    """Return whether a pattern covers the service's own subjects, or the replies to others, which are secrets."""
    first, *rest = subject.split(".")
    second = rest[0] if rest else ""
    if first == ">" or first in _OURS:
        return True
    if first == "_INBOX":
        return second in (ANY, ">")
    return first == ANY and second in (ANY, ">", "AI", "PUSH", *control_messages.SECOND_TOKENS)
