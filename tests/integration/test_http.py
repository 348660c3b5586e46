"""The HTTP door over a real socket: health, metrics, errors, and what happens to callers that send too much."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from structlog.testing import capture_logs

from mediator.endpoint import Endpoint
from mediator.errors import NoSuchMailboxError, QuotaExceededError, SetupError, UnavailableError
from mediator.http.app import MAX_BODY, Exposition, build_app
from mediator.http.health import Health
from mediator.http.server import MAX_HEADER, MAX_HEADERS, MAX_LINE, HttpServer
from mediator.metrics import Metrics
from tests.harness.waiting import PATIENCE

LOOPBACK = Endpoint("127.0.0.1", 0)


class Door:
    """A running server, and a client on it."""

    def __init__(self, server: HttpServer, client: aiohttp.ClientSession) -> None:
        self.server = server
        self.client = client

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(path) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else await answer.text()

    async def raw(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            writer.write(data)
            async with asyncio.timeout(30):
                return await reader.read(65536)
        finally:
            writer.close()
            await writer.wait_closed()


@asynccontextmanager
async def serving(
    health: Health | None = None,
    metrics: Metrics | None = None,
    add: Callable[[web.Application], object] = lambda _: None,
    **options: Any,
) -> AsyncIterator[Door]:
    health = health or Health()
    app = build_app(health, (metrics or Metrics()).registry, **options)
    add(app)
    server = HttpServer(LOOPBACK)
    await server.bind()
    try:
        await server.start(app)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client:
            yield Door(server, client)
    finally:
        await server.stop()
        await health.close()


async def fine() -> None:
    return None


def route(handler: Callable[[web.Request], Awaitable[web.Response]]) -> Callable[[web.Application], object]:
    return lambda app: app.router.add_route("*", "/x", handler)


def raising(error: Exception) -> Callable[[web.Application], object]:
    async def handler(_request: web.Request) -> web.Response:
        raise error

    return route(handler)


async def test_livez_answers_while_nothing_is_ready() -> None:
    async def broken() -> str:
        return "gone"

    health = Health()
    health.add("store", broken)
    async with serving(health) as door:
        assert await door.get("/livez") == (200, "ok")
        assert await door.get("/readyz") == (503, {"ready": False, "checks": {"store": "gone"}})


async def test_readyz_follows_the_checks() -> None:
    problem: str | None = None

    async def changing() -> str | None:
        return problem

    health = Health()
    health.add("store", fine)
    health.add("nats", changing)
    async with serving(health) as door:
        assert await door.get("/readyz") == (200, {"ready": True, "checks": {"store": "ok", "nats": "ok"}})
        problem = "not connected"
        assert await door.get("/readyz") == (503, {"ready": False, "checks": {"store": "ok", "nats": "not connected"}})
        problem = None
        assert (await door.get("/readyz"))[0] == 200


async def test_failing_check_shows_only_safe_text() -> None:
    async def refused() -> None:
        raise UnavailableError("the disk is full")

    async def unexpected() -> None:
        raise OSError("password hidden at db.example.org")

    health = Health()
    health.add("store", refused)
    health.add("nats", unexpected)
    async with serving(health) as door:
        status, body = await door.get("/readyz")
    assert status == 503
    assert body["checks"] == {"store": "unavailable: the disk is full", "nats": "failed: OSError"}


async def test_hanging_check_costs_its_time_once() -> None:
    asked = 0
    release = asyncio.Event()

    async def hanging() -> None:
        nonlocal asked
        asked += 1
        await release.wait()

    health = Health(timeout=0.2)
    health.add("store", hanging)
    health.add("nats", fine)
    async with serving(health) as door:
        answers = await asyncio.gather(*(door.get("/readyz") for _ in range(20)))
        late = {"ready": False, "checks": {"store": "no answer within 0.2 s", "nats": "ok"}}
        assert answers == [(503, late)] * 20
        assert asked == 1
        release.set()
        assert (await door.get("/readyz"))[0] == 200


async def test_late_check_says_what_it_waits_for() -> None:
    health = Health(timeout=0.2)
    health.add("store", asyncio.Event().wait, lambda: "process 7 holds a lock")
    async with serving(health) as door:
        status, body = await door.get("/readyz")
    assert (status, body["checks"]) == (503, {"store": "process 7 holds a lock"})
    await health.close()


async def test_checks_run_side_by_side() -> None:
    barrier = asyncio.Barrier(3)

    async def meeting() -> None:
        await barrier.wait()

    health = Health(timeout=PATIENCE)
    for name in ("store", "nats", "scheduler"):
        health.add(name, meeting)
    async with serving(health) as door:
        assert (await door.get("/readyz"))[0] == 200


async def test_cancelled_check_is_a_problem_like_any_other() -> None:
    async def impatient() -> None:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    health = Health()
    health.add("store", impatient)
    async with serving(health) as door:
        assert await door.get("/readyz") == (503, {"ready": False, "checks": {"store": "failed: TimeoutError"}})


async def test_metrics_show_the_readiness_of_the_moment() -> None:
    async def broken() -> str:
        return "gone"

    health, metrics = Health(), Metrics()
    health.add("store", fine)
    metrics.requests.count("default", "send", "ok", 0.001)
    async with serving(health, metrics) as door:
        async with door.client.get("/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            text = await answer.text()
        assert 'mediator_requests_total{outcome="ok",verb="send"} 1.0\n' in text
        assert "mediator_ready 1.0\n" in text
        assert 'mediator_check_ok{check="store"} 1.0\n' in text
        health.add("store", broken)
        _, text = await door.get("/metrics")
        assert "mediator_ready 0.0\n" in text
        assert 'mediator_check_ok{check="store"} 0.0\n' in text


def test_who_asks_for_metrics_without_end_takes_a_tenth() -> None:
    now, made = [0.0], []

    class Slow(Collector):
        def collect(self) -> Iterator[Metric]:
            now[0] += 0.1
            made.append(now[0])
            return iter(())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Slow())
    made.clear()
    exposition = Exposition(registry, lambda: now[0])
    for _ in range(10_000):
        exposition.text()
        now[0] += 0.001
    assert 10 <= len(made) <= 5 + 0.1 * now[0] / 0.1 + 1
    assert now[0] - made[-1] <= 1


async def test_an_error_of_ours_answers_its_status_and_code() -> None:
    async with serving(add=raising(NoSuchMailboxError("a.b"))) as door:
        expected = {"error": "mailbox a.b does not exist", "code": "mailbox_not_found"}
        assert await door.get("/x") == (404, expected)
    async with serving(add=raising(QuotaExceededError("mailbox messages", 5, 5))) as door:
        status, body = await door.get("/x")
        assert (status, body["code"]) == (429, "quota_exceeded")


async def test_an_unexpected_error_says_nothing_of_itself() -> None:
    async with serving(add=raising(RuntimeError("hidden"))) as door:
        assert await door.get("/x") == (500, {"error": "internal error", "code": "internal"})
    async with serving(add=raising(TimeoutError("hidden"))) as door:
        assert await door.get("/x") == (500, {"error": "internal error", "code": "internal"})


async def test_unknown_paths_and_methods_answer_json() -> None:
    async with serving() as door:
        assert await door.get("/nowhere") == (404, {"error": "not found", "code": "not_found"})
        async with door.client.post("/livez") as answer:
            assert answer.status == 405
            assert answer.headers["Allow"] == "GET,HEAD"
            assert await answer.json() == {"error": "method not allowed", "code": "method_not_allowed"}


async def test_a_redirect_stays_one() -> None:
    async with serving(add=raising(web.HTTPFound("/livez"))) as door:
        assert await door.get("/x") == (200, "ok")


async def test_a_handler_that_does_not_answer_in_time_is_ended() -> None:
    ended = asyncio.Event()

    async def slow(_request: web.Request) -> web.Response:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with serving(add=route(slow), request_seconds=0.1) as door:
        assert await door.get("/x") == (504, {"error": "no answer within 0.1 s", "code": "timeout"})
        assert ended.is_set()


async def reading(request: web.Request) -> web.Response:
    return web.Response(text=str(len(await request.read())))


async def test_body_above_the_limit_is_refused() -> None:
    async with serving(add=route(reading)) as door:
        async with door.client.post("/x", data=b"x" * MAX_BODY) as answer:
            assert (answer.status, await answer.text()) == (200, str(MAX_BODY))
        async with door.client.post("/x", data=b"x" * (MAX_BODY + 1)) as answer:
            assert answer.status == 413
            assert (await answer.json())["code"] == "request_entity_too_large"


async def test_a_body_that_never_ends_is_given_up() -> None:
    async with serving(add=route(reading), request_seconds=0.1) as door:
        answer = await door.raw(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nabc")
    assert answer.startswith(b"HTTP/1.1 504 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * MAX_LINE + b" HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: h\r\nX-Long: " + b"x" * (MAX_HEADER + 1) + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: h\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(MAX_HEADERS)) + b"\r\n",
        b"\x16\x03\x01 secret bytes\r\n\r\n",
    ],
    ids=["line", "header", "headers", "no http"],
)
async def test_malformed_head_is_refused_and_the_server_goes_on(head: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving() as door:
        answer = await door.raw(head)
        assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
        assert b"\r\nserver:" not in answer.lower()
        assert await door.get("/livez") == (200, "ok")
    assert "secret bytes" not in caplog.text


async def test_no_answer_tells_our_software_or_may_be_kept_by_a_proxy() -> None:
    async with serving() as door:
        for path in ("/livez", "/readyz", "/metrics", "/nowhere"):
            async with door.client.get(path) as answer:
                assert "Server" not in answer.headers
                if path != "/nowhere":
                    assert answer.headers["Cache-Control"] == "no-store"


async def test_an_address_in_use_is_a_setup_error_naming_it() -> None:
    async with serving() as door:
        endpoint = Endpoint("127.0.0.1", door.server.port)
        second = HttpServer(endpoint)
        with pytest.raises(SetupError, match=f"http: cannot listen on 127.0.0.1:{endpoint.port}: .*in use"):
            await second.bind()
        assert second.port == 0
        await second.stop()


async def test_a_stopped_server_is_gone_and_lets_the_last_answer_out() -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(_request: web.Request) -> web.Response:
        entered.set()
        await release.wait()
        return web.Response(text=json.dumps("done"))

    async with serving(add=route(slow)) as door:
        port = door.server.port
        request = asyncio.create_task(door.get("/x"))
        await entered.wait()
        stopping = asyncio.create_task(door.server.stop())
        release.set()
        assert await request == (200, '"done"')
        await stopping
        assert door.server.port == 0
        with pytest.raises(OSError):  # noqa: PT011 - any refusal will do
            await asyncio.open_connection("127.0.0.1", port)


async def test_a_caller_that_leaves_is_no_error_of_ours() -> None:
    async def leave(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    with capture_logs() as lines:
        async with serving(add=route(leave)) as door:
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await door.get("/x")
    assert [line for line in lines if line["log_level"] == "error"] == []
