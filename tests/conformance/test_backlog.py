"""What waits in all mailboxes, as operators watch it: on every store, in slices."""

import pytest

from mediator.broker import wall_clock
from mediator.mailboxes.fetching import Deliver
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Retention
from mediator.mailboxes.tables import backlog
from mediator.mailboxes.tables.backlog import Backlogs, MailboxBacklog
from mediator.store.base import Store
from tests.harness.broker import BOX, DAY, GROUP, HOUR, SECOND, START, Broker


@pytest.fixture
def broker(store: Store) -> Broker:
    return Broker(store)


def read_all(broker: Broker, limit: int = 100) -> dict[str, MailboxBacklog]:
    """Go through all mailboxes in slices, as the service does."""
    found: list[MailboxBacklog] = []
    while True:
        with broker.store.reading() as tx:
            more = tx.table(Backlogs).read_slice(found[-1].id if found else 0, limit, broker.now)
        if not more:
            return {each.address: each for each in found}
        assert len(more) <= limit
        found += more


def test_an_empty_store_has_no_backlog(broker: Broker) -> None:
    assert read_all(broker) == {}


def test_messages_and_delayed_ones_are_counted(broker: Broker) -> None:
    for box in ("a", "b", "c"):
        broker.create(box)
    for _ in range(3):
        broker.send(b"four", to="a")
    broker.send(b"later", to="b", delay=HOUR)
    for limit in (1, 2, 100):
        found = read_all(broker, limit)
        assert list(found) == ["a", "b", "c"]
        assert (found["a"].messages, found["a"].bytes, found["a"].delayed) == (3, 12, 0)
        assert (found["b"].messages, found["b"].delayed, found["b"].delayed_bytes) == (0, 1, 5)
        assert (found["c"].messages, found["c"].waiting_since) == (0, None)


@pytest.mark.rule("M1", "M4")
def test_mailboxes_that_are_gone_have_no_read_all(broker: Broker) -> None:
    for box, ttl in (("short", HOUR), ("deleted", None), ("lives", None)):
        broker.create(box, ttl=ttl)
        broker.send(to=box)
        broker.take("g", box, ack_wait=SECOND)
    broker.delete_mailbox("deleted")
    broker.advance(HOUR)
    assert list(read_all(broker)) == ["lives"]


@pytest.mark.rule("F6", "F7")
def test_leases_are_told_from_dead_and_given_back_ones(broker: Broker) -> None:
    broker.create()
    for _ in range(6):
        broker.send()
    broker.take("dead", num_msgs=2, ack_wait=SECOND, max_deliver=1)
    broker.advance(SECOND)
    assert broker.take("dead", num_msgs=1, ack_wait=DAY, max_deliver=1) == [2]
    broker.take("busy", num_msgs=3, ack_wait=DAY)
    broker.nack(0, group="busy", delay=HOUR)
    box = read_all(broker)[BOX]
    assert (box.leased, box.given_back, box.dead) == (3, 1, 2)
    assert {group.name: group.dead for group in box.groups} == {"busy": 0, "dead": 2}
    broker.delete(1)
    assert read_all(broker)[BOX].dead == 1, "a message that is gone is not dead any more"
    broker.drop(group="dead")
    assert read_all(broker)[BOX].dead == 0


@pytest.mark.rule("F6", "F7")
def test_mail_waits_again_when_a_lease_ends(broker: Broker) -> None:
    broker.create()
    for _ in range(3):
        broker.send()
    broker.take(num_msgs=3, ack_wait=HOUR, max_deliver=2)
    broker.nack(1, delay=SECOND)
    broker.delete(2)
    assert read_all(broker)[BOX].waiting_since is None
    broker.advance(DAY)
    box = read_all(broker)[BOX]
    assert (box.leased, box.given_back, box.dead) == (0, 0, 0)
    assert box.waiting_since == START + SECOND, "nobody fetched it since it could be given again"
    broker.take(num_msgs=2, ack_wait=HOUR, max_deliver=2)
    assert read_all(broker)[BOX].waiting_since is None
    broker.advance(HOUR)
    box = read_all(broker)[BOX]
    assert (box.dead, box.waiting_since) == (2, None), "dead, whether a FETCH has looked since or not"


@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.rule("A2", "F1")
def test_a_group_waits_for_the_oldest_it_was_not_given(broker: Broker, lane: Lane) -> None:
    broker.create()
    broker.send(lane=lane)
    broker.take()
    assert read_all(broker)[BOX].waiting_since is None, "delivered, if not acknowledged"
    broker.advance(HOUR)
    for _ in range(2):
        broker.send(lane=lane)
        broker.advance(SECOND)
    (group,) = read_all(broker)[BOX].groups
    assert (group.name, group.waiting_since) == (GROUP, START + HOUR)
    assert read_all(broker)[BOX].waiting_since == START + HOUR
    broker.take()
    assert read_all(broker)[BOX].waiting_since is None


@pytest.mark.rule("A5")
def test_without_a_group_mail_waits_until_it_is_acknowledged(broker: Broker) -> None:
    broker.create("queue", retention=Retention.UNTIL_ACK)
    broker.create("log")
    for box in ("queue", "log"):
        broker.send(to=box)
    assert {box: each.waiting_since for box, each in read_all(broker).items()} == {"log": None, "queue": START}


def test_many_groups_make_slices_smaller(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MAX_GROUPS", 3)
    for number in range(5):
        broker.create(f"box{number}")
        broker.send(to=f"box{number}")
        for group in ("a", "b", "c"):
            broker.take(group, f"box{number}")
        broker.send(to=f"box{number}")
    found = read_all(broker)
    assert [len(each.groups) for each in found.values()] == [3] * 5
    assert all(group.waiting_since == START for each in found.values() for group in each.groups)


@pytest.mark.parametrize("limit", [1, 100])
def test_one_mailbox_may_have_more_groups_than_a_slice(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(backlog, "MAX_GROUPS", 1)
    for box in ("gone", "many", "other"):
        broker.create(box)
        broker.send(to=box)
        for name in ("a", "b", "c"):
            broker.take(name, box, ack_wait=SECOND, max_deliver=1)
    broker.delete_mailbox("gone")
    broker.advance(SECOND)
    found = read_all(broker, limit)
    assert {box: (len(each.groups), each.dead) for box, each in found.items()} == {"many": (3, 3), "other": (3, 3)}


def test_a_database_server_tells_its_time(broker: Broker) -> None:
    with broker.store.reading() as tx:
        told = tx.session.dialect.clock()
    if broker.store.quick:
        assert told is None, "it is in this process"
    else:
        assert told is not None
        assert abs(told - wall_clock()) < 60_000, "on the same machine"


@pytest.mark.rule("F4")
def test_a_group_that_is_moved_on_waits_for_nothing(broker: Broker) -> None:
    broker.create()
    for lane in Lane:
        broker.send(lane=lane)
    broker.take(num_msgs=1)
    assert read_all(broker)[BOX].waiting_since == START
    broker.take(deliver=Deliver.LATEST, force_deliver=True)
    assert read_all(broker)[BOX].waiting_since is None
    broker.advance(SECOND)
    broker.send()
    assert read_all(broker)[BOX].waiting_since == START + SECOND
