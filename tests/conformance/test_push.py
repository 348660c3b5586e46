"""What pushing keeps, on every store: groups of a name space of their own, and how far mail was confirmed."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from mediator.errors import NoSuchMailboxError, TooManyGroupsError
from mediator.mailboxes import collecting, pushing
from mediator.mailboxes.group import MAX_GROUPS, Lease
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.pushing import QueueGroupRequest
from tests.harness.broker import BOX, DAY, Broker
from tests.harness.samples import ALL, T0, TENANT, add, cut, get, ids, leases, put
from tests.harness.stores import undone
from tests.unit.test_pushing_model import Pushing

PLACE = TENANT, BOX
KEEP = 7 * DAY


@pytest.mark.rule("A4", "E7")
def test_a_push_group_is_not_a_fetch_group(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        fetching, pushed = tx.groups.add(mailbox, "g"), tx.groups.add(mailbox, "g", push=True)
        assert fetching.id != pushed.id
        pushed.start_at(3)
        tx.groups.save(pushed)
        tx.groups.see(pushed, T0)
        tx.leases.put(pushed, [Lease(1, Lane.NORMAL, T0, 1)])
    with store.transaction() as tx:
        assert tx.groups.find(get(tx), "g") == fetching
        assert tx.groups.find(get(tx), "g", push=True) == pushed
        assert (pushed.push, pushed.seen_at, pushed.settled) == (True, T0, [2] * 4)
        assert [(group.name, group.push) for group in tx.groups.of(get(tx), ALL)] == [("g", False), ("g", True)]
        assert tx.groups.count(get(tx)) == 2
        assert tx.groups.by_id([pushed.id]) == {pushed.id: pushed}
        assert leases(tx, fetching, 1) == {}
        tx.groups.drop(pushed)
    with store.reading() as tx:
        assert tx.groups.find(get(tx), "g", push=True) is None
        assert tx.groups.find(get(tx), "g") == fetching
        assert leases(tx, pushed, 1) == {}


@pytest.mark.rule("E7")
def test_groups_without_members_are_found_by_their_age(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        tx.groups.add(mailbox, "fetch")
        for number in range(4):
            tx.groups.see(tx.groups.add(mailbox, f"g{number}", push=True), T0 + 10 - number)
        # A saved position says nothing of members.
        tx.groups.save(tx.groups.find(mailbox, "g3", push=True))
    with store.reading() as tx:
        assert [group.name for group in tx.groups.unseen(T0 + 10, ALL)] == ["g3", "g2", "g1"]
        assert [group.name for group in tx.groups.unseen(T0 + 10, 2)] == ["g3", "g2"]
        assert tx.groups.unseen(T0 + 7, ALL) == []


@pytest.mark.rule("E4")
def test_unread_is_what_stands_behind_the_marks(store):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        for number in range(8):
            put(tx, mailbox, lane=LANES[number % 4], expire_at=T0 + 10 if number == 7 else None)
        put(tx, other)
        assert tx.pushed.unread(mailbox, T0) == 8
        tx.pushed.raise_to(mailbox, [0, -1, 6, -1])
        assert tx.pushed.unread(mailbox, T0) == 5
    with store.transaction() as tx:
        tx.pushed.raise_to(get(tx), [-1, 1, 2, -1])
        assert tx.pushed.unread(get(tx), T0) == 4, "a mark never goes back"
        assert tx.pushed.unread(get(tx), T0 + 10) == 3
        cut(tx, get(tx), 5)
        assert tx.pushed.unread(get(tx), T0) == 3
        assert tx.pushed.unread(get(tx, "other"), T0) == 1


@pytest.mark.rule("E4", "A3")
def test_marks_go_with_their_mailbox_and_outlive_a_restart(reopen, store):
    with store.transaction() as tx:
        mailbox = add(tx)
        put(tx, mailbox)
        tx.pushed.raise_to(mailbox, [-1, -1, 0, -1])
    store = reopen()
    with store.transaction() as tx:
        mailbox = get(tx)
        assert tx.pushed.unread(mailbox, T0) == 0
        cut(tx, mailbox, 0)
        tx.mailboxes.retire(mailbox)
    with store.transaction() as tx:
        [retired] = tx.mailboxes.retired(ALL)
        tx.mailboxes.drop(retired)
        put(tx, add(tx))
        assert tx.pushed.unread(get(tx), T0) == 1


@pytest.mark.rule("E4", "A8")
def test_what_failed_is_taken_back(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        put(tx, mailbox)
        group = tx.groups.add(mailbox, "g", push=True)
        tx.groups.see(group, T0)

    with undone(store) as tx:
        tx.pushed.raise_to(get(tx), [5] * 4)
        tx.groups.see(tx.groups.find(get(tx), "g", push=True), T0 + 5)
        tx.groups.drop(tx.groups.find(get(tx), "g", push=True))
    with store.reading() as tx:
        assert tx.pushed.unread(get(tx), T0) == 1
        assert tx.groups.find(get(tx), "g", push=True) == group


class House(Broker):
    """A broker whose mailbox has a queue."""

    def join(self, name="workers"):
        return self.run(lambda tx: pushing.join_queue_group(tx, PLACE, name, KEEP, self.now))

    def turn(self, no, **told):
        request = QueueGroupRequest(PLACE, no, "workers", **told)
        return ids(self.run(lambda tx: pushing.serve_queue_group(tx, self.bounds, request, self.now)).messages)

    def all(self, no, **told):
        return self.turn(no, lanes=LANES, room=100, budget=ALL, **told)


@pytest.fixture
def house(store):
    house = House(store)
    house.create()
    return house


@pytest.mark.rule("E7", "A5")
def test_a_queue_takes_settles_and_starts_anew(house):
    for lane in (Lane.LOW, Lane.NORMAL, Lane.CRITICAL):
        house.send(lane=lane)
    no = house.join()
    assert house.all(no) == [2, 1, 0]
    assert house.all(no, confirmed=[(Lane.CRITICAL, 2)]) == []
    house.advance(pushing.LEASE)
    assert house.all(no) == [1, 0]
    assert house.all(no, confirmed=[(Lane.NORMAL, 1), (Lane.LOW, 0)]) == []
    house.advance(KEEP - pushing.LEASE - 1)
    house.join()
    assert house.all(no) == []
    house.advance(KEEP)
    house.join()
    assert house.all(no) == [2, 1, 0]
    assert house.shown() == [0, 1, 2]


@pytest.mark.rule("E7")
def test_a_group_is_listed_while_it_has_members(house):
    no = house.join()
    for _ in range(3):
        house.advance(pushing.SEEN_EVERY)
        house.turn(no, lanes=LANES, room=1, budget=1)
    seen = house.now

    def forget():
        return house.run(lambda tx: collecting.forget_unused_groups(tx, KEEP, house.now, 100)).groups

    house.now = seen + KEEP
    assert forget() == 0
    house.now += 1
    [finding] = house.run(lambda tx: collecting.plan_unused_groups(tx, KEEP, house.now, 5))
    assert (finding.count, [example.expired_at for example in finding.examples]) == (1, [seen + KEEP])
    assert house.run(lambda tx: collecting.forget_unused_groups(tx, 0, house.now, 100)).groups == 0
    assert forget() == 1
    assert house.run(lambda tx: collecting.plan_unused_groups(tx, KEEP, house.now, 5)) == []
    with pytest.raises(NoSuchMailboxError):
        house.turn(no, lanes=LANES, room=1, budget=1)


@pytest.mark.rule("A3", "N10")
def test_nothing_is_given_of_a_mailbox_that_ended(house):
    no = house.join()
    house.delete_mailbox()
    with pytest.raises(NoSuchMailboxError):
        house.join()
    house.create()
    with pytest.raises(NoSuchMailboxError):
        house.turn(no, lanes=LANES, room=1, budget=1)


@pytest.mark.rule("A4")
def test_queues_count_among_the_groups_of_a_mailbox(store):
    with store.transaction() as tx:
        mailbox = add(tx, BOX)
        for number in range(MAX_GROUPS):
            tx.groups.add(mailbox, f"g{number}", push=number % 2 == 0)
    house = House(store)
    with pytest.raises(TooManyGroupsError):
        house.join()


@pytest.mark.rule("A8", "E6", "E7", "E8")
def test_pushing_holds_on_every_store(new_store):
    few = settings(max_examples=8, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(lambda: Pushing(new_store().store), settings=few)


@pytest.mark.rule("E6", "A5")
@pytest.mark.parametrize(("limit", "budget"), [(100, ALL), (2, ALL), (1, ALL), (100, 2)])
def test_a_replay_passes_over_rows_that_cannot_be_read(store, limit, budget):
    """It gives all others once, says which it left out, and leaves those where they are."""
    with store.transaction() as tx:
        mailbox = add(tx)
        for number in range(10):
            put(tx, mailbox, lane=(Lane.NORMAL, Lane.LOW)[number // 7], headers={"a": "b"})
        damage(tx, mailbox, 0, 1, 2, 4, 6, 9)
    with store.reading() as tx:
        no, cursor, found = pushing.open_cursor(tx, (TENANT, "a"), LANES, limit, budget, T0)
        got, damaged = list(found.messages), list(found.damaged)
        while not found.complete:
            cursor.marks = found.marks
            found = pushing.read_next(tx, (TENANT, "a"), no, cursor, limit, budget, T0)
            assert len(found.messages) <= limit
            got += found.messages
            damaged += found.damaged
        assert [message.msg_id for message in got] == [3, 5, 7, 8]
        assert sorted(set(damaged)) == [0, 1, 2, 4, 6, 9]
        assert get(tx).messages == 10


@pytest.mark.rule("A5", "M1")
def test_rows_that_cannot_be_read_are_removed_as_any_others(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        for expire_at in (T0 + 10, T0 + 10, None):
            put(tx, mailbox, expire_at=expire_at, headers={"a": "b"}, dedup_id="d")
        damage(tx, mailbox, 0, 1, 2)
        assert [one.ref.msg_id for one in tx.messages.expired(T0 + 10, ALL)] == [0, 1]
        assert sorted(tx.messages.refs(mailbox, [0, 1, 2], T0)) == [0, 1, 2]
        cut(tx, mailbox, 0, 1, 2)
    with store.reading() as tx:
        assert get(tx).messages == 0


def damage(tx, mailbox, *msg_ids):
    """Make details of messages unreadable."""
    tx.session.flush()
    for msg_id in msg_ids:
        sql = "UPDATE message SET extra = ? WHERE mailbox_no = ? AND msg_id = ? RETURNING msg_id"
        assert list(tx.session.dialect.execute(sql, ((b"{", b'{"h":[]}')[msg_id % 2], mailbox.id, msg_id)))
