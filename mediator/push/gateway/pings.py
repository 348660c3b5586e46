"""What the PINGs and PONGs of a connection are for: its own, the server's, or to confirm pushes (E7, N10)."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mediator.push.gateway.session import GatewaySubscription

MAX_PINGS: Final = 4
"""PINGs behind pushes that may be under way at the same time: the next ones come while the client reads."""

Confirmed = dict["GatewaySubscription", int]
"""How many messages of each subscription a PONG confirms, counted from its beginning."""


class ClientPings:
    """The PINGs that the client gets, and what its next PONGs answer."""

    def __init__(self) -> None:
        self._waiting: deque[Confirmed | Callable[[], None] | None] = deque()
        """None is a PING of the server."""
        self._unconfirmed: set[GatewaySubscription] = set()
        self._under_way = 0

    def by_server(self) -> None:
        """Note a PING of the server."""
        self._waiting.append(None)

    def probe(self, answered: Callable[[], None]) -> None:
        """Note a PING whose PONG calls ``answered``."""
        self._waiting.append(answered)

    def pushed(self, subscription: "GatewaySubscription") -> None:
        """Note that something was pushed to a subscription."""
        self._unconfirmed.add(subscription)

    def is_due(self) -> bool:
        """Return whether a PING has to follow what was pushed; it is noted then."""
        if not self._unconfirmed or self._under_way >= MAX_PINGS:
            return False
        self._under_way += 1
        self._waiting.append({each: each.pushed for each in self._unconfirmed})
        self._unconfirmed.clear()
        return True

    def pong(self) -> Confirmed | None:
        """Take a PONG of the client, and return what it confirms; None: it is for the server."""
        answers = self._waiting.popleft() if self._waiting else None
        if isinstance(answers, dict):
            self._under_way -= 1
            return answers
        if answers is None:
            return None
        answers()
        return {}

    def forget(self, subscription: "GatewaySubscription") -> None:
        """Have what a subscription has not confirmed count as not received."""
        self._unconfirmed.discard(subscription)
        for answers in self._waiting:
            if isinstance(answers, dict):
                answers.pop(subscription, None)

    def end(self) -> "set[GatewaySubscription]":
        """Forget everything, since the connection is over; return the subscriptions with unconfirmed messages."""
        left = self._unconfirmed.union(*(each for each in self._waiting if isinstance(each, dict)))
        self._waiting.clear()
        self._unconfirmed.clear()
        return left


class ServerPings:
    """The PINGs that the server gets: the client's, and one behind each question about a subscription.

    The client's PONGs are held until all subscriptions before them are decided.
    """

    def __init__(self) -> None:
        self._waiting: deque[GatewaySubscription | None] = deque()
        """None is a PING of the client."""
        self._undecided: dict[GatewaySubscription, None] = {}
        """In their order."""
        self._made = 0
        self._held: deque[list[int]] = deque()
        """PONGs that wait: up to which number the subscriptions must be decided, and how many PONGs."""

    def by_client(self) -> None:
        """Note a PING of the client."""
        self._waiting.append(None)

    def ask(self, subscription: "GatewaySubscription") -> None:
        """Note a PING behind the question whether a client may subscribe."""
        self._made += 1
        subscription.number = self._made
        self._undecided[subscription] = None
        self._waiting.append(subscription)

    @property
    def asked(self) -> "GatewaySubscription | None":
        """The first subscription whose question is not answered."""
        return next((each for each in self._waiting if each is not None), None)

    def pong(self) -> "tuple[GatewaySubscription | None, bool]":
        """Take a PONG of the server: the subscription that is allowed, if any, and whether the PONG is passed on."""
        allowed = self._waiting.popleft() if self._waiting else None
        if allowed is not None:
            return allowed, False
        if not self._undecided:
            return None, True
        # It waits also for those that came behind its PING.
        if self._held and self._held[-1][0] == self._made:
            self._held[-1][1] += 1
        else:
            self._held.append([self._made, 1])
        return None, False

    def decide(self, subscription: "GatewaySubscription") -> int:
        """Take note that a subscription is decided; return how many PONGs are released."""
        self._undecided.pop(subscription, None)
        first = next(iter(self._undecided), None)
        count = 0
        while self._held and (first is None or first.number > self._held[0][0]):
            count += self._held.popleft()[1]
        return count

    def end(self) -> None:
        """Forget everything, since the connection is over."""
        self._undecided.clear()
        self._held.clear()
