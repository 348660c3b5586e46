"""Protects reply inboxes: while a connection holds one, no other connection of the account may subscribe to it (N10).

The first subscriber holds it. Clients reconnect with the same inbox before the gateway knows that their old connection
is dead, so a contested holder gets a PING, and loses the inbox if it does not answer in time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from mediator.nats.subjects import ANY, overlaps

if TYPE_CHECKING:
    from mediator.push.gateway.session import GatewaySession

_ROOT: Final = "_INBOX."
ANSWER_SECONDS: Final = 2.0
"""For a holder to answer the PING."""
MAX_HELD: Final = 100
"""InboxClaims that one connection can hold; further ones are open to others."""
_DEPTH: Final = 8
"""Tokens of a subject that are indexed."""


@dataclass(eq=False, slots=True)
class _Claim:
    holder: "GatewaySession"
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
        self._claims: dict[GatewaySession, dict[bytes, _Claim]] = {}
        self._at: dict[str, set[_Claim]] = {}
        """Claims by the last of their prefixes."""
        self._below: dict[str, set[_Claim]] = {}
        """Claims by each of their prefixes."""
        self._contests: dict[GatewaySession, _Contest] = {}

    def claim(self, asker: "GatewaySession", sid: bytes, subject: str, queue: str) -> bool | None:
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

    def release(self, holder: "GatewaySession", sid: bytes) -> None:
        """Release what a subscription holds, if anything."""
        claim = self._claims.get(holder, {}).pop(sid, None)
        if claim is not None:
            self._drop(claim)

    def holds(self, holder: "GatewaySession", sid: bytes) -> bool:
        """Return whether a subscription holds its inbox: no other connection may listen to it."""
        held = self._claims.get(holder)
        claim = held.get(sid) if held is not None else None
        return claim is not None and not claim.lost

    def leave(self, holder: "GatewaySession") -> None:
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

    def _contest(self, asker: "GatewaySession", holders: set["GatewaySession"]) -> None:
        contest = self._contests[asker] = _Contest()
        for holder in holders:
            holder.probe(partial(self._decide, asker, contest, False))
        self._call_later(ANSWER_SECONDS, partial(self._decide, asker, contest, True))

    def _decide(self, asker: "GatewaySession", contest: _Contest, won: bool) -> None:
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
