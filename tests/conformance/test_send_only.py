"""Send-only addresses on every store: found like any address, locked like any mailbox, gone with it (A10)."""

import pytest

from mediator.mailboxes.message import Filter
from tests.harness.samples import ALL, T0, TENANT, add, get, put

pytestmark = pytest.mark.rule("A10")


def made(store, address="a", **given):
    """Make a mailbox and return its send-only address."""
    with store.transaction() as tx:
        return tx.mailboxes.send_only(add(tx, address, **given))


def test_a_mailbox_is_found_by_it(store):
    to = made(store)
    for places in ((), [(TENANT, to)], [(TENANT, "a")], [(TENANT, to), (TENANT, "a"), (TENANT, "none")]):
        with store.transaction(places) as tx:
            found = tx.mailboxes.find_to_send(TENANT, to)
            # One object, or what is sent by one of the names would undo what is sent by the other.
            assert found is tx.mailboxes.find_to_send(TENANT, "a") is get(tx)
            assert tx.mailboxes.find(TENANT, to) is None
    with store.reading() as tx:
        assert tx.mailboxes.find_to_send(TENANT, to).address == "a"
        assert tx.mailboxes.send_only(get(tx)) == to


def test_many_are_found_at_once(store):
    names = [f"box{number}" for number in range(40)]
    by_name = {name: made(store, name) for name in names}
    places = [(TENANT, name if number % 2 else by_name[name]) for number, name in enumerate(names)]
    with store.transaction([*places, *places]) as tx:
        for (_, place), name in zip(places, names, strict=True):
            put(tx, tx.mailboxes.find_to_send(TENANT, place))
            put(tx, get(tx, name))
    with store.reading() as tx:
        for name in names:
            newest = tx.messages.newest(get(tx, name), Filter(), ALL, ALL, T0)
            assert [message.msg_id for message in newest] == [0, 1]


def test_it_outlives_a_restart(opened):
    to = made(opened.store)
    with opened.reopen().transaction([(TENANT, to)]) as tx:
        put(tx, tx.mailboxes.find_to_send(TENANT, to))
        assert get(tx).messages == 1


def test_one_that_is_retired_or_dropped_is_not_found(store):
    to = made(store)
    for end in ("retire", "drop"):
        with store.transaction([(TENANT, "a")]) as tx:
            [mailbox] = [get(tx)] if end == "retire" else tx.mailboxes.retired(ALL)
            getattr(tx.mailboxes, end)(mailbox)
        for places in ((), [(TENANT, to)]):
            with store.transaction(places) as tx:
                assert tx.mailboxes.find_to_send(TENANT, to) is None
    again = made(store)
    assert again != to
    with store.transaction([(TENANT, to), (TENANT, again)]) as tx:
        assert tx.mailboxes.find_to_send(TENANT, to) is None
        assert tx.mailboxes.find_to_send(TENANT, again) is get(tx)


def test_a_rollback_leaves_none(store):
    told = []

    def fail():
        with store.transaction() as tx:
            told.append(tx.mailboxes.send_only(add(tx)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with store.transaction([(TENANT, told[0])]) as tx:
        assert tx.mailboxes.find_to_send(TENANT, told[0]) is None


def test_those_of_many_mailboxes_are_told_at_once(store):
    to = {name: made(store, name) for name in ("a", "b.c")}
    made(store, "old", expire_at=T0 + 1)
    made(store, "a", tenant="other")
    for open_tx in (store.reading, store.transaction):
        with open_tx() as tx:
            assert tx.mailboxes.send_only_of(TENANT, ["a", "b.c", "old", "none"], T0 + 1) == to
            assert tx.mailboxes.send_only_of(TENANT, [], T0) == {}
            assert set(tx.mailboxes.send_only_of(TENANT, ["old"], T0)) == {"old"}
