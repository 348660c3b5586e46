"""Inserts mailboxes and messages directly through the store, because the port would take too long.

Use it only while no service runs on the database. What is measured afterwards goes through the port.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Mailbox, NewMailbox
from mediator.mailboxes.message import HIDDEN_ID, Delayed, Message
from mediator.mailboxes.transaction import Transaction
from mediator.store.base import Store
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore

TENANT = "default"
CHUNK = 10_000
PAYLOAD = bytes(range(256))


def addresses(count: int) -> list[str]:
    return [f"bench.{i}" for i in range(count)]


def open_postgres(url: str) -> Store:
    from mediator.store.postgres import PostgresStore

    return PostgresStore(url)


@contextmanager
def store(place: Path | str) -> Iterator[Store]:
    """Open the store of a data directory, or of PostgreSQL at a URL."""
    opened: Store = SqliteStore(database_path(place)) if isinstance(place, Path) else open_postgres(place)
    try:
        yield opened
    finally:
        opened.close()


def add_mailboxes(place: Path | str, names: Sequence[str]) -> None:
    now = _now()
    with store(place) as kept:
        for start in range(0, len(names), CHUNK):
            with kept.transaction() as tx:
                for name in names[start : start + CHUNK]:
                    tx.mailboxes.add(NewMailbox(TENANT, name, now))
            kept.upkeep(busy=False)


def add_messages(place: Path | str, names: Sequence[str], count: int, expire_at: int | None = None) -> None:
    """Add ``count`` messages of 256 bytes, spread over the mailboxes."""
    now = _now()
    with store(place) as kept:
        for start in range(0, count, CHUNK):
            with kept.transaction() as tx:
                boxes = _boxes(tx, names)
                for i in range(start, min(start + CHUNK, count)):
                    box = boxes[i % len(boxes)]
                    tx.messages.append(box, _message(box.next_id, now, expire_at))
            kept.upkeep(busy=False)


def add_delayed(data_dir: Path, names: Sequence[str], count: int, due_at: int) -> None:
    """Add ``count`` delayed messages due at the same millisecond, spread over the mailboxes."""
    now = _now()
    with store(data_dir) as kept:
        for start in range(0, count, CHUNK):
            with kept.transaction() as tx:
                boxes = _boxes(tx, names)
                for i in range(start, min(start + CHUNK, count)):
                    box = boxes[i % len(boxes)]
                    tx.delays.add(Delayed(0, box.id, due_at, False, _message(HIDDEN_ID, now, None)))
            kept.upkeep(busy=False)


def _boxes(tx: Transaction, names: Sequence[str]) -> list[Mailbox]:
    found = [tx.mailboxes.find(TENANT, name) for name in names]
    return [box for box in found if box is not None]


def _message(msg_id: int, now: int, expire_at: int | None) -> Message:
    return Message(msg_id, Lane.NORMAL, PAYLOAD, len(PAYLOAD), now, now, expire_at)


def _now() -> int:
    return time.time_ns() // 1_000_000
