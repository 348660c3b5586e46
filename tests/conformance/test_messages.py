"""The table of messages: order, filters, bounds, and what is gone."""

import pytest

from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.message import Expired, Filter, MessageRef, Usage
from tests.harness.samples import ALL, T0, add, cut, decoded, everything, get, held, ids, plain, put


@pytest.mark.rule("A3")
def test_append_numbers_and_counts(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        put(tx, mailbox, size=7, created_at=T0 + 1)
        assert held(mailbox) == (1, 1, 7)
        assert mailbox.last_at == T0 + 1
        put(tx, mailbox, size=0, created_at=T0 + 2)
        assert held(mailbox) == (2, 2, 7)
        assert plain(mailbox) == plain(get(tx))
    with store.transaction() as tx:
        mailbox = get(tx)
        assert held(mailbox) == (2, 2, 7)
        assert mailbox.last_at == T0 + 2
        put(tx, mailbox, size=1, created_at=T0 + 2)
    with store.reading() as tx:
        assert held(get(tx)) == (3, 3, 8)
        assert ids(everything(tx, get(tx))) == [0, 1, 2]


@pytest.mark.rule("A3", "A8")
def test_a_message_is_read_as_it_was_when_it_was_appended(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        rare = {"tags": ("a", "b"), "headers": {"x": "1"}, "dedup_id": "d", "reply_to": "r", "sent_at": T0 - 5000}
        kept = put(tx, mailbox, b"abc", lane=Lane.LOW, key="k", recipient="did", expire_at=T0 + 1, **rare)
        plain = put(tx, mailbox, b"")
        assert [decoded(message) for message in everything(tx, mailbox)] == [kept, plain]
        assert all(
            message.lane is put.lane for message, put in zip(everything(tx, mailbox), (kept, plain), strict=True)
        )


@pytest.mark.rule("A3")
@pytest.mark.parametrize("removed", [(0, 1, 2), (2,), (1, 2), (0,)])
def test_an_id_is_never_given_twice_after_deletes_and_a_restart(reopen, store, removed):
    with store.transaction() as tx:
        mailbox = add(tx)
        for number in range(3):
            put(tx, mailbox, created_at=T0 + number)
    with store.transaction() as tx:
        cut(tx, get(tx), *removed)
    store = reopen()
    with store.transaction() as tx:
        mailbox = get(tx)
        left = 3 - len(removed)
        assert held(mailbox) == (3, left, left)
        assert put(tx, mailbox).msg_id == 3
    with reopen().reading() as tx:
        assert held(get(tx)) == (4, left + 1, left + 1)


@pytest.mark.rule("A3")
def test_an_id_is_never_given_twice_in_one_transaction(reopen, store):
    with store.transaction() as tx:
        mailbox = add(tx)
        put(tx, mailbox)
        put(tx, mailbox)
        cut(tx, mailbox, 0, 1)
    with reopen().transaction() as tx:
        assert held(get(tx)) == (2, 0, 0)
        assert put(tx, get(tx)).msg_id == 2


@pytest.mark.rule("N5")
def test_the_time_of_the_newest_message_never_goes_back(reopen, store):
    with store.transaction() as tx:
        mailbox = add(tx)
        put(tx, mailbox, created_at=T0 + 5)
        put(tx, mailbox, created_at=T0 + 9)
    with store.transaction() as tx:
        cut(tx, get(tx), 1)
        assert get(tx).last_at == T0 + 9
    with reopen().reading() as tx:
        assert get(tx).last_at == T0 + 9


def test_handles_tell_enough_to_remove_and_to_count(store):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        put(tx, other)
        put(tx, mailbox, size=9, lane=Lane.LOW, created_at=T0 + 3, recipient="did:key:z6Mk#z6Mk", dedup_id="d'1")
        put(tx, mailbox, b"y", expire_at=T0 + 10)
        put(tx, mailbox, b"", lane=Lane.CRITICAL)
    with store.transaction() as tx:
        mailbox = get(tx)
        found = tx.messages.refs(mailbox, [2, 0, 1, 0, 99, 2**63 - 1], T0)
        assert found == {
            0: MessageRef(0, Lane.LOW, 9, T0 + 3, "did:key:z6Mk#z6Mk", "d'1"),
            1: MessageRef(1, Lane.NORMAL, 1, T0),
            2: MessageRef(2, Lane.CRITICAL, 0, T0),
        }
        assert all(isinstance(ref.lane, Lane) for ref in found.values())
        assert set(tx.messages.refs(mailbox, [0, 1], T0 + 10)) == {0}
        assert set(tx.messages.refs(mailbox, [0, 1], T0 + 9)) == {0, 1}
        assert tx.messages.refs(mailbox, [], T0) == {}
        assert tx.messages.refs(mailbox, [3, 4], T0) == {}
        assert set(tx.messages.refs(mailbox, range(10_000), T0)) == {0, 1, 2}


@pytest.mark.rule("S2")
def test_keyed_finds_the_message_of_a_key_expired_or_not(store):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        put(tx, other, key="k")
        put(tx, mailbox, key="k%", expire_at=T0 + 1, size=4)
        put(tx, mailbox, key="K")
        put(tx, mailbox, key="'k\" 😀")
        put(tx, mailbox)
    with store.transaction() as tx:
        mailbox = get(tx)
        assert tx.messages.keyed(mailbox, "k%") == MessageRef(0, Lane.NORMAL, 4, T0)
        assert tx.messages.keyed(mailbox, "'k\" 😀") == MessageRef(2, Lane.NORMAL, 1, T0)
        for unknown in ("k", "kk", "_", "%", "'k\"", "😀"):
            assert tx.messages.keyed(mailbox, unknown) is None, unknown
        cut(tx, mailbox, 0)
        assert tx.messages.keyed(mailbox, "k%") is None
        put(tx, mailbox, key="k%")
        assert tx.messages.keyed(mailbox, "k%").msg_id == 4


@pytest.mark.rule("A2", "F3")
def test_a_lane_gives_its_own_messages_in_order(store):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        for number in range(12):
            put(tx, mailbox, lane=LANES[number % 4])
            put(tx, other, lane=LANES[number % 4])
        for lane in LANES:
            assert ids(tx.messages.lane(mailbox, lane, -1, ALL, ALL, T0)) == [lane, lane + 4, lane + 8]
    with store.reading() as tx:
        mailbox = get(tx)
        for lane in LANES:
            found = tx.messages.lane(mailbox, lane, -1, ALL, ALL, T0)
            assert ids(found) == [lane, lane + 4, lane + 8]
            assert all(message.lane is lane for message in found)
            assert ids(tx.messages.lane(mailbox, lane, lane, ALL, ALL, T0)) == [lane + 4, lane + 8]
            assert ids(tx.messages.lane(mailbox, lane, lane - 1, 2, ALL, T0)) == [lane, lane + 4]
            assert ids(tx.messages.lane(mailbox, lane, -1, 1, 1, T0, without=range(8))) == [lane + 8]
            assert ids(tx.messages.lane(mailbox, lane, -1, 2, ALL, T0, [99, lane + 4, lane - 1])) == [lane, lane + 8]
            assert tx.messages.lane(mailbox, lane, -1, ALL, ALL, T0, without=range(1000)) == []
            assert tx.messages.lane(mailbox, lane, lane + 8, ALL, ALL, T0) == []
            assert tx.messages.lane(mailbox, lane, 2**40, ALL, ALL, T0) == []


@pytest.mark.rule("N7")
@pytest.mark.parametrize(("budget", "count"), [(0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (100, 4)])
def test_reads_stop_behind_their_budget_and_give_one_at_least(store, budget, count):
    with store.transaction() as tx:
        mailbox = add(tx)
        put(tx, mailbox, size=50, expire_at=T0)
        for _ in range(4):
            put(tx, mailbox, size=4)
        put(tx, mailbox, size=50, expire_at=T0)
    with store.reading() as tx:
        mailbox = get(tx)
        assert ids(tx.messages.lane(mailbox, Lane.NORMAL, -1, ALL, budget, T0)) == [1, 2, 3, 4][:count]
        assert ids(tx.messages.pick(mailbox, [4, 0, 3, 2, 1], budget, T0)) == [1, 2, 3, 4][:count]
        assert ids(tx.messages.newest(mailbox, Filter(), ALL, budget, T0)) == [1, 2, 3, 4][-count:]


@pytest.mark.rule("N7")
def test_the_budget_counts_sizes_as_given_and_not_payloads(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        for _ in range(3):
            put(tx, mailbox, b"x" * 1000, size=1)
    with store.reading() as tx:
        assert len(tx.messages.lane(get(tx), Lane.NORMAL, -1, ALL, 3, T0)) == 3


@pytest.mark.rule("S5")
def test_expired_messages_are_gone_wherever_now_is_given(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        for expire_at in (None, T0 + 10, T0 + 11, None):
            put(tx, mailbox, key="k", expire_at=expire_at)
    with store.reading() as tx:
        mailbox = get(tx)
        for now, left in ((T0 + 9, [0, 1, 2, 3]), (T0 + 10, [0, 2, 3]), (T0 + 11, [0, 3])):
            assert ids(tx.messages.lane(mailbox, Lane.NORMAL, -1, ALL, ALL, now)) == left
            assert ids(tx.messages.pick(mailbox, range(4), ALL, now)) == left
            assert ids(tx.messages.newest(mailbox, Filter(), ALL, ALL, now)) == left
            assert ids(tx.messages.newest(mailbox, Filter(key="k"), ALL, ALL, now)) == left
            assert sorted(tx.messages.refs(mailbox, range(4), now)) == left
            assert ids(tx.messages.between(mailbox, Lane.NORMAL, -1, 3, now)) == left
        assert ids(tx.messages.lane(mailbox, Lane.NORMAL, -1, 2, ALL, T0 + 10)) == [0, 2]
        assert ids(tx.messages.newest(mailbox, Filter(), 3, ALL, T0 + 11)) == [0, 3]
        assert ids(tx.messages.first(mailbox, ALL)) == [0, 1, 2, 3]
        assert mailbox.messages == 4


def test_pick_gives_named_messages_in_order_of_id(store):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        for number in range(6):
            put(tx, mailbox, lane=LANES[3 - number % 4])
            put(tx, other)
        cut(tx, mailbox, 3)
    with store.reading() as tx:
        mailbox = get(tx)
        assert ids(tx.messages.pick(mailbox, [5, 3, 0, 100, 2], ALL, T0)) == [0, 2, 5]
        assert tx.messages.pick(mailbox, [], ALL, T0) == []
        assert tx.messages.pick(mailbox, [3], ALL, T0) == []
        assert ids(tx.messages.pick(mailbox, range(5000), ALL, T0)) == [0, 1, 2, 4, 5]


@pytest.mark.rule("Q1")
def test_newest_applies_each_filter_and_all_together(store):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        put(tx, other, key="k0", tags=("x",))
        for number in range(10):
            put(
                tx,
                mailbox,
                key=f"k{number}" if number % 2 else None,
                tags=tuple(tag for tag, each in (("x", 2), ("y", 3), ("z", 5)) if number % each == 0),
                created_at=T0 + number // 2,
                lane=LANES[number % 4],
            )
    with store.reading() as tx:
        mailbox = get(tx)

        def found(limit=ALL, **wanted):
            return ids(tx.messages.newest(mailbox, Filter(**wanted), limit, ALL, T0))

        assert found() == list(range(10))
        assert found(limit=3) == [7, 8, 9]
        assert found(key="k3") == [3]
        assert found(key="k2") == []
        assert found(tags=("x",)) == [0, 2, 4, 6, 8]
        assert found(tags=("y", "x")) == [0, 6]
        assert found(tags=("x", "y", "z")) == [0]
        assert found(tags=("x", "x")) == [0, 2, 4, 6, 8]
        assert found(tags=("nope",)) == []
        assert found(since=T0 + 2) == [4, 5, 6, 7, 8, 9]
        assert found(since=T0 + 5) == []
        assert found(before_id=4) == [0, 1, 2, 3]
        assert found(before_id=0) == []
        assert found(before_id=4, limit=2) == [2, 3]
        assert found(limit=2, tags=("x",)) == [6, 8]
        assert found(limit=1, tags=("x",), before_id=8, since=T0 + 1) == [6]
        assert found(key="k9", tags=("y",), since=T0 + 4, before_id=10) == [9]
        assert found(key="k9", tags=("x",)) == []


# A comma is in no tag: it parts them on the wire (S1).
TAGS = [
    "bill", "billing", "ill", "Bill", "%", "_", "b%", "bil_", "%ll", "a b", "a", "b", " ", "'", '"', "''", "\\", "\\%",
    "[x]", "{}", "null", "😀", "é", "e\u0301", "ß", "a\nb", "a\x1fb", "\x1f", "|a|", "--", "*", "?", "x" * 128,
]  # fmt: skip


@pytest.mark.rule("Q1")
def test_a_tag_is_matched_whole_and_as_it_is_written(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        for tag in TAGS:
            put(tx, mailbox, tags=(tag,))
        put(tx, mailbox, tags=tuple(TAGS))
        put(tx, mailbox, tags=())
    with store.reading() as tx:
        mailbox = get(tx)
        for number, tag in enumerate(TAGS):
            found = tx.messages.newest(mailbox, Filter(tags=(tag,)), ALL, ALL, T0)
            assert ids(found) == [number, len(TAGS)], tag
        assert ids(tx.messages.newest(mailbox, Filter(tags=tuple(reversed(TAGS))), ALL, ALL, T0)) == [len(TAGS)]
        assert tx.messages.newest(mailbox, Filter(tags=("l",)), ALL, ALL, T0) == []
        assert [message.tags for message in everything(tx, mailbox)] == [(tag,) for tag in TAGS] + [tuple(TAGS), ()]


@pytest.mark.rule("K2")
def test_between_is_open_at_its_start_and_closed_at_its_end(store):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        for number in range(10):
            put(tx, other)
            put(tx, mailbox, lane=Lane.URGENT if number % 2 else Lane.NORMAL, expire_at=T0 + 1)
        cut(tx, mailbox, 4)
    with store.reading() as tx:
        mailbox = get(tx)
        assert sorted(ids(tx.messages.between(mailbox, Lane.NORMAL, 0, 8, T0))) == [2, 6, 8]
        assert sorted(ids(tx.messages.between(mailbox, Lane.NORMAL, -1, 7, T0))) == [0, 2, 6]
        assert sorted(ids(tx.messages.between(mailbox, Lane.URGENT, 3, 5, T0))) == [5]
        assert tx.messages.between(mailbox, Lane.NORMAL, 8, 8, T0) == []
        assert tx.messages.between(mailbox, Lane.NORMAL, 9, 3, T0) == []
        assert tx.messages.between(mailbox, Lane.LOW, -1, 100, T0) == []


def test_first_gives_the_oldest(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        for number in range(6):
            put(tx, mailbox, lane=LANES[number % 4], expire_at=T0)
        cut(tx, mailbox, 1)
        assert ids(tx.messages.first(mailbox, 3)) == [0, 2, 3]
        assert ids(tx.messages.first(mailbox, ALL)) == [0, 2, 3, 4, 5]
        assert tx.messages.first(add(tx, "empty"), ALL) == []


@pytest.mark.rule("F1", "N5")
def test_first_since_finds_the_lowest_id_of_a_time(store, reopen):
    with store.transaction() as tx:
        mailbox = add(tx)
        assert tx.messages.first_since(mailbox, T0) == 0
        for number in range(12):
            put(tx, mailbox, created_at=T0 + 10 * (number // 3), lane=LANES[number % 4])
        cut(tx, mailbox, 3, 4, 11)
    for _ in range(2):
        with store.transaction() as tx:
            mailbox = get(tx)
            for at, first in ((0, 0), (T0, 0), (T0 + 1, 5), (T0 + 10, 5), (T0 + 11, 6), (T0 + 20, 6), (T0 + 30, 9)):
                assert tx.messages.first_since(mailbox, at) == first
            assert tx.messages.first_since(mailbox, T0 + 31) == 12
        store = reopen()
    with store.transaction() as tx:
        cut(tx, get(tx), 9, 10)
    with store.transaction() as tx:
        assert tx.messages.first_since(get(tx), T0 + 30) == 12
        put(tx, get(tx), created_at=T0 + 30)
        put(tx, get(tx), created_at=T0 + 30)
        assert tx.messages.first_since(get(tx), T0 + 30) == 12
        assert tx.messages.first_since(get(tx), T0 + 31) == 14


def test_remove_takes_messages_and_counts_away(store):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        put(tx, other, size=3)
        for number in range(5):
            put(tx, mailbox, size=10**number, key=f"k{number}", recipient="r")
        cut(tx, mailbox, 1, 3)
        assert held(mailbox) == (5, 3, 10101)
        tx.messages.remove(mailbox, [])
    with store.transaction() as tx:
        mailbox = get(tx)
        assert held(mailbox) == (5, 3, 10101)
        assert ids(everything(tx, mailbox)) == [0, 2, 4]
        assert tx.messages.keyed(mailbox, "k1") is None
        assert tx.messages.recipient_usage(mailbox, "r") == Usage(3, 10101)
        assert held(get(tx, "other")) == (1, 1, 3)
        tx.messages.remove(mailbox, list(tx.messages.refs(mailbox, [0, 2, 4], T0).values()))
        assert held(mailbox) == (5, 0, 0)


def test_thousands_of_messages_are_removed_at_once(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        for _ in range(2500):
            put(tx, mailbox)
    with store.transaction() as tx:
        mailbox = get(tx)
        tx.messages.remove(mailbox, tx.messages.first(mailbox, 2400))
    with store.reading() as tx:
        assert held(get(tx)) == (2500, 100, 100)
        assert ids(everything(tx, get(tx))) == list(range(2400, 2500))


@pytest.mark.rule("S5")
def test_expired_comes_oldest_expiry_first_from_all_mailboxes(store):
    with store.transaction() as tx:
        a, b = add(tx, "a"), add(tx, "b")
        put(tx, a, expire_at=T0 + 30, size=5, lane=Lane.LOW, created_at=T0 + 2, recipient="r", dedup_id="d")
        put(tx, b, expire_at=T0 + 10)
        put(tx, a)
        put(tx, a, expire_at=T0 + 20)
        put(tx, b, expire_at=T0 + 31)
    with store.transaction() as tx:
        assert [(x.mailbox_id, x.ref.msg_id) for x in tx.messages.expired(T0 + 30, ALL)] == [
            (b.id, 0),
            (a.id, 2),
            (a.id, 0),
        ]
        assert tx.messages.expired(T0 + 30, ALL)[-1] == Expired(a.id, MessageRef(0, Lane.LOW, 5, T0 + 2, "r", "d"))
        assert [x.ref.msg_id for x in tx.messages.expired(T0 + 30, 2)] == [0, 2]
        assert tx.messages.expired(T0 + 9, ALL) == []
        cut(tx, get(tx, "b"), 0)
        assert [x.ref.msg_id for x in tx.messages.expired(T0 + 20, ALL)] == [2]


def test_recipient_usage_counts_each_recipient_alone(store, reopen):
    with store.transaction() as tx:
        mailbox, other = add(tx), add(tx, "other")
        put(tx, mailbox, size=10, recipient="r'1%")
        put(tx, mailbox, size=20, recipient="r'1%")
        put(tx, mailbox, size=1, recipient="😀")
        put(tx, mailbox, size=100)
        put(tx, other, size=7, recipient="r'1%")
        cut(tx, mailbox, 0, 3)
        assert tx.messages.recipient_usage(mailbox, "r'1%") == Usage(1, 20)
    store = reopen()
    with store.transaction() as tx:
        mailbox = get(tx)
        assert tx.messages.recipient_usage(mailbox, "r'1%") == Usage(1, 20)
        assert tx.messages.recipient_usage(mailbox, "😀") == Usage(1, 1)
        assert tx.messages.recipient_usage(mailbox, "nobody") == Usage(0, 0)
        assert tx.messages.recipient_usage(get(tx, "other"), "r'1%") == Usage(1, 7)
        cut(tx, mailbox, 1)
        assert tx.messages.recipient_usage(mailbox, "r'1%") == Usage(0, 0)


@pytest.mark.rule("A3", "A8")
def test_messages_of_a_mailbox_stay_with_it_across_a_restart(reopen, store):
    with store.transaction() as tx:
        mailbox = add(tx)
        kept = [put(tx, mailbox, f"p{number}".encode(), lane=LANES[number % 4]) for number in range(8)]
    with reopen().reading() as tx:
        assert [decoded(message) for message in everything(tx, get(tx))] == kept
