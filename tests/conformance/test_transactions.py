"""What a transaction promises: all or nothing, its own writes seen, and snapshots that see what is committed."""

import threading
from copy import deepcopy

import pytest

from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.group import Lease
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import NewMailbox
from mediator.mailboxes.message import Usage
from tests.harness.samples import (
    ALL,
    T0,
    TENANT,
    add,
    cut,
    decoded,
    everything,
    furnish,
    get,
    held,
    ids,
    leases,
    picture,
    put,
    waiting,
)
from tests.harness.stores import undone

DEADLINE = 20


def upset(tx):
    """Change something in every table that :func:`furnish` filled."""
    mailbox = get(tx, "a")
    put(tx, mailbox, b"new", lane=Lane.CRITICAL, created_at=T0 + 50, recipient="r", tags=("even",))
    put(tx, mailbox, b"newer", lane=Lane.LOW, created_at=T0 + 50, key="k9", recipient="new")
    cut(tx, mailbox, 0, 5, 6)
    tx.delays.remove(tx.delays.due(T0 + 4000, 1, ALL))
    tx.delays.add(waiting(mailbox, T0 + 1, b"soonest", archive=True))
    tx.dedup_ids.add(mailbox, "d2", 5, T0 + 10_000)
    tx.dedup_ids.add(mailbox, "d0", 5, T0 + 20_000)
    tx.dedup_ids.forget(mailbox, "d1")
    tx.dedup_ids.collect(T0, ALL)
    group = tx.groups.find(mailbox, "g")
    group.start_at(5)
    tx.groups.save(group)
    tx.leases.remove(group, [1])
    tx.leases.put(group, [Lease(2, Lane.NORMAL, T0 + 1, 9), Lease(4, Lane.LOW, T0 + 2, 1)])
    more = tx.groups.add(mailbox, "more")
    tx.leases.put(more, [Lease(3, Lane.LOW, T0 + 3, 1)])
    tx.outbox.add(mailbox, decoded(everything(tx, mailbox)[-1]))
    tx.mailboxes.describe(mailbox, "other", ("u",), None)
    [retired] = tx.mailboxes.retired(ALL)
    tx.mailboxes.drop(retired)
    put(tx, add(tx, "b", desc="again"))
    tx.mailboxes.retire(get(tx, "c", "other"))
    tx.mailboxes.retire(add(tx, "d"))
    tx.events.append(Event(EventType.STORED, T0, TENANT, mailbox.id))
    tx.woken.add((TENANT, "a"))
    tx.session.due = T0


@pytest.mark.rule("A8", "N3")
def test_a_rollback_takes_everything_back(store, reopen):
    with store.transaction() as tx:
        furnish(tx)
    with store.transaction() as tx:
        before = deepcopy(picture(tx))

    for _ in range(2):
        with undone(store) as tx:
            upset(tx)
            assert picture(tx) != before
        with store.transaction() as tx:
            assert picture(tx) == before
        with store.reading() as tx:
            assert picture(tx) == before
    store = reopen()
    with store.transaction() as tx:
        assert picture(tx) == before
    with store.transaction() as tx:
        assert put(tx, get(tx, "a")).msg_id == 6
        assert tx.groups.find(get(tx, "a"), "more") is None
        upset_again = tx.groups.add(get(tx, "a"), "more")
        assert leases(tx, upset_again, *range(10)) == {}


@pytest.mark.rule("A8")
def test_a_transaction_sees_its_own_writes(store, reopen):
    with store.transaction() as tx:
        furnish(tx)
        furnished = deepcopy(picture(tx))
    with store.transaction() as tx:
        assert picture(tx) == furnished
    with store.transaction() as tx:
        upset(tx)
        changed = deepcopy(picture(tx))
    with store.reading() as tx:
        assert picture(tx) == changed
    with reopen().transaction() as tx:
        assert picture(tx) == changed
        assert put(tx, get(tx, "a")).msg_id == 8


@pytest.mark.rule("A3", "A8")
def test_a_rollback_takes_back_counters_and_ids(store):
    with store.transaction() as tx:
        mailbox = add(tx)
        for number in range(3):
            put(tx, mailbox, created_at=T0 + number, recipient="r")

    with undone(store) as tx:
        mailbox = get(tx)
        put(tx, mailbox, size=100, created_at=T0 + 9, recipient="r")
        cut(tx, mailbox, 0, 1)
        assert held(mailbox) == (4, 2, 101)
        assert tx.messages.recipient_usage(mailbox, "r") == Usage(2, 101)
    with store.transaction() as tx:
        mailbox = get(tx)
        assert held(mailbox) == (3, 3, 3)
        assert mailbox.last_at == T0 + 2
        assert tx.messages.recipient_usage(mailbox, "r") == Usage(3, 3)
        assert put(tx, mailbox, recipient="r").msg_id == 3
        assert ids(everything(tx, mailbox)) == [0, 1, 2, 3]


@pytest.mark.rule("A8")
def test_a_mailbox_that_was_rolled_back_was_never_there(store):
    with undone(store) as tx:
        put(tx, add(tx))
    with store.transaction() as tx:
        assert tx.mailboxes.find(TENANT, "a") is None
        assert held(add(tx)) == (0, 0, 0)
        assert everything(tx, get(tx)) == []


@pytest.mark.rule("A8")
def test_a_retirement_that_was_rolled_back_did_not_happen(store):
    with store.transaction() as tx:
        put(tx, add(tx))

    with undone(store) as tx:
        tx.mailboxes.retire(get(tx))
        put(tx, add(tx))
    with store.transaction() as tx:
        assert held(get(tx)) == (1, 1, 1)
        assert tx.mailboxes.retired(ALL) == []
        assert tx.mailboxes.add(NewMailbox(TENANT, "a", T0)) is None


def test_what_a_transaction_tells_afterwards_starts_empty(store):
    for _ in range(2):
        with store.transaction() as tx:
            assert (tx.events, tx.woken, tx.session.due) == ([], set(), None)
            tx.events.append(Event(EventType.STORED, T0, TENANT, 1))
            tx.woken.add((TENANT, "a"))
            tx.session.due = T0
        assert tx.events == [Event(EventType.STORED, T0, TENANT, 1)]
        assert tx.woken == {(TENANT, "a")}
        assert tx.session.due == T0
        with store.reading() as tx:
            assert (tx.events, tx.woken, tx.session.due) == ([], set(), None)


def test_an_empty_transaction_is_one(store):
    with store.transaction():
        pass
    with store.reading() as tx:
        assert tx.mailboxes.list(TENANT, "", ALL, T0) == []


def test_places_may_repeat_in_any_order_without_a_mailbox(store):
    with store.transaction([(TENANT, "a")]) as tx:
        assert tx.mailboxes.find(TENANT, "a") is None
        add(tx, "a")
        add(tx, "b")
    places = [(TENANT, "b"), (TENANT, "nowhere"), (TENANT, "a"), ("other", "a"), (TENANT, "b")]
    with store.transaction(places) as tx:
        put(tx, get(tx, "a"))
        put(tx, get(tx, "b"))
        put(tx, add(tx, "not.named"))
        assert tx.mailboxes.find(TENANT, "nowhere") is None
        assert tx.mailboxes.find("other", "a") is None
    with store.reading() as tx:
        assert [held(get(tx, address)) for address in ("a", "b", "not.named")] == [(1, 1, 1)] * 3


class Reader(threading.Thread):
    """Asks the store a question in a snapshot, beside whatever goes on."""

    def __init__(self, store, question):
        super().__init__(daemon=True)
        self._store = store
        self._question = question
        self._answers = []
        self.start()

    def run(self):
        with self._store.reading() as tx:
            self._answers.append(self._question(tx))

    def answer(self):
        self.join(DEADLINE)
        assert self._answers, "the reader got no answer"
        return self._answers[0]


@pytest.mark.rule("A8")
def test_reading_sees_only_what_is_committed(store):
    with store.transaction() as tx:
        put(tx, add(tx), b"committed")

    def payloads(tx):
        return [message.payload for message in everything(tx, get(tx))]

    readers = []

    with undone(store) as tx:
        put(tx, get(tx), b"never")
        add(tx, "b")
        readers.append(Reader(store, payloads))
        readers.append(Reader(store, lambda tx: tx.mailboxes.find(TENANT, "b")))
        readers.append(Reader(store, lambda tx: held(get(tx))))
        # A store with a disk answers beside a writer; memory may make readers wait for it.
        assert readers[0].answer() == [b"committed"]
        assert readers[1].answer() is None
        assert readers[2].answer() == (1, 1, 9)
    assert readers[0].answer() == [b"committed"]
    assert readers[1].answer() is None
    assert readers[2].answer() == (1, 1, 9)
    with store.transaction() as tx:
        put(tx, get(tx), b"then")
    assert Reader(store, payloads).answer() == [b"committed", b"then"]


@pytest.mark.rule("A8")
def test_a_snapshot_stays_as_it_was(store):
    with store.transaction() as tx:
        put(tx, add(tx))
    first, written = threading.Event(), threading.Event()

    def look_twice(tx):
        before = held(get(tx)), ids(everything(tx, get(tx)))
        first.set()
        assert written.wait(DEADLINE)
        return before, (held(get(tx)), ids(everything(tx, get(tx))))

    reader = Reader(store, look_twice)
    assert first.wait(DEADLINE)
    with store.transaction() as tx:
        put(tx, get(tx))
        cut(tx, get(tx), 0)
    written.set()
    assert reader.answer() == (((1, 1, 1), [0]), ((1, 1, 1), [0]))


@pytest.mark.rule("A8")
def test_threads_read_whole_states_while_one_writes(store):
    with store.transaction() as tx:
        add(tx)
    done = threading.Event()
    looks, problems = [], []

    def read():
        try:
            while True:
                ending = done.is_set()
                with store.reading() as tx:
                    mailbox = get(tx)
                    found = ids(everything(tx, mailbox))
                    # Each transaction appends three messages and then takes the first two of them.
                    assert found == list(range(2, mailbox.next_id, 3))
                    assert held(mailbox) == (3 * len(found), len(found), len(found))
                looks.append(len(found))
                if ending:
                    break
        except BaseException as error:
            problems.append(error)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(40):
            with store.transaction() as tx:
                mailbox = get(tx)
                start = mailbox.next_id
                for _ in range(3):
                    put(tx, mailbox)
                cut(tx, mailbox, start, start + 1)
    finally:
        done.set()
        for reader in readers:
            reader.join(DEADLINE)
    assert problems == []
    assert looks.count(40) >= 3


def test_upkeep_changes_nothing_that_is_kept(store, reopen):
    with store.transaction() as tx:
        furnish(tx)
        mailbox = add(tx, "large")
        for _ in range(200):
            put(tx, mailbox, b"x" * 4000)
    with store.transaction() as tx:
        cut(tx, get(tx, "large"), *range(150))
        before = deepcopy(picture(tx))
    for busy in (True, False, True, False):
        store.upkeep(busy)
        with store.reading() as tx:
            assert picture(tx) == before
    with reopen().reading() as tx:
        assert picture(tx) == before


@pytest.mark.rule("A8")
def test_a_store_is_closed_and_opened_again_and_again(reopen, store):
    with store.transaction() as tx:
        furnish(tx)
        before = deepcopy(picture(tx))
    for number in range(3):
        store = reopen()
        with store.transaction() as tx:
            assert picture(tx) == before
            assert put(tx, get(tx, "a"), created_at=T0 + 100).msg_id == 6 + number
            before = deepcopy(picture(tx))
