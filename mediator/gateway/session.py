"""The subscriptions of one connection to stored mail: when each is decided, what a PONG confirms (E6, N10).

A PONG of the server waits until all subscriptions before it are decided. After pushes the client gets a PING, whose
PONG confirms that it has read them. Here are also the events of a connection, and what all connections share.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mediator.gateway.inboxes import InboxClaims
from mediator.gateway.streams import ConnectionStreams, UnfinishedCommands
from mediator.gateway.subscription import Subscription
from mediator.nats import frames, subjects
from mediator.nats.client import Request

MAX_PINGS: Final = 4
"""PINGs behind pushes that may be under way at the same time: the next ones come while the client reads."""

# Events. A request that takes the short way is one as it is: :class:`Request`.


class SubscriptionMade(NamedTuple):
    """The client subscribes to stored mail; nats-server is asked whether it may."""

    subscription: Subscription


class SubscriptionPermitted(NamedTuple):
    """The client may subscribe, and its tenant is known: the subscription is to be opened."""

    subscription: Subscription


class SubscriptionEnded(NamedTuple):
    """A subscription has ended: ``unsub`` or ``broken``."""

    subscription: Subscription
    how: str


class PushesConfirmed(NamedTuple):
    """The client has read so many messages of a subscription since its opening."""

    subscription: Subscription
    total: int


class IdentityRequested(NamedTuple):
    """The service was asked who the client is: :meth:`GatewayProtocol.identified` takes the answer."""

    token: str


class AccountNamed(NamedTuple):
    """The account of the client is known."""

    account: str


class ShortWayOpened(NamedTuple):
    """Requests of the client come from now on, from a connection of this name."""

    connection: str


class ReadingResumed(NamedTuple):
    """What the client wrote can be read again, after ``waiting`` was set."""


Event = (
    Request
    | SubscriptionMade
    | SubscriptionPermitted
    | SubscriptionEnded
    | PushesConfirmed
    | IdentityRequested
    | AccountNamed
    | ShortWayOpened
    | ReadingResumed
)


@dataclass(frozen=True, slots=True)
class PublicAddress:
    """What INFO tells clients about the gateway, and how many subscriptions each connection may have."""

    host: str
    port: int
    tls: bool
    tls_verify: bool
    """Whether clients show a certificate of their own."""
    max_subscriptions: int


@dataclass(slots=True)
class GatewayContext:
    """What all connections of a gateway share."""

    address: PublicAddress
    make_identity_request: Callable[[], tuple[str, bytes]]
    """Returns a new token, and the body of the question who a client is."""
    claims: InboxClaims
    find_alias: Callable[[str, str], str | None] | None = None
    """Returns the login in place of a user and a password that rotates; None: connections need no account."""
    unfinished: UnfinishedCommands = field(default_factory=UnfinishedCommands)
    short_way: bool = False
    """Whether somebody takes requests now."""


class PushSession(ConnectionStreams):
    """The stored-mail subscriptions of one connection: its protocol adds them, the gateway opens and refuses them."""

    closed = False
    tenant: str | None = None
    """None: the client is not identified."""
    _made = 0
    _full = False
    """Whether the client reads more slowly than it is written to."""
    _pings_under_way = 0

    def __init__(self, unfinished: UnfinishedCommands, wake: Callable[[], None]) -> None:
        """``wake`` as for :class:`~mediator.gateway.protocol.GatewayProtocol`."""
        super().__init__(unfinished)
        self._wake = wake
        self.events: deque[Event] = deque()
        """What has happened and is still to be handled, by who takes it out."""
        self._by_sid: dict[bytes, Subscription] = {}
        """Subscriptions whose sids are in use: not ended by the client, nor by the maximum of messages."""
        self._undecided: dict[Subscription, None] = {}
        """In their order."""
        self._blocked: set[Subscription] = set()
        """Subscriptions that have more to push when the client reads again."""
        self._unconfirmed: set[Subscription] = set()
        """Subscriptions with pushes that no PING has followed."""
        self._server_pongs: deque[Subscription | None] = deque()
        """What the next PONGs of the server answer: may the client subscribe; None: a PING of the client."""
        self._held_pongs: list[list[int]] = []
        """PONGs that wait: up to which number the subscriptions must be decided, and how many PONGs."""
        self._client_pongs: list[dict[Subscription, int] | list[Callable[[], None]] | None] = []
        """How many messages of each subscription a PONG confirms; what it calls; None: a PING of the server."""

    @property
    def subscriptions(self) -> int:
        """How many subscriptions to stored mail there are."""
        return len(self._by_sid)

    def subscriptions_to(self, tenant: str, address: str) -> list[Subscription]:
        """Return those that a mailbox is read by."""
        return [
            each
            for each in self._by_sid.values()
            if each.tenant == tenant and isinstance(each.subject, subjects.MailboxSubject)
            if each.subject.address == address
        ]

    def close(self) -> None:
        """End all subscriptions, since the connection is over."""
        super().close()
        self.closed = True
        unconfirmed = self._unconfirmed.union(*(each for each in self._client_pongs if isinstance(each, dict)))
        for subscription in unconfirmed.union(self._by_sid.values()):
            self.events.append(SubscriptionEnded(subscription, "broken"))
        for kept in (self._by_sid, self._blocked, self._undecided, self._held_pongs, self._client_pongs):
            kept.clear()
        self._unconfirmed.clear()

    def accept(self, subscription: Subscription) -> None:
        """Start a subscription that was opened; release the PONGs that wait for it."""
        if subscription.closed:
            subscription.close("broken")
            return
        self.release_pongs(subscription)
        subscription.start()

    def release_pongs(self, subscription: Subscription) -> None:
        """Release the PONGs that wait for a subscription: it is open, or takes too long."""
        self._down.insert(self._decide(subscription))
        self._wake()

    def refuse(self, subscription: Subscription, reason: str) -> None:
        """End a subscription that the service refused."""
        if self._by_sid.get(subscription.sid) is subscription:
            self._down.insert(self._refused(subscription, subjects.violation(subscription.text, reason)))
        else:
            self._down.insert(self._decide(subscription))
        self._wake()

    def push(self, subscription: Subscription, pushes: Sequence[bytes]) -> None:
        """Write pushes of a subscription, at most as many as it takes, and ask for their confirmation."""
        if not pushes or self._by_sid.get(subscription.sid) is not subscription:
            return
        if subscription.max_messages:
            pushes = pushes[: subscription.max_messages - subscription.pushed]
        subscription.pushed += len(pushes)
        self._unconfirmed.add(subscription)
        if subscription.pushed == subscription.max_messages:
            del self._by_sid[subscription.sid]
        self._down.insert(b"".join(pushes) + self._ask_for_confirmation())
        self._wake()

    def is_full(self, subscription: Subscription) -> bool:
        """Return whether a subscription must wait until the client has read."""
        if self._full:
            self._blocked.add(subscription)
        return self._full

    def set_full(self, full: bool) -> set[Subscription]:
        """Take note that the client reads too slowly, or has read; return the subscriptions that can be resumed."""
        self._full = full
        if full:
            return set()
        blocked, self._blocked = self._blocked, set()
        return blocked

    def probe(self, on_answer: Callable[[], None]) -> None:
        """Call ``on_answer`` when the client answers a PING: that of a probe under way, else a new one."""
        for answers in self._client_pongs:
            if isinstance(answers, list):
                answers.append(on_answer)
                return
        self._client_pongs.append([on_answer])
        self._down.insert(frames.PING)
        self._wake()

    def _pong(self, frame: bytes) -> bytes:
        """Take the PONG if it answers a PING of the gateway."""
        answers = self._client_pongs.pop(0) if self._client_pongs else None
        if answers is None:
            return frame
        if isinstance(answers, list):
            for on_answer in answers:
                on_answer()
            return b""
        self._pings_under_way -= 1
        for subscription, total in answers.items():
            subscription.confirmed = total
            self.events.append(PushesConfirmed(subscription, total))
            self._end_if_read(subscription)
        self._down.insert(self._ask_for_confirmation())
        return b""

    def _flushed(self, frame: bytes) -> bytes:
        """Hold a PONG until all subscriptions so far are decided, also those that came behind its PING (N10)."""
        allowed = self._server_pongs.popleft() if self._server_pongs else None
        if allowed is not None:
            allowed.permitted = True
            if self.tenant is not None and self._by_sid.get(allowed.sid) is allowed:
                self._permit(allowed)
            return b""
        if not self._undecided:
            return frame
        if self._held_pongs and self._held_pongs[-1][0] == self._made:
            self._held_pongs[-1][1] += 1
        else:
            self._held_pongs.append([self._made, 1])
        return b""

    def _permit(self, subscription: Subscription) -> None:
        subscription.tenant = self.tenant or ""
        self.events.append(SubscriptionPermitted(subscription))

    def _decide(self, subscription: Subscription) -> bytes:
        """Return the PONGs for which this was the last decision missing."""
        self._undecided.pop(subscription, None)
        first = next(iter(self._undecided), None)
        held = self._held_pongs
        ready = len(held) if first is None else bisect_left(held, [first.number])
        count = sum([count for _, count in held[:ready]])
        del held[:ready]
        return frames.PONG * count

    def _forget(self, subscription: Subscription) -> bytes:
        """Remove a subscription, and return the PONGs that waited for it; unconfirmed pushes count as not received."""
        self._by_sid.pop(subscription.sid, None)
        self._unconfirmed.discard(subscription)
        for answers in self._client_pongs:
            if isinstance(answers, dict):
                answers.pop(subscription, None)
        self._blocked.discard(subscription)
        return self._decide(subscription)

    def _refused(self, subscription: Subscription, text: str) -> bytes:
        """Remove a subscription, and return the frames for the client."""
        subscription.refused = True
        self.events.append(SubscriptionEnded(subscription, "unsub"))
        return frames.encode_error(text) + self._forget(subscription)

    def _end_if_read(self, subscription: Subscription) -> None:
        """End a subscription whose client has read all messages that it asked for."""
        if 0 < subscription.max_messages <= subscription.confirmed:
            self.events.append(SubscriptionEnded(subscription, "unsub"))

    def _ask_for_confirmation(self) -> bytes:
        """Return the PING whose PONG confirms what was pushed; empty while enough of them are under way."""
        if not self._unconfirmed or self._pings_under_way >= MAX_PINGS:
            return b""
        self._pings_under_way += 1
        self._client_pongs.append({each: each.pushed for each in self._unconfirmed})
        self._unconfirmed.clear()
        return frames.PING
