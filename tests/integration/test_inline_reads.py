"""Reads of many rows, which the event loop does itself while they are quick (E6)."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mediator.broker import Broker
from mediator.errors import UnavailableError
from mediator.mailboxes import pushing
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.message import Draft
from mediator.mailboxes.pushing import Cursor
from mediator.mailboxes.sending import Send
from mediator.store.base import Transaction
from mediator.store.sqlite import SqliteStore

BOX = "default", "task"
ROWS = 1_000_000
SLOW = f"WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {ROWS}) SELECT count(*) FROM n"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    store = SqliteStore(tmp_path / "mail.db")
    made = Broker(store, Bounds())
    yield made
    await made.close()
    store.close()


@pytest.mark.rule("E6")
async def test_slow_read_leaves_the_event_loop(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.broker.INLINE_REST", 10_000)
    began: list[bool] = []

    def read(tx: Transaction, now: int) -> int:
        began.append(threading.current_thread() is threading.main_thread())
        return int(tx.session.dialect.execute(SLOW)[0][0])

    assert await broker.read_batch(read) == ROWS
    assert began == [True, False]
    assert await broker.read_batch(read) == ROWS
    assert began == [True, False, False]


@pytest.mark.rule("E6")
async def test_event_loop_works_between_two_reads(broker: Broker) -> None:
    order: list[str] = []
    loop = asyncio.get_running_loop()

    def tick() -> None:
        order.append("tick")
        if order.count("read") < 3:
            loop.call_soon(tick)

    tick()
    await asyncio.gather(*(broker.read_batch(lambda _tx, _now: order.append("read")) for _ in range(3)))
    assert "read read" not in " ".join(order)
    assert order.count("read") == 3


@pytest.mark.rule("E6")
async def test_time_is_checked_within_a_batch(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "mail.db")
    broker = Broker(store, Bounds())
    number = (await broker.create(Create(*BOX))).mailbox.id
    await asyncio.gather(*(broker.send(Send(*BOX, Draft(b"x"))) for _ in range(100)))

    def read(tx: Transaction, now: int) -> int:
        cursor = Cursor(LANES, [-1] * len(LANES))
        return len(pushing.read_next(tx, BOX, number, cursor, 100, 1 << 20, now).messages)

    assert await broker.read_batch(read) == 100
    with pytest.raises(UnavailableError, match="too long"), store.reading(max_seconds=0) as tx:
        read(tx, broker.clock())
    await broker.close()
    store.close()
