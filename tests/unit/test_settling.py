"""MSG.ACK, NACK and EXTEND, and what operators do with dead messages (A5, A8, F6, F7, K2–K4)."""

import pytest

from mediator.errors import BadRequestError, NoSuchMailboxError, TooManyDelayedError
from mediator.mailboxes.events import EventType
from mediator.mailboxes.fetching import FULL, Deliver
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Mailbox, Retention
from mediator.mailboxes.message import MessageRef
from mediator.mailboxes.tables.messages import Messages
from tests.harness.broker import BOX, GROUP, HOUR, SECOND, START, TENANT, Broker

CRITICAL, URGENT, NORMAL, LOW = Lane
QUEUE = "queue"


@pytest.fixture
def broker(broker: Broker) -> Broker:
    broker.create()
    broker.create(QUEUE, retention=Retention.UNTIL_ACK)
    return broker


def send(broker: Broker, *lanes: Lane, to: str = "task") -> None:
    for lane in lanes:
        broker.send(lane=lane, to=to)


# K2: without a lease


@pytest.fixture
def looked(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Behind which message and up to which messages were read that an ACK does not name."""
    found: list[tuple[int, int]] = []
    with broker.store.transaction() as tx:
        between = type(tx.messages).between

    def watched(messages: Messages, mailbox: Mailbox, lane: Lane, after: int, last: int, now: int) -> list[MessageRef]:
        found.append((after, last))
        return between(messages, mailbox, lane, after, last, now)

    monkeypatch.setattr(type(tx.messages), "between", watched)
    return found


@pytest.mark.rule("K2", "K3")
def test_an_old_message_is_settled_without_reading_between(broker: Broker, looked: list[tuple[int, int]]) -> None:
    send(broker, *[NORMAL] * 50)
    assert broker.take(ack_wait=SECOND) == list(range(50))
    broker.ack(*range(1, 50))
    send(broker, NORMAL, NORMAL)
    broker.advance(SECOND)
    assert broker.take() == [0, 50, 51]
    looked.clear()
    broker.ack(51)
    assert looked == [(49, 51)]
    assert broker.take() == []
    assert broker.told(EventType.ACKNOWLEDGED)[-3:] == [0, 50, 51]


@pytest.mark.rule("K2")
@pytest.mark.parametrize("acks", [[[0], [1], [2], [3]], [[1, 0], [2, 3]], [[3, 2, 1, 0]]])
def test_messages_that_acks_name_are_read_once(broker: Broker, looked: list[tuple[int, int]], acks) -> None:
    send(broker, *[NORMAL] * 4)
    assert broker.take() == [0, 1, 2, 3]
    for ids in acks:
        assert broker.ack(*ids) == len(ids)
    assert looked == []
    assert broker.told(EventType.ACKNOWLEDGED) == [0, 1, 2, 3]
    assert broker.take() == []


@pytest.mark.rule("K2", "K4")
def test_ack_counts_what_it_covers_and_is_still_there(broker: Broker) -> None:
    send(broker, *[NORMAL] * 4)
    broker.send(ttl=5 * SECOND)
    broker.send(key="sensor")
    assert broker.take() == [0, 1, 2, 3, 4, 5]
    broker.advance(5 * SECOND)
    broker.send(key="sensor")
    assert broker.ack(1) == 2
    assert broker.ack(1) == 0
    assert broker.ack(5) == 2
    assert broker.ack(3) == 0
    assert broker.ack(3, group="unknown") == 0
    assert len(broker.told(EventType.ACKNOWLEDGED)) == 4


@pytest.mark.rule("K2", "F3")
def test_acknowledging_each_message_settles_each(broker: Broker) -> None:
    send(broker, NORMAL, CRITICAL, LOW, CRITICAL, URGENT, NORMAL)
    order = broker.take()
    for number, msg_id in enumerate(order, 1):
        broker.ack(msg_id)
        assert broker.take() == order[number:]


@pytest.mark.rule("K2")
def test_acknowledging_the_last_settles_a_mixed_batch(broker: Broker) -> None:
    # The ids of the higher lanes are above the id of the last message: only the reply tells that they were before it.
    send(broker, LOW, NORMAL, URGENT, CRITICAL)
    assert broker.take() == [3, 2, 1, 0]
    broker.ack(0)
    assert broker.take() == []
    assert broker.told(EventType.ACKNOWLEDGED) == [3, 2, 1, 0]


@pytest.mark.rule("K2")
@pytest.mark.parametrize("place", range(8))
def test_an_ack_in_the_middle_settles_what_stood_before_it(broker: Broker, place: int) -> None:
    send(broker, LOW, NORMAL, URGENT, CRITICAL, URGENT, CRITICAL, NORMAL, LOW)
    order = broker.take()
    assert order == [3, 5, 2, 4, 1, 6, 0, 7]
    broker.ack(order[place])
    assert broker.take() == order[place + 1 :]


@pytest.mark.rule("K2", "A8")
def test_an_ack_never_covers_what_came_after_the_reply(broker: Broker) -> None:
    send(broker, NORMAL, LOW)
    assert broker.take() == [0, 1]
    send(broker, CRITICAL, NORMAL, LOW)
    broker.ack(1)
    assert broker.take() == [2, 3, 4]


@pytest.mark.rule("K2", "A8")
def test_an_ack_never_covers_what_the_limit_cut_off(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL, CRITICAL)
    assert broker.take(num_msgs=2) == [3, 0]
    broker.ack(0)
    assert broker.take(num_msgs=1) == [1]
    broker.ack(1)
    assert broker.take() == [2]


@pytest.mark.rule("K2")
def test_an_ack_covers_higher_lanes_up_to_its_id(broker: Broker) -> None:
    send(broker, CRITICAL, NORMAL)
    assert broker.take(num_msgs=1) == [0]
    assert broker.take() == [0, 1]
    broker.take(force_deliver=True, num_msgs=1)
    send(broker, NORMAL)
    broker.take()
    broker.ack(2)
    assert broker.take() == []


@pytest.mark.rule("K2", "A8")
def test_an_ack_never_covers_a_lower_lane(broker: Broker) -> None:
    send(broker, LOW, NORMAL, CRITICAL)
    assert broker.take() == [2, 1, 0]
    broker.ack(2)
    assert broker.take() == [1, 0]


@pytest.mark.rule("K2", "A8")
@pytest.mark.parametrize(("connection", "left"), [("x", []), ("", [2])], ids=["known", "unknown"])
def test_every_remembered_reply_that_held_the_message_counts(broker: Broker, connection: str, left: list[int]) -> None:
    send(broker, LOW)
    send(broker, NORMAL)
    assert broker.take(connection=connection, max_wait=0) == [1, 0]
    send(broker, CRITICAL)
    assert broker.take(connection=connection, max_wait=0, num_msgs=2) == [2, 1]
    # The second reply did not hold 0, the first one did not hold 2.
    broker.ack(0, connection=connection)
    assert broker.take(connection=connection, max_wait=0) == [2]
    # Nobody knows of an unknown client whether it got the second reply.
    broker.ack(1, connection=connection)
    assert broker.take(connection=connection, max_wait=0) == left


@pytest.mark.rule("K2", "A8")
@pytest.mark.parametrize(("connection", "left"), [("x", []), ("", list(range(2, 33)))], ids=["known", "unknown"])
def test_the_last_32_replies_are_remembered(broker: Broker, connection: str, left: list[int]) -> None:
    send(broker, LOW)
    for _ in range(32):
        send(broker, CRITICAL)
        broker.take(connection=connection, max_wait=0)
    # All 32 replies held the low message, the last one after all the others; each of them may be the one that arrived.
    broker.ack(0, connection=connection)
    assert broker.take(connection=connection, max_wait=0) == left


@pytest.mark.rule("K2", "A8")
@pytest.mark.parametrize("lost_first", [True, False])
def test_an_ack_covers_nothing_of_a_reply_that_was_lost(broker: Broker, lost_first: bool) -> None:
    send(broker, NORMAL)
    replies = [broker.take()]
    send(broker, CRITICAL)
    replies.append(broker.take())
    assert replies == [[0], [1, 0]]
    # Which of the two arrived, nobody here knows: the service's instances may have answered in any order.
    got = set(replies[1 if lost_first else 0])
    broker.ack(0)
    assert got | set(broker.take()) == {0, 1}


@pytest.mark.rule("K2", "A8")
def test_a_repeated_ack_covers_nothing_of_a_reply_that_was_lost(broker: Broker) -> None:
    send(broker, URGENT)
    assert broker.take() == [0]
    send(broker, CRITICAL)
    assert broker.take() == [1, 0]
    # The first reply arrived, the second was lost; so was the answer to the first ACK.
    broker.ack(0)
    broker.ack(0)
    assert broker.take() == [1]


@pytest.mark.rule("K2", "A8")
def test_a_forgotten_reply_costs_duplicates_only(broker: Broker) -> None:
    send(broker, LOW, CRITICAL)
    assert broker.take() == [1, 0]
    for _ in range(40):
        send(broker, NORMAL)
        assert len(broker.take(num_msgs=broker.shown(limit=1)[0])) > 1
    again = broker.take()
    broker.ack(0)
    left = broker.take()
    assert set(left) <= set(again)
    assert 0 not in left
    broker.ack(*left)
    assert broker.take() == []


@pytest.mark.rule("K2", "A8")
def test_an_earlier_late_ack_settles_nothing_more(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL, LOW)
    assert broker.take(num_msgs=2) == [0, 1]
    broker.ack(1)
    assert broker.take() == [2, 3]
    broker.ack(0)
    broker.ack(1)
    broker.ack(0, 1, 0)
    assert broker.take() == [2, 3]


@pytest.mark.rule("K1", "K2")
def test_several_ids_in_one_ack(broker: Broker) -> None:
    send(broker, LOW, NORMAL, NORMAL, CRITICAL, LOW)
    assert broker.take() == [3, 1, 2, 0, 4]
    broker.ack(1, 0, 1, 77)
    assert broker.take() == [4]
    assert sorted(broker.told(EventType.ACKNOWLEDGED)) == [0, 1, 2, 3]


@pytest.mark.rule("K2")
def test_ids_around_what_was_deleted(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL, NORMAL)
    broker.take(num_msgs=3)
    broker.delete(1)
    broker.ack(2)
    assert broker.take() == [3]


# K3: with a lease


@pytest.mark.rule("K3", "A8")
def test_with_a_lease_an_ack_covers_its_messages_alone(broker: Broker) -> None:
    send(broker, LOW, NORMAL, NORMAL, CRITICAL)
    assert broker.take(ack_wait=SECOND) == [3, 1, 2, 0]
    broker.ack(2)
    broker.ack(0)
    broker.advance(SECOND)
    assert broker.take(ack_wait=SECOND) == [3, 1]
    broker.ack(3, 1)
    broker.advance(SECOND)
    assert broker.take() == []


@pytest.mark.rule("K3")
def test_a_late_ack_counts(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL)
    broker.take(ack_wait=SECOND)
    broker.advance(10 * SECOND)
    broker.ack(0)
    assert broker.take(ack_wait=SECOND) == [1, 2]
    # The lease of 1 is another worker's by now; the first one's ACK counts all the same.
    broker.ack(1)
    broker.advance(SECOND)
    assert broker.take(ack_wait=SECOND) == [2]


@pytest.mark.rule("K3", "F7")
def test_the_ack_of_a_dead_message_counts(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    broker.take(ack_wait=SECOND, max_deliver=1)
    broker.advance(SECOND)
    assert broker.take() == []
    broker.ack(0)
    assert broker.shown(dead_for=GROUP) == [1]
    assert broker.told(EventType.ACKNOWLEDGED) == [0]


@pytest.mark.rule("K2", "K3", "A8")
def test_an_ack_without_lease_covers_no_running_lease(broker: Broker) -> None:
    send(broker, CRITICAL, NORMAL, NORMAL)
    assert broker.take() == [0, 1, 2]
    assert broker.take(ack_wait=SECOND, num_msgs=2) == [0, 1]
    broker.ack(2)
    broker.advance(SECOND)
    assert broker.take() == [0, 1]


@pytest.mark.rule("K2", "K3")
def test_an_unleased_repeat_is_acknowledged_by_position(broker: Broker) -> None:
    send(broker, LOW, CRITICAL, NORMAL, NORMAL)
    assert broker.take(ack_wait=SECOND) == [1, 2, 3, 0]
    broker.advance(SECOND)
    send(broker, NORMAL)
    assert broker.take() == [1, 2, 3, 4, 0]
    broker.ack(0)
    assert broker.take() == []
    broker.advance(SECOND)
    assert broker.take() == []


@pytest.mark.rule("K3", "A8")
def test_an_ack_that_comes_twice_covers_nothing_that_came_since(broker: Broker) -> None:
    send(broker, CRITICAL, NORMAL, NORMAL)
    assert broker.take(ack_wait=SECOND) == [0, 1, 2]
    broker.ack(2)
    broker.advance(SECOND)
    assert broker.take() == [0, 1]
    broker.ack(2)
    assert broker.take() == [0, 1]


@pytest.mark.rule("K2", "K3", "A8")
def test_a_reply_around_a_message_did_not_hold_it(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    assert broker.take(ack_wait=SECOND) == [0, 1]
    broker.ack(1)
    broker.advance(SECOND)
    send(broker, NORMAL, CRITICAL)
    assert broker.take() == [3, 0, 2]
    broker.ack(1)
    assert broker.take() == [3, 0, 2]
    broker.ack(2)
    assert broker.take() == []


@pytest.mark.rule("K3", "A8")
def test_a_reply_covers_no_message_leased_since(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, CRITICAL)
    assert broker.take() == [2, 0, 1]
    assert broker.take(ack_wait=SECOND, num_msgs=2) == [2, 0]
    broker.ack(0)
    broker.advance(SECOND)
    assert broker.take(num_msgs=1) == [2]
    broker.ack(0)
    assert broker.take() == [2, 1]


# K4


@pytest.mark.rule("K4", "A8")
@pytest.mark.parametrize("ids", [(), (2,), (3,), (99,), (-1,), (2, 99)])
@pytest.mark.parametrize("options", [{}, {"ack_wait": SECOND}])
def test_an_id_never_delivered_changes_nothing(broker: Broker, ids: tuple[int, ...], options: dict[str, int]) -> None:
    send(broker, NORMAL, NORMAL, NORMAL, LOW)
    assert broker.take(num_msgs=2, **options) == [0, 1]
    broker.ack(*ids)
    broker.advance(SECOND)
    assert broker.take() == [0, 1, 2, 3]
    assert broker.told(EventType.ACKNOWLEDGED) == []


@pytest.mark.rule("K4", "A8")
def test_a_message_before_the_groups_start_is_not_delivered(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, to=QUEUE)
    assert broker.take(box=QUEUE, deliver=Deliver.FROM_ID, from_id=1) == [1]
    broker.ack(0, box=QUEUE)
    assert broker.shown(QUEUE) == [0, 1]
    broker.ack(1, box=QUEUE)
    assert broker.shown(QUEUE) == [0]


@pytest.mark.rule("K4")
@pytest.mark.parametrize("group", ["", "nobody", "Workers"])
def test_an_unknown_group_changes_nothing(broker: Broker, group: str) -> None:
    send(broker, NORMAL, to=QUEUE)
    broker.take(box=QUEUE)
    broker.ack(0, group=group, box=QUEUE)
    assert broker.take(box=QUEUE) == [0]
    assert broker.nack(0, group=group, box=QUEUE) == 0
    assert broker.extend(0, group=group, box=QUEUE, ack_wait=SECOND) == 0


@pytest.mark.rule("K2", "K4")
@pytest.mark.parametrize("lanes", [[NORMAL] * 3, [LOW, URGENT, NORMAL]])
@pytest.mark.parametrize("gone", ["expired", "deleted", "replaced"])
@pytest.mark.parametrize("box", [BOX, QUEUE])
def test_an_ack_of_a_last_one_that_is_gone_counts(broker: Broker, box: str, gone: str, lanes: list[Lane]) -> None:
    send(broker, *lanes, to=box)
    broker.send(to=box, lane=LOW, key="k", ttl=SECOND if gone == "expired" else None)
    *others, last = broker.take(box=box)
    assert last == 3
    if gone == "deleted":
        broker.delete(3, box)
    elif gone == "replaced":
        broker.send(to=box, lane=LOW, key="k")
    else:
        broker.advance(SECOND)
    send(broker, CRITICAL, to=box)
    assert broker.ack(3, box=box) == 3
    assert sorted(broker.told(EventType.ACKNOWLEDGED)) == sorted(others)
    assert broker.ack(3, box=box) == 0
    assert not set(broker.take(box=box)) & {0, 1, 2}


@pytest.mark.rule("K2", "K4")
def test_an_ack_of_a_replaced_key_ends_its_batch_each_time(broker: Broker) -> None:
    send(broker, *[NORMAL] * 5)
    broker.send(key="sensor")
    for _ in range(30):
        got = broker.take()
        broker.send(key="sensor")
        broker.ack(got[-1])
    assert broker.take() == [35]
    assert broker.told(EventType.ACKNOWLEDGED) == [0, 1, 2, 3, 4]


@pytest.mark.rule("K4", "A5")
def test_what_another_group_removed_may_be_acknowledged(broker: Broker) -> None:
    send(broker, *[NORMAL] * 3, to=QUEUE)
    assert broker.take("a", QUEUE) == broker.take("b", QUEUE) == [0, 1, 2]
    assert broker.take("c", QUEUE, ack_wait=SECOND) == [0, 1, 2]
    broker.ack(2, group="c", box=QUEUE)
    assert broker.shown(QUEUE) == [0, 1]
    assert broker.ack(2, group="a", box=QUEUE) == 2
    assert broker.shown(QUEUE) == []
    assert broker.ack(2, group="b", box=QUEUE) == 0


@pytest.mark.rule("K3", "K4")
def test_the_lease_of_a_message_that_is_gone_ends(broker: Broker) -> None:
    broker.send()
    broker.send(ttl=SECOND)
    assert broker.take(ack_wait=HOUR) == [0, 1]
    broker.advance(SECOND)
    assert broker.ack(1) == 0
    with broker.reading() as tx:
        group = tx.groups.find(tx.mailboxes.find(TENANT, BOX), GROUP)
        assert [lease.msg_id for lease in tx.leases.get(group, [0, 1])] == [0]
    broker.advance(HOUR)
    assert broker.take() == [0]


@pytest.mark.rule("K4", "A8")
def test_an_id_gone_before_delivery_changes_nothing(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, LOW)
    broker.send(ttl=SECOND)
    assert broker.take(num_msgs=2) == [0, 1]
    broker.advance(SECOND)
    broker.delete(2)
    for msg_id in (2, 3, 99):
        assert broker.ack(msg_id) == 0
    assert broker.take() == [0, 1]


@pytest.mark.rule("K2", "K4")
@pytest.mark.parametrize("box", [BOX, QUEUE])
def test_an_ack_behind_skips_mail_expired_undelivered(broker: Broker, box: str) -> None:
    broker.send(to=box)
    broker.send(to=box, ttl=SECOND)
    broker.advance(2 * SECOND)
    broker.send(to=box)
    assert broker.take(box=box) == [0, 2]
    broker.ack(2, box=box)
    assert broker.take(box=box) == []
    assert broker.told(EventType.ACKNOWLEDGED) == [0, 2]
    broker.collect()
    assert broker.told(EventType.EXPIRED) == [1]


@pytest.mark.rule("K4")
def test_a_mailbox_that_does_not_exist_is_an_error(broker: Broker) -> None:
    for verb in (broker.ack, broker.nack):
        with pytest.raises(NoSuchMailboxError, match=r"^mailbox nowhere does not exist$"):
            verb(0, box="nowhere")


# F4 and ACK


@pytest.mark.rule("F4", "K4", "A8")
def test_an_ack_after_force_deliver_covers_later_deliveries(broker: Broker) -> None:
    send(broker, LOW, NORMAL, NORMAL, NORMAL, CRITICAL)
    assert broker.take() == [4, 1, 2, 3, 0]
    broker.ack(0)
    assert broker.take(force_deliver=True, num_msgs=2) == [4, 1]
    broker.ack(1)
    assert broker.take() == [2, 3, 0]
    assert broker.take(force_deliver=True, num_msgs=1) == [4]
    broker.ack(0)
    broker.ack(3)
    assert broker.take() == [4, 1, 2, 3, 0]


@pytest.mark.rule("F4", "A8")
def test_force_deliver_backwards_repeats_acknowledged_messages(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    for options in ({}, {"ack_wait": SECOND}):
        assert broker.take(force_deliver=True, **options) == [0, 1]
        broker.ack(0, 1)
        broker.advance(SECOND)
        assert broker.take() == []
    assert broker.take(force_deliver=True) == [0, 1]


# A5: until_ack


@pytest.mark.rule("A5", "K2")
def test_in_a_work_queue_the_first_ack_removes_for_all(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, CRITICAL, to=QUEUE)
    assert broker.take("a", QUEUE) == broker.take("b", QUEUE) == [2, 0, 1]
    broker.ack(0, group="a", box=QUEUE)
    assert broker.take("b", QUEUE) == broker.take("c", QUEUE) == broker.take(None, QUEUE) == [1]
    assert broker.shown(QUEUE) == [1]
    assert broker.mailbox(QUEUE).messages == 1
    broker.ack(0, group="b", box=QUEUE)
    broker.ack(1, group="b", box=QUEUE)
    assert broker.shown(QUEUE) == []
    assert broker.take("a", QUEUE) == []
    # Whoever counts what is there need not know the mailbox's retention.
    assert broker.told(EventType.DELETED) == broker.told(EventType.ACKNOWLEDGED) == [2, 0, 1]


@pytest.mark.rule("A5", "K2", "A8")
def test_a_work_queue_never_loses_what_was_not_handed_out(broker: Broker) -> None:
    send(broker, LOW, NORMAL, CRITICAL, NORMAL, to=QUEUE)
    assert broker.take("a", QUEUE, num_msgs=2) == [2, 1]
    send(broker, CRITICAL, to=QUEUE)
    broker.ack(1, group="a", box=QUEUE)
    assert broker.shown(QUEUE) == [0, 3, 4]


@pytest.mark.rule("A5", "K3", "A8")
def test_a_leasing_work_queue_removes_what_is_named(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, CRITICAL, to=QUEUE)
    assert broker.take("a", QUEUE, ack_wait=SECOND) == [2, 0, 1]
    assert broker.take("b", QUEUE, ack_wait=SECOND) == [2, 0, 1]
    broker.ack(1, group="a", box=QUEUE)
    assert broker.shown(QUEUE) == [0, 2]
    broker.advance(SECOND)
    assert broker.take("b", QUEUE, ack_wait=SECOND) == [2, 0]
    broker.ack(2, 1, 0, group="b", box=QUEUE)
    assert broker.shown(QUEUE) == []
    broker.advance(SECOND)
    assert broker.take("a", QUEUE) == []
    assert broker.told(EventType.ACKNOWLEDGED) == [1, 2, 0]


@pytest.mark.rule("A5", "K3", "A8")
def test_a_work_queue_keeps_what_another_worker_leases(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL, to=QUEUE)
    assert broker.take(box=QUEUE, ack_wait=SECOND, num_msgs=1) == [0]
    assert broker.take(box=QUEUE, ack_wait=HOUR, num_msgs=1) == [1]
    broker.advance(SECOND)
    assert broker.take(box=QUEUE) == [0, 2]
    broker.ack(2, box=QUEUE)
    assert broker.shown(QUEUE) == [1]
    broker.advance(HOUR)
    assert broker.take(box=QUEUE) == [1]


@pytest.mark.rule("A5")
def test_a_kept_mailbox_keeps_what_is_acknowledged(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    broker.take()
    broker.ack(1)
    assert broker.shown() == [0, 1]
    assert broker.take("other") == [0, 1]


# F6: NACK and EXTEND


@pytest.mark.rule("F6")
def test_a_nack_gives_back_at_once(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL)
    broker.take(ack_wait=HOUR)
    assert broker.nack(2, 0, 0, 99) == 2
    assert broker.take(ack_wait=HOUR) == [0, 2]
    assert broker.take() == []


@pytest.mark.rule("F6")
def test_a_nack_may_give_back_later(broker: Broker) -> None:
    send(broker, NORMAL)
    broker.take(ack_wait=HOUR)
    assert broker.nack(0, delay=5 * SECOND) == 1
    broker.now = START + 5 * SECOND - 1
    assert broker.take() == []
    broker.advance(1)
    assert broker.take() == [0]


@pytest.mark.rule("F6", "K3")
def test_an_ack_after_a_nack_counts(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    broker.take(ack_wait=HOUR)
    broker.nack(0)
    broker.nack(1, delay=SECOND)
    broker.ack(0, 1)
    broker.advance(HOUR)
    assert broker.take() == []


@pytest.mark.rule("F6")
def test_a_nack_of_what_is_not_leased_does_nothing(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL)
    assert broker.take(num_msgs=1) == [0]
    assert broker.nack(0, 1) == 0
    assert broker.take(ack_wait=SECOND) == [0, 1, 2]
    broker.ack(1)
    assert broker.nack(1) == 0
    broker.advance(SECOND)
    assert broker.nack(0, 2, delay=HOUR) == 0
    assert broker.take() == [0, 2]


@pytest.fixture
def small(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Broker:
    """A mailbox of four normal messages whose groups may lease two and delay three."""
    monkeypatch.setattr("mediator.mailboxes.fetching.MAX_LEASED", 2)
    monkeypatch.setattr("mediator.mailboxes.settling.MAX_DELAYED", 3)
    send(broker, *[NORMAL] * 4)
    return broker


@pytest.mark.rule("F6", "F3")
def test_what_waits_for_its_delay_takes_no_room(small: Broker) -> None:
    assert small.take(ack_wait=SECOND) == [0, 1]
    assert small.nack(0, 1, delay=HOUR) == 2
    send(small, CRITICAL)
    assert small.take(ack_wait=SECOND) == [4, 2]
    small.ack(4, 2)
    assert small.take(ack_wait=SECOND) == [3]
    assert small.ack(0) == 1, "it may be acknowledged while it waits (K3)"
    small.advance(HOUR)
    assert small.take() == [1, 3]


@pytest.mark.rule("F6", "F3")
def test_leases_that_ended_take_no_room(small: Broker) -> None:
    assert small.take(ack_wait=SECOND) == [0, 1]
    small.advance(SECOND)
    send(small, CRITICAL)
    assert small.take(ack_wait=SECOND) == [4, 0]


@pytest.mark.rule("F6")
def test_what_is_due_after_a_delay_needs_room(small: Broker) -> None:
    assert small.take(ack_wait=SECOND) == [0, 1]
    small.nack(0, 1, delay=SECOND)
    assert small.take(ack_wait=HOUR) == [2, 3]
    small.advance(SECOND)
    found = small.fetch(ack_wait=HOUR)
    assert (found.messages, found.note, found.retry_at) == ([], FULL, START + HOUR)
    small.ack(3)
    assert small.take(ack_wait=HOUR) == [0]
    assert small.take() == [1], "without a lease it needs none"
    assert small.take(ack_wait=HOUR) == []


@pytest.mark.rule("F6")
def test_a_fetch_that_the_bound_keeps_short_notes_it(small: Broker) -> None:
    assert small.fetch(deliver=Deliver.EARLIEST, ack_wait=HOUR, num_msgs=1).note == ""
    short = small.fetch(ack_wait=HOUR)
    assert ([message.msg_id for message in short.messages], short.note) == ([1], FULL)
    assert small.fetch(ack_wait=HOUR).note == FULL
    assert small.fetch().note == ""
    small.delete(2)
    small.delete(3)
    assert small.fetch(ack_wait=HOUR).note == "", "nothing else waits"


@pytest.mark.rule("F6")
def test_more_delayed_than_may_be_are_refused_whole(small: Broker) -> None:
    assert small.take(ack_wait=HOUR) == [0, 1]
    small.nack(0, 1, delay=SECOND)
    assert small.take(ack_wait=HOUR) == [2, 3]
    with pytest.raises(TooManyDelayedError, match=r"^delay_ms: too_many_delayed, 2 messages .* at most 3"):
        small.nack(2, 3, delay=HOUR)
    assert small.extend(2, 3, ack_wait=HOUR) == 2, "they are leased as before"
    assert small.nack(2, delay=HOUR) == 1
    assert small.nack(0, 1, 2, delay=2 * SECOND) == 3, "those that wait are no more than before"
    with pytest.raises(TooManyDelayedError):
        small.nack(3, delay=1)
    assert small.nack(0, 3) == 2, "without a delay there is room"
    assert small.take(ack_wait=HOUR) == [0, 3]
    assert small.nack(3, delay=HOUR) == 1
    small.advance(2 * SECOND)
    assert small.take() == [1, 2]


@pytest.mark.rule("F6", "F7")
def test_the_last_delivery_with_a_delay_is_dead_after_it(small: Broker) -> None:
    assert small.take(ack_wait=HOUR, max_deliver=1) == [0, 1]
    small.nack(0, 1, delay=SECOND)
    assert small.shown(dead_for=GROUP) == []
    small.advance(SECOND)
    assert small.shown(dead_for=GROUP) == [0, 1]
    assert small.take(ack_wait=HOUR) == [2, 3]
    assert small.redrive() == small.nack(2, 3, delay=HOUR) == 2, "the dead wait for no delay"
    assert small.take(ack_wait=HOUR) == [0, 1]


@pytest.mark.rule("F6", "F2")
def test_who_waits_learns_when_a_delay_ends(small: Broker) -> None:
    assert small.take(ack_wait=HOUR) == [0, 1]
    small.nack(1, delay=5 * SECOND)
    assert small.take(ack_wait=HOUR) == [2]
    assert small.fetch(ack_wait=HOUR).retry_at == START + 5 * SECOND


@pytest.mark.rule("F6")
def test_extend_lengthens_what_still_runs(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL, NORMAL)
    broker.take(ack_wait=5 * SECOND, num_msgs=3)
    broker.ack(2)
    broker.advance(4 * SECOND)
    assert broker.extend(0, 0, 2, 3, 99, ack_wait=5 * SECOND) == 1
    assert broker.extend(0, ack_wait=SECOND) == 1, "never shorter"
    broker.now = START + 5 * SECOND
    assert broker.take(ack_wait=HOUR) == [1, 3]
    broker.now = START + 9 * SECOND - 1
    assert broker.take() == []
    broker.advance(1)
    assert broker.extend(0, ack_wait=HOUR) == 0, "it ended"
    assert broker.take() == [0]


# F7: dead messages


def make_dead(broker: Broker, box: str = "task") -> None:
    send(broker, NORMAL, NORMAL, CRITICAL, to=box)
    assert broker.take(box=box, ack_wait=SECOND, max_deliver=1) == [2, 0, 1]
    broker.advance(SECOND)


@pytest.mark.rule("F7")
@pytest.mark.parametrize("fetched", [True, False])
def test_dead_messages_are_dead_before_a_fetch_looks(broker: Broker, fetched: bool) -> None:
    make_dead(broker)
    if fetched:
        assert broker.take() == []
    assert broker.shown(dead_for=GROUP) == [0, 1, 2]
    assert broker.redrive([0]) == 1
    assert broker.drop([1]) == 1
    assert broker.shown(dead_for=GROUP) == [2]


@pytest.mark.rule("F7")
def test_redrive_delivers_again_counting_from_zero(broker: Broker) -> None:
    make_dead(broker)
    assert broker.redrive([1, 2, 2, 77]) == 2
    assert broker.shown(dead_for=GROUP) == [0]
    assert broker.fetch(ack_wait=SECOND).messages[0].deliveries == 1
    assert broker.take() == []
    broker.advance(SECOND)
    assert broker.take() == []
    assert broker.shown(dead_for=GROUP) == [0, 1, 2]
    assert broker.redrive() == 3
    assert broker.take() == [2, 0, 1]


@pytest.mark.rule("F7", "F2")
def test_redrive_wakes_who_waits(broker: Broker) -> None:
    make_dead(broker)
    broker.redrive()
    assert broker.woken == {("default", "task")}


@pytest.mark.rule("F7", "K3")
@pytest.mark.parametrize(("box", "left"), [("task", [0, 1, 2]), (QUEUE, [0])])
def test_drop_acknowledges(broker: Broker, box: str, left: list[int]) -> None:
    make_dead(broker, box)
    assert broker.drop([1, 2], box=box) == 2
    assert broker.shown(box, dead_for=GROUP) == [0]
    assert broker.shown(box) == left
    assert broker.drop(box=box) == 1
    assert broker.drop(box=box) == broker.redrive(box=box) == 0
    assert broker.take(box=box) == []


@pytest.mark.rule("F7")
def test_what_is_not_dead_is_neither_redriven_nor_dropped(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    broker.take(ack_wait=HOUR, num_msgs=1)
    assert broker.redrive([0, 1]) == broker.drop([0, 1]) == 0
    assert broker.take() == [1]
    for verb in (broker.redrive, broker.drop):
        with pytest.raises(BadRequestError, match=r"^group_name: "):
            verb(group="nobody")


@pytest.mark.rule("F7")
def test_dead_messages_that_are_gone_do_not_count(broker: Broker) -> None:
    make_dead(broker)
    broker.delete(0)
    assert broker.shown(dead_for=GROUP) == [1, 2]
    assert broker.redrive() == 2
    broker.delete(1)
    assert broker.take(ack_wait=SECOND) == [2]
    broker.advance(SECOND)
    assert broker.drop() == 1


@pytest.mark.rule("F6", "F7")
def test_dead_messages_take_no_room_among_the_leased(broker: Broker) -> None:
    for _ in range(10_000):
        broker.send()
    broker.send(b"last")
    for _ in range(10):
        assert len(broker.take(ack_wait=SECOND, max_deliver=1, num_msgs=1000)) == 1000
    assert broker.take(ack_wait=SECOND) == []
    broker.advance(SECOND)
    assert broker.take(ack_wait=SECOND) == [10_000]


@pytest.mark.rule("F2", "F6")
def test_an_ack_that_frees_lease_room_wakes_waiters(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.mailboxes.fetching.MAX_LEASED", 2)
    for _ in range(4):
        broker.send(b"x")
    assert broker.take(deliver=Deliver.EARLIEST, ack_wait=SECOND) == [0, 1]
    assert broker.take(ack_wait=SECOND) == []
    broker.ack(0)
    assert broker.woken == {(TENANT, BOX)}
    assert broker.take(ack_wait=SECOND) == [2]
    broker.ack(1, 2)
    broker.take(num_msgs=1, ack_wait=SECOND)
    broker.ack(3)
    assert broker.woken == set(), "there was room before"
