"""Ended sessions are the same in every store: kept over a restart, bounded, and gone when their time is over."""

import asyncio
from collections.abc import Callable

import pytest

from mediator.broker import Broker
from mediator.mailboxes.bounds import Bounds
from mediator.operate import access
from mediator.operate.access import EndedSessions, EndedSessionTable, OldEndedSessions
from mediator.store.base import Store
from tests.harness.samples import T0


def test_an_ended_session_stays_so_until_its_time_is_over(store: Store, reopen: Callable[[], Store]) -> None:
    with store.transaction() as tx:
        for digest, ends_at in (("a", T0 + 1), ("b", T0 + 2), ("a", T0 + 1)):
            tx.table(EndedSessionTable).add(digest, ends_at)
    store = reopen()
    with store.transaction() as tx:
        assert tx.table(EndedSessionTable).all() == {"a": T0 + 1, "b": T0 + 2}
        assert OldEndedSessions().run(tx, T0 + 1, 10).removed == {"ended_sessions": 0}
        assert OldEndedSessions().run(tx, T0 + 2, 10).removed == {"ended_sessions": 1}
        assert tx.table(EndedSessionTable).all() == {"b": T0 + 2}
        tx.table(EndedSessionTable).add("c", T0)
        assert OldEndedSessions().run(tx, T0 + 9, 1).more


async def test_too_many_end_the_sessions_that_began_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever signs in and out in a loop brings nobody's copied cookie back.
    monkeypatch.setattr(access, "MAX_ENDED", 5)
    broker = Broker(store, Bounds(), clock=lambda: T0)
    first, second = EndedSessions(broker), EndedSessions(broker)
    await first.open()
    for number in range(9):
        await first.end(str(number), T0 + number)
    await second.open()
    with store.reading() as tx:
        assert len(tx.table(EndedSessionTable).all()) == 5
    for known in (first, second):
        assert all(known.has(str(number), T0 + number) for number in range(9))
        assert known.has("of somebody else", T0 + 4)
        assert not known.has("of somebody else", T0 + 5)
    await broker.close()


async def test_instances_end_the_sessions_of_each_other(store: Store) -> None:
    heard: list[Callable[[bytes], None]] = []

    class Announcements:
        async def publish(self, data: bytes) -> None:
            for listener in heard:
                listener(data)

        async def listen(self, listener: Callable[[bytes], None]) -> None:
            heard.append(listener)

    broker = Broker(store, Bounds(), clock=lambda: T0)
    one, two, deaf = (EndedSessions(broker, announcer) for announcer in (Announcements(), Announcements(), None))
    told = asyncio.Event()
    two.on_change = told.set
    for each in (one, two, deaf):
        await each.open()
    await one.end("a", T0 + 1)
    if not broker.alone:
        async with asyncio.timeout(20):
            await told.wait()
        await deaf.poll()
        assert [each.has("a", T0 + 1) for each in (two, deaf)] == [True, True]
    for each in (one, two, deaf):
        await each.close()
    await broker.close()
