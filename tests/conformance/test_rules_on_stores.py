"""The verbs on every store, in short: that each rule that leans on the store holds there, and across a restart."""

import pytest

from mediator.errors import (
    ArchiveBacklogFullError,
    MailboxExistsError,
    NoSuchMailboxError,
    NoSuchMessageError,
    QuotaExceededError,
    TooManyGroupsError,
    WrongTokenError,
)
from mediator.mailboxes import fetching
from mediator.mailboxes.bounds import Bounds, Quota
from mediator.mailboxes.events import EventType
from mediator.mailboxes.fetching import Deliver
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Kind, Retention
from tests.harness.broker import DAY, HOUR, SECOND, Broker


class Restarting(Broker):
    """A broker that can lose its process."""

    def __init__(self, opened, **options):
        super().__init__(opened.store, **options)
        self._opened = opened

    def restart(self):
        self.store = self._opened.reopen()


@pytest.fixture
def broker(opened):
    return Restarting(opened)


def bodies(fetched):
    return [message.payload for message in fetched.messages]


@pytest.mark.rule("M1", "M2", "M3", "M4", "A3")
def test_the_life_of_a_mailbox(broker):
    created = broker.create("task", ttl=10 * SECOND, desc="d", tags=("t",))
    assert created.token is not None
    with pytest.raises(MailboxExistsError):
        broker.create("task")
    assert broker.create("task", public=False).token is None
    broker.restart()
    with pytest.raises(WrongTokenError):
        broker.update("wrong", "task", desc="no")
    broker.update(created.token, "task", desc="new")
    broker.restart()
    assert broker.mailbox("task").desc == "new"
    assert broker.mailbox("task").tags == ("t",)
    broker.send(b"old", to="task")
    broker.take("g", "task")
    broker.advance(10 * SECOND)
    with pytest.raises(NoSuchMailboxError):
        broker.send(b"late", to="task")
    broker.create("task")
    broker.restart()
    assert broker.send(b"new", to="task") == 0
    assert broker.take("g", "task") == [0]
    assert [message.payload for message in broker.query("task")] == [b"new"]
    assert broker.clean_up().mailboxes == 1
    broker.delete_mailbox("task")
    with pytest.raises(NoSuchMailboxError):
        broker.query("task")
    assert broker.clean_up(limit=1).messages == 1
    assert broker.clean_up().total == 0


@pytest.mark.rule("F3", "F1", "A2", "A8")
def test_lanes_come_by_rank_and_again_until_acknowledged(broker):
    broker.create()
    for lane in (Lane.LOW, Lane.NORMAL, Lane.CRITICAL, Lane.URGENT, Lane.NORMAL, Lane.CRITICAL):
        broker.send(lane.name.encode(), lane=lane)
    assert broker.take() == [2, 5, 3, 1, 4, 0]
    broker.restart()
    assert broker.take(num_msgs=4) == [2, 5, 3, 1]
    broker.ack(5)
    assert broker.take() == [3, 1, 4, 0]
    broker.restart()
    assert broker.take() == [3, 1, 4, 0]
    assert broker.take("other") == [2, 5, 3, 1, 4, 0]


@pytest.mark.rule("K2")
def test_the_last_message_acknowledges_a_mixed_batch(broker):
    broker.create()
    for lane in (Lane.NORMAL, Lane.CRITICAL, Lane.LOW, Lane.URGENT):
        broker.send(lane=lane)
    assert broker.take() == [1, 3, 0, 2]
    broker.send(lane=Lane.CRITICAL)
    broker.ack(2)
    assert broker.take() == [4]
    broker.restart()
    assert broker.take() == [4]
    broker.ack(4)
    assert broker.take() == []
    assert broker.shown() == [0, 1, 2, 3, 4]


@pytest.mark.rule("K4")
def test_an_ack_of_what_is_unknown_changes_nothing(broker):
    broker.create()
    broker.send()
    broker.ack(0)
    assert broker.take(num_msgs=1) == [0]
    broker.send()
    broker.ack(1, 7, 10**15)
    assert broker.take() == [0, 1]


@pytest.mark.rule("F1", "F4")
def test_a_group_starts_where_it_is_told(broker):
    broker.create()
    for number in range(6):
        broker.send()
        broker.advance(SECOND if number % 2 else 0)
    broker.delete(2)
    assert broker.take("latest", deliver=Deliver.LATEST) == []
    assert broker.take("id", deliver=Deliver.FROM_ID, from_id=4) == [4, 5]
    for number, (before, found) in enumerate([(1999, [4, 5]), (2000, [3, 4, 5]), (2001, [3, 4, 5]), (999, [])]):
        assert broker.take(f"time{number}", deliver=Deliver.FROM_TIME, from_time=broker.now - before) == found
    broker.restart()
    broker.send()
    assert broker.take("latest") == [6]
    assert broker.take("id", deliver=Deliver.EARLIEST) == [4, 5, 6]
    assert broker.take("id", deliver=Deliver.EARLIEST, force_deliver=True) == [0, 1, 3, 4, 5, 6]
    assert broker.take(None, deliver=Deliver.FROM_ID, from_id=3) == [3, 4, 5, 6]


@pytest.mark.rule("S2", "A3")
def test_the_newest_message_of_a_key_stays(broker):
    broker.create()
    assert [broker.send(b"1", key="k"), broker.send(b"x"), broker.send(b"2", key="k")] == [0, 1, 2]
    assert broker.send(b"3", key="k", delay=SECOND) == -1
    assert broker.shown() == [1, 2]
    broker.restart()
    broker.advance(SECOND)
    assert broker.release().count == 1
    assert [(message.msg_id, message.payload) for message in broker.query(key="k")] == [(3, b"3")]
    assert broker.send(b"4", key="k") == 4
    mailbox = broker.mailbox()
    assert (mailbox.next_id, mailbox.messages) == (5, 2)
    assert broker.told(EventType.COMPACTED) == [0, 2, 3]


@pytest.mark.rule("S2", "E4")
def test_a_mailbox_of_type_latest_keeps_one(broker):
    broker.create(kind=Kind.LATEST)
    for number in range(3):
        broker.send(bytes([number]))
    assert [(message.msg_id, message.payload) for message in broker.query()] == [(2, b"\x02")]


@pytest.mark.rule("S3")
def test_a_dedup_id_is_stored_once(broker):
    broker.create()
    broker.send()
    assert broker.send(b"first", dedup_id="d") == 1
    broker.restart()
    assert broker.send(b"second", dedup_id="d") == 1
    assert broker.send(b"later", dedup_id="z", delay=SECOND) == -1
    assert broker.send(b"later", dedup_id="z") == -1
    broker.advance(SECOND)
    broker.release()
    assert broker.send(b"later", dedup_id="z") == 2
    assert broker.shown() == [0, 1, 2]
    broker.delete(1)
    assert broker.send(b"third", dedup_id="d") == 3
    broker.advance(DAY)
    assert broker.send(b"fourth", dedup_id="d") == 4
    assert broker.collect().dedup_ids == 1
    assert broker.send(b"fifth", dedup_id="d") == 4


@pytest.mark.rule("S4", "A3", "N5")
def test_delayed_messages_become_visible_in_due_order(broker):
    broker.create()
    broker.create("other")
    for delay in (3, 1, 2, 1):
        assert broker.send(bytes([delay]), delay=delay * SECOND) == -1
    broker.send(b"gone", to="other", delay=SECOND)
    broker.delete_mailbox("other")
    assert broker.shown() == []
    assert broker.send(b"now") == 0
    broker.restart()
    assert broker.next_due() == broker.now + SECOND
    broker.advance(2 * SECOND)
    assert [broker.release(limit=2).count for _ in range(3)] == [2, 2, 0]
    assert [message.payload for message in broker.query()] == [b"now", b"\x01", b"\x01", b"\x02"]
    assert {message.created_at for message in broker.query(before_id=4)[1:]} == {broker.now}
    broker.restart()
    broker.advance(SECOND)
    broker.release()
    assert broker.shown() == [0, 1, 2, 3, 4]
    assert broker.next_due() is None
    assert broker.mailbox().messages == 5


@pytest.mark.rule("S5")
def test_messages_expire_on_time_and_are_collected_later(broker):
    broker.create()
    broker.send(b"12345", ttl=2 * SECOND)
    broker.send(b"1", ttl=SECOND)
    broker.send(b"1")
    broker.send(b"never", ttl=SECOND, delay=SECOND)
    broker.restart()
    broker.advance(SECOND)
    assert broker.release().count == 1
    assert broker.shown() == [0, 2]
    assert broker.take() == [0, 2]
    assert broker.mailbox().messages == 3
    assert broker.collect().messages == 1
    broker.restart()
    assert (broker.mailbox().messages, broker.mailbox().bytes) == (2, 6)
    broker.advance(SECOND)
    assert broker.shown() == [2]
    assert broker.clean_up().messages == 1
    assert (broker.mailbox().next_id, broker.mailbox().messages, broker.mailbox().bytes) == (3, 1, 1)


@pytest.mark.rule("S6")
def test_the_outbox_is_bounded(opened):
    broker = Restarting(opened, bounds=Bounds(archive_limit=2))
    broker.create(archive=True)
    broker.create("plain")
    broker.send()
    assert broker.send(to="plain", archive=True, delay=SECOND) == -1
    broker.restart()
    for to in ("task", "plain"):
        with pytest.raises(ArchiveBacklogFullError):
            broker.send(to=to, archive=True)
    assert broker.send(to="plain") == 0
    broker.advance(SECOND)
    assert broker.release().count == 1
    with pytest.raises(ArchiveBacklogFullError):
        broker.send()
    assert broker.shown() == [0]


@pytest.mark.rule("S7")
def test_quotas_count_what_is_there(opened):
    broker = Restarting(opened, bounds=Bounds(mailbox=Quota(messages=3), tenant=Quota(bytes=20)))
    broker.create()
    broker.create("other")
    broker.send(b"12345")
    broker.send(b"12345", delay=SECOND)
    broker.restart()
    broker.send(b"12345")
    with pytest.raises(QuotaExceededError):
        broker.send()
    broker.delete(0)
    broker.send()
    with pytest.raises(QuotaExceededError):
        broker.send(b"x" * 16, to="other")


@pytest.mark.rule("S5", "S7")
@pytest.mark.parametrize("bound", [{"messages": 3}, {"bytes": 300}])
@pytest.mark.parametrize("of", ["mailbox", "tenant"])
def test_expired_mail_takes_no_room_before_the_clean_up(opened, bound, of):
    broker = Restarting(opened, bounds=Bounds(**{of: Quota(**bound)}))
    broker.create()
    broker.create("ends", ttl=SECOND)
    broker.send(b"x" * 100, ttl=SECOND)
    broker.send(b"x" * 100, ttl=SECOND, delay=HOUR)
    broker.send(b"x" * 100, to="ends" if of == "tenant" else "task", ttl=SECOND)
    with pytest.raises(QuotaExceededError):
        broker.send(b"x" * 100)
    broker.advance(2 * SECOND)
    sent = [broker.send(b"x" * 100) for _ in range(3)]
    assert broker.shown() == sent
    with pytest.raises(QuotaExceededError):
        broker.send(b"x" * 100)


@pytest.mark.rule("M1", "S5", "S7")
def test_expired_messages_return_with_an_untrusted_clock(opened):
    broker = Restarting(opened, bounds=Bounds(mailbox=Quota(messages=1)))
    broker.create()
    broker.send(ttl=DAY)
    broker.quotas.trusts = lambda now: False
    broker.advance(DAY)
    with pytest.raises(QuotaExceededError):
        broker.send()
    broker.advance(-DAY)
    assert broker.shown() == [0]


@pytest.mark.rule("F6", "F8", "K3")
def test_a_lease_keeps_a_message_for_one_worker(broker):
    broker.create(ack_wait=10 * SECOND)
    for _ in range(4):
        broker.send()
    assert broker.take(num_msgs=2) == [0, 1]
    broker.restart()
    assert broker.take(num_msgs=2) == [2, 3]
    assert broker.take() == []
    broker.ack(1, 2)
    assert broker.nack(0, 1) == 1
    assert broker.take() == [0]
    assert broker.extend(3, ack_wait=60 * SECOND) == 1
    broker.restart()
    broker.advance(10 * SECOND)
    found = broker.fetch()
    assert [(message.msg_id, message.deliveries) for message in found.messages] == [(0, 3)]
    broker.ack(0)
    found = broker.fetch()
    assert found.messages == []
    assert found.retry_at == broker.now + 50 * SECOND
    broker.advance(50 * SECOND)
    assert broker.take() == [3]
    assert broker.shown() == [0, 1, 2, 3]


@pytest.mark.rule("F6", "F7", "K4")
@pytest.mark.parametrize("how", ["deleted", "expired", "replaced", "acknowledged by another", "collected"])
def test_leases_of_messages_that_are_gone_take_no_room(broker, monkeypatch, how):
    monkeypatch.setattr("mediator.mailboxes.fetching.MAX_LEASED", 4)
    broker.create(retention=Retention.UNTIL_ACK if how == "acknowledged by another" else Retention.KEEP)
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
    broker.restart()
    broker.send()
    got = broker.take(ack_wait=HOUR)
    assert len(got) == (3 if how == "replaced" else 2)
    assert got[0] == 4
    assert broker.take(ack_wait=HOUR) == []


@pytest.mark.rule("F7")
def test_a_message_delivered_too_often_is_dead_until_redriven(broker):
    broker.create()
    broker.send(b"poison")
    broker.send(b"fine")
    for _ in range(2):
        assert broker.take(ack_wait=SECOND, max_deliver=2) == [0, 1]
        broker.restart()
        broker.advance(SECOND)
    broker.ack(1)
    assert broker.take(ack_wait=SECOND) == []
    assert broker.shown(dead_for="workers") == [0]
    assert broker.shown() == [0, 1]
    broker.restart()
    assert broker.shown(dead_for="workers") == [0]
    assert broker.redrive() == 1
    assert broker.take(ack_wait=SECOND) == [0]
    broker.advance(SECOND)
    assert broker.take(ack_wait=SECOND) == [0]
    broker.advance(SECOND)
    assert broker.take(ack_wait=SECOND) == []
    assert broker.drop() == 1
    assert broker.shown(dead_for="workers") == []


@pytest.mark.rule("A5")
def test_an_acknowledged_message_leaves_a_work_queue(broker):
    broker.create(retention=Retention.UNTIL_ACK)
    for lane in (Lane.NORMAL, Lane.CRITICAL, Lane.NORMAL):
        broker.send(b"12", lane=lane)
    assert broker.take("one", num_msgs=2) == [1, 0]
    broker.ack(0, group="one")
    broker.restart()
    assert broker.shown() == [2]
    assert broker.take("two") == [2]
    assert (broker.mailbox().next_id, broker.mailbox().messages, broker.mailbox().bytes) == (3, 1, 2)
    assert broker.take("two", ack_wait=SECOND, force_deliver=True) == [2]
    broker.ack(2, group="two")
    assert broker.shown() == []


@pytest.mark.rule("Q1", "Q2")
def test_query_and_delete(broker):
    broker.create()
    for number in range(6):
        broker.send(
            bytes([number]) * 10_000, tags=("even", "x") if number % 2 == 0 else ("x",), headers={"n": str(number)}
        )
        broker.advance(SECOND)
    assert broker.shown(tags=("x", "even"), limit=2) == [2, 4]
    assert broker.shown(since=broker.now - 2 * SECOND) == [4, 5]
    assert broker.shown(before_id=3, limit=2) == [1, 2]
    assert broker.shown(budget=30_000) == [4, 5]
    broker.delete(4)
    with pytest.raises(NoSuchMessageError):
        broker.delete(4)
    broker.restart()
    with pytest.raises(NoSuchMessageError):
        broker.delete(4)
    assert broker.shown() == [0, 1, 2, 3, 5]
    assert broker.take("g") == [0, 1, 2, 3, 5]
    assert [dict(message.headers) for message in broker.query(limit=1)] == [{"n": "5"}]


@pytest.mark.rule("N7")
def test_a_fetch_stops_at_its_budget_and_goes_on_from_there(broker):
    broker.create()
    for _ in range(5):
        broker.send(b"x" * 1000)
    taken = []
    while found := broker.take(budget=3000):
        assert len(found) in (1, 2)
        taken += found
        broker.ack(*found)
    assert taken == [0, 1, 2, 3, 4]
    assert broker.take("all", budget=1) == [0]


@pytest.mark.rule("A4")
def test_the_groups_of_a_mailbox_are_bounded(broker, monkeypatch):
    monkeypatch.setattr(fetching, "MAX_GROUPS", 3)
    broker.create()
    for number in range(3):
        broker.fetch(f"g{number}")
    broker.restart()
    with pytest.raises(TooManyGroupsError):
        broker.fetch("g3")
    broker.fetch("g2")


@pytest.mark.rule("A6")
def test_tenants_do_not_see_each_other(broker):
    broker.create("task", tenant="x")
    broker.create("task", tenant="y")
    broker.send(b"x", to="task", tenant="x")
    broker.restart()
    assert bodies(broker.fetch("g", "task", tenant="y", deliver=Deliver.EARLIEST)) == []
    assert bodies(broker.fetch("g", "task", tenant="x", deliver=Deliver.EARLIEST)) == [b"x"]
    broker.delete_mailbox("task", tenant="x")
    assert broker.mailbox("task", tenant="y") is not None


@pytest.mark.rule("A3", "M1")
def test_the_clean_up_leaves_just_what_lives(broker):
    broker.create("kept")
    for number in range(5):
        name = f"m{number}"
        broker.create(name, ttl=SECOND)
        for _ in range(7):
            broker.send(b"x", to=name, dedup_id=f"d{_}", recipient="r")
        broker.send(b"x", to=name, delay=10 * SECOND)
        assert broker.take("g", name, ack_wait=DAY // 2) == list(range(7))
    broker.send(b"kept", to="kept", dedup_id="d")
    broker.advance(SECOND)
    broker.restart()
    collected = broker.clean_up(limit=3)
    assert (collected.messages, collected.delayed, collected.dedup_ids) == (35, 5, 35)
    broker.restart()
    assert broker.clean_up().total == 0
    assert broker.next_due() is None
    with broker.store.reading() as tx:
        assert [mailbox.address for mailbox in tx.mailboxes.list("default", "", 100, broker.now)] == ["kept"]
        assert tx.mailboxes.retired(100) == []
        assert tx.mailboxes.usage("default").messages == 1
    assert broker.send(b"again", to="kept", dedup_id="d") == 0
