"""MSG.FETCH: where it starts, in what order it gives, what it leases (A4, A8, F1–F8, N7)."""

import pytest

from mediator.errors import NoSuchMailboxError, TooManyGroupsError
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.events import EventType
from mediator.mailboxes.fetching import SKIP_FROM, Deliver, Fetch
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Retention
from mediator.store.base import Store
from tests.harness.broker import BOX, GROUP, HOUR, SECOND, START, TENANT, Broker

CRITICAL, URGENT, NORMAL, LOW = Lane


@pytest.fixture
def broker(broker: Broker) -> Broker:
    broker.create()
    return broker


def send(broker: Broker, *lanes: Lane) -> None:
    for lane in lanes:
        broker.send(lane=lane)


# F1: where it starts


@pytest.mark.rule("F1")
@pytest.mark.parametrize("group", [None, GROUP])
def test_latest_is_the_default_and_gives_what_comes_from_now_on(broker: Broker, group: str | None) -> None:
    broker.send()
    request = Fetch(TENANT, BOX, group)
    before = broker.fetching(request)
    assert before.messages == []
    broker.send()
    assert [m.msg_id for m in broker.again(request, before).messages] == [1]


@pytest.mark.rule("F1", "A3")
@pytest.mark.parametrize("group", [None, GROUP])
def test_latest_begins_with_the_newest_where_it_is_chosen(broker: Broker, group: str | None) -> None:
    broker.bounds = Bounds(latest_is_last=True)
    request = Fetch(TENANT, BOX, group)
    before = broker.fetching(Fetch(TENANT, BOX, "early"))
    assert before.messages == [], "nothing is there"
    send(broker, NORMAL, CRITICAL, LOW)
    assert [m.msg_id for m in broker.again(Fetch(TENANT, BOX, "early"), before).messages] == [1, 0, 2]
    assert [m.msg_id for m in broker.fetching(request).messages] == [2]
    send(broker, URGENT)
    assert [m.msg_id for m in broker.fetching(request).messages] == ([3, 2] if group else [3])


@pytest.mark.rule("F1", "A8")
@pytest.mark.parametrize("lane", list(Lane))
def test_latest_of_a_group_is_fixed_by_its_first_fetch(broker: Broker, lane: Lane) -> None:
    broker.send()
    assert broker.fetch().messages == []
    broker.send(lane=lane)
    broker.send(lane=lane)
    assert broker.take(deliver=Deliver.LATEST) == [1, 2]


@pytest.mark.rule("F1", "A3")
def test_latest_in_an_empty_mailbox_is_everything_to_come(broker: Broker) -> None:
    assert broker.fetch().messages == []
    broker.send()
    assert broker.take() == [0]


@pytest.mark.rule("F1")
def test_stateless_latest_starts_anew_with_each_call(broker: Broker) -> None:
    assert broker.fetch(None).messages == []
    broker.send()
    assert broker.fetch(None).messages == []
    assert broker.take(None) == broker.take(None) == [0]


@pytest.mark.rule("F1")
@pytest.mark.parametrize("group", [None, GROUP])
def test_earliest_is_the_oldest_message_there(broker: Broker, group: str | None) -> None:
    send(broker, NORMAL, NORMAL, NORMAL)
    broker.delete(0)
    assert broker.take(group) == [1, 2]


@pytest.mark.rule("F1", "F4")
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize(("from_id", "ids"), [(0, [2, 0, 1, 3]), (1, [2, 1, 3]), (2, [2, 3]), (3, [3]), (4, [])])
def test_from_id_is_inclusive_in_every_lane(broker: Broker, group: str | None, from_id: int, ids: list[int]) -> None:
    send(broker, NORMAL, NORMAL, CRITICAL, LOW)
    assert broker.take(group, deliver=Deliver.FROM_ID, from_id=from_id) == ids


@pytest.mark.rule("F1")
def test_from_id_may_name_a_message_that_is_gone_or_to_come(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL)
    broker.delete(1)
    assert broker.take("gone", deliver=Deliver.FROM_ID, from_id=1) == [2]
    assert broker.take("to come", deliver=Deliver.FROM_ID, from_id=4) == []
    send(broker, NORMAL, NORMAL)
    assert broker.take("to come") == [4]


@pytest.mark.rule("F1", "N5")
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize(
    ("at", "ids"),
    [
        (-SECOND, [0, 1, 2, 3, 4]),
        (0, [0, 1, 2, 3, 4]),
        (1, [1, 2, 3, 4]),
        (SECOND, [1, 2, 3, 4]),
        (SECOND + 1, [4]),
        (2 * SECOND + 1, []),
    ],
)
def test_from_time_is_inclusive_with_equal_times(broker: Broker, group: str | None, at: int, ids: list[int]) -> None:
    broker.send()
    broker.advance(SECOND)
    for _ in range(3):
        broker.send()
    broker.advance(SECOND)
    broker.send()
    assert broker.take(group, deliver=Deliver.FROM_TIME, from_time=START + at) == ids


@pytest.mark.rule("F1", "N5", "S4")
def test_from_time_compares_when_a_message_became_visible(broker: Broker) -> None:
    broker.send(delay=2 * SECOND)
    broker.advance(SECOND)
    broker.send()
    broker.advance(SECOND)
    broker.release()
    assert broker.take(deliver=Deliver.FROM_TIME, from_time=START + 2 * SECOND) == [1]


@pytest.mark.rule("F1", "N5")
def test_from_time_after_the_clock_stepped_back_misses_nothing(broker: Broker) -> None:
    broker.send()
    broker.advance(-HOUR)
    broker.send()
    assert broker.take(deliver=Deliver.FROM_TIME, from_time=START) == [0, 1]
    assert broker.take("other", deliver=Deliver.FROM_TIME, from_time=START - HOUR) == [0, 1]


@pytest.mark.rule("F1")
def test_deliver_has_no_effect_once_a_group_has_a_position(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL)
    assert broker.take(num_msgs=1) == [0]
    broker.ack(0)
    for deliver in Deliver:
        assert broker.take(deliver=deliver, from_id=2, from_time=START + HOUR) == [1, 2]


@pytest.mark.rule("F1", "A4")
def test_groups_do_not_touch_each_other(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    assert broker.take("a") == broker.take("b") == [0, 1]
    broker.ack(1, group="a")
    assert broker.take("a") == []
    assert broker.take("b") == broker.take(None) == [0, 1]


@pytest.mark.rule("A4", "N3")
def test_a_mailbox_has_at_most_10_000_groups(broker: Broker) -> None:
    broker.send()
    broker.create("other")

    def fill(tx) -> None:
        mailbox = tx.mailboxes.find(TENANT, BOX)
        for number in range(9_999):
            tx.groups.add(mailbox, f"g{number}")

    broker.run(fill)
    assert broker.take("the last") == [0]
    with pytest.raises(TooManyGroupsError, match="too_many_groups"):
        broker.fetch("one more")
    assert broker.take("the last") == [0]
    assert broker.take(None) == [0]
    assert broker.fetch("one more", "other").messages == []
    assert broker.take("g7", force_deliver=True) == [0]


# F2: the long poll


@pytest.mark.rule("F2")
def test_num_msgs_bounds_a_reply(broker: Broker) -> None:
    for _ in range(150):
        broker.send()
    assert len(broker.take()) == len(broker.take(None)) == 100
    assert broker.take(num_msgs=3) == broker.take(None, num_msgs=3) == [0, 1, 2]
    assert broker.take("leased", num_msgs=3, ack_wait=SECOND) == [0, 1, 2]
    assert broker.take("leased", num_msgs=3, ack_wait=SECOND) == [3, 4, 5]


@pytest.mark.rule("F2", "F6")
def test_who_waits_learns_when_the_next_lease_ends(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    broker.take(ack_wait=9 * SECOND, num_msgs=1)
    broker.take(ack_wait=3 * SECOND, num_msgs=1)
    request = Fetch(TENANT, BOX, GROUP)
    before = broker.fetching(request)
    assert (before.messages, before.retry_at) == ([], START + 3 * SECOND)
    assert broker.fetch(None).retry_at is None
    assert broker.fetch("other").retry_at is None
    broker.now = START + 3 * SECOND
    assert [m.msg_id for m in broker.again(request, before).messages] == [1]


@pytest.mark.rule("F2", "F6")
def test_who_waits_is_woken_by_a_nack_and_learns_its_delay(broker: Broker) -> None:
    send(broker, NORMAL)
    broker.take(ack_wait=HOUR)
    request = Fetch(TENANT, BOX, GROUP)
    before = broker.fetching(request)
    broker.nack(0, delay=SECOND)
    assert broker.woken == {(TENANT, BOX)}
    after = broker.again(request, before)
    assert (after.messages, after.retry_at) == ([], START + SECOND)
    broker.advance(SECOND)
    broker.take(ack_wait=HOUR)
    broker.nack(0)
    assert broker.woken == {(TENANT, BOX)}
    assert [m.msg_id for m in broker.again(request, before).messages] == [0]


@pytest.mark.rule("F2", "F5", "M1")
def test_who_waits_learns_when_the_mailbox_ends(broker: Broker) -> None:
    broker.create("brief", ttl=SECOND)
    for group in (None, GROUP):
        request = Fetch(TENANT, "brief", group)
        before = broker.fetching(request)
        assert before.retry_at == START + SECOND
        broker.now = START + SECOND
        with pytest.raises(NoSuchMailboxError, match=r"^mailbox brief does not exist$"):
            broker.again(request, before)
        broker.now = START


@pytest.mark.rule("F5", "A3")
@pytest.mark.parametrize("group", [None, GROUP])
def test_a_wait_does_not_go_on_in_a_mailbox_created_again(broker: Broker, group: str | None) -> None:
    request = Fetch(TENANT, BOX, group)
    before = broker.fetching(request)
    broker.delete_mailbox()
    broker.create()
    broker.send()
    with pytest.raises(NoSuchMailboxError):
        broker.again(request, before)


# F3: order


@pytest.mark.rule("F3", "A2")
@pytest.mark.parametrize("options", [{}, {"ack_wait": SECOND}])
@pytest.mark.parametrize("group", [None, GROUP])
def test_lanes_by_rank_and_fifo_in_each(broker: Broker, group: str | None, options: dict[str, int]) -> None:
    send(broker, LOW, NORMAL, CRITICAL, URGENT, LOW, NORMAL, CRITICAL, URGENT)
    assert broker.take(group, **options) == [2, 6, 3, 7, 1, 5, 0, 4]


@pytest.mark.rule("F3", "A2")
def test_a_limit_takes_the_higher_lanes_first(broker: Broker) -> None:
    send(broker, LOW, NORMAL, CRITICAL, URGENT, CRITICAL)
    taken = [broker.take(num_msgs=2, ack_wait=SECOND) for _ in range(3)]
    assert taken == [[2, 4], [3, 1], [0]]


@pytest.mark.rule("F3")
def test_without_an_ack_the_same_messages_come_again(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, URGENT)
    assert broker.take(num_msgs=2) == broker.take(num_msgs=2) == [2, 0]
    send(broker, CRITICAL)
    assert broker.take() == [3, 2, 0, 1]
    assert broker.told(EventType.DELIVERED) == [2, 0, 2, 0, 3, 2, 0, 1]
    assert broker.told(EventType.LEASED) == []


@pytest.mark.rule("F6")
def test_a_delivery_under_a_lease_is_told_as_one(broker: Broker) -> None:
    send(broker, NORMAL, URGENT)
    assert broker.take(ack_wait=SECOND) == [1, 0]
    assert broker.told(EventType.LEASED) == [1, 0]
    assert broker.told(EventType.DELIVERED) == []


# F4: force_deliver


@pytest.mark.rule("F4")
def test_force_deliver_sets_a_position_anew(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, CRITICAL, NORMAL)
    broker.take()
    broker.ack(3)
    assert broker.take() == []
    assert broker.take(force_deliver=True) == [2, 0, 1, 3]
    assert broker.take(force_deliver=True, deliver=Deliver.FROM_ID, from_id=1) == [2, 1, 3]
    assert broker.take(deliver=Deliver.FROM_ID, from_id=3) == [2, 1, 3]
    assert broker.take(force_deliver=True, deliver=Deliver.FROM_TIME, from_time=START + 1) == []
    assert broker.take(force_deliver=True, deliver=Deliver.LATEST) == []
    broker.send()
    assert broker.take() == [4]
    assert broker.take(force_deliver=True, deliver=Deliver.LATEST) == []
    assert broker.take() == []


@pytest.mark.rule("F4", "F1")
def test_force_deliver_latest_is_fixed_when_it_is_asked_for(broker: Broker) -> None:
    request = Fetch(TENANT, BOX, GROUP, force_deliver=True)
    before = broker.fetching(request)
    broker.send()
    assert [m.msg_id for m in broker.again(request, before).messages] == [0]


@pytest.mark.rule("F4", "F6")
def test_force_deliver_ends_the_leases_of_the_group_alone(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    broker.take(ack_wait=HOUR)
    broker.take("other", ack_wait=HOUR)
    assert broker.take(force_deliver=True, ack_wait=HOUR) == [0, 1]
    assert broker.take("other") == []
    broker.ack(0)
    broker.advance(HOUR)
    assert broker.take() == [1]


@pytest.mark.rule("F4", "F6")
def test_leased_mail_does_not_return_behind_a_new_position(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL)
    assert broker.take(ack_wait=SECOND) == [0, 1, 2]
    assert broker.take(force_deliver=True, deliver=Deliver.FROM_ID, from_id=2, ack_wait=SECOND) == [2]
    broker.advance(SECOND)
    assert broker.take() == [2]


@pytest.mark.rule("F4", "F7")
def test_force_deliver_brings_dead_messages_back(broker: Broker) -> None:
    send(broker, NORMAL)
    broker.take(ack_wait=SECOND, max_deliver=1)
    broker.advance(SECOND)
    assert broker.take() == []
    assert broker.take(force_deliver=True, ack_wait=SECOND) == [0]
    assert broker.shown(dead_for=GROUP) == []
    broker.advance(SECOND)
    assert broker.take() == []


# F6: leases


@pytest.mark.rule("F6")
@pytest.mark.parametrize("second", [{}, {"ack_wait": SECOND}])
def test_leased_messages_are_hidden_until_the_lease_ends(broker: Broker, second: dict[str, int]) -> None:
    send(broker, NORMAL, CRITICAL, NORMAL)
    assert broker.take(ack_wait=5 * SECOND, num_msgs=2) == [1, 0]
    assert broker.take("other") == broker.take(None) == [1, 0, 2]
    assert broker.take(**second) == [2]
    broker.ack(2)
    broker.now = START + 5 * SECOND - 1
    assert broker.take(**second) == []
    broker.now = START + 5 * SECOND
    assert broker.take(**second) == [1, 0]


@pytest.mark.rule("F6", "F3")
def test_what_comes_again_stands_before_the_new_of_its_lane(broker: Broker) -> None:
    send(broker, NORMAL, CRITICAL, NORMAL)
    broker.take(ack_wait=SECOND)
    send(broker, NORMAL, CRITICAL, LOW)
    broker.advance(SECOND)
    assert broker.take(num_msgs=4, ack_wait=SECOND) == [1, 4, 0, 2]
    assert broker.take(ack_wait=SECOND) == [3, 5]


@pytest.mark.rule("F6", "F7")
def test_leased_deliveries_are_counted_and_shown(broker: Broker) -> None:
    send(broker, NORMAL)
    counts = []
    for ack_wait in (SECOND, SECOND, 0, SECOND):
        counts.append([m.deliveries for m in broker.fetch(ack_wait=ack_wait, deliver=Deliver.EARLIEST).messages])
        broker.advance(SECOND)
    assert counts == [[1], [2], [0], [3]]
    assert [m.deliveries for m in broker.fetch("other", ack_wait=SECOND, deliver=Deliver.EARLIEST).messages] == [1]
    assert [m.deliveries for m in broker.query()] == [0]


@pytest.mark.rule("F6")
def test_a_fetch_without_lease_takes_no_lease_over(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL, NORMAL)
    assert broker.take() == [0, 1, 2]
    assert broker.take(ack_wait=SECOND, num_msgs=2) == [0, 1]
    assert broker.take() == [2]
    broker.advance(SECOND)
    assert broker.take() == broker.take() == [0, 1, 2]
    assert broker.take(ack_wait=SECOND) == [0, 1, 2]
    assert broker.take() == []


@pytest.mark.rule("F6", "F2", "A8")
@pytest.mark.parametrize("gone", ["deleted", "expired", "replaced", "collected"])
@pytest.mark.parametrize("options", [{}, {"ack_wait": SECOND}])
def test_a_lease_whose_message_is_gone_hides_nothing(broker: Broker, gone: str, options: dict[str, int]) -> None:
    for number in range(3):
        broker.send(key=f"k{number}", ttl=SECOND if gone in ("expired", "collected") else None)
    send(broker, NORMAL)
    assert broker.take(ack_wait=SECOND) == [0, 1, 2, 3]
    broker.advance(SECOND)
    left = [3]
    if gone == "deleted":
        for number in range(3):
            broker.delete(number)
    if gone == "replaced":
        for number in range(3):
            broker.send(key=f"k{number}")
        left = [3, 4, 5, 6]
    if gone == "collected":
        broker.clean_up()
    assert broker.take(num_msgs=1, **options) == left[:1]
    broker.ack(3)
    assert broker.take(**options) == left[1:]


@pytest.mark.rule("F6", "F7", "K4")
@pytest.mark.parametrize("how", ["deleted", "expired", "replaced", "acknowledged by another", "collected"])
def test_leases_of_messages_that_are_gone_take_no_room(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("mediator.mailboxes.fetching.MAX_LEASED", 4)
    if how == "acknowledged by another":
        broker.delete_mailbox()
        broker.create(retention=Retention.UNTIL_ACK)
    for number in range(4):
        broker.send(key=f"k{number}", ttl=5 * SECOND if how in ("expired", "collected") and number < 3 else None)
    assert broker.take(ack_wait=HOUR) == [0, 1, 2, 3]
    broker.send()
    assert broker.take(ack_wait=HOUR) == [], "the group is full"
    for msg_id in range(3):
        match how:
            case "deleted":
                broker.delete(msg_id)
            case "replaced":
                broker.send(key=f"k{msg_id}")
            case "acknowledged by another":
                assert broker.take("others", num_msgs=1) == [msg_id]
                broker.ack(msg_id, group="others")
    if how in ("expired", "collected"):
        broker.advance(5 * SECOND)
    if how == "collected":
        broker.clean_up()
    assert broker.nack(0, 1) == broker.extend(1, 2, ack_wait=HOUR) == 0, "none of them is leased any more"
    assert broker.extend(0, 3, ack_wait=HOUR) == 1
    broker.send()
    got = broker.take(ack_wait=HOUR)
    assert len(got) == (3 if how == "replaced" else 2)
    assert got[0] == 4
    assert broker.take(ack_wait=HOUR) == []


@pytest.mark.rule("F6", "F2")
def test_thousands_of_stale_leases_hide_nothing(broker: Broker) -> None:
    for _ in range(2500):
        broker.send(ttl=SECOND, lane=CRITICAL)
    send(broker, LOW)
    for _ in range(3):
        broker.take(ack_wait=SECOND, num_msgs=1000)
    broker.advance(SECOND)
    broker.clean_up()
    assert broker.take(ack_wait=SECOND) == [2500]


@pytest.mark.rule("F6", "A8")
@pytest.mark.parametrize("lane", [CRITICAL, LOW])
def test_a_group_has_at_most_10_000_leased(broker: Broker, lane: Lane) -> None:
    for _ in range(10_003):
        broker.send(lane=lane)
    send(broker, CRITICAL, LOW)
    taken: list[int] = []
    for _ in range(12):
        taken += broker.take(ack_wait=HOUR, num_msgs=1000)
    assert len(taken) == len(set(taken)) == 10_000
    assert broker.take(ack_wait=HOUR) == []
    # Without a lease there is always more to be had, and one acknowledged makes room for one more.
    rest = broker.take()
    assert len(rest) == 5
    assert not set(rest) & set(taken)
    broker.ack(taken[0])
    more = broker.take(ack_wait=HOUR)
    assert more == rest[:1]
    assert broker.take(ack_wait=HOUR) == []
    # What falls due again needs no room.
    broker.nack(taken[5])
    assert broker.take(ack_wait=HOUR) == [taken[5]]


# F7: dead messages


@pytest.mark.rule("F7")
def test_a_message_is_dead_for_its_group_after_the_last_try(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    for _ in range(2):
        assert broker.take(ack_wait=SECOND, max_deliver=2) == [0, 1]
        assert broker.shown(dead_for=GROUP) == []
        broker.advance(SECOND)
    assert broker.take(ack_wait=SECOND) == broker.take() == []
    assert broker.shown(dead_for=GROUP) == [0, 1]
    assert broker.told(EventType.DEAD) == [0, 1]
    assert broker.shown() == [0, 1]
    assert broker.take("other") == [0, 1]
    assert broker.shown(dead_for="other") == []
    broker.send()
    assert broker.take(ack_wait=SECOND) == [2]


@pytest.mark.rule("F7")
def test_max_deliver_is_fixed_by_the_first_fetch_that_names_it(broker: Broker) -> None:
    send(broker, NORMAL)
    assert broker.take(ack_wait=SECOND) == [0]
    for max_deliver in (3, 1, 100):
        assert broker.shown(dead_for=GROUP) == []
        broker.advance(SECOND)
        if max_deliver != 100:
            assert broker.take(ack_wait=SECOND, max_deliver=max_deliver) == [0]
    assert broker.take(ack_wait=SECOND, max_deliver=100) == []
    assert broker.shown(dead_for=GROUP) == [0]


@pytest.mark.rule("F7")
def test_max_deliver_may_be_fixed_by_a_fetch_that_finds_nothing(broker: Broker) -> None:
    broker.fetch(ack_wait=SECOND, max_deliver=1)
    send(broker, NORMAL)
    assert broker.take(ack_wait=SECOND, max_deliver=9) == [0]
    broker.advance(SECOND)
    assert broker.take() == []


@pytest.mark.rule("F7")
def test_only_leased_deliveries_count(broker: Broker) -> None:
    send(broker, NORMAL)
    for _ in range(5):
        assert broker.take(max_deliver=2) == [0]
    for _ in range(2):
        assert broker.take(ack_wait=SECOND) == [0]
        broker.advance(SECOND)
    assert broker.take() == []


@pytest.mark.rule("F7", "F6")
def test_a_nack_after_the_last_delivery_makes_a_message_dead(broker: Broker) -> None:
    send(broker, NORMAL, NORMAL)
    broker.take(ack_wait=HOUR, max_deliver=1)
    broker.nack(0)
    assert broker.take() == []
    assert broker.shown(dead_for=GROUP) == [0]


# F8: the mailbox's own lease


@pytest.mark.rule("F8")
@pytest.mark.parametrize(
    ("configured", "own", "asked", "leased"),
    [
        (0, None, None, 0),
        (5, None, None, 5),
        (5, 7, None, 7),
        (5, 0, None, 0),
        (0, 7, None, 7),
        (5, 7, 9, 9),
        (5, 7, 0, 0),
        (5, None, 0, 0),
    ],
)
def test_the_nearest_word_decides_on_the_lease(
    store: Store, configured: int, own: int | None, asked: int | None, leased: int
) -> None:
    broker = Broker(store, Bounds(default_ack_wait=configured * SECOND))
    broker.create(ack_wait=None if own is None else own * SECOND)
    broker.send()
    ack_wait = None if asked is None else asked * SECOND
    assert broker.take(ack_wait=ack_wait) == [0]
    if leased:
        broker.now = START + leased * SECOND - 1
        assert broker.take() == []
        broker.advance(1)
    assert broker.take() == [0]


@pytest.mark.rule("F8")
def test_a_lease_of_the_mailbox_needs_a_group(broker: Broker) -> None:
    broker.create("leasing", ack_wait=SECOND)
    broker.send(to="leasing")
    assert broker.take(None, "leasing") == broker.take(None, "leasing") == [0]
    assert broker.take("a", "leasing") == broker.take("b", "leasing") == [0]
    assert broker.take("a", "leasing") == []


@pytest.mark.rule("F8")
def test_an_operator_may_set_and_take_back_the_lease(broker: Broker) -> None:
    broker.send()
    assert broker.take() == broker.take() == [0]
    broker.set_ack_wait(SECOND)
    assert broker.take() == [0]
    assert broker.take() == []
    broker.set_ack_wait(None)
    broker.advance(SECOND)
    assert broker.take() == broker.take() == [0]


# N7: the byte budget


@pytest.mark.rule("N7", "A8")
@pytest.mark.parametrize("group", [None, GROUP])
def test_a_reply_has_at_least_one_item_up_to_its_bytes(broker: Broker, group: str | None) -> None:
    for lane in (NORMAL, NORMAL, CRITICAL):
        broker.send(b"x" * 10_000, lane=lane)
    assert broker.take(group, budget=1) == [2]
    assert broker.take(group, budget=0) == [2]
    assert broker.take(group, budget=15_000) == [2]
    assert broker.take(group, budget=30_000) == [2, 0]
    assert broker.take(group, budget=60_000) == [2, 0, 1]


@pytest.mark.rule("N7", "A8", "F3")
@pytest.mark.parametrize("budget", [1, 9_000, 15_000, 21_000, 40_000])
def test_what_the_budget_cut_off_is_never_settled_nor_leased(broker: Broker, budget: int) -> None:
    sizes = [10, 10_000, 20_000, 10, 10, 15_000, 30_000, 10, 5_000, 10]
    for number, size in enumerate(sizes):
        broker.send(b"x" * size, lane=Lane(number * 7 % 4))
    order = broker.take(None)
    for options in ({}, {"ack_wait": HOUR}):
        group = str(options)
        taken: list[int] = []
        while got := broker.take(group, budget=budget, **options):
            taken += got
            if options:
                broker.ack(*got, group=group)
            else:
                broker.ack(got[-1], group=group)
        assert taken == order


@pytest.mark.rule("N7", "A8", "F6")
def test_what_the_budget_cut_off_of_ended_leases_comes_next(broker: Broker) -> None:
    for number in range(6):
        broker.send(b"x" * 10_000, lane=Lane(number % 3))
    order = broker.take(ack_wait=SECOND)
    broker.advance(SECOND)
    send(broker, CRITICAL)
    taken: list[int] = []
    while got := broker.take(ack_wait=HOUR, budget=15_000):
        taken += got
    assert taken == [*order[:2], 6, *order[2:]]


# lanes that stand empty for long


@pytest.mark.rule("A8", "F3")
@pytest.mark.parametrize("options", [{}, {"ack_wait": HOUR}])
def test_a_lane_empty_for_thousands_of_ids_misses_nothing(broker: Broker, options: dict[str, int]) -> None:
    send(broker, URGENT)
    assert broker.take(**options) == [0]
    if not options:
        broker.ack(0)
    for _ in range(3000):
        broker.send()
    assert len(broker.take(num_msgs=1000, **options)) == 1000
    send(broker, LOW, CRITICAL, URGENT)
    assert broker.take(num_msgs=2, **options) == [3002, 3003]
    broker.ack(3002, 3003)
    rest: list[int] = []
    while got := broker.take(num_msgs=1000, **options):
        rest += got
        broker.ack(got[-1])
    assert rest == [*range(1001 if options else 1, 3001), 3001]


@pytest.mark.rule("A8", "A5")
def test_a_message_fetched_by_nobody_stays(broker: Broker) -> None:
    broker.create("queue", retention=Retention.UNTIL_ACK)
    broker.send(to="queue")
    broker.take("a", "queue")
    broker.take(None, "queue")
    broker.advance(1000 * HOUR)
    broker.clean_up()
    assert broker.take("b", "queue") == [0]


@pytest.mark.rule("A8")
def test_mail_expired_by_a_wrong_clock_comes_back(broker: Broker) -> None:
    for _ in range(SKIP_FROM + 2):
        broker.send(ttl=HOUR)
    assert broker.take(num_msgs=1) == [0]
    broker.advance(2 * HOUR)
    assert broker.take() == []
    broker.advance(-2 * HOUR)
    assert broker.take(num_msgs=2) == [0, 1]


@pytest.mark.rule("F2", "F4")
def test_a_new_position_wakes_the_members_that_wait(broker: Broker) -> None:
    send(broker, NORMAL)
    broker.take(deliver=Deliver.EARLIEST)
    broker.ack(0)
    broker.fetch(force_deliver=True, deliver=Deliver.EARLIEST, num_msgs=1)
    assert broker.woken == {(TENANT, BOX)}


# Messages that cannot be read


@pytest.mark.rule("A8", "N3")
@pytest.mark.parametrize("damaged", [b"{", b"[]"])
def test_a_damaged_message_uses_up_no_delivery_of_others(broker: Broker, damaged: bytes) -> None:
    send(broker, NORMAL, NORMAL)
    details = "UPDATE message SET extra = ? WHERE msg_id = 1 RETURNING msg_id"
    broker.run(lambda tx: tx.session.dialect.execute(details, (damaged,)))
    with pytest.raises((ValueError, AttributeError)):
        broker.take(ack_wait=SECOND, max_deliver=1)
    broker.run(lambda tx: tx.session.dialect.execute(details, (None,)))
    broker.advance(SECOND)
    assert broker.take(ack_wait=SECOND, max_deliver=1) == [0, 1]
