"""The subscriptions of a gateway: opened at their sources within limits, tried again, ended (E6, E7, N7, N10)."""

import asyncio
from dataclasses import dataclass, field

import pytest

from mediator.errors import MediatorError, NoSuchMailboxError, UnavailableError
from mediator.gateway.identity import ClientIdentity
from mediator.gateway.inboxes import InboxClaims
from mediator.gateway.protocol import GatewayProtocol
from mediator.gateway.session import (
    GatewayContext,
    PublicAddress,
    SubscriptionEnded,
    SubscriptionMade,
    SubscriptionPermitted,
)
from mediator.gateway.subscription import InFlightCounter, Subscription
from mediator.gateway.subscriptions import ANSWER_SECONDS, Subscriptions
from mediator.nats.subjects import MailboxSubject
from mediator.settings.sections import PushSettings
from tests.harness.gateway_protocol import ACME, Served
from tests.harness.waiting import until


@dataclass
class Source:
    """Opens subscriptions once it is let, or fails."""

    problem: MediatorError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[Subscription] = field(default_factory=list)
    opened: list[Served] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    async def open(self, subscription: Subscription) -> None:
        self.requests.append(subscription)
        await self.gate.wait()
        if self.problem is not None:
            raise self.problem
        self.opened.append(Served())
        subscription.in_flight = InFlightCounter(lambda _count: None)
        subscription.publishers = (self.opened[-1],)

    def start(self) -> None: ...

    def pause(self) -> None:
        self.done.append("paused")

    async def close(self, _seconds: float) -> None:
        self.done.append("closed")


class Gateway:
    """Some clients before one source; time stands still unless a test moves it."""

    def __init__(self, **limits: int) -> None:
        self.now = 100.0
        self.source = Source()
        self.source.gate.set()
        self.in_flight = InFlightCounter(lambda _count: None)
        self.subscriptions = Subscriptions(
            {MailboxSubject: self.source},  # type: ignore[dict-item]
            PushSettings(**limits),
            self.in_flight,
            lambda: self.now,
        )

    def client(self, identity: ClientIdentity = ACME) -> "Client":
        """Return a connection whose tenant is known."""
        return Client(self.subscriptions, identity)


class Client:
    """A connection, the events about whose subscriptions are handled."""

    def __init__(self, subscriptions: Subscriptions, identity: ClientIdentity) -> None:
        self._subscriptions = subscriptions
        context = GatewayContext(
            PublicAddress("example.org", 4222, False, False, 100),
            lambda: ("token", b"?"),
            InboxClaims(lambda *_: None),
        )
        self._protocol = GatewayProtocol(context, "10.0.0.1", self._handle_events)
        self.writes(b'CONNECT {"verbose":false,"pedantic":false}\r\n')
        self._protocol.identified("token", identity)

    @property
    def count(self) -> int:
        """How many subscriptions to stored mail it has."""
        return self._protocol.subscriptions

    def writes(self, data: bytes) -> None:
        self._protocol.receive_from_client(data)
        self._handle_events()

    def flushed(self) -> None:
        """The server answers a PING."""
        self._protocol.receive_from_server(b"PONG\r\n")
        self._handle_events()

    def got(self) -> bytes:
        """Return what was written to the client."""
        return self._protocol.data_to_send()[1]

    def close(self) -> None:
        self._protocol.close()
        self._handle_events()

    def _handle_events(self) -> None:
        while self._protocol.events:
            match self._protocol.events.popleft():
                case SubscriptionMade(subscription):
                    self._subscriptions.add(self._protocol, subscription)
                case SubscriptionPermitted(subscription):
                    self._subscriptions.open(self._protocol, subscription)
                case SubscriptionEnded(subscription, how):
                    self._subscriptions.end(subscription, how)


def subscribe(client: Client, *sids: bytes) -> None:
    for sid in sids:
        client.writes(b"SUB $mq9.AI.MAILBOX.MSG.a.* %b\r\n" % sid)
        client.flushed()
    client.got()


def refusal(reason: bytes) -> bytes:
    return b'-ERR \'Permissions Violation for Subscription to "$mq9.AI.MAILBOX.MSG.a.*": ' + reason


@pytest.mark.rule("N7")
async def test_the_last_place_goes_to_the_first_of_two() -> None:
    gateway = Gateway(max_subscriptions=2)
    client = gateway.client()
    subscribe(client, b"1", b"2", b"3")
    await until(lambda: len(gateway.source.opened) == 2 and client.count == 2)
    assert client.got() == refusal(b"server busy: 2 subscriptions are open") + b"'\r\n"
    assert gateway.subscriptions.count == 2
    client.writes(b"UNSUB 1\r\n")
    subscribe(client, b"3")
    await until(lambda: len(gateway.source.opened) == 3)
    assert client.got() == b""


@pytest.mark.rule("N7", "A6")
async def test_a_tenant_has_so_many_subscriptions() -> None:
    gateway = Gateway(tenant_subscriptions=1)
    one, same, other = gateway.client(), gateway.client(), gateway.client(ClientIdentity("other", "OTHER"))
    for client in (one, same, other):
        subscribe(client, b"1")
    await until(lambda: len(gateway.source.opened) == 2 and not same.count)
    assert same.got().startswith(refusal(b"quota_exceeded: subscriptions of the tenant, limit 1, in use 1"))
    assert [request.tenant for request in gateway.source.requests] == ["acme", "other"]
    one.close()
    subscribe(same, b"1")
    await until(lambda: len(gateway.source.opened) == 3)


@pytest.mark.rule("N10")
async def test_a_mailbox_that_is_missing_is_refused() -> None:
    gateway = Gateway()
    gateway.source.problem = NoSuchMailboxError("a")
    client = gateway.client()
    subscribe(client, b"1")
    await until(lambda: not client.count)
    assert client.got() == refusal(b"mailbox a does not exist") + b"'\r\n"
    assert (gateway.subscriptions.count, gateway.subscriptions.waiting) == (0, 0)


@pytest.mark.rule("A9", "N10")
async def test_it_is_tried_again_while_the_store_fails() -> None:
    gateway = Gateway()
    gateway.source.problem = UnavailableError("away")
    client = gateway.client()
    subscribe(client, b"1", b"2")
    client.writes(b"PING\r\n")
    client.flushed()
    await until(lambda: len(gateway.source.requests) == 2 and not gateway.subscriptions.count)
    gateway.subscriptions.watch()
    assert client.got() == b"", "the PONG waits"
    gateway.now += ANSWER_SECONDS
    await until(lambda: len(gateway.source.requests) == 4 and not gateway.subscriptions.count)
    gateway.subscriptions.watch()
    assert client.got() == b"PONG\r\n"
    await until(lambda: len(gateway.source.requests) == 6 and not gateway.subscriptions.count)
    assert gateway.subscriptions.waiting == 2
    client.writes(b"UNSUB 2\r\n")
    gateway.source.problem = None
    gateway.subscriptions.watch()
    await until(lambda: len(gateway.source.opened) == 1)
    gateway.subscriptions.watch()
    assert (len(gateway.source.requests), gateway.subscriptions.waiting) == (7, 0)


@pytest.mark.rule("E7")
@pytest.mark.parametrize("fails", [True, False])
async def test_what_ends_while_it_opens_leaves_nothing(fails: bool) -> None:
    gateway = Gateway()
    gateway.source.gate.clear()
    client = gateway.client()
    subscribe(client, b"1")
    await until(lambda: len(gateway.source.requests) == 1)
    client.close()
    gateway.source.problem = UnavailableError("away") if fails else None
    gateway.source.gate.set()
    if not fails:
        await until(lambda: bool(gateway.source.opened and gateway.source.opened[0].told))
        assert gateway.source.opened[0].told == ["broken"]
    gateway.subscriptions.watch()
    await asyncio.sleep(0)
    assert (len(gateway.source.requests), gateway.subscriptions.count, gateway.subscriptions.waiting) == (1, 0, 0)


@pytest.mark.rule("E7")
async def test_at_the_end_a_confirmed_subscription_is_drained() -> None:
    gateway = Gateway()
    client = gateway.client()
    subscribe(client, b"1")
    await until(lambda: len(gateway.source.opened) == 1)
    gateway.in_flight.add(1)
    closing = asyncio.ensure_future(gateway.subscriptions.close(10))
    await until(lambda: gateway.source.done == ["paused"])
    assert gateway.source.opened[0].told == ["start"], "its client may still confirm"
    gateway.in_flight.remove(1)
    await closing
    assert gateway.source.opened[0].told == ["start", "drained"]
    assert gateway.source.done == ["paused", "closed"]
    subscribe(client, b"2")
    assert len(gateway.source.requests) == 1
