"""What the gateway refuses: publishes that would pass for its own, inboxes that others hold (N2, N10)."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from mediator.nats import control_messages, subjects
from mediator.nats.subjects import ANY, overlaps

_API: Final = subjects.API.encode()
_STREAM_VERBS: Final = ("API.STREAM.CREATE.", "API.STREAM.UPDATE.", "API.STREAM.RESTORE.")
_NOT_FOR_CLIENTS: Final = (
    b"$mq9.AI.PUSH.",
    # nats-server answers some of these for the account of the client, with everything its clients subscribe to.
    b"$SYS.",
    *(each.encode() for each in (subjects.PUSH, control_messages.ROOT)),
)


def is_for_clients(subject: bytes) -> bool:
    """Return whether clients may publish to a subject, or name it for the reply."""
    return not subject.startswith(_NOT_FOR_CLIENTS)


def can_be_answered(subject: bytes, reply: bytes) -> bool:
    """Return whether a publish to this subject may name that one for the reply.

    With a wildcard in it, nats-server forgets other clients' requests to the service when the answer comes.
    """
    return not (subject.startswith(_API) and {b"*", b">"}.intersection(reply.split(b".")))


def without_empty_tokens(subject: bytes) -> bytes:
    """Return a request's subject as nats-server delivers it, though it has empty tokens (N2).

    The server would answer these with its own 503; what stands in their place is in no address and no verb.
    """
    if not subject.startswith(_API) or not (b".." in subject or subject.endswith(b".")):
        return subject
    return subject.partition(b"..")[0].removesuffix(b".") + b".#"


def makes_stream(subject: bytes) -> bool:
    """Return whether a request to this subject asks JetStream, in any domain, for a stream."""
    words = subject.decode("utf-8", "replace").split(".", 2)
    if words[0] != "$JS" or len(words) < 3:
        return False
    return any(rest.startswith(_STREAM_VERBS) for rest in (f"{words[1]}.{words[2]}", words[2]))


def is_stream_allowed(body: bytes) -> bool:
    """Return whether a stream's configuration is valid and has no subjects of requests, pushes or replies."""
    found = _stream_subjects(body)
    return found is not None and all(isinstance(each, str) and subjects.stream_allowed(each) for each in found)


def _stream_subjects(body: bytes) -> list[object] | None:
    """Return all subjects that nats-server may find in a stream's configuration; None if that is unknown.

    The server accepts names in any case, merges repeated ones, and reads bytes that are not UTF-8.
    """
    found: list[object] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        for name, value in pairs:
            if name.casefold() == "subjects":
                found.extend(value if isinstance(value, list) else [value])

    try:
        json.loads(body.decode("utf-8", "replace"), object_pairs_hook=note)
    except (ValueError, RecursionError):
        return None
    return [each for each in found if each is not None]


_ROOT: Final = "_INBOX."
ANSWER_SECONDS: Final = 2.0
"""For a holder to answer the PING."""
MAX_HELD: Final = 100
"""InboxClaims that one connection can hold; further ones are open to others."""
_DEPTH: Final = 8
"""Tokens of a subject that are indexed."""


@dataclass(eq=False, slots=True)
class InboxHolder:
    """A connection that holds inboxes, or wants to."""

    probe: Callable[[Callable[[], None]], None]
    """Asks the client for a sign of life, and calls what it is given when that comes."""
    resume: Callable[[], None]
    """Called when the claim that is not decided can be made again."""
    account: str = ""
    """The client's account, once the server has named it."""


@dataclass(eq=False, slots=True)
class _Claim:
    holder: InboxHolder
    subject: str
    queue: str
    prefixes: list[str]
    """The prefixes of the subject up to its first wildcard, of two tokens and more."""
    lost: bool = False
    """Whether another connection has the inbox now."""


@dataclass(eq=False, slots=True)
class _Contest:
    decided: bool = False
    won: bool = False


class InboxClaims:
    """The inboxes of all connections of this gateway."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        """``call_later`` is that of the event loop."""
        self._call_later = call_later
        self._claims: dict[InboxHolder, dict[bytes, _Claim]] = {}
        self._at: dict[str, set[_Claim]] = {}
        """Claims by the last of their prefixes."""
        self._below: dict[str, set[_Claim]] = {}
        """Claims by each of their prefixes."""
        self._contests: dict[InboxHolder, _Contest] = {}

    def claim(self, asker: InboxHolder, sid: bytes, subject: str, queue: str) -> bool | None:
        """Return whether a connection may subscribe to an inbox, which it then holds; see :func:`may_match`.

        A subject with a wildcard in place of ``_INBOX`` must match no inbox that another one holds, and holds none.
        None: not known yet. ``resume`` of the asker is called later; it must not claim anything else until then.
        """
        first, _, rest = subject.partition(".")
        inbox = _ROOT + rest
        claim = _Claim(asker, inbox, queue, _prefixes(inbox))
        contest = self._contests.get(asker)
        if contest is None:
            holders = {each.holder for each in self._conflicts(claim)}
            if holders:
                self._contest(asker, holders)
                return None
        elif not contest.decided:
            return None
        else:
            del self._contests[asker]
            if not contest.won:
                return False
            for each in list(self._conflicts(claim)):
                self._drop(each)
        held = self._claims.setdefault(asker, {})
        if first != ANY and len(held) < MAX_HELD and sid not in held:
            held[sid] = claim
            self._at.setdefault(claim.prefixes[-1], set()).add(claim)
            for prefix in claim.prefixes:
                self._below.setdefault(prefix, set()).add(claim)
        return True

    def release(self, holder: InboxHolder, sid: bytes) -> None:
        """Release what a subscription holds, if anything."""
        claim = self._claims.get(holder, {}).pop(sid, None)
        if claim is not None:
            self._drop(claim)

    def holds(self, holder: InboxHolder, sid: bytes) -> bool:
        """Return whether a subscription holds its inbox: no other connection may listen to it."""
        held = self._claims.get(holder)
        claim = held.get(sid) if held is not None else None
        return claim is not None and not claim.lost

    def leave(self, holder: InboxHolder) -> None:
        """Release everything that a connection holds or claims."""
        self._contests.pop(holder, None)
        for claim in self._claims.pop(holder, {}).values():
            self._drop(claim)

    def _conflicts(self, claim: _Claim) -> Iterator[_Claim]:
        *above, last = claim.prefixes
        for found in (self._below.get(last, ()), *(self._at.get(prefix, ()) for prefix in above)):
            for other in found:
                apart = other.holder.account and claim.holder.account not in ("", other.holder.account)
                # Members of a queue group share an inbox, as consumers of JetStream do.
                shared = claim.queue and claim.queue == other.queue
                if not (apart or shared or other.holder is claim.holder) and overlaps(claim.subject, other.subject):
                    yield other

    def _contest(self, asker: InboxHolder, holders: set[InboxHolder]) -> None:
        contest = self._contests[asker] = _Contest()
        for holder in holders:
            holder.probe(partial(self._decide, asker, contest, False))
        self._call_later(ANSWER_SECONDS, partial(self._decide, asker, contest, True))

    def _decide(self, asker: InboxHolder, contest: _Contest, won: bool) -> None:
        if not contest.decided:
            contest.decided, contest.won = True, won
            if self._contests.get(asker) is contest:
                asker.resume()

    def _drop(self, claim: _Claim) -> None:
        claim.lost = True
        _discard(self._at, claim.prefixes[-1], claim)
        for prefix in claim.prefixes:
            _discard(self._below, prefix, claim)


def may_match(subject: str) -> bool:
    """Return whether a subject that the gateway does not refuse anyway can match an inbox."""
    return subject.startswith((_ROOT, f"{ANY}."))


def _prefixes(subject: str) -> list[str]:
    tokens = subject.split(".")[:_DEPTH]
    count = next((place for place, token in enumerate(tokens) if token in (ANY, ">")), len(tokens))
    return [".".join(tokens[:end]) for end in range(2, max(2, count) + 1)]


def _discard(table: dict[str, set[_Claim]], key: str, claim: _Claim) -> None:
    claims = table.get(key)
    if claims is not None:
        claims.discard(claim)
        if not claims:
            del table[key]
