"""Models on a server elsewhere: no fault of it fails a DISCOVER or delays a REGISTER, and nothing wrong is stored."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from mediator.broker import Broker
from mediator.mailboxes.bounds import Bounds
from mediator.store.base import Store
from registry import outside as client
from registry.embedding import embedder, encoder, remote, switching
from registry.embedding.switching import EmbeddingModels
from registry.index import updater
from registry.index.vectors import unpack_rows
from registry.maintenance import examine
from registry.metrics import RegistryMetrics
from registry.records import Liveness
from registry.requests import DiscoverResult
from registry.service import outside_services, run_registry
from registry.settings import RegistrySettings
from registry.tables import RegistryTables
from tests.harness import outside
from tests.harness.directory import Instance
from tests.harness.outside import Handler, OutsideServer, embed, outside_server
from tests.harness.stores import ram_store
from tests.harness.waiting import until

REQUEST = "loaf"
"""What the server takes for bread, and no card says."""

pytestmark = [pytest.mark.rule("G1", "G3"), pytest.mark.timeout(120)]


class Home(Instance):
    """A registry whose model is on a server."""

    models: EmbeddingModels
    metrics: CollectorRegistry

    async def fill(self) -> None:
        await self.register("baker", "bread")
        await self.register("clerk", "invoices")
        await self.register("sailor", "sea")

    async def ask(self) -> DiscoverResult:
        return await self.discover(semantic=REQUEST, limit=2)

    async def by_meaning(self) -> bool:
        """Ask; an answer by meaning is right, and one by keywords says so."""
        embedded, found = self.embedded(), await self.ask()
        assert found.mode == "semantic"
        if found.note:
            assert found.note.startswith("answered by keywords: ")
        elif embedded:
            assert found.agents[0].name == "baker"
        return not found.note and embedded

    def embedded(self) -> bool:
        return self.updater.embedded == self.updater.agents > 0

    async def said(self) -> str:
        findings = await examine(self.updater, self.models)
        return "\n".join(f"{finding.level} {finding.text} {finding.advice}" for finding in findings)

    async def spaces(self) -> list[str]:
        return list(await self.broker.read(lambda tx, _now: tx.table(RegistryTables).vectors.spaces()))

    async def vectors(self, no: int) -> np.ndarray:
        """The stored vectors of an agent."""
        [space] = await self.spaces()
        read = await self.broker.read(lambda tx, _now: tx.table(RegistryTables).vectors.read(space, [no]))
        return unpack_rows(read[no].vectors)


def _settings(server: OutsideServer | None, model: str = "small") -> RegistrySettings:
    url = {} if server is None else {"embeddings_url": server.url, "embeddings_key": "only-for-this-test"}
    return RegistrySettings.model_validate({"model": model, **url})


@asynccontextmanager
async def running(
    store: Store, folder: Path, server: OutsideServer | None, model: str = "small"
) -> AsyncIterator[Home]:
    counted = CollectorRegistry()
    broker, metrics = Broker(store, Bounds()), RegistryMetrics(counted)
    chosen = _settings(server, model)
    try:
        async with (
            outside_services(chosen, metrics) as services,
            run_registry(broker, Liveness(), 0, model, folder, metrics, embeddings=services.embeddings) as made,
        ):
            home = Home(broker, made.updater, made.directory)
            assert made.models is not None
            home.models, home.metrics = made.models, counted
            yield home
    finally:
        await broker.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once: what is tested is that it is tried, not how much later."""
    monkeypatch.setattr(client, "MAX_BODY", 1 << 20)
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.01))
    monkeypatch.setattr(remote.RemoteModel, "longest_pause", 0.05)
    monkeypatch.setattr(encoder, "SHORTEST_PAUSE", 0.02)
    monkeypatch.setattr(embedder, "SWEEP_SECONDS", 0.1)
    monkeypatch.setattr(switching, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(updater, "POLL_SECONDS", 0.05)


@pytest.fixture
async def server() -> AsyncIterator[OutsideServer]:
    async with outside_server() as server:
        yield server


@pytest.fixture
async def home(server: OutsideServer, tmp_path: Path) -> AsyncIterator[Home]:
    async with running(ram_store(), tmp_path, server) as home:
        await home.fill()
        await until(home.by_meaning)
        yield home


async def test_cards_and_requests_are_embedded_by_the_server(home: Home, server: OutsideServer):
    assert {"baker\nbread", "sailor\nsea", REQUEST} <= set(server.texts)
    assert {(request["model"], request["encoding_format"]) for request in server.requests} == {("small", "float")}
    assert server.keys == {"Bearer only-for-this-test"}
    [space] = await home.spaces()
    assert space.startswith("small@")
    assert "/remote/64/" in space
    said = await home.said()
    assert f"ok Texts of cards and requests are sent to {server.url.removesuffix('/v1/embeddings')}" in said
    assert "ok The model small reads sentences, on the server of registry.embeddings_url." in said
    counted = generate_latest(home.metrics).decode()
    assert 'mediator_registry_outside_requests_total{result="ok",service="embeddings"}' in counted
    assert 'mediator_registry_outside_seconds_count{service="embeddings"}' in counted


async def test_many_cards_go_out_in_few_requests_at_a_time(home: Home, server: OutsideServer):
    before = len(server.requests)
    await asyncio.gather(*(home.register(f"ledger{number}", f"books of year {number}") for number in range(200)))
    await until(home.embedded)
    assert len(server.requests) - before <= 30
    assert server.most <= 4
    assert max(len(request["input"]) for request in server.requests) <= 32


FAULTS: dict[str, Handler] = {
    "refused key": outside.status(401, "no such key"),
    "other path": outside.status(404, "not found"),
    "redirect": outside.status(307, Location="http://127.0.0.1:1/"),
    "busy": outside.status(429, **{"Retry-After": "0"}),
    "error": outside.status(500, "out of memory"),
    "refuses all": outside.status(400, "no"),
    "page": outside.raw(b"<html>Welcome to nginx</html>"),
    "deep": outside.raw(b"[" * 100_000),
    "list": outside.raw(b"[]"),
    "no vectors": outside.raw(b'{"data": null}'),
    "compressed": outside.raw(b"{}", **{"Content-Encoding": "br"}),
    "endless": outside.endless,
    "broken off": outside.break_off,
    "one too few": outside.vectors(lambda texts: outside.answer([embed(text) for text in texts[1:]])),
    "one too many": outside.vectors(lambda texts: outside.answer([embed(text) for text in [*texts, "x"]])),
    "other size": outside.vectors(lambda texts: outside.answer([embed(text, 32) for text in texts])),
    "sizes differ": outside.vectors(lambda texts: outside.answer([embed(t, 9 + n) for n, t in enumerate(texts)])),
    "not a number": outside.vectors(lambda texts: outside.answer([[float("nan")] * 64 for _ in texts])),
    "infinite": outside.vectors(lambda texts: outside.answer([[float("inf")] * 64 for _ in texts])),
    "null": outside.vectors(lambda texts: outside.answer([[None] * 64 for _ in texts])),
    "zero": outside.vectors(lambda texts: outside.answer([[0.0] * 64 for _ in texts])),
    "same place twice": outside.vectors(
        lambda texts: {"data": [{"index": 0, "embedding": embed(t)} for t in texts * 2]}
    ),
    "text": outside.vectors(lambda texts: {"data": [{"index": n, "embedding": "AAAA"} for n in range(len(texts))]}),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_fails_no_request_and_stores_nothing(home: Home, server: OutsideServer, fault: str):
    server.behave = FAULTS[fault]
    no = await home.register("miller", "flour for bread")
    found = await home.discover(semantic="flour wanted")
    assert found.agents[0].name == "miller"
    assert found.note.startswith("answered by keywords: ")
    assert "127.0.0.1" not in found.note, "callers learn nothing of the operator's hosts"
    await until(lambda: server.failed > 3)
    assert home.updater.embedded == 3
    said = await until(lambda: _problem(home))
    assert "No vectors are made: the " in said or "The model does not work: the model has changed" in said
    assert (await home.ask()).note == "", "what was asked before is remembered"
    server.behave = None
    await until(home.embedded)
    await until(lambda: _well(home))
    assert np.isfinite(await home.vectors(no)).all()


REPEATED = f"no vectors for {REQUEST}"


async def _no_http(request: web.Request, _body: object) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(f"HTTP/1.1 {REPEATED}\r\n\r\n".encode())
    return web.Response()


@pytest.mark.parametrize(
    ("behave", "named"),
    [
        (
            outside.status(400, json.dumps({"error": {"message": REPEATED, "type": "bad_input", "code": 7}})),
            "bad_input, 7,",
        ),
        (
            outside.status(422, json.dumps({"error": REPEATED, "error_type": "Validation", "code": REPEATED})),
            "Validation,",
        ),
        (outside.status(500, REPEATED), "500"),
        (outside.raw(REPEATED.encode()), f"{len(REPEATED)} bytes that are not JSON"),
        (_no_http, "cannot be reached"),
    ],
)
async def test_no_text_of_an_answer_is_logged(server: OutsideServer, behave: Handler, named: str):
    server.behave = behave
    async with outside_services(_settings(server), RegistryMetrics(CollectorRegistry())) as services:
        assert services.embeddings is not None
        with pytest.raises(client.OutsideError) as raised:
            await services.embeddings.post({"input": [REQUEST]}, 5)
    assert named in raised.value.detail
    assert REQUEST not in raised.value.detail


async def _problem(home: Home) -> str:
    said = await home.said()
    return said if "problem " in said else ""


async def _well(home: Home) -> bool:
    return "problem" not in await home.said() and await home.by_meaning()


async def test_a_stalled_server_delays_few_requests(home: Home, server: OutsideServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "QUERY_SECONDS", 0.2)
    server.behave = outside.stall
    await home.register("miller", "flour for bread")
    assert (await home.discover(semantic="flour wanted")).note.startswith("answered by keywords: ")
    await until(lambda: home.models.problem)
    asked = len(server.requests)
    # Known to be away: only the encoder asks, now and then.
    for number in range(50):
        found = await home.discover(semantic=f"flour wanted, {number} bags")
        assert "gave no answer within" in found.note
    assert len(server.requests) <= asked + 2
    server.behave = None
    monkeypatch.setattr(remote, "START_SECONDS", 0.2)


async def test_a_server_that_dies_is_used_again_when_it_is_back(home: Home, server: OutsideServer):
    await server.stop()
    await home.register("miller", "flour for bread")
    found = await home.discover(semantic="grain")
    assert "the embedding server cannot be reached" in found.note
    assert (await home.ask()).note == "", "the vectors of what was asked before are remembered"
    assert "127.0.0.1" in await _problem(home)
    await server.start()
    await until(home.embedded)
    await until(lambda: _well(home))


async def test_the_service_starts_without_the_server(server: OutsideServer, tmp_path: Path):
    await server.stop()
    async with running(ram_store(), tmp_path, server) as home:
        await home.fill()
        assert (await home.ask()).note.startswith("answered by keywords: ")
        assert await home.found(semantic="invoices") == ["clerk"]
        await server.start()
        await until(home.by_meaning)


async def test_cards_in_flight_wait_for_a_server_that_dies(home: Home, server: OutsideServer):
    """However often it dies: no card is taken to be at fault."""
    for turn in range(2):
        server.behave = outside.break_off
        failed = server.failed
        await home.register(f"miller{turn}", "flour for bread")
        await until(lambda failed=failed: server.failed > failed + 2)
        server.behave = None
        await until(home.embedded)


async def test_only_the_text_that_the_model_refuses_has_no_vector(home: Home, server: OutsideServer):
    async def behave(request: web.Request, body: dict[str, list[str]]) -> web.StreamResponse:
        if any("unicorn" in text for text in body["input"]):
            return web.json_response({"error": "no unicorns"}, status=422)
        return await server.well(request, body)

    server.behave = behave
    with capture_logs() as lines:
        await asyncio.gather(
            home.register("rider", "rides a unicorn"),
            *(home.register(f"ledger{number}", "books") for number in range(20)),
        )
        await until(lambda: home.updater.embedded == home.updater.agents - 1 == 23)
        await until(lambda: [line for line in lines if line["event"] == "a card cannot be embedded"])
    assert await home.by_meaning() is False
    assert (await home.ask()).note == ""
    assert "1 agent without vectors" in await home.said()


async def test_a_text_longer_than_the_model_takes_is_cut(home: Home, server: OutsideServer):
    async def behave(request: web.Request, body: dict[str, list[str]]) -> web.StreamResponse:
        if any(len(text) > 300 for text in body["input"]):
            return web.json_response({"error": "at most 300 characters"}, status=413)
        return await server.well(request, body)

    server.behave = behave
    no = await home.register("writer", "word " * 70, skills=[{"name": "long", "description": "poem " * 300}])
    await until(home.embedded)
    assert len(await home.vectors(no)) == 2
    assert "2 texts were longer than the model takes and were cut" in await home.said()


async def test_a_busy_server_is_left_alone_as_long_as_it_asks(home: Home, server: OutsideServer):
    times: list[float] = []

    async def behave(request: web.Request, body: dict[str, list[str]]) -> web.StreamResponse:
        times.append(asyncio.get_running_loop().time())
        if len(times) > 1:
            return await server.well(request, body)
        return web.Response(status=429, headers={"Retry-After": "1"})

    server.behave = behave
    await home.register("miller", "flour for bread")
    await until(home.embedded)
    assert times[1] - times[0] >= 1


@pytest.mark.rule("G3")
async def test_a_change_of_model_runs_beside_the_service(tmp_path: Path, server: OutsideServer):
    store = ram_store()
    async with running(store, tmp_path, server) as home:
        await home.fill()
        await until(home.by_meaning)
        [former] = await home.spaces()

    async def behave(request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        # Another model under another name; the former one is still there.
        texts = [str(text) for text in body["input"]]  # type: ignore[attr-defined]
        if body["model"] == "large":
            return web.json_response(outside.answer([embed(text + " x", 96)[::-1] for text in texts]))
        return await server.well(request, body)

    server.behave = behave
    async with running(store, tmp_path, server, "large") as home:
        while not home.updater.space.startswith("large@"):
            await home.by_meaning()

        async def switched() -> bool:
            spaces = await home.spaces()
            return len(spaces) == 1 and spaces[0].startswith("large@") and former not in spaces

        await until(switched)
        await until(home.by_meaning)


async def test_the_same_model_on_other_hardware_embeds_nothing_again(tmp_path: Path, server: OutsideServer):
    store = ram_store()
    async with running(store, tmp_path, server) as home:
        await home.fill()
        await until(home.by_meaning)
        spaces = await home.spaces()
    rounded = outside.vectors(lambda texts: outside.answer([np.float16(embed(text)).tolist() for text in texts]))
    server.requests.clear()
    server.behave = rounded
    async with running(store, tmp_path, server) as home:
        await until(home.by_meaning)
        assert await home.spaces() == spaces
    assert not [text for text in server.texts if "bread" in text]


async def test_another_model_under_the_same_name_embeds_all_again(tmp_path: Path, server: OutsideServer):
    store = ram_store()
    async with running(store, tmp_path, server) as home:
        await home.fill()
        await until(home.by_meaning)
        [before] = await home.spaces()
    server.behave = outside.vectors(lambda texts: outside.answer([embed(text)[::-1] for text in texts]))
    async with running(store, tmp_path, server) as home:

        async def switched() -> bool:
            return home.updater.space not in ("", before) and await home.by_meaning()

        await until(switched)


async def test_nothing_is_sent_any_more_without_the_url(tmp_path: Path, server: OutsideServer):
    store = ram_store()
    async with running(store, tmp_path, server) as home:
        await home.fill()
        await until(home.by_meaning)
    server.requests.clear()
    async with running(store, tmp_path, None, "/no/such/model") as home:
        assert (await home.ask()).note.startswith("answered by keywords: ")
        await home.register("miller", "flour for bread")
        await until(lambda: home.models.encoder.failed)
    assert server.requests == []
