"""What no request shows: where the public URL leads, when its certificate expires, how clocks differ."""

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from mediator.metrics import Metrics
from mediator.operate import surroundings
from mediator.operate.diagnosis import Finding, Level
from mediator.operate.surroundings import Surroundings
from tests.harness.app import app
from tests.harness.certificates import issue
from tests.harness.core import Core, core
from tests.harness.pieces import serving_in_pieces
from tests.harness.service import free_port
from tests.harness.waiting import until

OPTION = "didcomm.public_url"
PROOF = "did:peer:2.own"


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "_AGAIN_SECONDS", 0.0)


@asynccontextmanager
async def server(*answers: web.Response, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Give these answers one after the other, the last one again and again."""
    waiting = list(answers)

    async def answer(_request: web.BaseRequest) -> web.Response:
        given = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return web.Response(status=given.status, text=given.text, headers={"Location": "http://x/"})

    runner, port = web.ServerRunner(web.Server(answer)), free_port()
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        yield port
    finally:
        await runner.cleanup()


async def look(inner: Core, url: str) -> tuple[list[Finding], Metrics]:
    metrics = Metrics()
    watch = Surroundings(inner.broker, metrics, {})
    watch.watch_url(OPTION, url, lambda: PROOF)
    await watch.check()
    return await watch.examine(), metrics


def up(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("mediator_public_url_up", {"option": OPTION})


async def test_a_url_that_leads_here_is_no_finding(tmp_path: Path) -> None:
    async with core(tmp_path) as inner, server(web.Response(text=f'{{"did": "{PROOF}"}}')) as port:
        found, metrics = await look(inner, f"http://127.0.0.1:{port}/didcomm/did")
        assert (found, up(metrics)) == ([], 1)


async def test_one_failure_is_none(tmp_path: Path) -> None:
    answers = web.Response(status=502), web.Response(text=PROOF)
    async with core(tmp_path) as inner, server(*answers) as port:
        found, metrics = await look(inner, f"http://127.0.0.1:{port}")
        assert (found, up(metrics)) == ([], 1)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (web.Response(text="<html>It works!"), "another service answers there"),
        (web.Response(status=502), "expected status 200, got 502"),
        (web.Response(status=301), "expected status 200, got 301"),
    ],
)
async def test_a_url_that_leads_elsewhere_is_a_problem(tmp_path: Path, answer: web.Response, said: str) -> None:
    async with core(tmp_path) as inner, server(answer) as port:
        (found,), metrics = await look(inner, f"http://127.0.0.1:{port}")
        assert (found.level, found.link, up(metrics)) == (Level.PROBLEM, "/settings", 0)
        assert said in found.text


async def test_an_answer_may_come_in_pieces(tmp_path: Path) -> None:
    page = f'{{"x": "{"a" * 3000}", "did": "{PROOF}"}}'.encode()
    async with core(tmp_path) as inner, serving_in_pieces(page[:1400], page[1400:]) as port:
        found, metrics = await look(inner, f"http://127.0.0.1:{port}")
        assert (found, up(metrics)) == ([], 1)


async def test_whoever_asks_early_gets_what_the_first_look_finds(tmp_path: Path) -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def answer(_request: web.BaseRequest) -> web.Response:
        asked.set()
        await go.wait()
        return web.Response(status=502)

    runner, port = web.ServerRunner(web.Server(answer)), free_port()
    async with core(tmp_path) as inner:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        watch = Surroundings(inner.broker, Metrics(), {})
        watch.watch_url(OPTION, f"http://127.0.0.1:{port}", lambda: PROOF)
        first = asyncio.create_task(watch.check())
        await asked.wait()
        early = asyncio.create_task(watch.examine())
        go.set()
        (found,) = await early
        assert found.code == f"unreachable_{OPTION}"
        await first
        await runner.cleanup()


async def test_nobody_there_is_a_problem(tmp_path: Path) -> None:
    async with core(tmp_path) as inner:
        (found,), _ = await look(inner, f"http://127.0.0.1:{free_port()}")
        assert found.text.startswith(f"{OPTION}: http://127.0.0.1:")
        assert "SSLContext" not in found.text
        assert "Connect call failed" in found.text


async def test_the_certificate_of_the_url_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = issue(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(made.cert, made.key)
    (tmp_path / "data").mkdir()
    async with core(tmp_path / "data") as inner, server(web.Response(text=PROOF), tls=tls) as port:
        url = f"https://localhost:{port}"
        (found,), metrics = await look(inner, url)
        assert "certificate" in found.text.lower(), "nobody trusts its issuer"
        monkeypatch.setenv("SSL_CERT_FILE", str(made.authority))
        (found,), metrics = await look(inner, url)
        # It is made for an hour.
        assert found.text.startswith(f"{OPTION}: the certificate expires on ")
        left = metrics.registry.get_sample_value("mediator_certificate_seconds", {"option": OPTION})
        assert left == pytest.approx(3600, abs=120)


@contextmanager
def never_closing(tls: ssl.SSLContext, answer: bytes) -> Iterator[int]:
    """Serve connections that answer, if they are asked, and never close on their side; gives the port."""
    connections: list[socket.socket] = []

    def serve() -> None:
        # Ends when the listener is shut down.
        with suppress(OSError):
            while True:
                connection = tls.wrap_socket(listener.accept()[0], server_side=True)
                connections.append(connection)
                if connection.recv(1 << 16):
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for each in connections:
                each.close()
            thread.join()


async def test_a_server_that_never_closes_holds_up_no_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = issue(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.authority))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(made.cert, made.key)
    (tmp_path / "data").mkdir()
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(PROOF)}\r\n\r\n{PROOF}".encode()
    async with core(tmp_path / "data") as inner:
        with never_closing(tls, answer) as port:
            async with asyncio.timeout(15):
                (found,), metrics = await look(inner, f"https://localhost:{port}")
            assert up(metrics) == 1
            assert found.text.startswith(f"{OPTION}: the certificate expires on ")


async def test_a_clock_that_differs_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with core(tmp_path) as inner:
        for ahead, texts in ((2, []), (-90, ["This machine's clock is 90 s behind the database server's."])):

            async def read(_look: object, ahead: int = ahead) -> int:
                return round((datetime.now(UTC).timestamp() - ahead) * 1000)

            monkeypatch.setattr(inner.broker, "read", read)
            metrics = Metrics()
            watch = Surroundings(inner.broker, metrics, {})
            await watch.check()
            assert [each.text for each in await watch.examine()] == texts
            skew = metrics.registry.get_sample_value("mediator_clock_skew_seconds")
            assert skew == pytest.approx(ahead, abs=1)


async def test_a_service_recognises_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.app.LOOK_SECONDS", 1)
    port = free_port()
    async with app(tmp_path, didcomm={"public_url": f"http://127.0.0.1:{port}"}) as service:

        async def pass_on(request: web.BaseRequest) -> web.Response:
            answer = await service.call("GET", request.path, token="")
            return web.Response(status=answer.status, body=answer.data)

        async def shows(value: str) -> bool:
            series = f'mediator_public_url_up{{option="{OPTION}"}} {value}\n'
            return series in (await service.call("GET", "/metrics")).data.decode()

        await until(lambda: shows("0.0"))
        runner = web.ServerRunner(web.Server(pass_on))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await until(lambda: shows("1.0"))
        await runner.cleanup()
