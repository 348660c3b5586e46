"""Reads of many rows, which the event loop does itself while they are quick (E6)."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mediator.broker import Broker
from mediator.mailboxes.bounds import Bounds
from mediator.store.base import Transaction
from mediator.store.sqlite import SqliteStore

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
