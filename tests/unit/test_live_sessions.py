"""Mail pushed to holders: live mode and implicit pickup, over channels that do what the test says."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry

from mediator.broker import Broker, wall_clock
from mediator.errors import BusyError, UnresolvedDidError
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.events import EventType
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.store.base import Store
from mediator.store.writer import Committed
from pickup import live_sessions as module
from pickup.broker import MediationBroker
from pickup.channels import AfterReply, ReturnRoutes
from pickup.live_sessions import LiveSessions
from pickup.message import DIDCOMM, OLD, MessageType, ReplyMessage, unbase64, write
from pickup.metrics import DidcommMetrics
from pickup.rules import message_queue
from pickup.rules.forwarding import Forward
from pickup.rules.message_queue import QueueStatus
from pickup.rules.records import Connection, Generation, MediationRules
from tests.harness.mediation import enrol, key
from tests.harness.stores import ram_store
from tests.harness.waiting import until

PATIENCE = 10.0
TENANT = "default"
LIVE_2 = MessageType(OLD, "messagepickup", 2, 0, "live-delivery-change")
LIVE_3 = MessageType(DIDCOMM, "messagepickup", 3, 0, "live-delivery-change")


class Line:
    """A channel in memory that can be slow, deaf or dead."""

    client = ""

    def __init__(self, persistent: bool = True) -> None:
        self.routes = ReturnRoutes()
        self.persistent = persistent
        self.sent: list[bytes] = []
        self.alive = True
        self.reads = True
        self.room = asyncio.Event()
        self.room.set()
        self.asked = 0
        self._changed = asyncio.Condition()

    async def send(self, envelope: bytes, _generation: Generation) -> bool:
        if self.alive:
            self.sent.append(envelope)
        async with self._changed:
            self._changed.notify_all()
        await self.room.wait()
        return self.alive

    async def confirmed(self) -> bool:
        self.asked += 1
        return self.alive and self.reads

    async def got(self, number: int) -> list[bytes]:
        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(lambda: len(self.sent) >= number)
        return self.sent

    async def mail(self, number: int) -> list[bytes]:
        """Return the messages of all deliveries, once there are so many."""
        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(lambda: len(self.payloads()) >= number)
        return self.payloads()

    def payloads(self) -> list[bytes]:
        return [payload for delivery in self.deliveries() for _, payload in delivery.attached]

    def deliveries(self) -> "list[Delivery]":
        return [Delivery(orjson.loads(sent)) for sent in self.sent]


class Delivery:
    """A pushed message, in plain text."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.type: str = raw.get("@type") or raw["type"]
        items = raw.get("~attach") or raw["attachments"]
        self.attached = [(item.get("@id") or item["id"], unbase64(item["data"]["base64"], "data")) for item in items]


class Plain:
    """Seals nothing; fails as often as it is told."""

    def __init__(self) -> None:
        self.failures = 0

    async def seal(self, connection: Connection, reply: ReplyMessage) -> bytes:
        if self.failures:
            self.failures -= 1
            raise UnresolvedDidError("not now")
        return orjson.dumps(write(reply, connection.generation, connection.my_did, connection.their_did))


class Air:
    """Carries announcements between instances, when it is told to."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self._hearing: list[Callable[[bytes], None]] = []

    async def publish(self, data: bytes) -> None:
        self.told.append(data)

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        self._hearing.append(heard)

    def carry(self) -> None:
        told, self.told = self.told, []
        for data in told:
            for heard in self._hearing:
                heard(data)


@dataclass
class Setup:
    """A broker and the sessions on it."""

    broker: Broker
    mediation: MediationBroker
    store: Store
    sessions: LiveSessions
    sealer: Plain
    registry: CollectorRegistry
    stack: AsyncExitStack
    delivered: list[int] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)

    async def holder(self, number: int = 1, generation: Generation = Generation.V1) -> Connection:
        """Connect a holder with mediation whose key is ``key(number)``."""
        return await enrol(self.mediation, number, key(number), generation=generation)

    async def forward(self, *payloads: bytes, to: int = 1, through: MediationBroker | None = None) -> None:
        outcome = await (through or self.mediation).forward(Forward(TENANT, [key(to)], payloads))
        assert outcome.queued == len(payloads)

    async def send(self, connection: Connection, payload: bytes, lane: Lane) -> None:
        await self.broker.send(Send(TENANT, connection.address or "", Draft(payload, lane)))

    async def waits(self, connection: Connection) -> int:
        return (await self.mediation.get_status(connection)).count

    async def live(
        self, connection: Connection, line: Line, on: bool = True, *, type: MessageType = LIVE_2, answered: bool = True
    ) -> QueueStatus:
        """Ask for live mode, and have the answer written."""
        if not on:
            self.sessions.end_live(connection, line)
            return await self.mediation.get_status(connection)
        after: list[AfterReply] = []
        status = await self.sessions.live(connection, line, type, after)
        await finish(after, answered)
        return status

    async def implicit(self, connection: Connection, line: Line) -> None:
        after: list[AfterReply] = []
        self.sessions.implicit(connection, line, after)
        await finish(after, answered=False)

    async def ended(self, connection: Connection) -> None:
        await until(lambda: not self.sessions.has(connection.id))

    async def beside(self, instance: str, air: Air | None, behind: int = 0) -> "Setup":
        """Run another instance on the same store, whose clock is ``behind`` by milliseconds."""
        return await self.stack.enter_async_context(setup(instance, air, self.store, behind))


async def finish(after: list[AfterReply], answered: bool) -> None:
    for notify in after:
        await notify(answered)


@asynccontextmanager
async def setup(
    instance: str = "one", air: Air | None = None, store: Store | None = None, behind: int = 0
) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        store = store or ram_store()
        broker = Broker(store, Bounds(), clock=lambda: wall_clock() - behind)
        stack.push_async_callback(broker.close)
        registry, sealer = CollectorRegistry(), Plain()
        mediation = MediationBroker(broker, MediationRules())
        sessions = LiveSessions(
            mediation,
            sealer,
            DidcommMetrics(registry),
            live_lease=MediationRules().live_lease,
            instance=instance,
            announcer=air,
        )
        await sessions.open()
        stack.push_async_callback(sessions.close)
        made = Setup(broker, mediation, store, sessions, sealer, registry, stack)
        broker.listen(lambda committed: note(made, committed))
        yield made


def note(made: Setup, committed: Committed) -> None:
    made.delivered += [event.msg_id for event in committed.events if event.type is EventType.DELIVERED]
    made.acknowledged += [event.msg_id for event in committed.events if event.type is EventType.ACKNOWLEDGED]


@pytest.fixture
async def home() -> AsyncIterator[Setup]:
    async with setup() as made:
        yield made


# Live mode.


@pytest.mark.rule("D6")
async def test_live_mode_says_what_waits_and_pushes_what_comes_then(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    await home.forward(b"before 1", b"before 2")
    assert (await home.live(holder, line)).count == 2
    assert home.sessions.pushes_to(holder, line)
    await home.forward(b"after 1")
    await home.forward(b"after 2")
    assert await line.mail(2) == [b"after 1", b"after 2"]
    assert await home.waits(holder) == 4


@pytest.mark.rule("D6", "D3")
@pytest.mark.parametrize(("type", "generation"), [(LIVE_2, Generation.V1), (LIVE_3, Generation.V2)])
async def test_live_mail_has_the_version_and_prefix_of_the_request(
    home: Setup, type: MessageType, generation: Generation
) -> None:
    holder, line = await home.holder(generation=generation), Line()
    await home.live(holder, line, type=type)
    await home.forward(b"mail")
    await line.got(1)
    [delivery] = line.deliveries()
    assert delivery.type == str(type.named("delivery"))
    assert "thid" not in delivery.raw
    assert "~thread" not in delivery.raw
    [(id, payload)] = delivery.attached
    assert (message_queue.parse_attachment_id(id), payload) == ((holder.mailbox_id, 0), b"mail")


@pytest.mark.rule("D6")
async def test_nothing_falls_between_the_status_and_the_first_push(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    after: list[AfterReply] = []
    assert (await home.sessions.live(holder, line, LIVE_2, after)).count == 0
    await home.forward(b"between")
    await finish(after, answered=True)
    assert await line.mail(1) == [b"between"]


@pytest.mark.rule("D6")
async def test_without_a_way_back_for_the_status_nothing_is_pushed(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    await home.live(holder, line, answered=False)
    assert not home.sessions.has(holder.id)


@pytest.mark.rule("D6")
async def test_live_mode_is_turned_off_on_its_own_channel(home: Setup) -> None:
    holder, line, other = await home.holder(), Line(), Line()
    await home.live(holder, line)
    await home.live(holder, other, on=False)
    assert home.sessions.pushes_to(holder, line)
    assert not home.sessions.pushes_to(holder, other)
    await home.forward(b"mail")
    await line.got(1)
    assert (await home.live(holder, line, on=False)).count == 1
    assert not home.sessions.pushes_to(holder, line)
    await home.forward(b"more")
    await home.live(holder, other)
    await home.forward(b"last")
    assert await other.mail(1) == [b"last"]
    assert line.payloads() == [b"mail"]
    assert await home.waits(holder) == 3


@pytest.mark.rule("D6")
async def test_mail_is_pushed_once_and_in_order_whatever_its_lane(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    await home.live(holder, line)
    sent = []
    for number in range(60):
        sent.append(b"%d" % number)
        await home.forward(sent[-1])
    await home.forward(*(more := [b"more %d" % number for number in range(45)]))
    assert await line.mail(105) == sent + more
    assert max(len(delivery.attached) for delivery in line.deliveries()) <= module.BATCH


async def test_a_socket_that_reads_slowly_holds_one_batch(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    await home.live(holder, line)
    line.room.clear()
    await home.forward(*(b"%d" % number for number in range(50)))
    await line.got(1)
    await home.forward(b"last")
    assert len(home.delivered) == module.BATCH
    assert len(line.sent) == 1
    line.room.set()
    assert len(await line.mail(51)) == 51


@pytest.mark.rule("D6")
async def test_a_dead_socket_loses_nothing(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    await home.live(holder, line)
    line.alive = False
    await home.forward(b"mail")
    await home.ended(holder)
    assert await home.waits(holder) == 1
    again = Line()
    assert (await home.live(holder, again)).count == 1


@pytest.mark.rule("D6")
async def test_sessions_end_with_their_channel(home: Setup) -> None:
    one, two, three = await home.holder(1), await home.holder(2), await home.holder(3)
    shared, own = Line(), Line()
    await home.live(one, shared)
    await home.live(two, shared)
    await home.live(three, own)
    await home.sessions.left(shared)
    await home.sessions.left(Line())
    assert [home.sessions.has(holder.id) for holder in (one, two, three)] == [False, False, True]
    assert home.registry.get_sample_value("mediator_didcomm_live") == 1


@pytest.mark.rule("D6")
async def test_the_newest_session_of_a_holder_wins(home: Setup) -> None:
    holder, old, new = await home.holder(), Line(), Line()
    await home.live(holder, old)
    await home.live(holder, new, type=LIVE_3)
    await home.forward(b"mail")
    assert await new.mail(1) == [b"mail"]
    assert old.sent == []
    await home.sessions.left(old)
    assert home.sessions.pushes_to(holder, new)


@pytest.mark.rule("D6")
async def test_a_holder_whose_mailbox_was_deleted_has_no_session(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    await home.live(holder, line)
    assert holder.address is not None
    await home.broker.delete_mailbox(TENANT, holder.address)
    await home.ended(holder)


async def test_a_push_that_fails_is_tried_again_and_keeps_its_place(
    home: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.001)
    holder, line = await home.holder(), Line()
    await home.live(holder, line)
    home.sealer.failures = 3
    await home.forward(b"1")
    await home.forward(b"2")
    assert await line.mail(2) == [b"1", b"2"]
    assert home.sealer.failures == 0


async def test_mail_is_found_although_the_wake_up_was_lost(home: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    # Not told of each other: as two instances whose messages are lost.
    other = await home.beside("two", None)
    live, implicit = await home.holder(1), await home.holder(2)
    line, bare = Line(), Line()
    await home.live(live, line)
    await home.implicit(implicit, bare)
    await home.forward(b"live", to=1, through=other.mediation)
    await home.forward(b"bare", to=2, through=other.mediation)
    assert await line.mail(1) == [b"live"]
    assert await bare.got(1) == [b"bare"]


async def test_sessions_are_bounded_in_number(home: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 1)
    one, two = await home.holder(1), await home.holder(2)
    await home.live(one, Line())
    with pytest.raises(BusyError):
        await home.live(two, Line())
    with pytest.raises(BusyError):
        await home.implicit(two, Line())
    await home.live(one, Line())


# Several instances.


@pytest.mark.rule("D6")
@pytest.mark.parametrize("behind", [-60_000, 0, 60_000])
async def test_the_newest_session_wins_whatever_the_clocks_say(home: Setup, behind: int) -> None:
    air = Air()
    one = await home.beside("one", air)
    two = await home.beside("two", air, behind)
    holder, other = await home.holder(1), await home.holder(2)
    for number in range(3):
        newer, older = (one, two) if number % 2 else (two, one)
        await older.live(other, Line())
        await newer.live(holder, Line())
        await told(air, 2)
        air.carry()
        assert newer.sessions.has(holder.id)
        assert not older.sessions.has(holder.id)
        assert older.sessions.has(other.id)


async def told(air: Air, number: int) -> None:
    await until(lambda: len(air.told) == number)


@pytest.mark.rule("D6")
async def test_over_http_only_the_sockets_instance_knows_live_mode(home: Setup) -> None:
    air, line, http = Air(), Line(), Line(persistent=False)
    one, two = await home.beside("one", air), await home.beside("two", air)
    holder = await home.holder()
    await one.live(holder, line)
    assert [one.sessions.pushes_to(holder, channel) for channel in (line, http, Line())] == [True, True, False]
    assert [two.sessions.pushes_to(holder, channel) for channel in (http, Line())] == [None, False]
    await one.sessions.left(line)
    assert home.sessions.pushes_to(holder, http) is False, "there are no others"


@pytest.mark.rule("D6")
async def test_of_two_sessions_begun_at_once_one_stays(home: Setup) -> None:
    air = Air()
    one, two = await home.beside("one", air), await home.beside("two", air)
    holder = await home.holder()
    await one.live(holder, Line())
    await two.live(holder, Line())
    await told(air, 2)
    air.carry()
    assert one.sessions.has(holder.id) != two.sessions.has(holder.id)


@pytest.mark.rule("A7")
async def test_an_announcement_tells_nothing_about_the_holder(home: Setup) -> None:
    air = Air()
    one = await home.beside("one", air)
    holder = await home.holder()
    await one.live(holder, Line())
    await told(air, 1)
    [data] = air.told
    assert holder.address is not None
    for secret in (holder.address, holder.their_did, *holder.callers):
        assert secret.encode() not in data


async def test_announcements_that_are_none_are_ignored(home: Setup) -> None:
    air = Air()
    one = await home.beside("one", air)
    holder = await home.holder()
    await one.live(holder, Line())
    await told(air, 1)
    [mine] = air.told
    hash, instance = mine[: module.WAKE_KEY_BYTES], b"two"
    air.told = [b"", b"x", mine, mine[:20], hash + b"\xff" * 8 + instance, hash + bytes(8) + instance, os.urandom(5000)]
    air.carry()
    assert one.sessions.has(holder.id)
    await one.live(holder, Line())


# Implicit pickup.


@pytest.mark.rule("D7")
async def test_implicit_pickup_removes_what_the_peer_confirms(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    await home.forward(*(b"%d" % number for number in range(12)))
    await home.implicit(holder, line)
    assert await line.got(12) == [b"%d" % number for number in range(12)]
    await home.forward(b"last")
    assert (await line.got(13))[-1] == b"last"
    await until(lambda: home.acknowledged == list(range(13)))
    assert await home.waits(holder) == 0
    assert not home.sessions.pushes_to(holder, line)


@pytest.mark.rule("D7")
async def test_what_the_peer_did_not_confirm_stays(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    line.reads = False
    await home.forward(b"1", b"2")
    await home.implicit(holder, line)
    await home.ended(holder)
    assert (line.sent, line.asked, await home.waits(holder)) == ([b"1", b"2"], 1, 2)


@pytest.mark.rule("D7")
async def test_implicit_pickup_needs_a_socket_without_live_mode(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    await home.implicit(holder, Line(persistent=False))
    assert not home.sessions.has(holder.id)
    await home.live(holder, line)
    await home.implicit(holder, line)
    assert home.sessions.pushes_to(holder, line)
    await home.implicit(holder, Line())
    assert not home.sessions.pushes_to(holder, line)


@pytest.mark.rule("D7")
async def test_pings_that_come_again_start_nothing_anew(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    line.room.clear()
    await home.forward(b"1")
    await home.implicit(holder, line)
    await line.got(1)
    await home.implicit(holder, line)
    line.room.set()
    await home.forward(b"2")
    assert await line.got(2) == [b"1", b"2"]


@pytest.mark.rule("D6")
async def test_after_the_close_nothing_is_pushed_or_begun(home: Setup) -> None:
    holder, line = await home.holder(), Line()
    await home.live(holder, line)
    await home.sessions.close()
    await home.forward(b"mail")
    await home.live(holder, line)
    assert not home.sessions.has(holder.id)
    assert (line.sent, await home.waits(holder)) == ([], 1)
