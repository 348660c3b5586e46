"""Counters are kept and never scanned for, and yet they are right at any moment, also right after a restart."""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Usage
from mediator.mailboxes.transaction import Transaction
from tests.harness.samples import ALL, T0, add, get, held, put

RECIPIENTS = (None, "r", "s")


class Undone(Exception):
    """Ends a transaction that is to leave nothing."""


@dataclass
class Book:
    """What must be in one mailbox, kept by hand."""

    next_id: int = 0
    last_at: int = 0
    messages: dict[int, tuple[int, str | None]] = field(default_factory=dict)
    """Size and recipient by msg_id."""

    def copy(self) -> "Book":
        return Book(self.next_id, self.last_at, dict(self.messages))


sends = st.tuples(st.just("send"), st.integers(0, 2), st.integers(0, 1000), st.sampled_from(RECIPIENTS))
cuts = st.tuples(st.just("cut"), st.integers(0, 2), st.sets(st.integers(0, 7), min_size=1, max_size=4), st.none())
transactions = st.tuples(
    st.sampled_from(["commit", "commit", "commit", "undo", "restart"]),
    st.lists(sends | cuts, min_size=1, max_size=8),
)


def change(tx: Transaction, books: list[Book], address: str, step) -> None:
    what, number, argument, recipient = step
    book, mailbox = books[number], get(tx, f"{address}.{number}")
    if what == "send":
        book.last_at = max(book.last_at, T0 + 10 * len(book.messages))
        put(tx, mailbox, size=argument, recipient=recipient, created_at=book.last_at)
        book.messages[book.next_id] = argument, recipient
        book.next_id += 1
    else:
        # Counted from the newest, since it is there that a restart could give an id twice.
        gone = [msg_id for place, msg_id in enumerate(sorted(book.messages, reverse=True)) if place in argument]
        tx.messages.remove(mailbox, list(tx.messages.refs(mailbox, gone, T0).values()))
        for msg_id in gone:
            del book.messages[msg_id]


def compare(tx: Transaction, mailbox: Mailbox, book: Book) -> None:
    sizes = {msg_id: size for msg_id, (size, _) in book.messages.items()}
    assert {ref.msg_id: ref.size for ref in tx.messages.first(mailbox, ALL)} == sizes
    assert held(mailbox) == (book.next_id, len(sizes), sum(sizes.values()))
    assert mailbox.last_at == book.last_at
    for recipient in RECIPIENTS[1:]:
        theirs = [size for size, whose in book.messages.values() if whose == recipient]
        assert tx.messages.recipient_usage(mailbox, recipient) == Usage(len(theirs), sum(theirs))


@pytest.mark.rule("A3", "S7")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(transactions, max_size=12))
def test_counters_are_what_a_count_would_say(opened, script):
    with opened.store.transaction() as tx:
        # Every script has mailboxes of its own; all scripts share one store.
        address = f"m{len(tx.mailboxes.list('default', '', ALL, T0))}"
        for number in range(3):
            add(tx, f"{address}.{number}")
    books = [Book(), Book(), Book()]
    for ending, steps in script:
        if ending == "restart":
            opened.reopen()
        attempt = [book.copy() for book in books]
        try:
            with opened.store.transaction() as tx:
                for step in steps:
                    change(tx, attempt, address, step)
                for number, book in enumerate(attempt):
                    compare(tx, get(tx, f"{address}.{number}"), book)
                if ending == "undo":
                    raise Undone
            books = attempt
        except Undone:
            pass
        with opened.store.reading() as tx:
            for number, book in enumerate(books):
                compare(tx, get(tx, f"{address}.{number}"), book)
            kept = [size for book in books for size, _ in book.messages.values()]
            assert tx.mailboxes.usage("default") == Usage(len(kept), sum(kept))
    with opened.store.transaction() as tx:
        for number, book in enumerate(books):
            mailbox = get(tx, f"{address}.{number}")
            compare(tx, mailbox, book)
            tx.messages.remove(mailbox, tx.messages.first(mailbox, ALL))
        assert tx.mailboxes.usage("default") == Usage(0, 0)


@pytest.mark.rule("A3", "S7")
@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 2500])
def test_counters_are_right_after_many_sends_and_a_restart(reopen, store, count):
    with store.transaction() as tx:
        add(tx)
    for part in range(0, count, 400):
        with store.transaction() as tx:
            mailbox = get(tx)
            for number in range(part, min(count, part + 400)):
                put(tx, mailbox, size=number, recipient="r", created_at=T0 + number)
    size = sum(range(count))
    for _ in range(2):
        store = reopen()
        with store.reading() as tx:
            assert held(get(tx)) == (count, count, size)
            assert get(tx).last_at == T0 + count - 1
            assert tx.messages.recipient_usage(get(tx), "r") == Usage(count, size)
            assert tx.mailboxes.usage("default") == Usage(count, size)
    with store.transaction() as tx:
        mailbox = get(tx)
        tx.messages.remove(mailbox, tx.messages.first(mailbox, 1))
        assert put(tx, mailbox, size=7).msg_id == count
    with reopen().reading() as tx:
        assert held(get(tx)) == (count + 1, count, size + 7)
