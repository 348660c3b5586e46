"""What a search may cost others: memory, and the event loop's time."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from mediator.errors import BusyError
from registry import directory
from registry.cards.card import Card, read_card
from registry.index.analysis import analyze
from registry.records import Agent
from registry.requests import DiscoverRequest
from registry.search import searcher
from registry.search.snapshots import SearchResult, SearchSnapshot, SnapshotCache
from registry.tables import Agents
from tests.harness.directory import instance
from tests.harness.stores import ram_store

LARGE = 50_000
"""Bytes of a card."""


@pytest.mark.rule("N7")
async def test_a_page_of_large_cards_reads_few_cards_ahead(monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []
    pick = Agents.pick

    def watched(self: Agents, numbers: Sequence[int]) -> dict[int, Agent]:
        picked = pick(self, numbers)
        read.append(sum(len(agent.card) for agent in picked.values()))
        return picked

    async with instance(ram_store()) as one:
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
async def test_a_forged_snapshot_shows_no_agents_of_other_tenants():
    class Air:
        async def publish(self, data: bytes) -> None:
            self.heard(data)

        async def listen(self, heard: Callable[[bytes], None]) -> None:
            self.heard = heard

    air = Air()
    async with instance(ram_store(), announcer=air) as one:
        await one.register("own")
        theirs = (await one.directory.register("other", b'{"mailbox": "theirs"}')).agent.id
        forged = SearchResult(np.array([theirs], np.int64), np.empty(0, np.float32), 1, "list")
        await SnapshotCache(air).publish(SearchSnapshot("id", "default", b"", forged, 0.0))
        assert await one.found(cursor="id.0") == []


@pytest.mark.parametrize(
    "asked", [DiscoverRequest(text="invoice. plants"), DiscoverRequest(semantic="invoice. plants")]
)
async def test_the_event_loop_runs_while_a_request_is_analyzed(monkeypatch: pytest.MonkeyPatch, asked: DiscoverRequest):
    others_go_on = threading.Event()

    def slow(text: str) -> list[str]:
        assert others_go_on.wait(5), "the event loop stands still"
        return analyze(text)

    async with instance(ram_store()) as one:
        await one.register("payments", "Pays an invoice")
        monkeypatch.setattr(searcher, "analyze", slow)
        asyncio.get_running_loop().call_soon(others_go_on.set)
        page = await one.directory.searcher.discover("default", asked, 1 << 20)
        assert [agent.name for agent in page.agents] == ["payments"]


async def test_large_cards_waiting_to_be_parsed_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
):
    going_on = threading.Event()

    def slow(data: bytes) -> Card:
        assert going_on.wait(5), "whoever else needs a thread waits"
        return read_card(data)

    monkeypatch.setattr(directory, "read_card", slow)
    monkeypatch.setattr(directory, "MAX_READING", 40 * LARGE)
    async with instance(ram_store()) as one:
        registering = [asyncio.create_task(one.register(f"a{n}", pad="x" * LARGE)) for n in range(100)]
        await asyncio.sleep(0)
        await asyncio.to_thread(going_on.set)
        outcomes = await asyncio.gather(*registering, return_exceptions=True)
        done = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert {type(outcome) for outcome in outcomes} == {int, BusyError}
        assert 40 <= len(done) <= 42
        assert (await one.discover()).total == len(done)
