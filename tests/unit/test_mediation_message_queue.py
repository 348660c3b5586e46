"""Pickup: status, delivery, acknowledgement, batches without one, and live mail (D1–D3, D6, D7)."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import NotEnrolledError
from mediator.mailboxes.events import EventType
from mediator.mailboxes.lanes import Lane
from pickup.rules import message_queue
from pickup.rules.message_queue import QueueStatus
from pickup.rules.records import Connection
from tests.harness.broker import DAY, SECOND, START
from tests.harness.mediation import Mediation, ids, key, payloads

TEN = [b"%d" % number for number in range(10)]


@pytest.mark.rule("D1", "D3")
def test_status_counts_everything_or_one_key(house: Mediation) -> None:
    holder = house.holder(1, key(10), key(11))
    assert house.status(holder) == QueueStatus()
    house.forward(key(10), b"abc")
    house.advance(SECOND)
    house.forward(key(11), b"de")
    house.advance(SECOND)
    house.forward(key(10), b"f")
    assert house.status(holder) == QueueStatus(3, 6, START, START + 2 * SECOND)
    assert house.status(holder, key(10)) == QueueStatus(2, 4, START, START + 2 * SECOND)
    assert house.status(holder, key(11)) == QueueStatus(1, 2, START + SECOND, START + SECOND)
    assert house.status(holder, key(12)) == QueueStatus()


@pytest.mark.rule("D2")
def test_status_tells_the_truth_after_an_acknowledgement(house: Mediation) -> None:
    holder = house.holder(1, key(10), key(11))
    for number in (10, 11, 10):
        house.forward(key(number))
        house.advance(SECOND)
    house.acknowledge(holder, 0)
    assert house.status(holder) == QueueStatus(2, 8, START + SECOND, START + 2 * SECOND)
    assert house.status(holder, key(10)) == QueueStatus(1, 4, START + 2 * SECOND, START + 2 * SECOND)
    house.acknowledge(holder, 2)
    assert house.status(holder) == QueueStatus(1, 4, START + SECOND, START + SECOND)
    house.acknowledge(holder, 1)
    assert house.status(holder) == house.status(holder, key(11)) == QueueStatus()


@pytest.mark.rule("D1", "D2")
def test_a_queue_of_expired_mail_counts_nothing(house: Mediation) -> None:
    holder = house.holder(1, key(10), key(11))
    house.forward(key(10), expire_at=START + SECOND)
    house.advance(SECOND)
    assert house.status(holder) == house.status(holder, key(10)) == QueueStatus()
    house.forward(key(11))
    assert house.status(holder, key(10)) == QueueStatus()
    assert (house.status(holder).oldest_at, house.status(holder).newest_at) == (START + SECOND, START + SECOND)
    house.clean_up()
    assert house.status(holder) == QueueStatus(1, 4, START + SECOND, START + SECOND)


@pytest.mark.rule("D1")
def test_the_newest_is_the_newest_that_lives(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10))
    house.advance(SECOND)
    house.forward(key(10), expire_at=house.now + SECOND)
    house.advance(SECOND)
    for recipient in (None, key(10)):
        status = house.status(holder, recipient)
        assert (status.oldest_at, status.newest_at) == (START, START)


@pytest.mark.rule("D2")
def test_what_is_not_acknowledged_comes_again(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), *TEN)
    assert payloads(house.deliver(holder, limit=3)) == TEN[:3]
    assert payloads(house.deliver(holder, limit=3)) == TEN[:3]
    assert house.acknowledge(holder, 1) == 1
    assert ids(house.deliver(holder, limit=3)) == [0, 2, 3]
    assert house.told(EventType.DELIVERED) == [0, 1, 2, 0, 1, 2, 0, 2, 3]
    assert house.told(EventType.ACKNOWLEDGED) == [1]


@pytest.mark.rule("D1", "D2")
def test_an_acknowledgement_removes_exactly_what_it_names(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), *TEN)
    assert house.acknowledge(holder, 7, 7, 2, 99, 2**62) == 2
    assert ids(house.deliver(holder)) == [0, 1, 3, 4, 5, 6, 8, 9]
    assert house.acknowledge(holder, 7, 2) == 0
    assert house.acknowledge(holder) == 0
    assert house.told(EventType.ACKNOWLEDGED) == house.told(EventType.DELETED) == [2, 7]


@pytest.mark.rule("D2")
def test_what_expired_after_it_was_taken_can_be_acknowledged(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), expire_at=START + SECOND)
    house.deliver(holder)
    house.advance(SECOND)
    assert house.acknowledge(holder, 0) == 1
    assert house.clean_up().messages == 0


@pytest.mark.rule("D3")
def test_one_keys_mail_is_delivered_alone(house: Mediation) -> None:
    holder = house.holder(1, key(10), key(11))
    for number in range(6):
        house.forward(key(10 + number % 2), b"%d" % number)
    assert payloads(house.deliver(holder, recipient=key(10))) == [b"0", b"2", b"4"]
    assert payloads(house.deliver(holder, limit=2, recipient=key(11))) == [b"1", b"3"]
    assert house.deliver(holder, recipient=key(12)) == []


@pytest.mark.rule("D1", "N7")
@pytest.mark.parametrize("by_key", [False, True])
def test_a_delivery_keeps_to_its_bytes_but_has_at_least_one(house: Mediation, by_key: bool) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), b"x" * 10, b"x" * 10, b"x" * 10, b"x")
    recipient = key(10) if by_key else None
    for budget, expected in ((1, [0]), (10, [0]), (19, [0]), (20, [0, 1]), (30, [0, 1, 2]), (31, [0, 1, 2, 3])):
        assert ids(house.deliver(holder, recipient=recipient, budget=budget)) == expected


@pytest.mark.rule("D3")
def test_an_attachment_id_names_one_message_in_the_mediator(house: Mediation) -> None:
    alice, bob = house.holder(1, key(10)), house.holder(2, key(20))
    house.forward([key(10), key(20)])
    made = {
        message_queue.attachment_id(house.mailbox_of(holder).id, message.msg_id)
        for holder in (alice, bob)
        for message in house.deliver(holder)
    }
    assert len(made) == 2


@pytest.mark.rule("D3")
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_an_attachment_id_can_be_read_again(mailbox_id: int, msg_id: int) -> None:
    id = message_queue.attachment_id(mailbox_id, msg_id)
    assert re.fullmatch(r"[-_./a-zA-Z0-9]{8,64}", id), "Credo rejects other message ids"
    assert message_queue.parse_attachment_id(id) == (mailbox_id, msg_id)


@pytest.mark.rule("D3")
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_an_attachment_id_of_an_earlier_release_can_be_read(mailbox_id: int, msg_id: int) -> None:
    assert message_queue.parse_attachment_id(f"{mailbox_id}-{msg_id}") == (mailbox_id, msg_id)


@pytest.mark.rule("D2", "D12")
@pytest.mark.parametrize(
    "text", ["", "-", "1", "1-", "-1", "01-1", "1-01", "1--1", "1-1-1", "1-x", "١-١", " 1-1", "1-1\n", f"1-{2**63}"]
)
def test_other_ids_are_unknown(text: str) -> None:
    assert message_queue.parse_attachment_id(text) is None


@pytest.mark.rule("D8")
def test_without_mediation_nothing_can_be_taken(house: Mediation) -> None:
    stranger = house.connect(key(1))
    for verb in (
        lambda: house.status(stranger),
        lambda: house.deliver(stranger),
        lambda: house.acknowledge(stranger, 0),
        lambda: house.take_batch(stranger),
        lambda: house.pick(stranger, 0),
        lambda: house.open_live(stranger),
        lambda: house.arrived(stranger, 0),
    ):
        with pytest.raises(NotEnrolledError):
            verb()
    assert house.settle_handed(stranger) == stranger


@pytest.mark.rule("D7")
def test_a_batch_is_confirmed_by_the_next_request_alone(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), *TEN)
    assert payloads(house.take_batch(holder, 4)) == TEN[:4]
    assert house.status(holder).count == 10
    assert payloads(house.take_batch(_again(house), 4)) == TEN[4:8]
    assert house.status(holder).count == 6
    assert payloads(house.take_batch(_again(house), 4)) == TEN[8:]
    assert house.take_batch(_again(house), 4) == []
    assert house.status(holder).count == 0
    assert _again(house).handed == ()
    assert house.told(EventType.ACKNOWLEDGED) == list(range(10))


def _again(house: Mediation) -> Connection:
    """Return the connection as the next request finds it."""
    kept = house.called(key(1))
    assert kept is not None
    return kept


@pytest.mark.rule("D7")
def test_another_request_confirms_a_batch_once(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), *TEN)
    house.take_batch(holder, 4)
    handed = _again(house)
    assert house.settle_handed(handed).handed == ()
    assert house.settle_handed(handed).handed == ()
    assert house.status(holder).count == 6
    # One that was read before the batch confirms nothing.
    house.take_batch(_again(house), 2)
    assert house.settle_handed(holder) == holder
    assert house.status(holder).count == 6


@pytest.mark.rule("D7")
def test_concurrent_requests_do_not_confirm_each_other(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), *TEN)
    house.take_batch(holder, 2)
    one = other = _again(house)
    assert payloads(house.take_batch(one, 3)) == TEN[2:5]
    house.settle_handed(other)
    assert house.status(holder).count == 8


@pytest.mark.rule("D7")
@pytest.mark.parametrize(("about", "kept"), [(["other", "batch 1"], True), ([], True), (["other"], False)])
def test_a_batch_that_is_reported_stays(house: Mediation, about: list[str], kept: bool) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), *TEN)
    house.take_batch(holder, 4)
    house.keep_handed(holder, *about)
    house.settle_handed(_again(house))
    assert house.status(holder).count == (10 if kept else 6)


@pytest.mark.rule("A3", "D7")
def test_a_batch_of_a_lost_mailbox_confirms_nothing_later(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), *TEN)
    house.take_batch(holder, 4)
    stale = _again(house)
    house.delete_mailbox(str(holder.address))
    house.grant(stale)
    house.forward(key(10), *TEN)
    with pytest.raises(NotEnrolledError):
        house.settle_handed(stale)
    assert payloads(house.take_batch(_again(house), 4)) == TEN[:4]
    assert house.status(_again(house)).count == 10


@pytest.mark.rule("A3", "D7")
def test_a_batch_sent_during_mailbox_loss_confirms_nothing(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), *TEN)
    messages = house.deliver(holder, 4)
    house.delete_mailbox(str(holder.address))
    house.grant(holder)
    house.forward(key(10), *TEN)
    house.hand_over(holder, messages)
    assert house.settle_handed(_again(house)).handed == ()
    assert house.status(_again(house)).count == 10
    house.disconnect(holder)
    house.hand_over(holder, messages)
    assert house.called(key(1)) is None


@pytest.mark.rule("D3")
def test_messages_can_be_picked_and_stay(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), *TEN)
    assert payloads(house.pick(holder, 7, 3, 3, 99)) == [b"3", b"7"]
    assert payloads(house.pick(holder, 7, 3, budget=1)) == [b"3"]
    assert house.pick(holder) == []
    assert house.status(holder).count == 10


@pytest.mark.rule("D6")
def test_nothing_falls_between_the_backlog_and_live_mail(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), b"backlog")
    status, cursor = house.open_live(holder)
    assert status.count == 1
    assert house.arrived(holder, cursor) == []
    house.forward(key(10), *TEN)
    first = house.arrived(holder, cursor, limit=4)
    assert payloads(first) == TEN[:4]
    assert payloads(house.arrived(holder, first[-1].msg_id + 1)) == TEN[4:]
    assert house.status(holder).count == 11
    assert payloads(house.deliver(holder, limit=2)) == [b"backlog", TEN[0]]


@pytest.mark.rule("D6")
def test_live_mail_comes_in_id_order_whatever_its_lane(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    _, cursor = house.open_live(holder)
    lanes = (Lane.LOW, Lane.CRITICAL, Lane.NORMAL, Lane.URGENT, Lane.CRITICAL, Lane.NORMAL)
    for lane in lanes:
        house.send(b"xx", to=str(holder.address), lane=lane, recipient=key(10))
    seen: list[int] = []
    for limit, budget in ((2, 100), (100, 4), (100, 1), (1, 100)):
        got = ids(house.arrived(holder, cursor, limit, budget))
        seen += got
        cursor = got[-1] + 1
    assert seen == list(range(len(lanes)))
    assert house.arrived(holder, cursor) == []


@pytest.mark.rule("D6")
def test_empty_messages_and_a_spent_budget_skip_nothing(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    for number in range(6):
        lane = Lane.URGENT if number == 5 else Lane.NORMAL
        house.send(b"xx" if number < 2 else b"", to=str(holder.address), lane=lane, recipient=key(10))
    cursor, seen = 0, list[int]()
    while got := ids(house.arrived(holder, cursor, 100, 4)):
        seen += got
        cursor = got[-1] + 1
    assert seen == list(range(6))


@pytest.mark.rule("D6")
def test_what_was_taken_meanwhile_is_not_pushed(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    _, cursor = house.open_live(holder)
    house.forward(key(10), *TEN)
    house.acknowledge(holder, *range(9))
    assert ids(house.arrived(holder, cursor)) == [9]
    house.advance(7 * DAY)
    assert house.arrived(holder, cursor) == []


@pytest.mark.rule("D1", "D6")
@pytest.mark.parametrize("recipient", [None, key(10)])
def test_what_is_leased_neither_counts_nor_is_handed_out(house: Mediation, recipient: str | None) -> None:
    holder = house.holder(1, key(10), key(11))
    for number in range(5):
        house.forward(key(10), b"x" * number)
        house.advance(SECOND)
    if recipient is not None:
        house.forward(key(11))
    # At both ends, in the middle, what is gone, and what is for somebody else.
    left = house.status(holder, recipient, leased=[0, 2, 4, 5, 99])
    assert left == QueueStatus(2, 1 + 3, START + SECOND, START + 3 * SECOND)
    assert ids(house.deliver(holder, recipient=recipient, leased=[0, 2, 4, 5])) == [1, 3]
    assert ids(house.deliver(holder, 1, recipient, leased=[0, 1])) == [2]
    assert house.status(holder, recipient, leased=range(6)) == QueueStatus()
    assert house.deliver(holder, recipient=recipient, leased=range(6)) == []


@pytest.mark.rule("D6")
def test_live_mail_delivered_on_request_is_skipped(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    _, cursor = house.open_live(holder)
    house.forward(key(10), *TEN)
    assert ids(house.arrived(holder, cursor, limit=3, leased=[0, 1, 3])) == [2, 4, 5]
    assert house.arrived(holder, 6, leased=range(10)) == []
