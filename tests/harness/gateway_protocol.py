"""A connection through the gateway without sockets: bytes in on both sides, bytes and events out."""

from dataclasses import dataclass, field

from mediator.gateway.identity import ClientIdentity
from mediator.gateway.inboxes import InboxClaims
from mediator.gateway.protocol import GatewayProtocol
from mediator.gateway.session import (
    AccountNamed,
    Event,
    GatewayContext,
    IdentityRequested,
    PublicAddress,
    PushesConfirmed,
    ReadingResumed,
    ShortWayOpened,
    SubscriptionEnded,
    SubscriptionMade,
    SubscriptionPermitted,
)
from mediator.gateway.streams import UnfinishedCommands
from mediator.gateway.subscription import InFlightCounter, Publisher, Subscription
from mediator.mailboxes.pushing import Item
from mediator.nats.client import Request

QUIET = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"name":"me"}\r\n'
ACME = ClientIdentity("acme", "ACME")


def question(number: int) -> bytes:
    """Return what asks the service who the client is."""
    body = b"question %d" % number
    return b"PUB $mq9.AI.PUSH.OPEN %d\r\n%b\r\n" % (len(body), body)


@dataclass
class Served(Publisher):
    """What pushes to a subscription: keeps what it is told."""

    told: list[object] = field(default_factory=list)

    def start(self, subscription: Subscription) -> None:
        """Keep that it starts."""
        self.told.append("start")

    def on_confirmed(self, subscription: Subscription, items: list[Item]) -> None:
        """Keep how many messages are confirmed."""
        self.told.append(subscription.confirmed)

    def resume(self, subscription: Subscription) -> None:
        """Keep that the client has read."""
        self.told.append("resume")

    def leave(self, subscription: Subscription, items: list[Item], how: str) -> None:
        """Keep how it ended."""
        self.told.append(how)


class ClientPath:
    """One client's way through the gateway; its events are kept, and handled as the gateway does."""

    def __init__(
        self,
        connect: bytes = QUIET,
        *,
        inboxes: InboxClaims | None = None,
        unfinished: UnfinishedCommands | None = None,
        account: bytes = b"",
        short_way: bool = True,
        tls: bool = False,
    ) -> None:
        """``account``: what the server names; the client's CONNECT, if any, follows."""
        self.questions = 0
        self.requests: list[Request] = []
        self.made: list[Subscription] = []
        self.opened: list[tuple[bytes, str]] = []
        self.ends: list[tuple[bytes, str]] = []
        self.context = GatewayContext(
            PublicAddress("example.org", 4222, tls, False, 3),
            self._make_question,
            inboxes or InboxClaims(lambda *_: None),
            unfinished=unfinished or UnfinishedCommands(),
            short_way=short_way,
        )
        self.protocol = GatewayProtocol(self.context, "10.0.0.1", self._handle_events)
        if account:
            self.server(b'INFO {"max_payload":1000000,"remote_account":"%b"} \r\n' % account)
        self.client(connect)

    def _make_question(self) -> tuple[str, bytes]:
        self.questions += 1
        return f"token{self.questions}", b"question %d" % self.questions

    def _handle_events(self) -> None:
        while self.protocol.events:
            self._handle(self.protocol.events.popleft())

    def _handle(self, event: Event) -> None:
        match event:
            case Request():
                self.requests.append(event)
            case SubscriptionMade(subscription):
                self.made.append(subscription)
            case SubscriptionPermitted(subscription):
                self.opened.append((subscription.sid, subscription.tenant))
            case SubscriptionEnded(subscription, how):
                self.ends.append((subscription.sid, how))
                subscription.closed = True
            case PushesConfirmed(subscription, total):
                subscription.confirm(total)
            case ReadingResumed():
                self.protocol.receive_from_client(b"")
            case IdentityRequested() | AccountNamed() | ShortWayOpened():
                pass

    def take(self) -> tuple[bytes, bytes]:
        """Return what goes to the server and to the client."""
        self._handle_events()
        return self.protocol.data_to_send()[:2]

    def client(self, data: bytes) -> tuple[bytes, bytes]:
        """The client writes; returns the same."""
        self.protocol.receive_from_client(data)
        return self.take()

    def server(self, data: bytes) -> tuple[bytes, bytes]:
        """The server writes; returns the same."""
        self.protocol.receive_from_server(data)
        return self.take()

    def identify(self, identity: ClientIdentity | None = ACME) -> tuple[bytes, bytes]:
        """Answer the last question; returns the same."""
        self.protocol.identified(f"token{self.questions}", identity)
        return self.take()

    def close(self) -> None:
        """End the connection."""
        self.protocol.close()
        self._handle_events()

    def set_full(self, full: bool) -> None:
        """The client reads too slowly, or has read."""
        for subscription in self.protocol.set_full(full):
            subscription.resume()

    def serve(self, subscription: Subscription) -> Served:
        """Open a subscription; returns what serves it."""
        served = Served()
        subscription.in_flight = InFlightCounter(lambda _count: None)
        subscription.publishers = (served,)
        self.protocol.accept(subscription)
        return served

    def subscribe(self, line: bytes) -> tuple[Subscription, Served]:
        """The client subscribes, and is served; returns the subscription and what serves it."""
        self.client(b"SUB %b\r\n" % line)
        self.server(b"PONG\r\n")
        self.protocol.identified("token1", ACME)
        made = self.made[-1]
        served = self.serve(made)
        assert served.told == ["start"]
        return made, served

    def push(self, subscription: Subscription, *pushes: bytes) -> bytes:
        """Push; returns what goes to the client."""
        self.protocol.push(subscription, pushes)
        return self.take()[1]

    def answer(self, number: int, data: bytes) -> bytes:
        """Answer a request; returns what goes to the client."""
        answer = self.requests[number].answer
        assert answer is not None
        answer(data)
        return self.take()[1]

    def goes_long(self, data: bytes) -> bool:
        """The client asks; return whether this goes to nats-server as it is."""
        return self.client(data)[0] == data and not self.requests
