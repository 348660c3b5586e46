"""The tables of delayed messages, dedup ids and the outbox."""

import sys

import pytest

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, OutboxKey, Usage
from tests.harness.samples import ALL, T0, add, everything, get, put, waiting
from tests.harness.stores import undone


@pytest.mark.rule("S4")
def test_a_delayed_message_is_kept_whole_and_seen_nowhere(store, reopen):
    with store.transaction() as tx:
        mailbox = add(tx)
        delayed = waiting(
            mailbox,
            T0 + 100,
            b"\x00\xff",
            archive=True,
            lane=Lane.LOW,
            size=40,
            key="k'",
            tags=("a", "%"),
            headers={"h": "v"},
            expire_at=T0 + 1000,
            dedup_id="d",
            reply_to="r.t",
            recipient="did",
        )
        tx.delays.add(delayed)
        assert everything(tx, mailbox) == []
        assert (mailbox.next_id, mailbox.messages, mailbox.bytes) == (0, 0, 0)
        assert tx.messages.recipient_usage(mailbox, "did") == Usage(0, 0)
    store = reopen()
    with store.reading() as tx:
        [kept] = tx.delays.due(T0 + 100, ALL, ALL)
        assert [kept] == tx.delays.of(get(tx), ALL)
        assert (kept.mailbox_id, kept.due_at, kept.archive) == (get(tx).id, T0 + 100, True)
        assert kept.message == delayed.message
        assert kept.message.msg_id == HIDDEN_ID
        assert kept.message.lane is Lane.LOW


@pytest.mark.rule("S4")
def test_due_messages_come_by_time_and_then_in_order_of_arrival(store, reopen):
    with store.transaction() as tx:
        a, b = add(tx, "a"), add(tx, "b")
        for number, (mailbox, due_at) in enumerate([(a, 30), (b, 20), (a, 20), (b, 10), (a, 20), (a, 31)]):
            tx.delays.add(waiting(mailbox, T0 + due_at, bytes([number])))
    store = reopen()
    with store.transaction() as tx:
        tx.delays.add(waiting(get(tx, "b"), T0 + 20, bytes([6])))

        def due(now, limit=ALL):
            return [delayed.message.payload[0] for delayed in tx.delays.due(now, limit, ALL)]

        assert due(T0 + 30) == [3, 1, 2, 4, 6, 0]
        assert due(T0 + 30, 3) == [3, 1, 2]
        assert due(T0 + 9) == []
        assert due(T0 + 10) == [3]
        assert tx.delays.next_due() == T0 + 10
        found = tx.delays.due(T0 + 30, ALL, ALL)
        assert len({delayed.seq for delayed in found}) == 6
        tx.delays.remove(found[:4])
        assert due(T0 + 31) == [6, 0, 5]
        assert tx.delays.next_due() == T0 + 20
        tx.delays.remove([])
        tx.delays.remove(tx.delays.due(T0 + 31, ALL, ALL))
        assert tx.delays.next_due() is None
    with store.reading() as tx:
        assert tx.delays.next_due() is None
        assert tx.delays.due(T0 + 31, ALL, ALL) == []


@pytest.mark.rule("S4")
def test_due_mail_stops_behind_the_budget_with_one_at_least(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        for number, size in enumerate((500, 20, 20, 900, 1)):
            tx.delays.add(waiting(mailbox, T0 + number, bytes([number]), size=size))

        def due(limit, budget):
            return [delayed.message.payload[0] for delayed in tx.delays.due(T0 + 4, limit, budget)]

        assert due(ALL, 1) == [0]
        assert due(ALL, 500) == [0]
        assert due(ALL, 501) == [0, 1]
        assert due(ALL, 541) == [0, 1, 2, 3]
        assert due(2, 541) == [0, 1]
        assert due(ALL, ALL) == [0, 1, 2, 3, 4]


@pytest.mark.rule("M1", "S4")
def test_what_waits_for_a_mailbox_is_cleared_in_slices(store, reopen):
    with store.transaction() as tx:
        a, b = add(tx, "a"), add(tx, "b")
        for number in range(5):
            tx.delays.add(waiting(a, T0 + number, archive=number % 2 == 0))
        tx.delays.add(waiting(b, T0, archive=True))
        assert tx.outbox.backlog() == 4
        assert tx.delays.clear(a, 3) == 3
        assert tx.delays.usage(a).messages == 2
    store = reopen()
    with store.transaction() as tx:
        a, b = get(tx, "a"), get(tx, "b")
        assert tx.delays.clear(a, ALL) == 2
        assert tx.delays.clear(a, ALL) == 0
        assert (tx.delays.usage(a).messages, tx.delays.usage(b).messages) == (0, 1)
        assert tx.outbox.backlog() == 1


@pytest.mark.rule("S4", "S7")
def test_what_waits_is_counted_by_mailbox(store):
    with store.transaction() as tx:
        a, b = add(tx, "a"), add(tx, "b")
        for mailbox, size in ((a, 1), (a, 20), (b, 300), (a, 4000)):
            tx.delays.add(waiting(mailbox, T0, size=size))
        assert tx.delays.usage(a) == Usage(3, 4021)
        tx.delays.remove([delayed for delayed in tx.delays.of(a, ALL) if delayed.message.size == 20])
    with store.reading() as tx:
        a = get(tx, "a")
        assert tx.delays.usage(a) == Usage(2, 4001)
        assert tx.delays.usage(get(tx, "b")) == Usage(1, 300)
        assert tx.mailboxes.usage("default") == Usage(3, 4301)
        assert sorted(delayed.message.size for delayed in tx.delays.of(a, ALL)) == [1, 4000]
        assert len(tx.delays.of(a, 1)) == 1


def test_what_is_due_soonest_is_listed_without_payloads(store):
    with store.transaction() as tx:
        a, b = add(tx, "a"), add(tx, "b")
        for due, lane in ((30, Lane.NORMAL), (10, Lane.URGENT), (20, Lane.LOW)):
            tx.delays.add(waiting(a, T0 + due, lane=lane))
        tx.delays.add(waiting(b, T0))
    with store.reading() as tx:
        found = tx.delays.soonest(get(tx, "a"), ALL, 2)
        assert [(row.due_at - T0, row.lane, row.size, row.sent_at) for row in found] == [
            (10, Lane.URGENT, 1, T0),
            (20, Lane.LOW, 1, T0),
        ]
        assert len(tx.delays.soonest(get(tx, "a"), 1, 2)) == 1


def test_what_waits_for_an_empty_mailbox_is_nothing(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        assert tx.delays.usage(mailbox) == Usage(0, 0)
        assert tx.delays.of(mailbox, ALL) == []
        assert tx.delays.next_due() is None


def test_thousands_of_delayed_messages_are_removed_at_once(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        for number in range(1200):
            tx.delays.add(waiting(mailbox, T0 + number))
        tx.delays.remove(tx.delays.due(T0 + 1100, ALL, ALL))
        assert tx.delays.usage(mailbox) == Usage(99, 99)


@pytest.mark.rule("S3")
def test_a_dedup_id_is_known_until_its_time_is_over(store, reopen):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        tx.dedup_ids.add(mailbox, "d", 0, T0 + 10)
        tx.dedup_ids.add(mailbox, "later", HIDDEN_ID, T0 + 10)
        tx.dedup_ids.add(other, "d", 5, T0 + 10)
        assert tx.dedup_ids.find(mailbox, "d", T0) == 0
    store = reopen()
    with store.transaction() as tx:
        mailbox = get(tx)
        assert tx.dedup_ids.find(mailbox, "d", T0 + 9) == 0
        assert tx.dedup_ids.find(mailbox, "d", T0 + 10) is None
        assert tx.dedup_ids.find(mailbox, "later", T0 + 9) == HIDDEN_ID
        assert tx.dedup_ids.find(get(tx, "other"), "d", T0) == 5
        for unknown in ("D", "%", "_", "d ", "dd"):
            assert tx.dedup_ids.find(mailbox, unknown, T0) is None, unknown


@pytest.mark.rule("S3")
def test_a_dedup_id_is_settled_used_anew_and_forgotten(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        tx.dedup_ids.add(mailbox, "d", HIDDEN_ID, T0 + 10)
        tx.dedup_ids.settle(mailbox, "d", 7)
        tx.dedup_ids.settle(mailbox, "unknown", 7)
    with store.transaction() as tx:
        mailbox = get(tx)
        assert tx.dedup_ids.find(mailbox, "d", T0 + 9) == 7
        assert tx.dedup_ids.find(mailbox, "d", T0 + 10) is None
        assert tx.dedup_ids.find(mailbox, "unknown", T0) is None
        tx.dedup_ids.add(mailbox, "d", 9, T0 + 30)
        assert tx.dedup_ids.find(mailbox, "d", T0 + 20) == 9
    with store.transaction() as tx:
        mailbox = get(tx)
        tx.dedup_ids.forget(mailbox, "d")
        tx.dedup_ids.forget(mailbox, "unknown")
        assert tx.dedup_ids.find(mailbox, "d", T0 + 20) is None


@pytest.mark.rule("S3")
def test_ended_dedup_ids_are_collected_in_slices(store):
    with store.transaction() as tx:
        a, b = add(tx, "a"), add(tx, "b")
        for number in range(5):
            tx.dedup_ids.add(a, f"d{number}", number, T0 + number)
            tx.dedup_ids.add(b, f"d{number}", number, T0 + number)
    with store.transaction() as tx:
        assert tx.dedup_ids.collect(T0 + 2, 4) == 4
        assert tx.dedup_ids.collect(T0 + 2, 4) == 2
        assert tx.dedup_ids.collect(T0 + 2, 4) == 0
    with store.reading() as tx:
        for address in ("a", "b"):
            found = [tx.dedup_ids.find(get(tx, address), f"d{number}", 0) for number in range(5)]
            assert found == [None, None, None, 3, 4]


def test_the_dedup_ids_of_one_mailbox_are_cleared_in_slices(store):
    with store.transaction() as tx:
        a, b = add(tx, "a"), add(tx, "b")
        for number in range(5):
            tx.dedup_ids.add(a, f"d{number}", number, T0 + 10)
        tx.dedup_ids.add(b, "d0", 0, T0 + 10)
        tx.mailboxes.retire(a)
    with store.transaction() as tx:
        [a] = tx.mailboxes.retired(ALL)
        assert [tx.dedup_ids.clear(a, 3) for _ in range(3)] == [3, 2, 0]
        assert tx.dedup_ids.find(get(tx, "b"), "d0", T0) == 0


@pytest.fixture
def five_dedup_ids(monkeypatch):
    """Lower the bound of 100 000 wherever it was imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mediator.") and hasattr(module, "MAX_DEDUP_IDS"):
            monkeypatch.setattr(module, "MAX_DEDUP_IDS", 5)


@pytest.mark.rule("S3")
@pytest.mark.usefixtures("five_dedup_ids")
def test_a_mailbox_keeps_a_bounded_number_of_dedup_ids(store, reopen):
    def known(tx, address="a"):
        return [number for number in range(20) if tx.dedup_ids.find(get(tx, address), f"d{number}", T0) == number]

    with store.transaction() as tx:
        a, b = add(tx, "a"), add(tx, "b")
        tx.dedup_ids.add(b, "d0", 0, T0 + 1)
        for number in range(7):
            tx.dedup_ids.add(a, f"d{number}", number, T0 + 100 + number)
        assert known(tx) == [2, 3, 4, 5, 6]
    store = reopen()
    with store.transaction() as tx:
        a = get(tx)
        tx.dedup_ids.add(a, "d7", 7, T0 + 107)
        assert known(tx) == [3, 4, 5, 6, 7]
        tx.dedup_ids.forget(a, "d5")
    with store.transaction() as tx:
        a = get(tx)
        tx.dedup_ids.add(a, "d8", 8, T0 + 108)
        assert known(tx) == [3, 4, 6, 7, 8]
        tx.dedup_ids.add(a, "d8", 8, T0 + 109)
        assert known(tx) == [3, 4, 6, 7, 8]
        assert tx.dedup_ids.collect(T0 + 104, ALL) == 3
    with store.transaction() as tx:
        a = get(tx)
        for number in (9, 10):
            tx.dedup_ids.add(a, f"d{number}", number, T0 + 110)
        assert known(tx) == [6, 7, 8, 9, 10]
        assert known(tx, "b") == []


@pytest.mark.rule("S3")
@pytest.mark.usefixtures("five_dedup_ids")
def test_a_rollback_takes_back_what_the_bound_made_forget(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        for number in range(5):
            tx.dedup_ids.add(mailbox, f"d{number}", number, T0 + 10)

    for _ in range(3):
        with undone(store) as tx:
            tx.dedup_ids.add(get(tx), "more", 5, T0 + 10)
    with store.transaction() as tx:
        mailbox = get(tx)
        tx.dedup_ids.forget(mailbox, "d4")
        tx.dedup_ids.add(mailbox, "d5", 5, T0 + 10)
        assert [tx.dedup_ids.find(mailbox, f"d{number}", T0) for number in range(6)] == [0, 1, 2, 3, None, 5]


@pytest.mark.rule("S6")
def test_the_outbox_counts_copies_and_delayed_messages(store, reopen):
    with store.transaction() as tx:
        mailbox = add(tx)
        assert tx.outbox.backlog() == 0
        tx.outbox.add(mailbox, put(tx, mailbox, bytes(range(256)), key="k", tags=("t",), headers={"ü": "😀"}))
        tx.delays.add(waiting(mailbox, T0 + 1, archive=True))
        tx.delays.add(waiting(mailbox, T0 + 1, archive=False))
        assert tx.outbox.backlog() == 2
    store = reopen()
    with store.transaction() as tx:
        assert tx.outbox.backlog() == 2
        tx.delays.remove(tx.delays.due(T0 + 1, ALL, ALL))
        assert tx.outbox.backlog() == 1
        tx.messages.remove(get(tx), tx.messages.first(get(tx), ALL))
        assert tx.outbox.backlog() == 1
    with store.transaction() as tx:
        assert tx.outbox.backlog() == 1


@pytest.mark.rule("S6")
def test_what_the_archive_has_leaves_the_outbox_by_its_name(store, reopen):
    with store.transaction() as tx:
        mailbox = add(tx)
        copies = []
        for seq in range(1, 701):
            message = put(tx, mailbox, bytes(range(256)))
            tx.outbox.add(mailbox, message)
            copies.append(OutboxKey(seq, mailbox.id, message.msg_id, message.created_at))
        tx.delays.add(waiting(mailbox, T0 + 1, archive=True))
    with store.transaction() as tx:
        assert tx.outbox.remove([]) == 0
        # By the numbers of another store other messages are meant.
        for name in ("mailbox_no", "msg_id", "created_at"):
            assert tx.outbox.remove([copy._replace(**{name: 999_999}) for copy in copies]) == 0
        assert tx.outbox.remove(copies[:600]) == 600
        assert tx.outbox.backlog() == 101

    with undone(store) as tx:
        assert tx.outbox.remove(copies[600:602]) == 2
        assert tx.outbox.backlog() == 99
    with store.transaction() as tx:
        assert tx.outbox.backlog() == 101
    store = reopen()
    with store.transaction() as tx:
        assert tx.outbox.remove([copies[0], copies[600], copies[699], copies[699]._replace(seq=701)]) == 2
        tx.outbox.add(get(tx), put(tx, get(tx), b"new"))
    with store.transaction() as tx:
        # Messages stay, and numbers only grow.
        assert len(tx.messages.first(get(tx), ALL)) == 701
        assert tx.outbox.remove([copies[0], copies[600], copies[699]]) == 0
        assert tx.outbox.remove(copies) == 98
        # The new one, and the delayed one.
        assert tx.outbox.backlog() == 2
