"""Moving, copying, purging and sending again, on every store: no message is lost, none is replaced (A5, F6, F7, S7)."""

import pytest

from mediator.errors import BadRequestError, NoSuchMailboxError, NoSuchMessageError, QuotaExceededError
from mediator.mailboxes import moving, settling
from mediator.mailboxes.bounds import Bounds, Quota
from mediator.mailboxes.events import EventType
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.mailboxes.message import HIDDEN_ID
from mediator.mailboxes.moving import Resend, Transfer
from pickup.broker import MEDIATION_HOOKS
from tests.harness.broker import BOX, GROUP, HOUR, SECOND, TENANT, Broker

OTHER = "parked"


@pytest.fixture
def broker(store):
    broker = Broker(store)
    broker.create()
    broker.create(OTHER)
    return broker


def transfer(broker, *ids, to=OTHER, keep=False, box=BOX):
    request = Transfer(TENANT, box, to, sorted(ids), keep)
    hooks = {Kind.MEDIATION: MEDIATION_HOOKS}
    return broker.run(lambda tx: moving.transfer(tx, broker.bounds, broker.quotas, request, broker.now, hooks))


def payloads(broker, box=BOX):
    return [message.payload for message in broker.query(box)]


def test_a_moved_message_keeps_all_but_its_number(broker):
    broker.send(b"first", to=OTHER)
    broker.send(b"x", lane=Lane.URGENT, tags=("a",), headers={"h": "v"}, ttl=HOUR, reply_to="r", key="k", dedup_id="d")
    broker.advance(SECOND)
    assert transfer(broker, 0).count == 1
    assert payloads(broker) == []
    [_, moved] = broker.query(OTHER)
    assert (moved.msg_id, moved.payload, moved.lane, moved.tags) == (1, b"x", Lane.URGENT, ("a",))
    assert (moved.headers, moved.reply_to, moved.key) == ({"h": "v"}, "r", "k")
    assert moved.expire_at == broker.now - SECOND + HOUR
    assert broker.told(EventType.DELETED) == [0]
    assert broker.mailbox().messages == 0
    assert (TENANT, OTHER) in broker.woken


@pytest.mark.rule("S3")
def test_a_repeated_send_is_not_stored_behind_a_move(broker):
    broker.send(b"x", dedup_id="d")
    transfer(broker, 0)
    assert broker.send(b"x", dedup_id="d") == 0
    assert (payloads(broker), payloads(broker, OTHER)) == ([], [b"x"])


def test_a_copy_stays_where_it_is(broker):
    for text in (b"a", b"b", b"c"):
        broker.send(text)
    assert transfer(broker, 0, 2, keep=True).count == 2
    assert (payloads(broker), payloads(broker, OTHER)) == ([b"a", b"b", b"c"], [b"a", b"c"])


@pytest.mark.rule("S2")
def test_a_move_replaces_no_message_of_the_same_key(broker):
    broker.send(b"newer", to=OTHER, key="sensor", ttl=HOUR)
    broker.send(b"free")
    broker.send(b"older", key="sensor")
    found = transfer(broker, 0, 1)
    assert (found.count, found.refused_id) == (1, 1)
    assert str(found.refused) == "to_address: has a message with the same key as message 1 already"
    assert (payloads(broker), payloads(broker, OTHER)) == ([b"older"], [b"newer", b"free"])
    broker.advance(HOUR)
    assert transfer(broker, 1).count == 1
    assert payloads(broker, OTHER) == [b"free", b"older"]


@pytest.mark.rule("S7")
def test_what_a_quota_refuses_stays_where_it_is(store):
    broker = Broker(store, Bounds(mailbox=Quota(messages=3)))
    broker.create()
    broker.create(OTHER)
    broker.send(b"there", to=OTHER)
    for text in (b"a", b"b", b"c"):
        broker.send(text)
    refused: list[str] = []
    broker.quotas.on_refused.append(refused.append)
    found = transfer(broker, 0, 1, 2)
    assert (found.count, found.refused_id, type(found.refused)) == (2, 2, QuotaExceededError)
    assert (payloads(broker), payloads(broker, OTHER)) == ([b"c"], [b"there", b"a", b"b"])
    assert refused == [], "the operator knows it; no client was refused"
    with pytest.raises(QuotaExceededError):
        broker.send(b"d", to=OTHER)
    assert refused == [TENANT]


@pytest.mark.rule("S7")
def test_a_move_takes_no_more_of_the_quota_than_there_is(store):
    broker = Broker(store, Bounds(tenant=Quota(messages=10)))
    broker.create()
    broker.create(OTHER)
    for _ in range(7):
        broker.send(b"x")
    assert transfer(broker, *range(7)).count == 7
    for _ in range(3):
        broker.send(b"x")
    with pytest.raises(QuotaExceededError):
        broker.send(b"x")


@pytest.mark.rule("D11")
def test_a_wallets_mailbox_takes_no_other_mail_by_a_move(broker):
    broker.create("wallet", kind=Kind.MEDIATION, retention=Retention.UNTIL_ACK)
    broker.send(b"plain")
    found = transfer(broker, 0, to="wallet")
    assert (found.count, str(found.refused)[:9]) == (0, "payload: ")
    assert payloads(broker) == [b"plain"]


@pytest.mark.parametrize(
    ("to", "error"),
    [(BOX, BadRequestError), ("latest", BadRequestError), ("public", BadRequestError), ("none", NoSuchMailboxError)],
)
def test_a_wrong_target_takes_nothing(broker, to, error):
    broker.create("latest", kind=Kind.LATEST)
    broker.send(b"x")
    with pytest.raises(error):
        transfer(broker, 0, to=to)
    assert payloads(broker) == [b"x"]


def test_a_large_move_is_done_slice_by_slice(broker, monkeypatch):
    monkeypatch.setattr(moving, "SLICE", 2)
    monkeypatch.setattr(moving, "SLICE_BYTES", 15)
    for size in (10, 10, 1, 1, 1):
        broker.send(b"x" * size)
    ids, counts = [*range(5), 99], []
    while ids:
        found = transfer(broker, *ids)
        counts.append(found.count)
        ids = [] if found.last is None else [each for each in ids if each > found.last]
    assert (sum(counts), max(counts)) == (5, 2)
    assert len(payloads(broker, OTHER)) == 5


def begin_purge(broker):
    return broker.run(lambda tx: moving.begin_purge(tx, TENANT, BOX, broker.now))


def purge(broker, begun):
    """Return how many messages went with each slice."""
    counts = []
    while count := broker.run(lambda tx: moving.purge(tx, begun, broker.now)):
        counts.append(count)
    return counts


def test_a_purge_takes_all_and_what_is_delayed(broker, monkeypatch):
    monkeypatch.setattr(moving, "SLICE", 2)
    for number in range(3):
        broker.send(b"x", dedup_id=str(number))
    broker.send(b"later", delay=HOUR, dedup_id="later")
    assert purge(broker, begin_purge(broker)) == [1, 2, 1]
    assert broker.told(EventType.DELETED) == [HIDDEN_ID, 0, 1, 2]
    broker.advance(HOUR)
    assert broker.release().count == 0
    assert [broker.send(b"x", dedup_id=each) for each in ("0", "later")] == [3, 4]


def test_a_purge_leaves_what_came_meanwhile(broker):
    broker.send(b"old")
    broker.send(b"old, later", delay=HOUR)
    begun = begin_purge(broker)
    broker.send(b"new")
    broker.send(b"new, later", delay=HOUR)
    assert purge(broker, begun) == [1, 1]
    broker.advance(HOUR)
    assert broker.release().count == 1
    assert payloads(broker) == [b"new", b"new, later"]


def test_some_messages_are_removed_and_others_stay(broker):
    for text in (b"a", b"b", b"c"):
        broker.send(text)
    assert broker.run(lambda tx: moving.delete_some(tx, TENANT, BOX, [0, 2, 2, 7], broker.now)) == 2
    assert broker.run(lambda tx: moving.delete_some(tx, TENANT, BOX, [], broker.now)) == 0
    assert payloads(broker) == [b"b"]


def resend(broker, msg_id=0, **change):
    request = Resend(TENANT, BOX, GROUP, msg_id, **change)
    return broker.run(lambda tx: moving.resend(tx, broker.bounds, broker.quotas, request, broker.now))


def kill(broker):
    broker.take(ack_wait=SECOND, max_deliver=1)
    broker.advance(SECOND)


@pytest.mark.rule("F7")
@pytest.mark.parametrize("retention", list(Retention))
def test_a_dead_message_is_sent_again_changed(store, retention):
    broker = Broker(store)
    broker.create(retention=retention)
    broker.send(b'{"price": "x"}', tags=("a",), dedup_id="d")
    kill(broker)
    assert resend(broker, payload=b'{"price": 1}', lane=Lane.CRITICAL) == 1
    assert broker.shown(dead_for=GROUP) == []
    [again] = broker.fetch(ack_wait=SECOND).messages
    assert (again.msg_id, again.payload, again.lane, again.tags) == (1, b'{"price": 1}', Lane.CRITICAL, ("a",))
    assert broker.shown() == ([0, 1] if retention is Retention.KEEP else [1])


@pytest.mark.rule("F7", "S2")
def test_a_keyed_message_sent_again_replaces_the_dead_one(broker):
    broker.send(b"x", key="sensor")
    kill(broker)
    assert resend(broker) == 1
    assert (broker.shown(), broker.shown(dead_for=GROUP)) == ([1], [])
    assert broker.take(ack_wait=SECOND) == [1]


@pytest.mark.rule("F7")
def test_only_a_dead_message_is_sent_again(broker):
    broker.send(b"x")
    broker.take(ack_wait=SECOND)
    with pytest.raises(NoSuchMessageError):
        resend(broker)
    assert payloads(broker) == [b"x"]


@pytest.mark.rule("F7", "S7")
def test_a_quota_keeps_the_dead_message(store):
    broker = Broker(store, Bounds(mailbox=Quota(messages=1)))
    broker.create()
    broker.send(b"x")
    kill(broker)
    with pytest.raises(QuotaExceededError):
        resend(broker, payload=b"y")
    assert (payloads(broker), broker.shown(dead_for=GROUP)) == ([b"x"], [0])


@pytest.mark.rule("F6")
def test_running_leases_are_listed_and_others_not(broker):
    for _ in range(4):
        broker.send(b"x")
    broker.take(num_msgs=3, ack_wait=HOUR)
    broker.nack(1, delay=HOUR)
    broker.nack(2)
    broker.delete(0)

    def leases():
        return broker.run(lambda tx: settling.running_leases(tx, TENANT, BOX, GROUP, 10, broker.now))

    assert [(each.msg_id, each.delayed) for each in leases()] == [(1, True)]
    broker.nack(1)
    assert leases() == []
    with pytest.raises(BadRequestError, match="no such group"):
        broker.run(lambda tx: settling.running_leases(tx, TENANT, BOX, "none", 10, broker.now))
