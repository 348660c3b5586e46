"""The clean-up: everything that is unreachable goes, in bounded slices, and nothing else (A8, M1, S3, S5)."""

import pytest

from mediator.mailboxes import collecting
from mediator.mailboxes.collecting import Collected
from mediator.mailboxes.events import EventType
from mediator.mailboxes.fetching import Deliver
from mediator.mailboxes.group import LeaseCursor
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Usage
from tests.harness.broker import BOX, DAY, GROUP, HOUR, SECOND, TENANT, Broker


@pytest.fixture
def broker(broker: Broker) -> Broker:
    broker.create()
    return broker


def usage(broker: Broker) -> Usage:
    with broker.store.reading() as tx:
        return tx.mailboxes.usage(TENANT)


@pytest.mark.rule("S5")
def test_expired_messages_go_oldest_expiry_first_in_slices(broker: Broker) -> None:
    for second in (3, 1, 5, 2, 4):
        broker.send(b"x", ttl=second * SECOND, lane=Lane(second % 4))
    broker.send(b"x")
    broker.advance(4 * SECOND)
    assert broker.shown() == [2, 5]
    assert broker.collect(limit=3) == Collected(messages=3)
    assert broker.told(EventType.EXPIRED) == [1, 3, 0]
    assert usage(broker) == Usage(3, 3)
    assert broker.collect(limit=3) == Collected(messages=1)
    assert broker.collect(limit=3) == Collected()
    assert broker.shown() == [2, 5]
    assert usage(broker) == Usage(2, 2)


@pytest.mark.rule("S5", "A8")
def test_cleaning_up_changes_nothing_that_can_be_seen(broker: Broker) -> None:
    for number in range(20):
        broker.send(ttl=SECOND if number % 3 else None, key=f"k{number}", dedup_id=f"d{number}")
    broker.send(delay=HOUR)
    before = broker.take(), broker.take("leased", ack_wait=DAY), broker.take(None)
    broker.ack(before[0][3])
    broker.advance(SECOND)
    seen = broker.take(), broker.take(None), broker.shown()
    broker.clean_up(limit=2)
    assert (broker.take(), broker.take(None), broker.shown()) == seen
    assert broker.take("leased") == []
    assert broker.send(dedup_id="d0") == 0
    assert broker.send(dedup_id="d1") == 20
    assert broker.next_due() is not None


@pytest.mark.rule("M1", "M4", "A3")
@pytest.mark.parametrize("end", ["expired", "deleted"])
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_a_mailbox_is_collected_with_all_that_was_in_it(broker: Broker, end: str, limit: int) -> None:
    broker.create("gone", ttl=HOUR)
    for number in range(5):
        broker.send(b"x", to="gone", dedup_id=f"d{number}")
        broker.send(b"x", to="gone", delay=DAY)
        broker.take(f"g{number}", "gone", ack_wait=SECOND)
    broker.send(b"x")
    if end == "deleted":
        broker.delete_mailbox("gone")
    else:
        broker.advance(HOUR)
    done = broker.clean_up(limit)
    assert (done.messages, done.delayed, done.dedup_ids) == (5, 5, 5)
    assert done.groups >= 5
    assert broker.mailbox("gone") is None
    assert usage(broker) == Usage(1, 1)
    assert broker.next_due() is None
    assert broker.shown() == [0]


@pytest.mark.rule("M1")
@pytest.mark.parametrize("limit", [1, 2, 7])
def test_a_slice_removes_no_more_than_it_is_asked_to(broker: Broker, limit: int) -> None:
    for box in ("a", "b", "c"):
        broker.create(box, ttl=HOUR)
        for number in range(5):
            broker.send(to=box, dedup_id=f"d{number}")
            broker.send(to=box, delay=DAY)
            broker.fetch(f"g{number}", box)
    broker.advance(HOUR)
    slices = 0
    while (done := broker.collect(limit)).total:
        # Mailboxes whose time is over and what is left of retired ones are two slices.
        assert done.messages + done.delayed + done.groups + done.dedup_ids <= limit
        assert done.total <= 2 * limit
        slices += 1
        assert slices < 200
    assert [broker.mailbox(box) for box in ("a", "b", "c")] == [None] * 3


@pytest.mark.rule("M1", "A3")
def test_the_old_mailbox_is_collected_behind_the_new_one(broker: Broker) -> None:
    broker.send(b"old")
    broker.take()
    broker.delete_mailbox()
    broker.create()
    broker.send(b"new")
    assert broker.take() == [0]
    assert broker.clean_up(limit=1).mailboxes == 1
    assert [m.payload for m in broker.query()] == [b"new"]
    assert broker.take() == [0]
    broker.ack(0)
    assert broker.take() == []


@pytest.mark.rule("M1")
def test_expired_mail_of_an_expired_mailbox_goes_once(broker: Broker) -> None:
    broker.create("gone", ttl=HOUR)
    broker.send(b"x", to="gone", ttl=SECOND)
    broker.send(b"x", to="gone")
    broker.advance(HOUR)
    assert broker.clean_up(limit=1).messages == 2
    assert usage(broker) == Usage(0, 0)


@pytest.mark.rule("A3", "M1")
def test_the_clean_up_leaves_just_what_lives(broker: Broker) -> None:
    for number in range(5):
        name = f"m{number}"
        broker.create(name, ttl=SECOND)
        for _ in range(7):
            broker.send(b"x", to=name, dedup_id=f"d{_}", recipient="r")
        broker.send(b"x", to=name, delay=10 * SECOND)
        assert broker.take("g", name, ack_wait=DAY // 2) == list(range(7))
    broker.send(b"kept", dedup_id="d")
    broker.advance(SECOND)
    collected = broker.clean_up(limit=3)
    assert (collected.messages, collected.delayed, collected.dedup_ids) == (35, 5, 35)
    assert broker.clean_up().total == 0
    assert broker.next_due() is None
    with broker.store.reading() as tx:
        assert [mailbox.address for mailbox in tx.mailboxes.list(TENANT, "", 100, broker.now)] == [BOX]
        assert tx.mailboxes.retired(100) == []
        assert tx.mailboxes.usage(TENANT).messages == 1
    assert broker.send(b"again", dedup_id="d") == 0


@pytest.mark.rule("S3")
def test_dedup_ids_go_when_their_time_is_over(broker: Broker) -> None:
    broker.send(dedup_id="a")
    broker.send(dedup_id="b", ttl=SECOND)
    broker.advance(SECOND)
    assert broker.clean_up().dedup_ids == 1
    broker.advance(DAY - SECOND - 1)
    assert broker.clean_up().dedup_ids == 0
    assert broker.send(dedup_id="a") == 0
    broker.advance(1)
    assert broker.clean_up().dedup_ids == 1


@pytest.mark.rule("A8")
def test_there_is_nothing_to_collect_in_a_living_mailbox(broker: Broker) -> None:
    broker.send(delay=HOUR)
    broker.send(ttl=DAY, dedup_id="d")
    broker.take()
    assert broker.collect() == Collected()


@pytest.mark.rule("F7")
def test_a_dead_message_that_is_gone_leaves_no_lease_behind(broker: Broker) -> None:
    broker.send(b"x", ttl=60 * SECOND)
    broker.send(b"y")
    for _ in range(2):
        broker.take(deliver=Deliver.EARLIEST, ack_wait=SECOND, max_deliver=2)
        broker.advance(2 * SECOND)
    broker.take()
    assert broker.shown(dead_for=GROUP) == [0, 1]
    broker.advance(60 * SECOND)
    collected, after = broker.run(lambda tx: collecting.ended_leases(tx, LeaseCursor(-1, 0, 0), broker.now, 100))
    assert (collected, after) == (Collected(leases=1), None)
    assert broker.shown(dead_for=GROUP) == [1]


@pytest.mark.rule("F7")
def test_the_clean_up_declares_messages_dead_unasked(broker: Broker) -> None:
    broker.send()
    broker.take(ack_wait=SECOND, max_deliver=1)
    broker.advance(SECOND)
    broker.run(lambda tx: collecting.ended_leases(tx, LeaseCursor(-1, 0, 0), broker.now, 100))
    assert broker.told(EventType.DEAD) == [0]
