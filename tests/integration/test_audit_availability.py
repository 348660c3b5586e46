"""An audit's attacks on availability, each against real servers: what one client does must not stop the others."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import nats
import pytest
from aiohttp import ClientSession, web
from nats.aio.client import Client
from nats.aio.msg import Msg

from mediator.app import RunningService, open_service
from mediator.broker import Broker
from mediator.endpoint import Endpoint
from mediator.http.app import build_app, lift_time_limit
from mediator.http.connections import RESERVE
from mediator.http.health import Health
from mediator.http.server import HttpServer
from mediator.mailboxes.bounds import Bounds
from mediator.metrics import Metrics
from mediator.nats import control_messages
from mediator.nats.client import Request
from mediator.nats.connection import Announcements, Upstreams, connect
from mediator.nats.opening import ANNOUNCE_SECONDS, WakeAnnouncer
from tests.harness.core import make_settings
from tests.harness.door import PATIENCE, Service, serving, serving_two
from tests.harness.service import free_port, spawn
from tests.harness.stores import ram_store
from tests.harness.waiting import until
from tests.harness.wire import CONTROL_KEY, flushed, transport_of
from tests.integration.test_gateway_stock import nats_server
from tests.integration.test_nats_drain import Gated

# A nats-server that stalls.


def has_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.rule("A8")
async def test_late_pong_does_not_end_the_reading(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.create()
        pid = service.server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            # The signal reaches the threads that run on another core a little later.
            await until(lambda: has_stopped(pid))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(service.connection.flush(5), 0.05)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await service.ask("MSG.SEND.task", b"x", seconds=PATIENCE) == {"error": "", "msg_id": 0}
        assert service.lost == 0, "the same connection goes on"


@pytest.mark.rule("E6", "F5")
async def test_a_lost_connection_wakes_all_instances(tmp_path: Path) -> None:
    """What was announced meanwhile may be lost, and pushes would wait for the next message."""
    place = "default", "task"
    async with serving(tmp_path) as service:
        connection = await connect(service.server.upstreams(CONTROL_KEY), "other")
        store = ram_store()
        other = Broker(store, Bounds(), max_pending=10, max_waiting=10)
        announcers = [
            WakeAnnouncer(Announcements(each, control_messages.WAKE), broker, name)
            for each, broker, name in ((service.connection, service.broker, "one"), (connection, other, "two"))
        ]
        for announcer in announcers:
            await announcer.open()
        await connection.flush(PATIENCE)
        with service.broker.watching(place) as here, other.watching(place) as there:
            transport_of(service.connection.client).abort()
            await until(lambda: here.is_set() and there.is_set(), PATIENCE)
        for announcer in announcers:
            await announcer.close()
        await connection.close()
        await other.close()
        store.close()


@pytest.mark.rule("F2")
async def test_new_mail_is_announced_at_once_and_then_in_groups(tmp_path: Path) -> None:
    """Each announcement costs every instance as much as several SENDs: under load they do not come with each commit."""
    async with serving(tmp_path) as service:
        announcer = WakeAnnouncer(Announcements(service.connection, control_messages.WAKE), service.broker, "one")
        await announcer.open()
        connection = await connect(service.server.upstreams(CONTROL_KEY), "other")
        heard: list[bytes] = []
        await Announcements(connection, control_messages.WAKE).listen(heard.append)
        await connection.flush(PATIENCE)
        sent = [f"box{number}" for number in range(50)]
        for name in sent:
            await service.create(name)
        started = time.monotonic()
        for name in sent:
            await service.send(b"x", name)
        woken = {service.broker.wake_key(("default", name)) for name in sent}
        await until(lambda: all(any(key in announced for announced in heard) for key in woken))
        most = 2 + (time.monotonic() - started) / ANNOUNCE_SECONDS
        assert len(heard) <= most
        await announcer.close()
        await connection.close()


async def test_connection_is_remade_when_its_reading_ends() -> None:
    """Whatever error comes up while a line is read, the client never stays connected and deaf."""
    connections = 0

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        first = connections == 1
        writer.write(b'INFO {"max_payload":1048576,"headers":true}\r\n')
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
                if line.startswith(b"SUB"):
                    writer.write(b"INFO {nonsense\r\n" if first else b"MSG a 1 2\r\nhi\r\n")
        writer.close()

    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    connection = await connect(Upstreams([f"nats://127.0.0.1:{port}"]), "test")
    heard: list[Request] = []
    try:
        await connection.subscribe("a", "", heard.append)
        await until(lambda: heard)
        assert (heard[0].data, connections) == (b"hi", 2)
    finally:
        await connection.close()
        listening.close()


# Control messages between instances, on a server without accounts, where clients can publish to their subjects.


@dataclass
class Open:
    """A service with a gateway before an external server without accounts, and a spy who connects past the gateway."""

    service: RunningService
    spy: Client
    heard: list[Msg]
    """All that went over the server."""
    stack: contextlib.AsyncExitStack

    async def client(self, url: str | None = None) -> Client:
        problems: asyncio.Queue[Exception] = asyncio.Queue()
        client = await nats.connect(
            url or self.service.nats_url, error_cb=problems.put, allow_reconnect=False, connect_timeout=PATIENCE
        )
        client.problems = problems
        self.stack.push_async_callback(client.close)
        return client

    async def metric(self, name: str) -> float:
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{self.service.http_port}/metrics") as got:
            lines = [line for line in (await got.text()).splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def overheard(self, subject: str, words: str = "") -> Msg:
        """Return a message that went over the server."""

        def find() -> list[Msg]:
            return [each for each in self.heard if re.search(subject, each.subject) and words in str(each.data)]

        await until(find)
        return find()[0]


@pytest.fixture
async def external(tmp_path: Path) -> AsyncIterator[Open]:
    async with contextlib.AsyncExitStack() as stack:
        port, _ = await stack.enter_async_context(nats_server(tmp_path, ""))
        settings = make_settings(
            data_dir=tmp_path,
            nats_url=f"nats://127.0.0.1:{port}",
            http="127.0.0.1:0",
            gateway={"listen": "127.0.0.1:0"},
            registry={"enabled": False},
            didcomm={"enabled": False},
        )
        service = await stack.enter_async_context(open_service(settings))
        made = Open(service, None, [], stack)
        made.spy = await made.client(f"nats://127.0.0.1:{port}")

        async def hear(message: Msg) -> None:
            made.heard.append(message)

        await made.spy.subscribe(">", cb=hear)
        await flushed(made.spy)
        yield made


@pytest.mark.rule("E9", "N10")
async def test_forged_and_replayed_control_messages_are_dropped(external: Open) -> None:
    victim = await external.client()
    subscription = await victim.subscribe("$mq9.AI.BROADCAST.a.*")
    await flushed(victim)
    opened = json.loads((await external.overheard("PUSH.OPEN$")).data)
    await victim.request("$mq9.AI.BROADCAST.a.b", b"first", timeout=PATIENCE)
    assert (await subscription.next_msg(PATIENCE)).data == b"first"
    # What makes the victim another tenant, and a broadcast sent once more and as somebody likes it.
    identity = await external.overheard(r"^mq9ctl\.gateway\.")
    other = json.dumps({"token": opened["token"], "tenant": "other", "account": None}).encode()
    cast = await external.overheard(r"^mq9(ctl\.)?cast\.", "first")
    await external.spy.publish(cast.subject, cast.data)
    await external.spy.publish(cast.subject, cast.data.replace(b"first", b"forged"))
    await external.spy.publish(identity.subject, other)
    await external.spy.publish(identity.subject, identity.data)
    await flushed(external.spy)
    await victim.request("$mq9.AI.BROADCAST.a.b", b"second", timeout=PATIENCE)
    assert (await subscription.next_msg(PATIENCE)).data == b"second"
    assert await external.metric("mediator_control_refused_total{") == 4


@pytest.mark.rule("N10")
@pytest.mark.parametrize("subject", ["live", "wake", "found", "gateway.x", "cast.default.a.b"])
async def test_gateway_lets_no_client_act_as_the_service(external: Open, subject: str) -> None:
    client = await external.client()
    problems: asyncio.Queue[Exception] = client.problems
    await client.publish(f"mq9ctl.{subject}", b"forged")
    assert "permissions violation for publish" in str(await asyncio.wait_for(problems.get(), PATIENCE))
    await client.publish("a", b"", reply=f"mq9ctl.{subject}")
    assert "permissions violation for publish" in str(await asyncio.wait_for(problems.get(), PATIENCE))
    for pattern in (f"mq9ctl.{subject}", f"*.{subject}", "mq9ctl.>"):
        await client.subscribe(pattern)
        assert "permissions violation for subscription" in str(await asyncio.wait_for(problems.get(), PATIENCE))
    assert not [message for message in external.heard if message.data == b"forged"]


# Subscriptions by the ten thousand.


async def test_subscriptions_of_one_connection_are_limited(tmp_path: Path) -> None:
    settings = make_settings(
        data_dir=tmp_path,
        nats="127.0.0.1:0",
        http="127.0.0.1:0",
        nats_max_subscriptions=100,
        gateway={"max_subscriptions": 10},
        registry={"enabled": False},
        didcomm={"enabled": False},
    )
    async with open_service(settings) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(service.nats_url).port)
        try:
            writer.write(b'CONNECT {"verbose":false}\r\n')
            for sid in range(5000):
                writer.write(b"SUB %b.%d %d\r\n" % (b"x" * 2000, sid, sid))
            writer.write(b"PING\r\n")
            async with asyncio.timeout(PATIENCE):
                lines = []
                while not lines or lines[-1] != b"PONG\r\n":
                    lines.append(await reader.readline())
                    assert lines[-1], "the connection is over"
        finally:
            writer.close()
        assert lines.count(b"-ERR 'maximum subscriptions exceeded'\r\n") == 5000 - 110
        assert len(lines) == 5000 - 110 + 2


# One tenant beside another.


@contextlib.asynccontextmanager
async def greedy(folder: Path, store: Gated | None = None) -> AsyncIterator[tuple[Service, Client, Client]]:
    """Run a door with room for 20 requests; gives it, a greedy client of one tenant, and a client of another."""
    async with serving_two(folder, store=store, door_pending=20) as (service, ann, bob):
        for client in (ann, bob):
            assert (await service.ask("MAILBOX.CREATE", {"name": "task"}, client=client))["error"] == ""
        yield service, ann, bob


@pytest.mark.rule("A6", "F2", "N1")
async def test_long_polls_of_one_tenant_leave_room_for_another(tmp_path: Path) -> None:
    async with greedy(tmp_path) as (service, ann, bob):
        others = [await service.client("ann", "a") for _ in range(5)]
        wait = {"config": {"max_wait_ms": 4500}}
        polls = [
            asyncio.create_task(service.ask("MSG.FETCH.task", wait, client=client))
            for client in (ann, *others)
            for _ in range(20)
        ]
        await until(lambda: sum(poll.done() for poll in polls) + service.broker.waiting == len(polls))
        refused = [poll.result() for poll in polls if poll.done()]
        assert refused
        assert {re.sub(r"\d+", "N", reply["error"]) for reply in refused} <= {
            "server busy: this connection has N FETCH requests under way, its share of N",
            "server busy: this tenant has N FETCH requests under way, its share of N",
        }
        # The other tenant's wait and work, and the greedy one's own work, go on.
        waiting = asyncio.create_task(service.ask("MSG.FETCH.task", wait, client=bob))
        assert (await service.ask("MSG.QUERY.task", {}, client=ann))["error"] == ""
        assert (await service.ask("MSG.SEND.task", b"x", client=bob))["error"] == ""
        assert len((await waiting)["messages"]) == 1
        assert (await service.ask("MSG.SEND.task", b"x", client=ann))["error"] == ""
        answers = await asyncio.gather(*polls)
        assert all(len(reply["messages"]) == 1 for reply in answers if not reply["error"])


@pytest.mark.rule("A6", "A9", "N1")
@pytest.mark.parametrize("size", [1, 60_000])
async def test_sends_of_one_tenant_leave_room_for_another(tmp_path: Path, size: int) -> None:
    store = Gated(tmp_path / "mail.db")
    async with greedy(tmp_path, store) as (service, ann, bob):
        store.gate.clear()
        flood = [asyncio.create_task(service.ask("MSG.SEND.task", b"x" * size, client=ann)) for _ in range(40)]
        await until(lambda: any(send.done() for send in flood))
        mine = asyncio.create_task(service.ask("MSG.SEND.task", b"mine", client=bob))
        await flushed(bob)
        store.gate.set()
        assert await mine == {"error": "", "msg_id": 0}
        replies = [await send for send in flood]
        refused = [reply for reply in replies if reply["error"]]
        assert 0 < len(refused) < len(replies)
        assert all(reply["error"].startswith("server busy: this connection has ") for reply in refused)
        assert (await service.ask("MSG.SEND.task", b"again", client=ann))["error"] == "", "a retry helps"


# HTTP connections.


@contextlib.asynccontextmanager
async def web_server(limit: int, hold: asyncio.Event | None = None) -> AsyncIterator[HttpServer]:
    """Serve health, a page that reads its body, and one that waits until ``hold`` is set."""

    async def read(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    async def wait(_request: web.Request) -> web.Response:
        await hold.wait()
        return web.Response()

    async def echo(request: web.Request) -> web.WebSocketResponse:
        lift_time_limit(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data)
        return socket

    app = build_app(Health(), Metrics().registry)
    app.router.add_get("/echo", echo)
    app.router.add_post("/read", read)
    app.router.add_get("/wait", wait)
    server = HttpServer(Endpoint("127.0.0.1", 0), limit)
    await server.bind()
    try:
        await server.start(app)
        yield server
    finally:
        await server.stop()


async def opened(
    server: HttpServer, count: int, data: bytes, stack: contextlib.ExitStack
) -> list[asyncio.StreamReader]:
    """Open connections that send this, and wait until all have."""
    readers = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        stack.callback(writer.close)
        writer.write(data)
        await writer.drain()
        readers.append(reader)
    return readers


async def got(server: HttpServer, path: str) -> int:
    async with ClientSession() as session, session.get(f"http://127.0.0.1:{server.port}{path}") as answer:
        return answer.status


HEAD = b"GET /livez HTTP/1.1\r\nHost: x\r\n"
HALVES = {
    "nothing": b"",
    "half a head": HEAD + b"X-Slow: ",
    "a slow body": b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx",
    "idle": HEAD + b"\r\n",
}


@pytest.mark.parametrize("half", HALVES)
async def test_connections_that_keep_us_waiting_give_way_to_others(half: str) -> None:
    async with web_server(20) as server:
        with contextlib.ExitStack() as stack:
            await opened(server, 60, HALVES[half], stack)
            for path in ("/livez", "/readyz", "/metrics"):
                assert await got(server, path) == 200
            assert server.connections <= 20


async def test_websockets_are_no_part_of_the_bound_and_stay() -> None:
    async with (
        web_server(20) as server,
        ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{server.port}/echo") as socket,
    ):
        await until(lambda: server.connections == 0)
        with contextlib.ExitStack() as stack:
            await opened(server, 60, HEAD, stack)
            await socket.send_str("still here")
            assert await socket.receive_str(timeout=PATIENCE) == "still here"


async def test_busy_http_server_answers_health_alone() -> None:
    hold = asyncio.Event()
    async with web_server(20, hold) as server:
        with contextlib.ExitStack() as stack:
            waiting = await opened(server, 20, b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n", stack)
            assert [await got(server, path) for path in ("/livez", "/readyz", "/wait")] == [200, 200, 503]
            await opened(server, 100, HEAD, stack)
            assert await got(server, "/livez") == 200
            assert server.connections <= 20 + RESERVE
            hold.set()
            assert {(await reader.readline()).split()[1] for reader in waiting} == {b"200"}


async def test_a_head_must_come_in_time_however_its_bytes_drip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.http.connections.HEAD_SECONDS", 0.2)
    async with web_server(20) as server:
        with contextlib.ExitStack() as stack:
            readers = [(await opened(server, 1, data, stack))[0] for data in (b"", HEAD)]
            answered, writer = await asyncio.open_connection("127.0.0.1", server.port)
            stack.callback(writer.close)
            writer.write(HEAD + b"\r\n")
            async with asyncio.timeout(PATIENCE):
                assert await answered.readuntil(b"\r\n\r\nok")
                writer.write(HEAD)
                ends = await asyncio.gather(*(each.read() for each in (*readers, answered)), return_exceptions=True)
            assert [isinstance(end, ConnectionError) or end == b"" for end in ends] == [True] * 3
            assert server.connections == 0


async def test_half_requests_shut_out_neither_nats_nor_health(tmp_path: Path) -> None:
    """With the open files that many systems allow, all doors stay open, and a default start warns of nothing."""
    nats_port, http_port = free_port(), free_port()
    command = ["/bin/sh", "-c", 'ulimit -n 1024; exec "$0" "$@"', sys.executable, "-m", "mediator", "serve"]
    command += ["--data-dir", str(tmp_path / "data"), "--nats", f"127.0.0.1:{nats_port}"]
    log = tmp_path / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEDIATOR_")}
    process = spawn([*command, "--http", f"127.0.0.1:{http_port}"], log, {**environment, "MEDIATOR_LOG_FORMAT": "json"})
    try:
        await until(lambda: '"ready"' in log.read_text(), 40)
        assert '"warning"' not in log.read_text()
        with contextlib.ExitStack() as stack:
            for _ in range(1200):
                _, writer = await asyncio.open_connection("127.0.0.1", http_port)
                stack.callback(writer.close)
                writer.write(HEAD)
            async with asyncio.timeout(PATIENCE):
                async with ClientSession() as session, session.get(f"http://127.0.0.1:{http_port}/readyz") as answer:
                    assert answer.status == 200, await answer.text()
                client = await nats.connect(
                    f"nats://127.0.0.1:{nats_port}", allow_reconnect=False, connect_timeout=PATIENCE
                )
                reply = await client.request("$mq9.AI.MAILBOX.CREATE", b"{}", timeout=PATIENCE)
                assert json.loads(reply.data)["error"] == ""
                await client.close()
        assert log.read_text().count("too many http connections") == 1
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, PATIENCE)
