"""The journal's tail: rows commit with what they tell of, and go when they are told to."""

from collections.abc import Callable

import pytest

from mediator.mailboxes.events import EventType
from mediator.store.base import Store
from tests.harness.samples import T0, add, cut, put
from tests.harness.stores import undone


def test_rows_come_back_in_order(store: Store) -> None:
    for number, instance in enumerate(["a", "b", "a"]):
        with store.transaction() as tx:
            tx.tail.add(instance, b"line %d\n" % number, T0 + number)
    with store.reading() as tx:
        rows = tx.tail.read(0, 100)
        assert [row[1:] for row in rows] == [
            ("a", T0, b"line 0\n"),
            ("b", T0 + 1, b"line 1\n"),
            ("a", T0 + 2, b"line 2\n"),
        ]
        assert tx.tail.read(rows[0].id, 1) == [rows[1]]
        assert sorted(tx.tail.numbers("a")) == [rows[0].id, rows[2].id]
        assert tx.tail.numbers("c") == []


def test_removed_rows_are_gone_and_numbers_are_not_reused(store: Store) -> None:
    with store.transaction() as tx:
        tx.tail.add("a", b"1", T0)
    with store.transaction() as tx:
        (gone,) = tx.tail.numbers("a")
        tx.tail.remove([gone, gone + 10])
    with store.transaction() as tx:
        assert tx.tail.numbers("a") == []
        tx.tail.remove([])
        tx.tail.add("a", b"2", T0)
    with store.reading() as tx:
        assert tx.tail.numbers("a")[0] > gone


def test_a_transaction_that_fails_leaves_no_row(store: Store) -> None:
    with undone(store) as tx:
        tx.tail.add("a", b"1", T0)
    with store.reading() as tx:
        assert tx.tail.read(0, 10) == []


def test_rows_survive_a_restart(store: Store, reopen: Callable[[], Store]) -> None:
    with store.transaction() as tx:
        tx.tail.add("a", b"\x00\xff", T0)
    with reopen().reading() as tx:
        assert [row.lines for row in tx.tail.read(0, 10)] == [b"\x00\xff"]


def test_messages_behind_a_mark_tell_of_their_storing(store: Store) -> None:
    with store.transaction() as tx:
        if not tx.tail.ordered:
            pytest.skip("this store keeps messages in no common order")
        one, two = add(tx, "a"), add(tx, "b", tenant="other")
        put(tx, one, b"old")
        mark = tx.tail.mark()
        put(tx, two, b"12345", created_at=T0 + 5)
        put(tx, one, b"123", created_at=T0 + 6)
        assert not tx.session.removed
        behind = tx.tail.behind(mark, 10)
        assert [(e.type, e.at, e.tenant, e.mailbox_id, e.lane, e.msg_id, e.size, e.created_at) for _, e in behind] == [
            (EventType.STORED, T0 + 5, "other", two.id, 2, 0, 5, T0 + 5),
            (EventType.STORED, T0 + 6, "default", one.id, 2, 1, 3, T0 + 6),
        ]
        assert tx.tail.behind(behind[0][0], 10) == behind[1:]
        assert tx.tail.behind(mark, 1) == behind[:1]
        assert behind[-1][0] == tx.tail.mark()


def test_a_transaction_tells_that_it_removed(store: Store) -> None:
    with store.transaction() as tx:
        if not tx.tail.ordered:
            pytest.skip("this store keeps messages in no common order")
        box = add(tx, "a")
        put(tx, box)
        assert tx.tail.mark() > 0
        cut(tx, box, 0)
        assert tx.session.removed
        assert tx.tail.mark() == 0
    with store.transaction() as tx:
        assert not tx.session.removed
