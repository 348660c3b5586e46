"""Re-ranking by a server elsewhere: the first agents of a search by meaning, in time or not at all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from mediator.broker import Broker
from mediator.mailboxes.bounds import Bounds
from registry.maintenance import examine
from registry.metrics import RegistryMetrics
from registry.records import Liveness
from registry.search import reranking
from registry.search.reranking import Reranker
from registry.service import outside_services, run_registry
from registry.settings import RegistrySettings
from tests.harness import outside
from tests.harness.directory import Instance
from tests.harness.outside import Handler, OutsideServer, outside_server
from tests.harness.stores import ram_store
from tests.harness.waiting import until

REQUEST = "loaf for the sea"
FIRST = ["ferry", "diver", "baker"]
"""By keywords alone; re-ranked, the baker comes first: the server takes a loaf for bread."""

pytestmark = [pytest.mark.rule("G3"), pytest.mark.timeout(120)]


class Home(Instance):
    """A registry without vectors, whose first agents are re-ranked."""

    reranker: Reranker
    metrics: CollectorRegistry

    async def reranked(self) -> bool:
        return (await self.discover(semantic=REQUEST)).note == "answered by keywords: search by meaning is turned off"

    async def said(self) -> str:
        return "\n".join(f"{each.level} {each.text}" for each in await examine(self.updater, None, self.reranker))


@asynccontextmanager
async def running(folder: Path, server: OutsideServer, **options: object) -> AsyncIterator[Home]:
    counted = CollectorRegistry()
    broker, metrics = Broker(ram_store(), Bounds()), RegistryMetrics(counted)
    chosen = RegistrySettings.model_validate({"rerank_url": server.rerank_url, "rerank_ms": 5000, **options})
    try:
        async with (
            outside_services(chosen, metrics) as services,
            run_registry(broker, Liveness(), 0, None, folder, metrics, reranker=services.reranker) as made,
        ):
            home = Home(broker, made.updater, made.directory)
            assert services.reranker is not None
            home.reranker, home.metrics = services.reranker, counted
            await home.register("ferry", "sea")
            await home.register("diver", "sea sea")
            await home.register("baker", "bread bread sea")
            yield home
    finally:
        await broker.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reranking, "SHORTEST_PAUSE", 0.02)
    monkeypatch.setattr(reranking, "LONGEST_PAUSE", 0.05)


@pytest.fixture
async def server() -> AsyncIterator[OutsideServer]:
    async with outside_server() as server:
        server.behave = outside.rerank
        yield server


@pytest.mark.parametrize("form", [outside.rerank, outside.rerank_texts])
async def test_the_first_agents_are_in_the_servers_order(tmp_path: Path, server: OutsideServer, form: Handler):
    server.behave = form
    async with running(tmp_path, server, rerank_model="judge") as home:
        by_words = await home.discover(text=REQUEST, explain=True)
        await until(home.reranked)
        found = await home.discover(semantic=REQUEST, explain=True)
        assert found.agents[0].name == "baker"
        assert by_words.agents[0].name != "baker"
        assert found.scores == by_words.scores, "a place keeps its score"
        assert found.explanations is not None
        best = found.explanations[0]
        assert best.rerank is not None
        assert best.keywords is not None
        assert best.rerank.place == [agent.name for agent in by_words.agents].index("baker") + 1
        assert best.rerank.score + best.keywords.score == pytest.approx(found.scores[0], abs=1e-5)
        assert best.rerank.relevance > 0.5
        asked = server.requests[-1]
        assert asked["query"] == REQUEST
        assert "baker\nbread bread sea" in asked.get("documents", asked.get("texts"))
        assert asked.get("model", "judge") == "judge"
        assert f"are sent to {server.rerank_url.removesuffix('/rerank')}, to be re-ranked" in await home.said()
        assert 'service="rerank"' in generate_latest(home.metrics).decode()
        # Pages belong together, lists and searches by words are never sent.
        sent = len(server.requests)
        pages = [await home.found(semantic=REQUEST, limit=1, page=page) for page in (2, 3)]
        assert pages == [[agent.name] for agent in found.agents[1:]]
        await home.discover()
        await home.discover(text="bread")
        assert len(server.requests) <= sent + 1


async def test_only_the_first_agents_are_sent(tmp_path: Path, server: OutsideServer):
    async with running(tmp_path, server, rerank_depth=2) as home:
        await until(home.reranked)
        before = await home.found(text=REQUEST)
        found = await home.found(semantic=REQUEST)
        assert len(server.requests[-1]["documents"]) == 2
        assert (sorted(found[:2]), found[2:]) == (sorted(before[:2]), before[2:])


FAULTS: dict[str, Handler] = {
    "refused key": outside.status(401),
    "busy": outside.status(429, **{"Retry-After": "0"}),
    "error": outside.status(500, "out of memory"),
    "refuses": outside.status(422),
    "page": outside.raw(b"<html>"),
    "endless": outside.endless,
    "broken off": outside.break_off,
    "no results": outside.raw(b'{"results": []}'),
    "number": outside.raw(b"7"),
    "one place": outside.raw(
        b'{"results": [{"index": 0, "score": 1}, {"index": 0, "score": 1}, {"index": 1, "score": 1}]}'
    ),
    "nan": outside.raw(b'[{"index": 0, "score": NaN}, {"index": 1, "score": 1}, {"index": 2, "score": 1}]'),
    "text": outside.raw(b'[{"index": 0, "score": "x"}, {"index": 1, "score": 1}, {"index": 2, "score": 1}]'),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_first_order_stands_where_the_server_fails(tmp_path: Path, server: OutsideServer, fault: str):
    async with running(tmp_path, server) as home:
        await until(home.reranked)
        before = await home.found(text=REQUEST)
        server.behave = FAULTS[fault]
        for _ in range(4):
            found = await home.discover(semantic=REQUEST)
            assert [agent.name for agent in found.agents] == before
            assert "; not re-ranked: the re-ranking server " in found.note
            assert "127.0.0.1" not in found.note

        async def told() -> bool:
            return "problem Nothing is re-ranked: the re-ranking server" in await home.said()

        await until(told)
        server.behave = outside.rerank
        await until(home.reranked)
        assert (await home.found(semantic=REQUEST))[0] == "baker"


async def test_texts_that_are_refused_keep_no_other_search_waiting(tmp_path: Path, server: OutsideServer):
    async def choosy(request: web.Request, body: Any) -> web.StreamResponse:
        return await (outside.status(422) if body["query"] == "sea unfit" else outside.rerank)(request, body)

    async with running(tmp_path, server) as home:
        await until(home.reranked)
        server.behave = choosy
        for _ in range(reranking.IN_A_ROW + 1):
            assert "not re-ranked" in (await home.discover(semantic="sea unfit")).note
            assert (await home.found(semantic=REQUEST))[0] == "baker"
            assert "re-ranked" not in (await home.discover(semantic=REQUEST)).note


async def test_a_stalled_server_is_waited_for_a_few_times(tmp_path: Path, server: OutsideServer):
    async with running(tmp_path, server, rerank_ms=20) as home:
        await until(lambda: home.reranker.problem is None)
        server.behave = outside.stall
        for _ in range(reranking.IN_A_ROW):
            assert "gave no answer within 0.02 s" in (await home.discover(semantic=REQUEST)).note
        # From here on only the probe waits.
        await until(lambda: home.reranker.problem)
        asked = len(server.requests)
        for _ in range(50):
            assert "not re-ranked" in (await home.discover(semantic=REQUEST)).note
        assert len(server.requests) <= asked + 1


async def test_a_server_that_dies_is_used_again_when_it_is_back(tmp_path: Path, server: OutsideServer):
    async with running(tmp_path, server) as home:
        await until(home.reranked)
        await server.stop()
        assert "not re-ranked" in (await home.discover(semantic=REQUEST)).note
        await server.start()
        await until(home.reranked)


async def test_too_many_requests_do_not_wait(tmp_path: Path, server: OutsideServer):
    async with running(tmp_path, server) as home:
        await until(home.reranked)
        free = asyncio.Event()

        async def behave(request: web.Request, body: object) -> web.StreamResponse:
            await free.wait()
            return await outside.rerank(request, body)

        server.behave = behave
        waiting = [asyncio.create_task(home.discover(semantic=REQUEST)) for _ in range(reranking.MAX_RUNNING)]
        await until(lambda: server.running == reranking.MAX_RUNNING)
        assert "requests wait for the re-ranking server" in (await home.discover(semantic=REQUEST)).note
        free.set()
        assert all("re-ranked" not in found.note for found in await asyncio.gather(*waiting))
