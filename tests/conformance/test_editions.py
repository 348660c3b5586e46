"""What the older editions need of every store: mail that ends with the next start, public mailboxes, marks of push."""

import pytest

from mediator.mailboxes.board import PublicList, list_public
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.collecting import remove_mail_kept_until_start
from mediator.mailboxes.events import EventType
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Draft, Filter
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.sending import Send, release, send
from tests.harness.samples import ALL, T0, TENANT, add, cut, everything, get, held, ids, put, waiting

SECOND = 1000
HERE = "here"


def keep(store, payload=b"x", *, kept_until_start_of=HERE, now=T0, **given):
    """Send to the mailbox and return the msg_id."""
    bounds = Bounds()
    request = Send(TENANT, "a", Draft(payload, kept_until_start_of=kept_until_start_of, **given))
    with store.transaction() as tx:
        return send(tx, bounds, Quotas(bounds.mailbox, bounds.tenant), request, now)


def start(store, instance=HERE, limit=1000):
    """Do what a start does and return how many messages went in each slice, and the events."""
    counts, events = [], []
    while not counts or counts[-1]:
        with store.transaction() as tx:
            counts.append(remove_mail_kept_until_start(tx, instance, T0, limit))
            events += tx.events
    return counts, events


@pytest.fixture
def box(store):
    """A store with an empty mailbox."""
    with store.transaction() as tx:
        add(tx)
    return store


@pytest.mark.rule("E5")
def test_a_start_removes_volatile_mailboxes_only(box):
    keep(box, b"gone", lane=Lane.LOW)
    keep(box, b"stays", kept_until_start_of=None, lane=Lane.LOW)
    keep(box, b"another's", kept_until_start_of="there")
    keep(box, b"large" * 10_000, tags=("t",), key="k")
    counts, events = start(box)
    assert counts == [2, 0]
    assert [(event.type, event.msg_id) for event in events] == [(EventType.EXPIRED, 0), (EventType.EXPIRED, 3)]
    with box.transaction() as tx:
        assert [message.payload for message in everything(tx, get(tx))] == [b"stays", b"another's"]
        assert held(get(tx)) == (4, 2, len(b"stays" + b"another's"))
        assert tx.messages.keyed(get(tx), "k") is None
    assert start(box, "there")[0] == [1, 0]


@pytest.mark.rule("E5", "S4")
def test_delayed_volatile_mail_ends_with_the_start_too(box):
    for due in (1, 1000):
        keep(box, b"gone", delay=due * SECOND, archive=True)
    keep(box, b"stays", kept_until_start_of=None, delay=SECOND)
    with box.transaction() as tx:
        assert release(tx, T0 + 2 * SECOND, 10).count == 2
        assert ids(everything(tx, get(tx))) == [0, 1]
        backlog = tx.outbox.backlog()
    counts, _ = start(box)
    assert counts == [2, 0]
    with box.transaction() as tx:
        assert [message.payload for message in everything(tx, get(tx))] == [b"stays"]
        assert tx.delays.usage(get(tx)).messages == 0
        assert tx.outbox.backlog() == backlog - 1


@pytest.mark.rule("E5", "S3")
def test_what_a_start_removed_may_be_sent_again(box):
    assert keep(box, dedup_id="seen") == 0
    assert keep(box, dedup_id="waits", delay=SECOND) == -1
    start(box)
    assert keep(box, dedup_id="seen") == 1
    assert keep(box, dedup_id="waits") == 2


@pytest.mark.rule("E5")
def test_a_start_goes_by_slices(box):
    for _ in range(5):
        keep(box)
    assert start(box, limit=2)[0] == [2, 2, 1, 0]


@pytest.mark.rule("E5")
def test_what_went_before_the_start_is_not_looked_for(box):
    keep(box)
    keep(box)
    with box.transaction() as tx:
        cut(tx, get(tx), 0)
    assert start(box)[0] == [1, 0]


@pytest.mark.rule("E5")
def test_a_mark_outlives_a_restart(opened, reopen):
    with opened.store.transaction() as tx:
        mailbox = add(tx)
        put(tx, mailbox, kept_until_start_of=HERE)
        tx.delays.add(waiting(mailbox, T0, kept_until_start_of=HERE))
        tx.delays.add(waiting(mailbox, T0, kept_until_start_of="there"))
    again = reopen()
    with again.transaction() as tx:
        assert [delayed.message.kept_until_start_of for delayed in tx.delays.due(T0, 10, ALL)] == [HERE, "there"]
    assert start(again)[0] == [2, 0]


@pytest.mark.rule("Q1")
def test_heads_are_the_newest_messages_without_their_payloads(box):
    for number in range(4):
        tags = ("even",) if number % 2 == 0 else ()
        keep(
            box,
            b"x" * (5000 + number),
            tags=tags,
            headers={"own": "é"},
            dedup_id=f"d{number}",
            kept_until_start_of=None,
        )
    with box.reading() as tx:
        whole = everything(tx, get(tx))
        heads = tx.messages.heads(get(tx), Filter(), 10, T0)
        assert [message._replace(payload=b"") for message in whole] == heads
        assert [message.payload_size for message in heads] == [5000, 5001, 5002, 5003]
        assert [message.payload_size for message in whole] == [5000, 5001, 5002, 5003]
        assert ids(tx.messages.heads(get(tx), Filter(tags=("even",)), 10, T0)) == [0, 2]
        assert ids(tx.messages.heads(get(tx), Filter(before_id=3), 2, T0)) == [1, 2]


@pytest.mark.rule("E10")
def test_public_mailboxes_are_found_by_tag_and_in_pages(store):
    with store.transaction() as tx:
        for number in range(5):
            add(tx, f"b{number}", public=True, tags=("all", "even" if number % 2 == 0 else "odd"))
        add(tx, "alone", public=True)
        add(tx, "private", tags=("all",))
        add(tx, "other", tenant="t2", public=True, tags=("all",))
        add(tx, "over", public=True, tags=("all",), expire_at=T0)
        tx.mailboxes.retire(get(tx, "b4"))

    def ask(**given):
        with store.reading() as tx:
            page = list_public(tx, PublicList(TENANT, **given), T0)
        return [mailbox.address for mailbox in page.mailboxes], page.more

    assert ask() == (["alone", "b0", "b1", "b2", "b3"], False)
    assert ask(tags=("all",)) == (["b0", "b1", "b2", "b3"], False)
    assert ask(tags=("all", "even")) == (["b0", "b2"], False)
    assert ask(tags=("al",)) == ([], False)
    assert ask(limit=2) == (["alone", "b0"], True)
    assert ask(limit=2, page=2) == (["b1", "b2"], True)
    assert ask(limit=2, page=3) == (["b3"], False)
    assert ask(limit=2, page=4) == ([], False)
    assert ask(limit=2, after="b0") == (["b1", "b2"], True)
    assert ask(limit=2, page=2, after="b0") == (["b3"], False)


@pytest.mark.rule("E4")
def test_marks_of_push_are_read_by_lane(box):
    with box.transaction() as tx:
        assert tx.pushed.marks(get(tx)) == [-1, -1, -1, -1]
        tx.pushed.raise_to(get(tx), [-1, 4, 7, -1])
        tx.pushed.raise_to(get(tx), [2, 3, -1, -1])
    with box.reading() as tx:
        assert tx.pushed.marks(get(tx)) == [2, 4, 7, -1]
