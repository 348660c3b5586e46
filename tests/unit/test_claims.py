"""Several connections of one group share its messages, and what always fails does not spin (F9, F10, K2, K4)."""

import asyncio
from typing import Any

import pytest

from mediator import broker as use_cases
from mediator.mailboxes import claims
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.events import EventType
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Retention
from mediator.mailboxes.message import Draft
from mediator.mailboxes.settling import Ack
from mediator.store.base import Store
from tests.harness.broker import BOX, GROUP, SECOND, TENANT, Broker
from tests.harness.stores import undone

CRITICAL, URGENT, NORMAL, LOW = Lane
QUEUE = "queue"
CLAIM = 30 * SECOND
BOXES = pytest.mark.parametrize("box", [BOX, QUEUE])


@pytest.fixture
def broker(broker: Broker) -> Broker:
    broker.create()
    broker.create(QUEUE, retention=Retention.UNTIL_ACK)
    return broker


def send(broker: Broker, *lanes: Lane, box: str = BOX) -> None:
    for lane in lanes:
        broker.send(lane=lane, to=box)


def take(broker: Broker, connection: str, box: str = BOX, **options: Any) -> list[int]:
    return broker.take(box=box, connection=connection, **{"max_wait": 0, **options})


# F9


@BOXES
@pytest.mark.rule("F9", "K2")
def test_each_message_goes_to_one_connection(broker: Broker, box: str) -> None:
    send(broker, *[NORMAL] * 100, box=box)
    got: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(10):
        for connection in got:
            new = take(broker, connection, box, num_msgs=5)
            got[connection] += new
            broker.ack(new[-1], box=box, connection=connection)
    assert [len(done) for done in got.values()] == [50, 50]
    assert sorted(got["a"] + got["b"]) == list(range(100))
    assert sorted(broker.told(EventType.ACKNOWLEDGED)) == list(range(100))
    assert take(broker, "a", box) == take(broker, "b", box) == []


@BOXES
@pytest.mark.rule("F9", "K2", "A8")
def test_an_ack_covers_nothing_that_another_was_handed(broker: Broker, box: str) -> None:
    send(broker, LOW, NORMAL, NORMAL, NORMAL, box=box)
    assert take(broker, "a", box, num_msgs=2) == [1, 2]
    send(broker, CRITICAL, box=box)
    assert take(broker, "b", box) == [4, 3, 0]
    assert broker.ack(0, box=box, connection="b") == 3
    assert take(broker, "b", box) == []
    assert take(broker, "a", box) == [1, 2]
    assert broker.ack(1, box=box, connection="a") == 1
    broker.end("a")
    assert take(broker, "b", box) == [2]
    assert broker.ack(2, box=box, connection="b") == 1
    assert sorted(broker.told(EventType.ACKNOWLEDGED)) == list(range(5))


@pytest.mark.rule("F9", "A8")
def test_an_ack_covers_nothing_of_a_connection_that_died(broker: Broker) -> None:
    send(broker, *[NORMAL] * 4)
    assert take(broker, "a", num_msgs=2) == [0, 1]
    assert take(broker, "b") == [2, 3]
    broker.end("a")
    assert broker.woken == {(TENANT, BOX)}
    assert broker.ack(3, connection="b") == 2
    assert take(broker, "c") == [0, 1]


@pytest.mark.rule("F9")
def test_a_claim_ends_with_its_time(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    assert take(broker, "a", num_msgs=1) == [0]
    broker.advance(CLAIM - 1)
    assert take(broker, "b", num_msgs=1) == [1]
    found = broker.fetch(connection="c")
    assert (found.messages, found.retry_at) == ([], broker.now + 1)
    broker.advance(1)
    assert take(broker, "c") == [0]
    # The first one is late: what it names counts, and its claim is another's now.
    assert take(broker, "a") == []
    assert broker.ack(0, connection="a") == 1
    assert take(broker, "c") == []


@pytest.mark.rule("F9")
def test_handing_out_again_begins_a_claim_anew(broker: Broker) -> None:
    send(broker, NORMAL)
    assert take(broker, "a") == [0]
    broker.advance(CLAIM - 1)
    assert take(broker, "a") == [0]
    broker.advance(CLAIM - 1)
    assert take(broker, "b") == []
    broker.advance(1)
    assert take(broker, "b") == [0]


@pytest.mark.rule("F9")
def test_without_claims_all_connections_get_the_same(store: Store) -> None:
    broker = Broker(store, Bounds(claim=0))
    broker.create()
    send(broker, NORMAL, NORMAL)
    assert take(broker, "a") == take(broker, "b") == [0, 1]
    assert broker.ack(1, connection="b") == 2
    assert take(broker, "a") == []


@pytest.mark.rule("F9")
def test_callers_that_are_not_known_are_one(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    assert take(broker, "") == take(broker, "") == [0, 1]
    assert broker.ack(1) == 2


@pytest.mark.rule("F9", "K2")
def test_one_consumer_may_acknowledge_on_another_connection(broker: Broker) -> None:
    send(broker, LOW, NORMAL, NORMAL, CRITICAL)
    assert take(broker, "a") == [3, 1, 2, 0]
    assert broker.ack(2, connection="b") == 3
    assert take(broker, "a") == [0]
    assert broker.ack(0, connection="b") == 1


@pytest.mark.rule("F9", "K2", "A8")
def test_where_several_fetch_an_ack_from_elsewhere_names_one(broker: Broker) -> None:
    send(broker, *[NORMAL] * 6)
    assert take(broker, "a", num_msgs=3) == [0, 1, 2]
    assert take(broker, "b") == [3, 4, 5]
    assert broker.ack(5, connection="c") == 1
    assert broker.ack(1, connection="c") == 1
    assert take(broker, "a") == [0, 2]
    assert take(broker, "b") == [3, 4]
    assert broker.ack(2, connection="a") == broker.ack(4, connection="b") == 2


@BOXES
@pytest.mark.rule("F9", "K4")
def test_a_message_that_another_acknowledged_ends_its_batch(broker: Broker, box: str) -> None:
    send(broker, *[NORMAL] * 3, box=box)
    assert take(broker, "a", box) == [0, 1, 2]
    broker.advance(CLAIM)
    assert take(broker, "b", box) == [0, 1, 2]
    assert broker.ack(2, box=box, connection="a") == 1
    assert broker.ack(2, box=box, connection="b") == 2
    assert take(broker, "a", box) == take(broker, "b", box) == []


@pytest.mark.rule("F9", "K4")
@pytest.mark.parametrize("gone", [0, 1, 2, 3])
def test_any_message_of_a_batch_may_be_gone(broker: Broker, gone: int) -> None:
    send(broker, *[NORMAL] * 4)
    assert take(broker, "a", num_msgs=2) == [0, 1]
    assert take(broker, "b") == [2, 3]
    broker.delete(gone)
    connection = "a" if gone < 2 else "b"
    broker.ack(gone, connection=connection)
    assert take(broker, connection) == [i for i in ((0, 1) if gone < 2 else (2, 3)) if i > gone]


@pytest.mark.rule("F9", "A8")
def test_after_a_restart_an_ack_loses_nothing(broker: Broker) -> None:
    send(broker, *[NORMAL] * 4)
    assert take(broker, "a", num_msgs=2) == [0, 1]
    assert take(broker, "b") == [2, 3]
    broker.forget_claims()
    # Nobody knows any more who was handed what stands before it.
    assert broker.ack(3, connection="b2") == 1
    assert take(broker, "a2") == [0, 1, 2]
    assert broker.ack(2, connection="a2") == 3
    # From here on it is one reader again.
    send(broker, NORMAL, NORMAL)
    assert take(broker, "c") == [4, 5]
    broker.forget_claims()
    assert broker.ack(5, connection="d") == 2


@pytest.mark.rule("K2", "A8")
def test_who_reconnects_covers_what_every_reply_held(broker: Broker) -> None:
    send(broker, NORMAL)
    assert take(broker, "a") == [0]
    broker.advance(CLAIM)
    send(broker, CRITICAL)
    assert take(broker, "b") == [1, 0]
    broker.end("b")
    broker.end("a")
    assert broker.ack(0, connection="a2") == 1
    assert take(broker, "c") == [1]


@pytest.mark.rule("F6", "F9", "A8")
@pytest.mark.parametrize("connection", ["a", "b"])
def test_leases_pass_over_claims_and_lose_none(broker: Broker, connection: str) -> None:
    send(broker, *[NORMAL] * 4)
    assert take(broker, "a", num_msgs=2) == [0, 1]
    expected = [0, 1, 2, 3] if connection == "a" else [2, 3]
    assert take(broker, connection, ack_wait=SECOND) == expected
    broker.ack(3, connection=connection)
    broker.end("a")
    broker.advance(SECOND)
    assert take(broker, "c") == [0, 1, 2]


@pytest.mark.rule("F4", "F9")
def test_force_deliver_ends_all_claims(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    assert take(broker, "a") == [0, 1]
    assert take(broker, "b", force_deliver=True) == [0, 1]
    assert broker.ack(1, connection="b") == 2


@pytest.mark.rule("F9", "A8")
def test_a_reply_that_was_not_committed_claims_nothing(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    request = Fetch(TENANT, BOX, GROUP, Deliver.EARLIEST, connection="a")
    with undone(broker.store) as tx:
        assert len(use_cases.fetching.fetch(tx, broker.bounds, request, broker.now).messages) == 2
    assert take(broker, "b") == [0, 1]
    with undone(broker.store) as tx:
        assert use_cases.settling.ack(tx, Ack(TENANT, BOX, GROUP, [0], "b"), broker.now) == 1
    assert take(broker, "a") == []
    assert broker.ack(1, connection="b") == 2


@pytest.mark.rule("F9", "A8")
def test_claims_beyond_the_bounds_are_forgotten_unharmed(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MAX_CLAIMED", 80)
    send(broker, *[NORMAL] * 40)
    names = [f"c{number}" for number in range(8)]
    seen = {name: take(broker, name, num_msgs=5) for name in names}
    assert max(len(got) for got in seen.values()) == 5
    for name, got in seen.items():
        broker.ack(got[-1], connection=name)
    left = take(broker, "z")
    assert set(left) | set(broker.told(EventType.ACKNOWLEDGED)) == set(range(40))
    assert not set(left) & set(broker.told(EventType.ACKNOWLEDGED))


@pytest.mark.rule("F9")
def test_claims_of_all_groups_together_are_bounded(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MAX_ALL_CLAIMED", 100)
    send(broker, NORMAL, NORMAL)
    for number in range(20):
        assert take(broker, "a", group=f"g{number}") == [0, 1]
    with broker.reading() as tx:
        groups = [tx.groups.find(tx.mailboxes.find(TENANT, BOX), f"g{number}") for number in range(20)]
    known = [broker.store.claims.consumer(group.id, "a").lanes for group in groups]  # type: ignore[attr-defined]
    assert [bool(lanes) for lanes in known] == [False] * 15 + [True] * 5
    assert broker.ack(1, group="g0", connection="a") == 2, "one reader alone needs none"


@pytest.mark.rule("F9")
def test_what_ended_leaves_nothing_behind(broker: Broker) -> None:
    memory = broker.store.claims  # type: ignore[attr-defined]
    send(broker, *LANES)
    for connection in "ab":
        take(broker, connection, num_msgs=2)
    broker.ack(3, connection="b")
    broker.end("a")
    broker.end("never heard of")
    assert memory.size == 0


# F10


@pytest.mark.rule("F10")
def test_what_comes_again_and_again_is_held_back(broker: Broker) -> None:
    send(broker, NORMAL)
    held: list[int] = []
    for _ in range(12):
        request = Fetch(TENANT, BOX, GROUP, Deliver.EARLIEST, connection="a", max_wait=100)
        found = broker.fetching(request)
        if found.messages:
            held.append(0)
            continue
        assert found.backoff_until == found.retry_at is not None
        held.append(found.backoff_until - broker.now)
        broker.advance(held[-1] - 1)
        found = broker.again(request, found)
        assert not found.messages
        broker.advance(1)
        assert [message.msg_id for message in broker.again(request, found).messages] == [0]
    assert held == [0, 0, 1, 2, 4, 8, 16, 32, 64, 100, 100, 100]


@pytest.mark.rule("F10")
@pytest.mark.parametrize("ends", ["new", "higher", "ack", "nowait", "unknown", "other"])
def test_the_brake_ends(broker: Broker, ends: str) -> None:
    send(broker, NORMAL, LOW)
    connection = "" if ends == "unknown" else "a"
    for _ in range(2):
        assert take(broker, connection) == [0, 1]
    if ends in ("new", "higher"):
        send(broker, NORMAL if ends == "new" else CRITICAL)
    elif ends == "ack":
        broker.ack(99, connection="b")
    elif ends == "other":
        broker.end("a")
        connection = "b"
    wait = 0 if ends == "nowait" else 500
    assert len(take(broker, connection, max_wait=wait)) == 2 + (ends in ("new", "higher"))


@pytest.mark.rule("F10")
async def test_a_waiting_fetch_is_held_back_and_answered(store: Store) -> None:
    broker = use_cases.Broker(store, Bounds())
    broker.connection_opened("a")
    try:
        await broker.create(use_cases.creating.Create(TENANT, BOX))
        await broker.send(use_cases.sending.Send(TENANT, BOX, Draft(b"1")))
        request = Fetch(TENANT, BOX, GROUP, Deliver.EARLIEST, connection="a", max_wait=40)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(10):
            assert [message.msg_id for message in (await broker.fetch(request)).messages] == [0]
        assert loop.time() - began > 0.1
        waiting = asyncio.create_task(broker.fetch(Fetch(TENANT, BOX, GROUP, connection="a", max_wait=4500)))
        await broker.wait_committed()
        await broker.send(use_cases.sending.Send(TENANT, BOX, Draft(b"2")))
        assert [message.msg_id for message in (await waiting).messages] == [0, 1], "anything new ends it"
    finally:
        await broker.close()
