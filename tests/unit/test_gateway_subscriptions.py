"""The subscriptions of a gateway: opened at their sources within limits, tried again, ended (E6, E7, N7, N10)."""

import asyncio
from dataclasses import dataclass, field

import pytest

from mediator.config.sections import PushSettings
from mediator.errors import MediatorError, NoSuchMailboxError, UnavailableError
from mediator.gateway.identity import ClientIdentity
from mediator.gateway.permissions import InboxClaims
from mediator.gateway.protocol import GatewaySession, PublicAddress
from mediator.gateway.subscription import InFlightCounter, Publisher, Subscription
from mediator.gateway.subscriptions import ANSWER_SECONDS, Subscriptions
from mediator.mailboxes.pushing import Item
from mediator.nats.subjects import MailboxSubject
from tests.harness.waiting import until

ACME = ClientIdentity("acme", "ACME")


@dataclass
class Served(Publisher):
    """What pushes to a subscription: keeps what it is told."""

    told: list[object] = field(default_factory=list)

    def start(self, subscription: Subscription) -> None:
        self.told.append("start")

    def confirmed(self, subscription: Subscription, items: list[Item]) -> None:
        self.told.append(subscription.confirmed)

    def resume(self, subscription: Subscription) -> None: ...

    def leave(self, subscription: Subscription, items: list[Item], how: str) -> None:
        self.told.append(how)


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

    def ask(self, _session: GatewaySession) -> tuple[str, bytes]:
        return "token", b"?"

    def client(self, identity: ClientIdentity = ACME) -> GatewaySession:
        """Return a connection whose tenant is known."""
        public = PublicAddress("example.org", 4222, False, False, 100)
        claims = InboxClaims(lambda *_: None)
        session = GatewaySession(self.subscriptions, self, lambda: None, claims, public, "10.0.0.1")  # type: ignore[arg-type]
        session.from_client(b'CONNECT {"verbose":false,"pedantic":false}\r\n')
        session.identified("token", identity)
        return session


def subscribe(session: GatewaySession, *sids: bytes) -> None:
    for sid in sids:
        session.from_client(b"SUB $mq9.AI.MAILBOX.MSG.a.* %b\r\n" % sid)
        session.from_server(b"PONG\r\n")
    session.take()


def refusal(reason: bytes) -> bytes:
    return b'-ERR \'Permissions Violation for Subscription to "$mq9.AI.MAILBOX.MSG.a.*": ' + reason


@pytest.mark.rule("N7")
async def test_the_last_place_goes_to_the_first_of_two() -> None:
    gateway = Gateway(max_subscriptions=2)
    session = gateway.client()
    subscribe(session, b"1", b"2", b"3")
    await until(lambda: len(gateway.source.opened) == 2 and session.subscriptions == 2)
    assert session.take()[1] == refusal(b"server busy: 2 subscriptions are open") + b"'\r\n"
    assert gateway.subscriptions.count == 2
    session.from_client(b"UNSUB 1\r\n")
    subscribe(session, b"3")
    await until(lambda: len(gateway.source.opened) == 3)
    assert session.take()[1] == b""


@pytest.mark.rule("N7", "A6")
async def test_a_tenant_has_so_many_subscriptions() -> None:
    gateway = Gateway(tenant_subscriptions=1)
    one, same, other = gateway.client(), gateway.client(), gateway.client(ClientIdentity("other", "OTHER"))
    for session in (one, same, other):
        subscribe(session, b"1")
    await until(lambda: len(gateway.source.opened) == 2 and not same.subscriptions)
    assert same.take()[1].startswith(refusal(b"quota_exceeded: subscriptions of the tenant, limit 1, in use 1"))
    assert [request.tenant for request in gateway.source.requests] == ["acme", "other"]
    one.close()
    subscribe(same, b"1")
    await until(lambda: len(gateway.source.opened) == 3)


@pytest.mark.rule("N10")
async def test_a_mailbox_that_is_missing_is_refused() -> None:
    gateway = Gateway()
    gateway.source.problem = NoSuchMailboxError("a")
    session = gateway.client()
    subscribe(session, b"1")
    await until(lambda: not session.subscriptions)
    assert session.take()[1] == refusal(b"mailbox a does not exist") + b"'\r\n"
    assert (gateway.subscriptions.count, gateway.subscriptions.waiting) == (0, 0)


@pytest.mark.rule("A9", "N10")
async def test_it_is_tried_again_while_the_store_fails() -> None:
    gateway = Gateway()
    gateway.source.problem = UnavailableError("away")
    session = gateway.client()
    subscribe(session, b"1", b"2")
    session.from_client(b"PING\r\n")
    session.from_server(b"PONG\r\n")
    await until(lambda: len(gateway.source.requests) == 2 and not gateway.subscriptions.count)
    gateway.subscriptions.watch()
    assert session.take()[1] == b"", "the PONG waits"
    gateway.now += ANSWER_SECONDS
    await until(lambda: len(gateway.source.requests) == 4 and not gateway.subscriptions.count)
    gateway.subscriptions.watch()
    assert session.take()[1] == b"PONG\r\n"
    await until(lambda: len(gateway.source.requests) == 6 and not gateway.subscriptions.count)
    assert gateway.subscriptions.waiting == 2
    session.from_client(b"UNSUB 2\r\n")
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
    session = gateway.client()
    subscribe(session, b"1")
    await until(lambda: len(gateway.source.requests) == 1)
    session.close()
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
    session = gateway.client()
    subscribe(session, b"1")
    await until(lambda: len(gateway.source.opened) == 1)
    gateway.in_flight.add(1)
    closing = asyncio.ensure_future(gateway.subscriptions.close(10))
    await until(lambda: gateway.source.done == ["paused"])
    assert gateway.source.opened[0].told == ["start"], "its client may still confirm"
    gateway.in_flight.remove(1)
    await closing
    assert gateway.source.opened[0].told == ["start", "drained"]
    assert gateway.source.done == ["paused", "closed"]
    subscribe(session, b"2")
    assert len(gateway.source.requests) == 1
