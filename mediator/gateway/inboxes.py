"""Inboxes: which connections hold one, so that no other may listen (N2, N10), and where a reply to one leads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from mediator.nats.subjects import ANY, overlaps

MAX_INBOXES: Final = 1000
"""Subscriptions of one connection that may match inboxes; one that has made more sends all requests the long way."""
_ROOT: Final = "_INBOX."
ANSWER_SECONDS: Final = 2.0
"""For a holder to answer the PING."""
MAX_HELD: Final = 100
"""Inboxes that one connection can hold; further ones are open to others."""
_DEPTH: Final = 8
"""Tokens of a subject that are indexed."""
_ANY_LAST: Final = b".*"


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
class InboxClaim:
    """What one subscription of a connection holds, or wants to."""

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
        self._claims: dict[InboxHolder, dict[bytes, InboxClaim]] = {}
        self._at: dict[str, set[InboxClaim]] = {}
        """Claims by the last of their prefixes."""
        self._below: dict[str, set[InboxClaim]] = {}
        """Claims by each of their prefixes."""
        self._contests: dict[InboxHolder, _Contest] = {}

    def claim(self, asker: InboxHolder, sid: bytes, subject: str, queue: str) -> bool | None:
        """Return whether a connection may subscribe to an inbox, which it then holds; see :func:`may_match`.

        A subject with a wildcard in place of ``_INBOX`` must match no inbox that another one holds, and holds none.
        None: not known yet. ``resume`` of the asker is called later; it must not claim anything else until then.
        """
        first, _, rest = subject.partition(".")
        inbox = _ROOT + rest
        claim = InboxClaim(asker, inbox, queue, _prefixes(inbox))
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

    def find(self, holder: InboxHolder, sid: bytes) -> InboxClaim | None:
        """Return the claim of a subscription; None: it has none, and others may listen to its inbox."""
        return self._claims.get(holder, {}).get(sid)

    def leave(self, holder: InboxHolder) -> None:
        """Release everything that a connection holds or claims."""
        self._contests.pop(holder, None)
        for claim in self._claims.pop(holder, {}).values():
            self._drop(claim)

    def _conflicts(self, claim: InboxClaim) -> Iterator[InboxClaim]:
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

    def _drop(self, claim: InboxClaim) -> None:
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


def _discard(table: dict[str, set[InboxClaim]], key: str, claim: InboxClaim) -> None:
    claims = table.get(key)
    if claims is not None:
        claims.discard(claim)
        if not claims:
            del table[key]


@dataclass(slots=True, eq=False)
class ReplySubscription:
    """A plain subscription to an inbox, and the answers that take the short way to it."""

    sid: bytes
    subject: bytes
    """As it is, wildcard included."""
    claim: InboxClaim | None
    """What keeps others from listening to the inbox, until it is lost; None: nothing does."""
    requests: int = 0
    """How many there are, under way included."""
    answers: int = 0
    """How many it got."""
    max_answers: int | None = None
    """How many it takes, once it is to end; None: all."""


class ReplyInboxes:
    """The subscriptions of one connection that may match an inbox."""

    def __init__(self) -> None:
        self._by_sid: dict[bytes, ReplySubscription] = {}
        self._by_subject: dict[bytes, list[ReplySubscription]] = {}
        self._others: set[bytes] = set()
        """Sids of those that answers cannot be handed to: of queue groups, and with wildcards elsewhere."""

    def add(self, sid: bytes, subject: bytes, queue: bytes, claim: InboxClaim | None) -> bool:
        """Add one; False: there are too many."""
        if sid in self._by_sid or sid in self._others:
            return True
        if len(self._by_sid) + len(self._others) >= MAX_INBOXES:
            return False
        exact = subject.removesuffix(_ANY_LAST)
        if queue or b"*" in exact or b">" in exact:
            self._others.add(sid)
        else:
            made = self._by_sid[sid] = ReplySubscription(sid, subject, claim)
            self._by_subject.setdefault(subject, []).append(made)
        return True

    def remove(self, sid: bytes, max_msgs: int) -> int:
        """End one after ``max_msgs`` messages in all, 0: now; return how many may come through nats-server."""
        self._others.discard(sid)
        found = self._by_sid.pop(sid, None)
        if found is None:
            return max_msgs
        same = self._by_subject[found.subject]
        same.remove(found)
        if not same:
            del self._by_subject[found.subject]
        # Answers to what was asked before still come the short way.
        found.max_answers = min(max_msgs, found.requests)
        return max_msgs - found.max_answers

    def find(self, reply: bytes) -> ReplySubscription | None:
        """Return the one subscription that a reply subject leads to, if nobody else can listen to it."""
        if self._others:
            return None
        exact = self._by_subject.get(reply)
        wild = self._by_subject.get(reply.rpartition(b".")[0] + _ANY_LAST)
        found = exact if wild is None else wild
        if found is None or len(found) > 1 or (exact and wild):
            return None
        claim = found[0].claim
        return found[0] if claim is not None and not claim.lost else None
