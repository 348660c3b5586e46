"""The table of mailboxes: addresses, generations, expiry, retirement."""

import pytest

from mediator.mailboxes.mailbox import Kind, MailboxRow, NewMailbox, Retention
from mediator.mailboxes.message import Usage
from tests.harness.samples import ALL, T0, TENANT, add, cut, everything, get, held, plain, put, waiting


@pytest.mark.rule("M1")
def test_a_mailbox_is_found_as_it_was_added(store):
    new = NewMailbox(
        tenant=TENANT,
        address="agent.one",
        created_at=T0,
        expire_at=T0 + 1,
        desc="Übersetzt 'Texte', 100 % genau 😀",
        tags=("a b", "50%", "_", "'quoted'", '"double"', "back\\slash", "ü😀", "line\nbreak", "unit\x1fseparator"),
        public=True,
        kind=Kind.LATEST,
        retention=Retention.UNTIL_ACK,
        archive=True,
        ack_wait=0,
        token_hash=bytes(range(256)),
    )
    with store.transaction() as tx:
        added = tx.mailboxes.add(new)
        assert plain(get(tx, "agent.one")) == plain(added)
    with store.transaction() as tx:
        found = get(tx, "agent.one")
        for name in NewMailbox.__slots__:
            assert getattr(found, name) == getattr(new, name), name
        assert found.kind is Kind.LATEST
        assert found.retention is Retention.UNTIL_ACK
        assert found.public is True
        assert found.archive is True
        assert (found.next_id, found.messages, found.bytes, found.last_at) == (0, 0, 0, 0)


@pytest.mark.rule("M1")
def test_a_mailbox_with_nothing_given_is_found_as_it_was_added(store):
    new = NewMailbox(TENANT, "a", T0)
    with store.transaction() as tx:
        tx.mailboxes.add(new)
    with store.reading() as tx:
        found = get(tx)
        for name in NewMailbox.__slots__:
            assert getattr(found, name) == getattr(new, name), name
        assert found.kind is Kind.STANDARD
        assert found.retention is Retention.KEEP
        assert found.public is False
        assert found.archive is False


def test_an_unknown_address_finds_nothing(store):
    with store.transaction() as tx:
        add(tx, "a.b")
        assert tx.mailboxes.find(TENANT, "a") is None
        assert tx.mailboxes.find(TENANT, "a.b.c") is None
        assert tx.mailboxes.find(TENANT, "") is None


@pytest.mark.rule("A6")
def test_the_same_address_in_two_tenants_is_two_mailboxes(store):
    with store.transaction() as tx:
        ours, theirs = add(tx, "a", tenant="x"), add(tx, "a", tenant="y")
        put(tx, ours)
        assert ours.id != theirs.id
        assert get(tx, "a", "x").messages == 1
        assert get(tx, "a", "y").messages == 0
        assert everything(tx, theirs) == []
        assert tx.mailboxes.find("z", "a") is None


@pytest.mark.rule("M2")
def test_a_taken_address_does_not_end_the_transaction(store):
    with store.transaction() as tx:
        first = add(tx, "a", desc="first")
        assert tx.mailboxes.add(NewMailbox(TENANT, "a", T0, desc="second")) is None
        put(tx, first)
    with store.transaction() as tx:
        assert tx.mailboxes.add(NewMailbox(TENANT, "a", T0, desc="third")) is None
        assert get(tx).desc == "first"
        assert get(tx).messages == 1
        add(tx, "b")
    with store.reading() as tx:
        assert get(tx, "b").desc == ""


@pytest.mark.rule("M1")
def test_an_expired_mailbox_keeps_its_address_until_retired(store):
    with store.transaction() as tx:
        add(tx, "a", expire_at=T0 + 10)
    with store.transaction() as tx:
        assert not get(tx).is_live(T0 + 10)
        assert tx.mailboxes.add(NewMailbox(TENANT, "a", T0 + 10)) is None


@pytest.mark.rule("A3", "M4")
def test_a_retired_mailbox_frees_its_address(store):
    with store.transaction() as tx:
        old = add(tx)
        put(tx, old, b"old")
        tx.dedup_ids.add(old, "d", 0, T0 + 1000)
        tx.groups.add(old, "g")
        tx.delays.add(waiting(old, T0 + 1))
        tx.mailboxes.retire(old)
        assert tx.mailboxes.find(TENANT, "a") is None
        assert tx.mailboxes.list(TENANT, "", ALL, T0) == []
        new = add(tx)
        assert new.id != old.id
    with store.transaction() as tx:
        new = get(tx)
        assert new.next_id == 0
        assert held(new) == (0, 0, 0)
        assert everything(tx, new) == []
        assert tx.messages.first(new, ALL) == []
        assert tx.dedup_ids.find(new, "d", T0) is None
        assert tx.groups.find(new, "g") is None
        assert tx.delays.of(new, ALL) == []
        put(tx, new, b"new")
        [left] = tx.mailboxes.retired(ALL)
        assert left.id == old.id
        assert left.address == ""
        assert [ref.size for ref in tx.messages.first(left, ALL)] == [3]


@pytest.mark.rule("A3")
def test_the_same_address_may_be_retired_again_and_again(store):
    numbers = set()
    for _ in range(4):
        with store.transaction() as tx:
            mailbox = add(tx)
            numbers.add(mailbox.id)
            tx.mailboxes.retire(mailbox)
    with store.transaction() as tx:
        assert {mailbox.id for mailbox in tx.mailboxes.retired(ALL)} == numbers
        assert len(numbers) == 4
        assert len(tx.mailboxes.retired(3)) == 3


@pytest.mark.rule("A3")
def test_the_number_of_a_dropped_mailbox_is_never_given_again(reopen, store):
    numbers = []
    for _ in range(3):
        with store.transaction() as tx:
            mailbox = add(tx)
            numbers.append(mailbox.id)
            tx.mailboxes.retire(mailbox)
            tx.mailboxes.drop(mailbox)
            assert tx.mailboxes.retired(ALL) == []
        store = reopen()
    assert len(set(numbers)) == 3
    with store.transaction() as tx:
        assert tx.mailboxes.by_id(numbers) == {}


def test_by_no_finds_living_and_retired_ones(store):
    with store.transaction() as tx:
        a, b, c = add(tx, "a"), add(tx, "b"), add(tx, "c")
        wanted = {c.id, a.id, b.id, c.id + 1000}
        tx.mailboxes.retire(b)
    with store.transaction() as tx:
        found = tx.mailboxes.by_id(wanted)
        assert {no: mailbox.address for no, mailbox in found.items()} == {a.id: "a", b.id: "", c.id: "c"}
        assert {no: mailbox.id for no, mailbox in found.items()} == {no: no for no in found}
        assert tx.mailboxes.by_id(iter([])) == {}
        assert list(tx.mailboxes.by_id(no for no in [c.id])) == [c.id]


@pytest.mark.rule("M4")
def test_describe_changes_words_and_lease_only(store):
    with store.transaction() as tx:
        mailbox = add(tx, desc="old", tags=("old",), ack_wait=None)
        put(tx, mailbox)
        tx.mailboxes.describe(mailbox, "new", ("n", "ü "), 5000)
        assert (mailbox.desc, mailbox.tags, mailbox.ack_wait) == ("new", ("n", "ü "), 5000)
    with store.transaction() as tx:
        mailbox = get(tx)
        assert (mailbox.desc, mailbox.tags, mailbox.ack_wait) == ("new", ("n", "ü "), 5000)
        assert held(mailbox) == (1, 1, 1)
        tx.mailboxes.describe(mailbox, "", (), None)
    with store.reading() as tx:
        mailbox = get(tx)
        assert (mailbox.desc, mailbox.tags, mailbox.ack_wait) == ("", (), None)


@pytest.mark.rule("M1")
def test_expired_mailboxes_come_oldest_expiry_first(store):
    with store.transaction() as tx:
        for address, expire_at in (("a", T0 + 30), ("b", T0 + 10), ("c", T0 + 20), ("d", T0 + 31), ("e", None)):
            add(tx, address, expire_at=expire_at)
    with store.transaction() as tx:
        assert [mailbox.address for mailbox in tx.mailboxes.expired(T0 + 30, ALL)] == ["b", "c", "a"]
        assert [mailbox.address for mailbox in tx.mailboxes.expired(T0 + 30, 2)] == ["b", "c"]
        assert tx.mailboxes.expired(T0 + 9, ALL) == []
        tx.mailboxes.retire(get(tx, "b"))
        assert [mailbox.address for mailbox in tx.mailboxes.expired(T0 + 30, ALL)] == ["c", "a"]
        tx.mailboxes.drop(tx.mailboxes.retired(1)[0])
        assert tx.mailboxes.retired(ALL) == []


def test_list_goes_through_the_living_in_byte_order(store):
    addresses = ["a", "a.b", "a.b.c", "a0", "a9.x", "ab", "b", "z", "0", "9a"]
    with store.transaction() as tx:
        for address in reversed(addresses):
            add(tx, address)
        add(tx, "aa", tenant="other")
        add(tx, "m", expire_at=T0 + 5)
        tx.mailboxes.retire(add(tx, "r"))
    with store.reading() as tx:
        listed = [mailbox.address for mailbox in tx.mailboxes.list(TENANT, "", ALL, T0 + 5)]
        assert listed == sorted(addresses)
        assert [mailbox.address for mailbox in tx.mailboxes.list(TENANT, "a", 3, T0 + 5)] == ["a.b", "a.b.c", "a0"]
        assert [mailbox.address for mailbox in tx.mailboxes.list(TENANT, "a.", 1, T0 + 5)] == ["a.b"]
        assert [mailbox.address for mailbox in tx.mailboxes.list(TENANT, "b", 2, T0 + 4)] == ["m", "z"]
        assert tx.mailboxes.list(TENANT, "z", ALL, T0) == []
        assert tx.mailboxes.list("nobody", "", ALL, T0) == []


@pytest.mark.rule("S7")
def test_usage_sums_the_mailboxes_of_one_tenant(store):
    with store.transaction() as tx:
        a, b, other = add(tx, "a"), add(tx, "b"), add(tx, "c", tenant="other")
        for mailbox, size in ((a, 10), (a, 20), (b, 5), (other, 100)):
            put(tx, mailbox, size=size)
        cut(tx, a, 0)
        assert tx.mailboxes.usage(TENANT) == Usage(2, 25)
    with store.reading() as tx:
        assert tx.mailboxes.usage(TENANT) == Usage(2, 25)
        assert tx.mailboxes.usage("other") == Usage(1, 100)
        assert tx.mailboxes.usage("nobody") == Usage(0, 0)


def test_many_mailboxes_are_found_by_number(store):
    with store.transaction() as tx:
        numbers = [add(tx, f"m{number}").id for number in range(1200)]
    with store.transaction() as tx:
        assert set(tx.mailboxes.by_id(numbers)) == set(numbers)


def test_the_tenants_are_those_that_have_mailboxes(store):
    with store.transaction() as tx:
        assert tx.mailboxes.tenants() == []
        for number, tenant in enumerate(("b", "a", "c-d", "a", "gone")):
            retired = add(tx, f"m{number}", tenant=tenant)
        tx.mailboxes.retire(retired)
        assert tx.mailboxes.tenants() == ["a", "b", "c-d"]
    with store.reading() as tx:
        assert tx.mailboxes.tenants() == ["a", "b", "c-d"]


def test_rows_show_mailboxes_as_their_messages_are(store, reopen):
    with store.transaction() as tx:
        for address in ("a", "a.b", "ab", "b"):
            add(tx, address, retention=Retention.UNTIL_ACK)
        add(tx, "a", tenant="other")
        add(tx, "a.hidden", kind=Kind.BROADCAST)
        add(tx, "a.over", expire_at=T0 + 5)
        for at, payload in ((1, b"12"), (2, b"345")):
            put(tx, get(tx, "a.b"), payload, created_at=T0 + at)
        put(tx, get(tx, "ab"))
    with store.transaction() as tx:
        cut(tx, get(tx, "a.b"), 0)
        put(tx, get(tx, "a.b"), b"6", created_at=T0 + 3)
    look_at_rows(store)
    look_at_rows(reopen())


def look_at_rows(store):
    with store.reading() as tx:
        first, second, third = tx.mailboxes.list_rows(TENANT, "a", ALL, T0 + 5)
        assert (first.address, first.messages, first.oldest_at) == ("a", 0, None)
        assert second == MailboxRow(
            get(tx, "a.b").id, TENANT, "a.b", Kind.STANDARD, Retention.UNTIL_ACK,
            2, 4, 3, None, T0 + 3, T0 + 2,
        )  # fmt: skip
        assert (third.address, third.messages, third.next_id) == ("ab", 1, 1)
        assert [row.address for row in tx.mailboxes.list_rows(TENANT, "a", 2, T0)] == ["a", "a.b"]
        assert tx.mailboxes.list_rows(TENANT, "none", ALL, T0) == []


def test_a_database_has_a_size(store):
    with store.reading() as tx:
        assert tx.session.dialect.size() > 0
