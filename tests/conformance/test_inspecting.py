"""What an operator is told of a mailbox, on every store: counts that are true, and sentences that name the cause."""

import pytest

from mediator.errors import NoSuchMailboxError
from mediator.mailboxes.bounds import Bounds, Quota
from mediator.mailboxes.fetching import Deliver
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.operate import diagnosis
from mediator.operate.diagnosis import Level, diagnose, inspect_mailbox
from pickup.broker import MEDIATION_HOOKS
from tests.harness.broker import BOX, DAY, GROUP, HOUR, SECOND, TENANT, Broker
from tests.harness.mediation import Mediation, key

UNBOUNDED = Bounds()


@pytest.fixture
def broker(store):
    return Broker(store)


def inspect(broker, box=BOX, bounds=UNBOUNDED):
    with broker.store.reading() as tx:
        return inspect_mailbox(tx, TENANT, box, bounds, broker.now, {Kind.MEDIATION: MEDIATION_HOOKS})


def look(broker):
    return inspect(broker).view


def said(broker, bounds=UNBOUNDED):
    return diagnose(inspect(broker, bounds=bounds), BOX, bounds, broker.now)


def problems(broker, **options):
    return [finding.text for finding in said(broker, **options) if finding.level is Level.PROBLEM]


def notes(broker):
    return [finding.text for finding in said(broker) if finding.level is Level.NOTE]


def test_a_mailbox_that_is_not_there(broker):
    with pytest.raises(NoSuchMailboxError):
        look(broker)


def test_an_empty_mailbox_is_not_stuck(broker):
    broker.create()
    view = look(broker)
    assert (view.oldest, view.counted, view.groups, view.group_count) == (None, 0, [], 0)
    assert problems(broker) == []
    assert notes(broker) == ["The mailbox has no readable message; none has ever arrived."]


def test_lanes_are_counted_with_their_oldest_message(broker):
    broker.create()
    broker.send(lane=Lane.LOW)
    broker.advance(SECOND)
    broker.send(lane=Lane.CRITICAL)
    broker.send(lane=Lane.LOW)
    view = look(broker)
    assert [(lane.messages, lane.oldest_id) for lane in view.lanes] == [(1, 1), (0, None), (0, None), (2, 0)]
    assert view.lanes[Lane.CRITICAL].oldest_at == view.lanes[Lane.LOW].oldest_at + SECOND
    assert view.oldest.msg_id == 0


def test_mail_that_nobody_fetches(broker):
    broker.create()
    broker.send()
    (problem,) = problems(broker)
    assert problem.startswith("No group has fetched from it yet; 1 message waiting")


@pytest.mark.rule("D11")
def test_mail_that_no_wallet_picks_up(store):
    house = Mediation(store)
    holder = house.holder(1, key(10))
    house.forward(key(10))

    def found():
        return diagnose(inspect(house, holder.address), holder.address, UNBOUNDED, house.now)

    assert not any(finding.level is Level.PROBLEM for finding in found())
    house.advance(2 * DAY)
    (problem,) = [finding for finding in found() if finding.level is Level.PROBLEM]
    assert problem.text.startswith(f"Mailbox of a wallet, connection {holder.id}")
    assert f"mediator connections show {holder.id}" in problem.advice
    # A FETCH of a group would take nothing off the wallet's queue.
    assert not any("mediator fetch" in finding.advice for finding in found())


@pytest.mark.rule("F3", "K2")
def test_delivered_without_a_lease_and_never_acknowledged(broker):
    broker.create()
    for _ in range(3):
        broker.send()
    broker.take(deliver=Deliver.EARLIEST, num_msgs=2)
    (group,) = look(broker).groups
    assert (group.waiting, group.open, group.leased, group.due, group.dead) == (1, 2, 0, 0, 0)
    assert "has not acknowledged them" in problems(broker)[0]
    broker.ack(1)
    (group,) = look(broker).groups
    assert (group.waiting, group.open) == (1, 0)


@pytest.mark.rule("F6")
def test_leased_then_due_again(broker):
    broker.create()
    broker.send()
    broker.send()
    broker.take(deliver=Deliver.EARLIEST, ack_wait=60 * SECOND, num_msgs=1)
    (group,) = look(broker).groups
    assert (group.waiting, group.open, group.leased, group.due) == (1, 0, 1, 0)
    assert group.next_lease_end == broker.now + 60 * SECOND
    assert any("the first lease ends" in note and "(in 1m)" in note for note in notes(broker))
    broker.advance(60 * SECOND)
    (group,) = look(broker).groups
    assert (group.leased, group.due, group.next_lease_end) == (0, 1, None)
    assert any("ended without an ACK: 1 message will be delivered again" in problem for problem in problems(broker))
    assert broker.take(ack_wait=0, num_msgs=1) == [0]
    (group,) = look(broker).groups
    assert (group.leased, group.due, group.open) == (0, 0, 1)


@pytest.mark.rule("F6")
def test_what_waits_for_its_delay_is_shown_apart(broker):
    broker.create()
    for _ in range(3):
        broker.send()
    broker.take(deliver=Deliver.EARLIEST, ack_wait=60 * SECOND)
    broker.nack(0, 1, delay=90 * SECOND)
    (group,) = look(broker).groups
    assert (group.leased, group.delayed, group.due, group.idle) == (1, 2, 0, False)
    assert group.next_lease_end == broker.now + 60 * SECOND
    assert group.next_delay_end == broker.now + 90 * SECOND
    assert any("gave back 2 messages with a delay; the first delay ends" in note for note in notes(broker))
    broker.delete(1)
    broker.advance(60 * SECOND)
    (group,) = look(broker).groups
    assert (group.leased, group.delayed, group.due, group.next_lease_end) == (0, 1, 1, None)
    broker.advance(30 * SECOND)
    (group,) = look(broker).groups
    assert (group.leased, group.delayed, group.due, group.next_delay_end) == (0, 0, 2, None)


@pytest.mark.rule("F7")
def test_dead_for_a_group_from_the_end_of_the_last_lease_on(broker):
    broker.create()
    broker.send()
    broker.take(deliver=Deliver.EARLIEST, ack_wait=SECOND, max_deliver=1)
    broker.advance(SECOND)
    # Nobody has looked since, neither a FETCH nor the clean-up.
    (group,) = look(broker).groups
    assert (group.leased, group.due, group.dead, group.dead_more) == (0, 0, 1, False)
    broker.take()
    (group,) = look(broker).groups
    assert group.dead == 1
    assert f"Dead for group {GROUP}: 1 message" in problems(broker)[0]
    broker.delete(0)
    (group,) = look(broker).groups
    assert group.dead == 0


def test_names_of_groups_are_quoted_for_the_shell(broker):
    """Whoever fetches chooses it."""
    broker.create()
    broker.send()
    group = "$(id); x"
    broker.take(group, ack_wait=SECOND, max_deliver=1)
    broker.advance(SECOND)
    advice = " ".join(finding.advice for finding in said(broker))
    assert f"`mediator dead list {BOX} --group '$(id); x'`" in advice


def test_a_group_that_is_behind_is_a_problem_only_after_a_while(broker):
    broker.create()
    broker.take(deliver=Deliver.EARLIEST)
    broker.send()
    assert problems(broker) == []
    assert any("lags: 1 message not yet fetched" in note for note in notes(broker))
    broker.advance(120 * SECOND)
    assert any("lags:" in problem for problem in problems(broker))


@pytest.mark.rule("A5")
def test_what_stays_after_every_ack(broker):
    broker.create()
    broker.send()
    broker.take(deliver=Deliver.EARLIEST)
    broker.ack(0)
    assert problems(broker) == []
    assert any("since the retention is keep" in note for note in notes(broker))


@pytest.mark.rule("F1", "A5")
def test_a_work_queue_whose_groups_began_behind_its_messages(broker):
    broker.create(retention=Retention.UNTIL_ACK)
    broker.send()
    broker.take(deliver=Deliver.LATEST)
    (problem,) = problems(broker)
    assert "behind the position of every group" in problem


@pytest.mark.rule("S4")
def test_delayed_mail_and_when_it_is_due(broker):
    broker.create()
    broker.send(delay=2 * HOUR)
    broker.send(delay=HOUR)
    view = look(broker)
    assert (view.delayed.messages, view.delayed.next_due_at) == (2, broker.now + HOUR)
    assert any("2 messages" in note and "(in 1h)" in note for note in notes(broker))


@pytest.mark.rule("M1", "S5")
def test_ends_that_come_and_ends_that_came(broker):
    broker.create(ttl=2 * HOUR)
    broker.send(ttl=HOUR)
    broker.send(ttl=SECOND)
    broker.send()
    found = inspect(broker)
    assert (found.ending, found.first_end, found.expired) == (2, broker.now + SECOND, 0)
    broker.advance(SECOND)
    found = inspect(broker)
    assert (found.ending, found.first_end, found.expired) == (1, broker.now - SECOND + HOUR, 1)
    assert found.view.lanes[Lane.NORMAL].messages == 2
    assert any(note.startswith("The mailbox expires") for note in notes(broker))
    assert any(note.startswith("Expired: 1 message;") for note in notes(broker))


def test_a_mailbox_with_much_time_left_is_not_said_to_end(broker):
    broker.create(ttl=2 * DAY)
    assert not any("expires" in note for note in notes(broker))


@pytest.mark.rule("S7")
def test_a_full_mailbox_and_a_full_tenant(broker):
    broker.create()
    for _ in range(9):
        broker.send(b"x")
    broker.send(b"x", delay=HOUR)
    full = Bounds(mailbox=Quota(messages=10), tenant=Quota(bytes=9))
    found = problems(broker, bounds=full)
    assert any("The mailbox is full, 10 of 10 messages" in problem for problem in found)
    assert any(f"Tenant {TENANT} is full" in problem for problem in found)
    nearly = Bounds(mailbox=Quota(messages=11))
    assert any(finding.text == "The mailbox is nearly full: 10 of 11 messages." for finding in said(broker, nearly))


def test_a_large_mailbox_is_looked_at_from_both_ends(broker, monkeypatch):
    monkeypatch.setattr(diagnosis, "WINDOW", 4)
    broker.create()
    broker.take(deliver=Deliver.EARLIEST, group="slow")
    for _ in range(10):
        broker.send()
    broker.take(group="quick", deliver=Deliver.FROM_ID, from_id=8, num_msgs=1)
    view = look(broker)
    assert (view.counted, view.lanes[Lane.NORMAL].messages) == (4, 4)
    groups = {group.name: group for group in view.groups}
    assert groups["slow"].exact is False
    assert groups["slow"].waiting == 10
    assert groups["quick"].exact is True
    assert (groups["quick"].waiting, groups["quick"].open) == (1, 1)


def test_the_worst_comes_first(broker):
    broker.create()
    broker.send()
    broker.send(delay=HOUR)
    levels = [finding.level for finding in said(broker)]
    assert levels == sorted(levels, key=[Level.PROBLEM, Level.NOTE, Level.OK].index)
