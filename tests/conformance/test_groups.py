"""The tables of groups and their leases."""

from contextlib import closing

import pytest

from mediator.errors import BadRequestError
from mediator.mailboxes import settling
from mediator.mailboxes.group import NO_LEASE, NO_LEASES, Checked, Lease, LeaseCount, LeaseCursor, Reply
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.settling import DeadSelection
from mediator.store.sqlite import SqliteStore
from tests.harness.broker import BOX, GROUP, HOUR, SECOND, TENANT, Broker
from tests.harness.samples import ALL, T0, add, get, ids, leases, put
from tests.harness.stores import undone

BEGIN = LeaseCursor(-1, -1, -1)


@pytest.mark.rule("A4")
def test_a_new_group_stands_before_the_first_message(store):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        assert tx.groups.find(mailbox, "g") is None
        added = tx.groups.add(mailbox, "g")
        assert (added.mailbox_id, added.name) == (mailbox.id, "g")
        assert added.settled == added.delivered == [-1, -1, -1, -1]
        assert added.replies == []
        assert added.max_deliver is None
        assert tx.groups.find(mailbox, "g") == added
        assert tx.groups.find(other, "g") is None
        assert tx.groups.add(other, "g").id != added.id
    with store.reading() as tx:
        assert tx.groups.find(get(tx), "g") == added
        assert tx.groups.find(get(tx), "G") is None


@pytest.mark.rule("A4", "K2")
def test_a_group_changes_only_when_it_is_saved(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        group = tx.groups.add(mailbox, "g")
        group.start_at(5)
        group.max_deliver = 3
        assert tx.groups.find(mailbox, "g").settled == [-1] * 4
        tx.groups.save(group)
        assert tx.groups.find(mailbox, "g") == group
        group.settled[0] = 99
        assert tx.groups.find(mailbox, "g").settled == [4] * 4
    with store.transaction() as tx:
        group = tx.groups.find(get(tx), "g")
        assert (group.settled, group.delivered, group.max_deliver) == ([4] * 4, [4] * 4, 3)
        for number in range(40):
            group.hand_out([(Lane.CRITICAL, 10 + 3 * number), (Lane.NORMAL, 11 + 3 * number), (Lane.LOW, 12)])
        group.settle([9, 8, 11, 6])
        tx.groups.save(group)
        assert tx.groups.find(get(tx), "g") == group
    with store.transaction() as tx:
        found = tx.groups.find(get(tx), "g")
        assert found == group
        assert len(found.replies) == 32
        assert found.replies[-1] == Reply({Lane.CRITICAL: (127, 127), Lane.NORMAL: (128, 128), Lane.LOW: (12, 12)})


@pytest.mark.rule("A4", "A8")
def test_a_position_outlives_a_restart(reopen, store):
    with store.transaction() as tx:
        group = tx.groups.add(add(tx), "g")
        group.start_at(2**40)
        group.hand_out([(Lane.CRITICAL, 2**40), (Lane.LOW, 2**40 + 1)])
        group.settle([2**40, -1, -1, -1])
        group.max_deliver = 1_000_000
        tx.groups.save(group)
    with reopen().reading() as tx:
        found = tx.groups.find(get(tx), "g")
        assert found.id == group.id
        assert found.settled == [2**40, 2**40 - 1, 2**40 - 1, 2**40 - 1]
        assert found.delivered == [2**40, 2**40 - 1, 2**40 - 1, 2**40 + 1]
        assert found.max_deliver == 1_000_000


@pytest.mark.rule("F9", "A8")
@pytest.mark.parametrize("checked", [None, Checked(3, None), Checked(3, 2**40)])
def test_that_a_group_is_shared_outlives_a_restart(reopen, store, checked):
    with store.transaction() as tx:
        group = tx.groups.add(add(tx), "g")
        group.shared, group.checked = True, checked
        tx.groups.save(group)
    with reopen().transaction() as tx:
        found = tx.groups.find(get(tx), "g")
        assert (found.shared, found.checked) == (True, checked)
        found.start_at(0)
        tx.groups.save(found)
        assert tx.groups.find(get(tx), "g").shared is False


NAMES = ["B", "a", "a%", "a'b", "ab", 'q"', "ä", "\uffff", "😀", "x" * 256]


@pytest.mark.rule("A4")
def test_groups_are_listed_by_name_and_counted(store):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        tx.groups.add(other, "z")
        numbers = {tx.groups.add(mailbox, name).id: name for name in reversed(NAMES)}
        assert tx.groups.count(mailbox) == len(NAMES)
    with store.reading() as tx:
        mailbox = get(tx)
        assert [group.name for group in tx.groups.of(mailbox, ALL)] == sorted(NAMES)
        assert [group.name for group in tx.groups.of(mailbox, 2)] == sorted(NAMES)[:2]
        assert tx.groups.count(mailbox) == len(NAMES)
        assert tx.groups.count(get(tx, "other")) == 1
        for name in NAMES:
            assert tx.groups.find(mailbox, name).name == name
        found = tx.groups.by_id([*numbers, max(numbers) + 1000])
        assert {no: group.name for no, group in found.items()} == numbers
        assert tx.groups.by_id([]) == {}
        assert next(iter(found.values())) == tx.groups.find(mailbox, next(iter(found.values())).name)


def test_groups_by_number_are_copies(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        no = tx.groups.add(mailbox, "g").id
        tx.groups.by_id({no})[no].settled[0] = 5
        assert tx.groups.find(mailbox, "g").settled == [-1] * 4


def test_clear_takes_groups_and_their_leases_in_slices(store):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        groups = [tx.groups.add(mailbox, f"g{number}") for number in range(4)]
        kept = tx.groups.add(other, "kept")
        for group in [*groups, kept]:
            tx.leases.put(group, [Lease(number, Lane.NORMAL, T0, 1) for number in range(3)])
        tx.mailboxes.retire(mailbox)
    slices = []
    while True:
        with store.transaction() as tx:
            [mailbox] = tx.mailboxes.retired(ALL)
            gone = tx.groups.clear(mailbox, 2)
            if gone == (0, 0):
                break
            slices.append(gone)
    assert all(sum(gone) <= 2 for gone in slices)
    assert [sum(each) for each in zip(*slices, strict=True)] == [4, 12]
    with store.reading() as tx:
        [mailbox] = tx.mailboxes.retired(ALL)
        assert tx.groups.count(mailbox) == 0
        assert all(leases(tx, group, 0, 1, 2) == {} for group in groups)
        assert len(leases(tx, kept, 0, 1, 2)) == 3
        assert tx.groups.count(get(tx, "other")) == 1


@pytest.fixture
def leased(store):
    """A group with a lease of each sort, and a neighbour that has the same ids."""
    with store.transaction() as tx:
        mailbox = add(tx)
        group, other = tx.groups.add(mailbox, "g"), tx.groups.add(mailbox, "other")
        tx.leases.put(other, [Lease(number, Lane.NORMAL, T0 + 1, 1) for number in range(10)])
        tx.leases.put(
            group,
            [
                Lease(0, Lane.LOW, T0 + 10, 1),
                Lease(1, Lane.CRITICAL, T0 + 20, 2),
                Lease(2, Lane.LOW, T0 + 5, 3),
                Lease(3, Lane.URGENT, NO_LEASE, 4),
                Lease(4, Lane.CRITICAL, T0 + 10, 5),
                Lease(5, Lane.NORMAL, T0 + 3, 6, dead=True),
                Lease(6, Lane.URGENT, NO_LEASE, 7),
                Lease(8, Lane.NORMAL, T0 + 30, 8, dead=True),
            ],
        )
    return group


@pytest.mark.rule("F6")
def test_leases_are_found_as_they_were_put(opened, leased):
    store = opened.reopen()
    with store.transaction() as tx:
        found = tx.leases.get(leased, [5, 0, 3, 77, 0, 7])
        assert sorted(ids(found)) == [0, 3, 5]
        assert leases(tx, leased, *range(10))[0] == Lease(0, Lane.LOW, T0 + 10, 1)
        assert leases(tx, leased, 5)[5] == Lease(5, Lane.NORMAL, T0 + 3, 6, dead=True)
        assert all(any(lease.lane is lane for lane in LANES) for lease in found)
        assert all(isinstance(lease.dead, bool) for lease in found)
        assert tx.leases.get(leased, []) == []
        assert sorted(ids(tx.leases.get(leased, range(10_000)))) == [0, 1, 2, 3, 4, 5, 6, 8]


@pytest.mark.rule("F6")
def test_leases_are_changed_and_ended(store, leased):
    with store.transaction() as tx:
        lease = leases(tx, leased, 2)[2]
        lease.until, lease.deliveries = T0 + 99, 4
        assert leases(tx, leased, 2)[2].until == T0 + 5
        tx.leases.put(leased, [lease, Lease(9, Lane.LOW, T0 + 1, 1)])
        tx.leases.put(leased, [])
        tx.leases.remove(leased, [0, 0, 5, 1000])
        tx.leases.remove(leased, [])
        assert sorted(leases(tx, leased, *range(10))) == [1, 2, 3, 4, 6, 8, 9]
    with store.reading() as tx:
        found = leases(tx, leased, *range(10))
        assert sorted(found) == [1, 2, 3, 4, 6, 8, 9]
        assert found[2] == Lease(2, Lane.LOW, T0 + 99, 4)
        other = tx.groups.find(get(tx), "other")
        assert sorted(leases(tx, other, *range(10))) == list(range(10))


@pytest.mark.rule("F6", "F7")
def test_due_leases_come_by_lane_and_id_without_the_dead(store, leased):
    with store.reading() as tx:
        assert ids(tx.leases.due(leased, T0 + 10, ALL)) == [4, 3, 6, 0, 2]
        assert ids(tx.leases.due(leased, T0 + 10, 3)) == [4, 3, 6]
        assert ids(tx.leases.due(leased, T0 + 9, ALL)) == [3, 6, 2]
        assert ids(tx.leases.due(leased, T0 + 20, ALL)) == [1, 4, 3, 6, 0, 2]
        assert ids(tx.leases.due(leased, T0, ALL)) == [3, 6]


@pytest.mark.rule("K2")
def test_loose_leases_are_those_that_were_given_without_one(store, leased):
    with store.transaction() as tx:
        assert sorted(tx.leases.without_lease(leased, Lane.URGENT, 6)) == [3, 6]
        assert tx.leases.without_lease(leased, Lane.URGENT, 5) == [3]
        assert tx.leases.without_lease(leased, Lane.URGENT, 2) == []
        assert tx.leases.without_lease(leased, Lane.LOW, 10) == []
        tx.leases.put(leased, [Lease(3, Lane.URGENT, NO_LEASE, 4, dead=True)])
        assert tx.leases.without_lease(leased, Lane.URGENT, 6) == [6]


@pytest.mark.rule("F7")
def test_dead_leases_come_in_order_of_id(store, leased):
    with store.transaction() as tx:
        assert ids(tx.leases.dead(leased, -1, ALL)) == [5, 8]
        assert ids(tx.leases.dead(leased, 5, ALL)) == [8]
        assert ids(tx.leases.dead(leased, -1, 1)) == [5]
        assert tx.leases.dead(leased, 8, ALL) == []
        tx.leases.put(leased, [Lease(5, Lane.NORMAL, T0, 0, dead=False), Lease(0, Lane.LOW, T0, 1, dead=True)])
        assert ids(tx.leases.dead(leased, -1, ALL)) == [0, 8]


@pytest.mark.rule("F6")
def test_living_leases_are_counted(store, leased):
    with store.transaction() as tx:
        assert tx.leases.count(leased, T0) == LeaseCount(4, due=True)
        assert tx.leases.count(leased, T0 + 10) == LeaseCount(1, due=True)
        assert tx.leases.count(leased, T0 + 20) == LeaseCount(0, due=True)
        tx.leases.put(leased, [Lease(0, Lane.LOW, T0 + 10, 1, dead=True)])
        tx.leases.remove(leased, [1, 3, 5, 6])
        assert tx.leases.count(leased, T0) == LeaseCount(2, due=False)
        assert tx.leases.count(leased, T0 + 5) == LeaseCount(1, due=True)
        tx.leases.remove(leased, [2, 4])
        assert tx.leases.count(leased, T0 + 50) == NO_LEASES, "the dead are left"


@pytest.mark.rule("F6")
@pytest.mark.parametrize("lane", LANES)
def test_delayed_leases_do_not_run_and_fall_due(opened, leased, lane):
    store = opened.reopen()
    with store.transaction() as tx:
        tx.leases.put(leased, [Lease(20, lane, T0 + 2, 1, delayed=True), Lease(21, lane, T0 + 40, 1, delayed=True)])
    with store.transaction() as tx:
        assert leases(tx, leased, 20)[20] == Lease(20, lane, T0 + 2, 1, delayed=True)
        tx.leases.remove(leased, [3, 6])
        assert tx.leases.count(leased, T0) == LeaseCount(4, due=False)
        assert tx.leases.count(leased, T0 + 2) == LeaseCount(4, due=True)
        assert ids(tx.leases.due(leased, T0 + 2, ALL)) == [20]
        assert ids(tx.leases.due(leased, T0 + 2, ALL, [lane])) == [20]
        assert ids(tx.leases.due(leased, T0 + 2, ALL, [other for other in LANES if other is not lane])) == []
        assert tx.leases.next_end(leased, T0) == tx.leases.next_end(leased, T0, delayed=[True]) == T0 + 2
        assert tx.leases.next_end(leased, T0, delayed=[False]) == T0 + 5
        assert tx.leases.next_end(leased, T0 + 20) == T0 + 40
        tx.leases.put(leased, [Lease(20, lane, NO_LEASE, 1), Lease(21, lane, T0 + 40, 2)])
        assert tx.leases.without_lease(leased, lane, 20) == [20]
        assert tx.leases.count(leased, T0) == LeaseCount(5, due=True), "leased anew, or given without a lease"


@pytest.mark.rule("F3", "F6")
def test_of_many_due_leases_the_first_to_end_come_first(store, leased):
    with store.transaction() as tx:
        tx.leases.clear(leased)
        slow = [Lease(number, Lane.NORMAL, T0 + 20 - number, 1, delayed=True) for number in range(10)]
        tx.leases.put(leased, [*slow, *(Lease(number, Lane.LOW, T0, 1) for number in range(10, 14))])
        assert ids(tx.leases.due(leased, T0 + 30, 3)) == [7, 8, 9]
        assert ids(tx.leases.due(leased, T0 + 30, 3, [Lane.LOW])) == [10, 11, 12]
        assert ids(tx.leases.due(leased, T0 + 30, ALL)) == list(range(14))
        tx.leases.put(leased, [Lease(99, Lane.CRITICAL, T0 + 29, 1, delayed=True)])
        assert ids(tx.leases.due(leased, T0 + 30, 1)) == [99]


@pytest.mark.rule("F6")
def test_what_waits_for_its_delay_is_counted(store, leased):
    def count(tx, exact_above=ALL):
        return tx.leases.count_delayed(get(tx), leased, exact_above, T0)

    with store.transaction() as tx:
        assert count(tx) == 0
        tx.leases.put(leased, [Lease(number, Lane.NORMAL, T0 + 9, 1, delayed=True) for number in range(20, 25)])
        assert count(tx) == count(tx, 0) == 5
    with undone(store) as tx:
        tx.leases.put(leased, [Lease(30, Lane.NORMAL, T0 + 9, 1, delayed=True)])
        assert count(tx) == 6
    with store.transaction() as tx:
        assert count(tx) == 5
        tx.leases.remove(leased, [20, 21])
        tx.leases.put(leased, [Lease(22, Lane.NORMAL, T0 + 9, 2), Lease(23, Lane.NORMAL, T0 + 9, 2, dead=True)])
        assert count(tx, 0) == 1, "exact where more may not fit"


@pytest.mark.rule("F6", "K4")
def test_delayed_leases_of_gone_messages_are_not_counted(store, leased):
    with store.transaction() as tx:
        mailbox = get(tx)
        kept = [put(tx, mailbox).msg_id for _ in range(3)]
        tx.leases.clear(leased)
        tx.leases.put(leased, [Lease(i, Lane.NORMAL, T0 + 9, 1, delayed=True) for i in (*kept, 70, 71)])
        assert tx.leases.living(mailbox, leased, T0, delayed=True).number == 3
        assert tx.leases.living(mailbox, leased, T0).number == 0
        assert tx.leases.count_delayed(mailbox, leased, 3, T0) == 3
        assert sorted(leases(tx, leased, *kept, 70, 71)) == kept


@pytest.mark.rule("F2", "F6")
def test_the_next_end_is_that_of_a_running_lease(store, leased):
    with store.transaction() as tx:
        for now, end in ((T0, 5), (T0 + 4, 5), (T0 + 5, 10), (T0 + 10, 20), (T0 + 19, 20)):
            assert tx.leases.next_end(leased, now) == T0 + end
        assert tx.leases.next_end(leased, T0 + 20) is None


@pytest.mark.rule("F7")
def test_ended_leases_of_all_groups_come_in_order_of_their_end(store, leased):
    with store.transaction() as tx:
        other = tx.groups.find(get(tx), "other")
        tx.leases.remove(other, range(2, 10))
        first, second = sorted([leased.id, other.id])
        tx.leases.put(other, [Lease(0, Lane.NORMAL, T0 + 10, 1), Lease(1, Lane.NORMAL, T0 + 11, 1)])
        wanted = [LeaseCursor(NO_LEASE, leased.id, 3), LeaseCursor(NO_LEASE, leased.id, 6)]
        wanted += [LeaseCursor(T0 + 3, leased.id, 5), LeaseCursor(T0 + 5, leased.id, 2)]  # the first of them is dead
        by_group = {leased.id: [0, 4], other.id: [0]}
        wanted += [LeaseCursor(T0 + 10, no, msg_id) for no in (first, second) for msg_id in by_group[no]]
        assert tx.leases.ended(BEGIN, T0 + 10, ALL) == wanted
        assert tx.leases.ended(BEGIN, T0 + 10, 2) == wanted[:2]
        for number, place in enumerate(wanted):
            assert tx.leases.ended(place, T0 + 10, ALL) == wanted[number + 1 :]
        assert tx.leases.ended(wanted[1], T0 + 2, ALL) == []


@pytest.mark.rule("F4")
def test_clear_ends_all_leases_of_one_group(store, leased):
    with store.transaction() as tx:
        tx.leases.clear(leased)
        tx.leases.clear(leased)
        assert tx.leases.get(leased, range(10)) == []
        assert tx.leases.count(leased, T0) == NO_LEASES
        assert tx.leases.dead(leased, -1, ALL) == []
    with store.reading() as tx:
        assert tx.leases.count(leased, T0) == NO_LEASES
        assert tx.leases.count(tx.groups.find(get(tx), "other"), T0) == LeaseCount(10, due=False)
        assert tx.groups.find(get(tx), "g") is not None


@pytest.mark.rule("F6")
def test_as_many_leases_as_a_group_may_have_are_kept_at_once(store):
    with store.transaction() as tx:
        group = tx.groups.add(add(tx), "g")
        tx.leases.put(group, [Lease(number, Lane.NORMAL, T0, 1) for number in range(10_000)])
        assert tx.leases.count(group, T0 - 1) == LeaseCount(10_000, due=False)
    with store.transaction() as tx:
        assert len(tx.leases.get(group, range(10_000))) == 10_000
        tx.leases.remove(group, range(1_000))
        assert ids(tx.leases.due(group, T0, ALL)) == list(range(1_000, 10_000))


@pytest.mark.rule("K2", "A8")
def test_cached_changes_are_seen_at_once_and_rolled_back(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        group = tx.groups.add(mailbox, "g")
        group.delivered = [1, 2, 3, 4]
        tx.groups.remember(group)
    with store.transaction() as tx:
        found = tx.groups.find(get(tx), "g")
        assert found.delivered == [1, 2, 3, 4]
    with undone(store) as tx:
        found.delivered = [9, 9, 9, 9]
        found.settled = [5, 5, 5, 5]
        tx.groups.save(found)
        found.delivered = [10, 10, 10, 10]
        tx.groups.remember(found)
        assert tx.groups.find(get(tx), "g").delivered == [10, 10, 10, 10]
    with store.reading() as tx:
        found = tx.groups.find(get(tx), "g")
        assert (found.settled, found.delivered) == ([-1] * 4, [1, 2, 3, 4])
        assert tx.groups.by_id([found.id])[found.id].delivered == [1, 2, 3, 4]


@pytest.mark.rule("K2")
def test_what_was_only_remembered_is_written_by_an_orderly_end(store, reopen):
    with store.transaction() as tx:
        group = tx.groups.add(add(tx), "g")
    with store.transaction() as tx:
        group.delivered = [1, 2, 3, 4]
        tx.groups.remember(group)
    store = reopen()
    with store.reading() as tx:
        assert tx.groups.find(get(tx), "g").delivered == [1, 2, 3, 4]


@pytest.mark.rule("K2")
def test_more_positions_than_are_remembered_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("mediator.store.sqlite.UNFLUSHED_POSITIONS", 2)
    store = SqliteStore(tmp_path / "m.db")
    with store.transaction() as tx:
        mailbox = add(tx)
        groups = [tx.groups.add(mailbox, f"g{number}") for number in range(5)]
        for group in groups:
            group.delivered = [group.id] * 4
            tx.groups.remember(group)
    with store.transaction() as tx:
        assert [tx.groups.find(get(tx), g.name).delivered for g in groups] == [[g.id] * 4 for g in groups]
    store.close()


@pytest.mark.rule("F6", "A8")
def test_leases_whose_end_is_rolled_back_are_there_again(store, leased):
    with undone(store) as tx:
        tx.leases.clear(leased)
        assert tx.leases.count(leased, T0) == NO_LEASES
    for _ in range(2):
        with store.transaction() as tx:
            assert sorted(leases(tx, leased, *range(10))) == [0, 1, 2, 3, 4, 5, 6, 8]
            assert tx.leases.without_lease(leased, Lane.URGENT, 9) == [3, 6]
            assert tx.leases.count(leased, T0).running


@pytest.mark.rule("F6")
def test_a_group_with_dead_leases_alone_has_leases(store):
    with store.transaction() as tx:
        group = tx.groups.add(add(tx), "g")
        tx.leases.put(group, [Lease(5, Lane.NORMAL, T0, 6, dead=True)])
    for _ in range(2):
        with store.transaction() as tx:
            assert tx.leases.count(group, T0 + 1) == NO_LEASES
            assert ids(tx.leases.get(group, [5])) == [5]


@pytest.mark.rule("F6")
def test_a_group_without_leases_is_looked_at_once(tmp_path):
    with closing(SqliteStore(tmp_path / "m.db")) as store:
        with store.transaction() as tx:
            group = tx.groups.add(add(tx), "g")
            asked: list[str] = []
            tx.session.dialect.connection.set_trace_callback(asked.append)
        for _ in range(3):
            with store.transaction() as tx:
                assert tx.leases.count(group, T0) == NO_LEASES
                assert tx.leases.get(group, [1, 2]) == tx.leases.without_lease(group, Lane.NORMAL, 9) == []
                tx.leases.put(group, [])
        assert len([sql for sql in asked if "lease" in sql]) == 1
        with store.transaction() as tx:
            tx.leases.put(group, [Lease(1, Lane.NORMAL, T0 + 1, 1)])
        with store.transaction() as tx:
            assert ids(tx.leases.get(group, [1, 2])) == [1]
            assert tx.leases.count(group, T0) == LeaseCount(1, due=False)


@pytest.mark.rule("F6")
def test_more_groups_without_leases_than_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr("mediator.store.sqlite.UNLEASED_GROUPS", 2)
    with closing(SqliteStore(tmp_path / "m.db")) as store:
        for number in range(5):
            with store.transaction() as tx:
                group = tx.groups.add(add(tx, f"m{number}"), "g")
                assert len(tx.session.unleased) <= 2
                assert tx.leases.count(group, T0) == NO_LEASES


def test_a_dropped_group_is_forgotten_and_others_stay(store, monkeypatch):
    """In slices, with what is dead for it; under its name a new one may begin."""
    monkeypatch.setattr(settling, "DEAD_SLICE", 2)
    broker = Broker(store)
    broker.create()
    for _ in range(5):
        broker.send(b"x")
    assert broker.take(ack_wait=SECOND, max_deliver=1, group="old", num_msgs=5) == [0, 1, 2, 3, 4]
    assert broker.take(group="other", num_msgs=2) == [0, 1]

    def drop(name):
        return broker.run(lambda tx: settling.drop_group(tx, TENANT, BOX, name, broker.now))

    with pytest.raises(BadRequestError, match="its members hold messages"):
        drop("old")
    broker.advance(SECOND)
    assert [drop("old") for _ in range(3)] == [False, False, True]
    with pytest.raises(BadRequestError, match="has no such group"):
        drop("old")
    assert broker.mailbox().messages == 5
    assert broker.take(group="other", num_msgs=3) == [0, 1, 2]
    assert broker.take(group="old", num_msgs=5) == [0, 1, 2, 3, 4]


@pytest.mark.rule("A4")
def test_a_group_being_dropped_goes_whatever_a_member_does(store, monkeypatch):
    """Without the leases that are gone already, it would go on and never get their messages again."""
    monkeypatch.setattr(settling, "DEAD_SLICE", 2)
    broker = Broker(store)
    broker.create()
    for _ in range(6):
        broker.send(b"x")
    assert broker.take(ack_wait=SECOND, group="old", num_msgs=5) == [0, 1, 2, 3, 4]
    broker.advance(SECOND)

    def drop(*, begun):
        return broker.run(lambda tx: settling.drop_group(tx, TENANT, BOX, "old", broker.now, begun=begun))

    assert not drop(begun=False)
    assert broker.take(ack_wait=HOUR, group="old", num_msgs=1)
    while not drop(begun=True):
        pass
    assert drop(begun=True)
    assert broker.take(group="old", num_msgs=10) == [0, 1, 2, 3, 4, 5]


@pytest.mark.rule("F7")
def test_dead_mail_is_found_behind_leases_without_messages(store, monkeypatch):
    monkeypatch.setattr(settling, "DEAD_SLICE", 2)
    broker = Broker(store)
    broker.create()
    for _ in range(5):
        broker.send(b"x")
    assert broker.take(ack_wait=SECOND, max_deliver=1, num_msgs=5) == [0, 1, 2, 3, 4]
    broker.advance(SECOND)
    dead = DeadSelection(TENANT, BOX, GROUP)
    assert broker.run(lambda tx: len(settling.find_dead(tx, dead, broker.now)[2])) == 2
    for msg_id in (0, 1, 2):
        broker.delete(msg_id)
    counts = [broker.run(lambda tx: settling.drop(tx, dead, broker.now)) for _ in range(3)]
    assert (sum(counts), counts[-1]) == (2, 0)
