"""What a search may cost others: memory, and the event loop's time."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from mediator.agents.records import Agent
from mediator.errors import BusyError
from mediator.store.memory import MemoryStore
from mediator.store.memory_agents import Agents
from registry import directory, searching
from registry.cards import Card, read_card
from registry.requests import Discover
from registry.sharing import Sharing
from registry.snapshots import Result, Snapshot, Snapshots
from registry.words import words
from tests.integration.directory import instance

LARGE = 50_000
"""Bytes of a card."""


@pytest.mark.rule("N7")
async def test_a_page_of_large_cards_reads_few_more_than_it_holds(monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []
    pick = Agents.pick

    def watched(self: Agents, numbers: Sequence[int]) -> dict[int, Agent]:
        picked = pick(self, numbers)
        read.append(sum(len(agent.card) for agent in picked.values()))
        return picked

    async with instance(MemoryStore()) as one:
        for n in range(60):
            await one.register(f"a{n}", pad="x" * LARGE)
        monkeypatch.setattr(Agents, "pick", watched)
        page = await one.discover(limit=1000, budget=5 * LARGE)
        assert [agent.name for agent in page.agents] == ["a0", "a1", "a2", "a3"]
        assert sum(read) < 25 * LARGE
        read.clear()
        rest = await one.discover(limit=1000, budget=LARGE * 100, cursor=page.next)
        assert [agent.name for agent in rest.agents] == [f"a{n}" for n in range(4, 60)]
        assert sum(read) < 60 * LARGE


@pytest.mark.rule("A6")
async def test_a_result_heard_of_that_names_agents_of_another_tenant_shows_none_of_them():
    class Air:
        async def publish(self, data: bytes) -> None:
            self.heard(data)

        async def listen(self, heard: Callable[[bytes], None]) -> None:
            self.heard = heard

    air = Air()
    async with instance(MemoryStore(), announcer=air) as one:
        await one.register("own")
        theirs = (await one.directory.register("other", b'{"mailbox": "theirs"}')).agent.no
        forged = Result(np.array([theirs], np.int64), np.empty(0, np.float32), 1, "list")
        await Sharing(air, Snapshots()).tell(Snapshot("id", "default", b"", forged, 0.0))
        assert await one.found(cursor="id.0") == []


@pytest.mark.parametrize("asked", [Discover(text="invoice. plants"), Discover(semantic="invoice. plants")])
async def test_nobody_waits_while_a_request_is_read(monkeypatch: pytest.MonkeyPatch, asked: Discover):
    others_go_on = threading.Event()

    def slow(text: str) -> list[str]:
        assert others_go_on.wait(5), "the event loop stands still"
        return words(text)

    async with instance(MemoryStore()) as one:
        await one.register("payments", "Pays an invoice")
        monkeypatch.setattr(searching, "words", slow)
        asyncio.get_running_loop().call_soon(others_go_on.set)
        page = await one.directory.discover("default", asked, 1 << 20)
        assert [agent.name for agent in page.agents] == ["payments"]


async def test_large_cards_that_wait_to_be_read_are_bounded_and_keep_nobody_else_from_a_thread(
    monkeypatch: pytest.MonkeyPatch,
):
    going_on = threading.Event()

    def slow(data: bytes) -> Card:
        assert going_on.wait(5), "whoever else needs a thread waits"
        return read_card(data)

    monkeypatch.setattr(directory, "read_card", slow)
    monkeypatch.setattr(directory, "MAX_READING", 40 * LARGE)
    async with instance(MemoryStore()) as one:
        registering = [asyncio.create_task(one.register(f"a{n}", pad="x" * LARGE)) for n in range(100)]
        await asyncio.sleep(0)
        await asyncio.to_thread(going_on.set)
        outcomes = await asyncio.gather(*registering, return_exceptions=True)
        done = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert {type(outcome) for outcome in outcomes} == {int, BusyError}
        assert 40 <= len(done) <= 42
        assert (await one.discover()).total == len(done)
