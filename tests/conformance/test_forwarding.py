"""Copies that a rule forwards, on every store: one batch at a time, in order, until each is confirmed or dead."""

import pytest

from mediator.errors import BadRequestError
from mediator.mailboxes import copying, fetching, forwarding, settling
from mediator.mailboxes.copy_rule import CopyRule
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.forwarding import LEASE, Attempt
from mediator.mailboxes.mailbox import Retention
from mediator.mailboxes.settling import DeadSelection
from tests.harness.broker import BOX, HOUR, SECOND, TENANT, Broker

KEPT = "kept"
GROUP = "copy.all"


@pytest.fixture
def broker(store):
    broker = Broker(store)
    broker.create()
    broker.create(KEPT, retention=Retention.UNTIL_ACK)
    return broker


def add(broker, name="all", **options):
    rule = CopyRule(TENANT, name, KEPT, **{"address": BOX, "to_subject": "audit", **options})
    return broker.run(lambda tx: copying.add_rule(tx, rule, broker.now))


def take(broker, rule, number=10):
    return broker.run(lambda tx: forwarding.lease_batch(tx, broker.bounds, rule, number, broker.now))


def settle(broker, rule, batch, delay=0, **outcome):
    attempt = Attempt(**outcome)
    broker.run(lambda tx: forwarding.settle(tx, rule, batch, attempt, delay, broker.now))


def lag(broker, rule):
    return broker.run(lambda tx: forwarding.measure_lag(tx, rule, broker.now))


def payloads(batch):
    return [copy.message.payload for copy in batch.copies]


@pytest.mark.rule("C7")
def test_one_batch_is_under_way_at_a_time(broker):
    rule = add(broker)
    for payload in (b"0", b"1", b"2"):
        broker.send(payload)
    first = take(broker, rule, 2)
    assert payloads(first) == [b"0", b"1"]
    second = take(broker, rule)
    assert (list(second.copies), second.retry_at) == ([], broker.now + LEASE)
    broker.advance(LEASE)
    again = take(broker, rule)
    assert payloads(again) == [b"0", b"1", b"2"]
    assert [copy.id for copy in again.copies][:2] == [copy.id for copy in first.copies]
    settle(broker, rule, again, confirmed=[0, 1, 2])
    assert not take(broker, rule).copies
    assert broker.query(KEPT) == []


@pytest.mark.rule("C7")
def test_what_is_not_confirmed_comes_again_in_order(broker):
    rule = add(broker)
    for payload in (b"0", b"1", b"2"):
        broker.send(payload)
    batch = take(broker, rule)
    settle(broker, rule, batch, 5 * SECOND, confirmed=[0], untried=[2], problem="x")
    broker.send(b"3")
    waiting = take(broker, rule)
    assert (list(waiting.copies), waiting.retry_at) == ([], broker.now + 5 * SECOND)
    broker.advance(5 * SECOND)
    again = take(broker, rule)
    assert payloads(again) == [b"1", b"2", b"3"]
    # What was not tried counts no attempt.
    assert [copy.message.deliveries for copy in again.copies] == [2, 1, 1]


@pytest.mark.rule("C7", "F7")
def test_what_is_refused_is_dead_and_can_be_redriven(broker):
    rule = add(broker)
    broker.send(b"0")
    settle(broker, rule, take(broker, rule), refused=[0], problem="too large")
    assert not take(broker, rule).copies
    assert lag(broker, rule) == 0
    selection = DeadSelection(TENANT, KEPT, GROUP)
    assert broker.run(lambda tx: settling.redrive(tx, selection, broker.now)) == 1
    broker.advance(1)
    assert payloads(take(broker, rule)) == [b"0"]


@pytest.mark.rule("C7")
def test_a_restart_counts_no_attempt_that_nobody_saw_the_end_of(broker):
    rule = add(broker)
    broker.send(b"0")
    for _ in range(30):
        [copy] = take(broker, rule).copies
        assert copy.message.deliveries == 1
        broker.run(lambda tx: forwarding.release(tx, rule, broker.now))
        broker.advance(1)


@pytest.mark.rule("C7")
def test_the_lag_is_that_of_the_oldest_copy_taken_or_not(broker):
    rule = add(broker)
    assert lag(broker, rule) == 0
    broker.send(b"0")
    broker.advance(SECOND)
    broker.send(b"1")
    assert lag(broker, rule) == SECOND
    batch = take(broker, rule)
    broker.advance(SECOND)
    assert lag(broker, rule) == 2 * SECOND
    settle(broker, rule, batch, 60 * SECOND, confirmed=[0], problem="x")
    broker.advance(SECOND)
    assert lag(broker, rule) == 2 * SECOND


@pytest.mark.rule("C7")
def test_a_dropped_group_begins_with_all_that_is_there(broker):
    broker.send(b"before", to=KEPT)
    rule = add(broker)
    broker.send(b"after")
    batch = take(broker, rule)
    assert payloads(batch) == [b"after"]
    settle(broker, rule, batch)
    broker.advance(1)
    broker.run(lambda tx: settling.drop_group(tx, TENANT, KEPT, GROUP, broker.now))
    assert payloads(take(broker, rule)) == [b"before", b"after"]


@pytest.mark.rule("C7")
def test_a_rule_that_ended_takes_nothing_and_makes_no_group(broker):
    rule = add(broker)
    broker.send(b"0")
    batch = take(broker, rule)
    broker.run(lambda tx: copying.remove_rule(tx, TENANT, "all"))
    assert not take(broker, rule).copies
    settle(broker, rule, batch, confirmed=[0])
    assert [message.payload for message in broker.query(KEPT)] == [b"0"]


@pytest.mark.rule("C7")
def test_one_rule_alone_forwards_from_a_mailbox(broker):
    add(broker)
    with pytest.raises(BadRequestError, match="no other rule forwards"):
        add(broker, "other", address="other")
    # One that only copies there is none.
    add(broker, "third", address="third", to_subject="")


@pytest.mark.rule("C7")
@pytest.mark.parametrize("way", ["start_at", "lease", "waiting"])
def test_no_group_of_a_client_stands_in_the_way_of_a_rule(broker, way, monkeypatch):
    """What a client did with a group of this name, while no rule kept it from that, is undone."""
    monkeypatch.setattr(fetching, "FORWARDER", "reserved later.")
    broker.send(b"old", to=KEPT)
    ahead = {"deliver": Deliver.FROM_ID, "from_id": 10**6} if way == "start_at" else {"deliver": Deliver.EARLIEST}
    request = Fetch(TENANT, KEPT, GROUP, max_deliver=1, ack_wait=HOUR, **ahead)
    if way == "waiting":
        broker.run(lambda tx: fetching.fetch(tx, broker.bounds, request, broker.now))
    before = broker.run(lambda tx: fetching.fetch(tx, broker.bounds, request, broker.now))
    monkeypatch.undo()
    rule = add(broker)
    broker.send(b"0")
    with pytest.raises(BadRequestError, match="reserved for what forwards"):
        broker.run(lambda tx: fetching.fetch_again(tx, broker.bounds, request, before, broker.now))
    for attempt in range(1, 4):
        [copy] = take(broker, rule).copies
        assert (copy.message.payload, copy.message.deliveries) == (b"0", attempt)
        broker.advance(LEASE)


@pytest.mark.rule("C7")
def test_clients_make_no_group_for_a_rule_to_come(broker):
    with pytest.raises(BadRequestError, match="group_name"):
        broker.fetch(box=KEPT, group=GROUP)
    assert take(broker, add(broker)).retry_at is None


@pytest.mark.rule("C7")
def test_ids_differ_by_rule_and_by_message(broker):
    """A stream drops what has an id that it knows: two copies with one id would be a loss."""
    rule = add(broker)
    for payload in (b"0", b"0"):
        broker.send(payload)
    batch = take(broker, rule)
    ids = {copy.id for copy in batch.copies}
    assert len(ids) == 2
    settle(broker, rule, batch)
    broker.run(lambda tx: copying.remove_rule(tx, TENANT, "all"))
    other = add(broker, "other")
    broker.send(b"0")
    ids |= {copy.id for copy in take(broker, other).copies}
    assert len(ids) == 3
