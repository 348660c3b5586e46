"""What works against nats-server works through the gateway: the features of NATS itself, and its refusals."""

import asyncio
import contextlib
import json
import os
import signal
import ssl

import nats
import pytest
from nats.errors import NoRespondersError

from mediator.endpoint import Endpoint
from mediator.errors import SetupError
from mediator.gateway import server
from mediator.gateway.opening import run_gateway, upstream
from mediator.gateway.streams import MAX_UNFINISHED
from mediator.mailboxes.bounds import Bounds
from mediator.metrics import Metrics
from mediator.nats.accounts import AccountUser, TenantAccount
from mediator.nats.connection import Upstreams
from mediator.nats.door import DoorOptions
from mediator.nats.frames import MAX_LINE
from mediator.settings.sections import GatewaySettings
from tests.harness.certificates import issue
from tests.harness.door import PUSH, joined
from tests.harness.external import nats_server
from tests.harness.gateway import Raw, gateway
from tests.harness.nkeys import Key
from tests.harness.stores import ram_store
from tests.harness.waiting import until
from tests.harness.wire import flushed

PATIENCE = 10
ANY_PORT = Endpoint("127.0.0.1", 0)
SMALL = 100_000
"""Bytes of a message where nats-server has its default limit."""


@pytest.fixture
async def house(tmp_path):
    async with gateway(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def before(folder, config, url="nats://svc:svc@127.0.0.1:{port}"):
    """A gateway before such a server, which lets the service in at this URL; gives gateway and process."""
    async with nats_server(folder, config) as (port, process), contextlib.AsyncExitStack() as stack:
        upstreams, bounds = Upstreams([url.format(port=port)]), Bounds(max_message=SMALL)
        door = DoorOptions(accounts=False, instance="test", max_pending=10_000)
        parts = await joined(stack, upstreams, ram_store(), bounds, door, short_way=False)
        yield parts["gateway"], process


def at(house, upstreams, listen, settings=None):
    """One more gateway of the service, before these servers."""
    options = listen, settings or GatewaySettings(), PUSH, PATIENCE
    service = house.service
    return run_gateway(*options, upstreams, service.connection, service.broker, Metrics())


@contextlib.asynccontextmanager
async def connected(port, **options):
    client = await nats.connect(f"nats://127.0.0.1:{port}", error_cb=_ignore, **options)
    try:
        yield client
    finally:
        await client.close()


async def _ignore(error):
    pass


@contextlib.asynccontextmanager
async def raw(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


async def echo(message):
    await message.respond(message.data)


@pytest.mark.parametrize("pedantic", [False, True])
@pytest.mark.parametrize("verbose", [False, True])
async def test_requests_headers_and_queue_groups(house, verbose, pedantic):
    one = await house.client(verbose=verbose, pedantic=pedantic)
    two = await house.client(verbose=verbose, pedantic=pedantic)
    got: list[list[str]] = [[], []]

    def member(number):
        async def answer(message):
            got[number].append(message.headers["n"])
            await message.respond(message.data + b"!")

        return answer

    for number, client in enumerate((one, two)):
        await client.subscribe("work.*", queue="workers", cb=member(number))
        await flushed(client)
    big = os.urandom(900_000)
    answers = await asyncio.gather(
        *(two.request("work.x", big if n == 0 else b"", headers={"n": str(n)}, timeout=PATIENCE) for n in range(60))
    )
    assert answers[0].data == big + b"!"
    assert sorted(map(int, got[0] + got[1])) == list(range(60))
    assert got[0]
    assert got[1]


async def test_nobody_there_to_answer_is_told_at_once(house):
    client = await house.client()
    with pytest.raises(NoRespondersError):
        await client.request("nobody", b"", timeout=PATIENCE)


async def test_a_drain_delivers_all_that_had_come(house):
    client, sender = await house.client(), await house.client()
    got = []

    async def slowly(message):
        await asyncio.sleep(0)
        got.append(message.data)

    await client.subscribe("a", cb=slowly)
    await flushed(client)
    for n in range(500):
        await sender.publish("a", b"%d" % n)
    await flushed(sender)
    await client.drain()
    assert got == [b"%d" % n for n in range(500)]


async def test_what_was_published_before_an_end_arrives(house):
    listener, sender = await house.client(), await house.client()
    subscription = await listener.subscribe("a")
    await flushed(listener)
    for n in range(200):
        await sender.publish("a", b"%d" % n)
    await sender.close()
    assert [(await subscription.next_msg(timeout=PATIENCE)).data for _ in range(200)] == [b"%d" % n for n in range(200)]


async def test_automatic_ends_of_subscriptions(house):
    client = await house.client()
    subscription = await client.subscribe("a")
    await subscription.unsubscribe(limit=2)
    for _ in range(5):
        await client.publish("a", b"")
    await flushed(client)
    assert [await subscription.next_msg(timeout=PATIENCE) for _ in range(2)]
    with pytest.raises((nats.errors.Error, asyncio.TimeoutError)):
        await subscription.next_msg(timeout=0.1)


async def test_clients_find_their_way_back_when_nats_server_dies(house):
    client = await house.client()
    await house.service.create("orders")
    await client.subscribe("a", cb=echo)
    stored = await client.subscribe("$mq9.AI.MAILBOX.MSG.orders.*")
    await house.service.send(b"one", "orders")
    assert (await stored.next_msg(timeout=PATIENCE)).data == b"one"
    lost = house.service.lost
    os.kill(house.server.pid, signal.SIGKILL)
    await until(lambda: client.stats["reconnects"])
    await until(lambda: client.is_connected and house.service.lost > lost and house.service.connection.connected)
    assert (await client.request("a", b"x", timeout=PATIENCE)).data == b"x"
    # It begins anew with the new connection.
    assert (await stored.next_msg(timeout=PATIENCE)).data == b"one"
    reply = await client.request("$mq9.AI.MSG.SEND.orders", b"two", timeout=PATIENCE)
    assert json.loads(reply.data)["msg_id"] == 1
    assert (await stored.next_msg(timeout=PATIENCE)).data == b"two"


async def test_the_greeting_names_the_gateway_and_no_way_around_it(tmp_path):
    async with (
        before(tmp_path, "cluster { name: c, listen: 127.0.0.1:-1 }\nserver_name: nats-1") as (made, process),
        raw(made.port) as client,
    ):
        told = json.loads((await client.line())[5:])
        assert (told["host"], told["port"], told["server_name"]) == ("127.0.0.1", made.port, "nats-1")
        assert told["client_ip"] == "127.0.0.1"
        assert not {"connect_urls", "ws_connect_urls", "tls_required", "tls_available"} & set(told)
        client.write(b'CONNECT {"verbose":false,"protocol":1}\r\nPING\r\n')
        await client.until(b"PONG")
        process.send_signal(signal.SIGUSR2)
        while not (lame := json.loads((await client.until(b"INFO"))[5:])).get("ldm"):
            pass
        assert (lame["port"], "connect_urls" in lame) == (made.port, False)


async def test_jetstream_and_key_value(tmp_path):
    config = f'jetstream {{ store_dir: "{tmp_path}/js" }}'
    async with before(tmp_path, config) as (made, _), connected(made.port) as client:
        stream = client.jetstream()
        await stream.add_stream(name="orders", subjects=["orders.>"])
        for n in range(50):
            await stream.publish("orders.new", b"%d" % n, headers={"Nats-Msg-Id": str(n)})
        pulled = await stream.pull_subscribe("orders.>", "durable")
        got = await pulled.fetch(50, timeout=PATIENCE)
        assert [message.data for message in got] == [b"%d" % n for n in range(50)]
        for message in got:
            await message.ack_sync(timeout=PATIENCE)
        pushed = await stream.subscribe("orders.>", ordered_consumer=True)
        assert (await pushed.next_msg(timeout=PATIENCE)).data == b"0"
        values = await stream.create_key_value(bucket="settings")
        watcher = await values.watchall()
        await values.put("a", b"1")
        assert (await values.get("a")).value == b"1"
        assert (await watcher.updates(timeout=PATIENCE)) is None
        assert (await watcher.updates(timeout=PATIENCE)).value == b"1"


@pytest.mark.parametrize(
    ("config", "good", "bad"),
    [
        (
            "authorization { users: [{user: svc, password: svc}, {user: a, password: b}] }",
            {"user": "a", "password": "b"},
            {"user": "a", "pass": "c"},
        ),
        ("authorization { token: svc }", {"token": "svc"}, {"auth_token": "no"}),
    ],
)
async def test_logins_are_those_of_nats_server(tmp_path, config, good, bad):
    url = "nats://svc@127.0.0.1:{port}" if "token" in good else "nats://svc:svc@127.0.0.1:{port}"
    async with before(tmp_path, config, url) as (made, _):
        async with connected(made.port, **good) as client:
            await client.subscribe("a", cb=echo)
            assert (await client.request("a", b"x", timeout=PATIENCE)).data == b"x"
        async with raw(made.port) as refused:
            told = json.loads((await refused.line())[5:])
            assert told["auth_required"] is True
            refused.write(b"CONNECT " + json.dumps({"verbose": False, **bad}).encode() + b"\r\nPING\r\n")
            assert (await refused.rest()).splitlines() == [b"-ERR 'Authorization Violation'"]


async def test_an_nkey_signs_the_nonce_of_nats_server(tmp_path):
    key = Key("user")
    config = f"authorization {{ users: [{{user: svc, password: svc}}, {{nkey: {key.public}}}] }}"
    async with before(tmp_path, config) as (made, _):
        for signer, answer in ((key, b"PONG"), (Key("user"), b"-ERR 'Authorization Violation'")):
            async with raw(made.port) as client:
                nonce = json.loads((await client.line())[5:])["nonce"]
                options = {"verbose": False, "nkey": key.public, "sig": signer.sign(nonce)}
                client.write(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
                assert await client.line() == answer


async def test_a_jwt_names_its_account(tmp_path):
    operator, system, account, user = Key("operator"), Key("account"), Key("account"), Key("user")
    unlimited = {
        "limits": {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1}
    }
    config = (
        f"operator: {operator.vouch(operator, 'op')}\nsystem_account: {system.public}\nresolver: MEMORY\n"
        f"resolver_preload {{ {system.public}: {operator.vouch(system, 'sys', **unlimited)}\n"
        f"{account.public}: {operator.vouch(account, 'acme', **unlimited)} }}"
    )
    token = account.vouch(user, "a", pub={}, sub={}, subs=-1, data=-1, payload=-1)
    async with gateway(tmp_path) as house, nats_server(tmp_path, config) as (port, _):
        # The service's own connection is to the first server: it has no part in this.
        upstreams = Upstreams([f"nats://127.0.0.1:{port}"])
        async with at(house, upstreams, ANY_PORT) as made, raw(made.port) as client:
            nonce = json.loads((await client.line())[5:])["nonce"]
            options = {"verbose": False, "jwt": token, "sig": user.sign(nonce)}
            client.write(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
            assert await client.line() == b"PONG"


@pytest.fixture
def certificate(tmp_path):
    return issue(tmp_path)


async def test_clients_encrypt_where_the_gateway_has_a_certificate(tmp_path, certificate):
    async with gateway(tmp_path, tls_cert=certificate.cert, tls_key=certificate.key) as house:
        assert house.gateway.url.startswith("tls://")
        context = ssl.create_default_context(cafile=certificate.authority)
        client = await house.client(tls=context, tls_hostname="localhost")
        await client.subscribe("a", cb=echo)
        big = os.urandom(900_000)
        assert (await client.request("a", big, timeout=PATIENCE)).data == big
        await client.request("$mq9.AI.MAILBOX.CREATE", b'{"name":"orders"}', timeout=PATIENCE)
        subscription = await client.subscribe("$mq9.AI.MAILBOX.MSG.orders.*")
        await client.request("$mq9.AI.MSG.SEND.orders", big, timeout=PATIENCE)
        assert (await subscription.next_msg(timeout=PATIENCE)).data == big
        await house.service.confirmed()


async def test_the_gateway_uses_tls_where_the_server_wants_it(tmp_path, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.authority))
    config = f'tls {{ cert_file: "{certificate.cert}", key_file: "{certificate.key}" }}'
    async with before(tmp_path, config, "tls://127.0.0.1:{port}") as (made, _), connected(made.port) as client:
        await client.subscribe("a", cb=echo)
        big = os.urandom(900_000)
        assert (await client.request("a", big, timeout=PATIENCE)).data == big


async def test_files_that_are_no_certificate_are_told(house, tmp_path, certificate):
    settings = GatewaySettings(tls_cert=certificate.cert, tls_key=tmp_path / "none")
    with pytest.raises(SetupError, match=r"gateway\.tls_cert"):
        await at(house, house.server.upstreams(), ANY_PORT, settings).__aenter__()
    with pytest.raises(SetupError, match="nats://"):
        upstream("ws://127.0.0.1", house.server.upstreams().tls())


# Bad input.


async def test_a_payload_that_is_too_large_is_refused_by_nats_server(house):
    client = await house.raw()
    client.write(b'CONNECT {"verbose":false}\r\nPUB a 20000000\r\n')
    assert await client.until(b"-ERR") == b"-ERR 'Maximum Payload Violation'"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"-ERR 'Unknown Protocol Operation'"),
        (b"PUB a -5\r\nhello\r\n", b"-ERR 'Unknown Protocol Operation'"),
        (b"SUB a " + b"q" * 100_000 + b" 1\r\n", b"-ERR 'maximum control line exceeded'"),
        (b"SUB $mq9.AI.MAILBOX.MSG.a.* " + b"q" * 100_000 + b" 1\r\n", b"-ERR 'maximum control line exceeded'"),
        (b"\x00\x01\x02\x03\r\n", b"-ERR 'Unknown Protocol Operation'"),
        (b"PUB a 1\r\nxSUB $mq9.PUSH.> 1\r\n", b"-ERR 'Unknown Protocol Operation'"),
    ],
)
async def test_broken_frames_end_the_connection_as_nats_server_does(house, sent, said):
    other = await house.client()
    client = await house.raw()
    client.write(b'CONNECT {"verbose":false}\r\n' + sent)
    lines = (await client.rest()).splitlines()
    assert said in lines
    assert await other.flush() is None


async def test_a_client_that_says_nothing_is_sent_away(tmp_path, monkeypatch):
    async with gateway(tmp_path) as house:
        kept = await house.client()
        monkeypatch.setattr(server, "HELLO_SECONDS", 0.2)
        for sent in (b"", b"PING", b"PING\r\n"):
            client = await house.raw()
            client.write(sent)
            assert b"-ERR 'Authentication Timeout'" in await client.rest()
        assert kept.is_connected
        assert len(house.gateway.clients) == 1


async def test_there_are_no_more_clients_than_may_be(tmp_path):
    async with gateway(tmp_path, max_connections=2) as house:
        one, _ = await house.client(), await house.client()
        third = await house.raw()
        assert (await third.rest()) == b"-ERR 'maximum connections exceeded'\r\n"
        await one.close()
        await until(lambda: len(house.gateway.clients) == 1)
        assert await (await house.client()).flush() is None


async def test_a_client_that_never_reads_costs_little_memory(house):
    lazy = await house.raw()
    lazy.write(b'CONNECT {"verbose":false}\r\nSUB flood 1\r\nPING\r\n')
    await lazy.until(b"PONG")
    lazy.writer.transport.pause_reading()
    sender, other = await house.client(), await house.client()
    subscription = await other.subscribe("calm")
    await flushed(other)
    for _ in range(300):
        await sender.publish("flood", b"x" * 100_000)
    await sender.publish("calm", b"y")
    await flushed(sender)
    assert (await subscription.next_msg(timeout=PATIENCE)).data == b"y"
    waiting = max(client.transport.get_write_buffer_size() for client in house.gateway.clients)
    assert waiting <= 4 * server.BUFFER_BYTES


async def test_a_client_that_never_reads_refusals_is_cut_off(house, monkeypatch):
    monkeypatch.setattr(server, "UNREAD_BYTES", 2 << 20)
    lazy = await house.raw()
    lazy.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
    await lazy.until(b"PONG")
    lazy.writer.transport.pause_reading()

    async def ask_for_all():
        # Each is answered with five times as many bytes.
        for _ in range(200):
            lazy.write(b"SUB > 1\r\n" * 10_000)
            await lazy.writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(ask_for_all(), PATIENCE)
    await until(lambda: not house.gateway.clients)


async def test_an_absent_server_costs_the_client_its_connection(tmp_path):
    async with gateway(tmp_path) as house:
        await house.server.stop()
        await until(lambda: not house.service.connection.connected)
        client = await house.raw()
        assert await client.rest() == b""


async def test_a_taken_port_is_told(house):
    taken = Endpoint("127.0.0.1", house.gateway.port)
    with pytest.raises(SetupError, match="is taken by another program"):
        await at(house, house.server.upstreams(), taken).__aenter__()


@pytest.mark.rule("A6")
async def test_the_users_of_tenants_log_in_through_the_gateway(tmp_path):
    key = Key("user")
    tenants = (TenantAccount("acme", (AccountUser("a", "pw"), AccountUser("k", nkey=key.public))),)
    async with gateway(tmp_path, tenants=tenants) as house:
        client = await house.client(user="a", password="pw")
        await flushed(client)
        async with raw(house.gateway.port) as signed:
            nonce = json.loads((await signed.line())[5:])["nonce"]
            options = {"verbose": False, "nkey": key.public, "sig": key.sign(nonce)}
            signed.write(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
            assert await signed.line() == b"PONG"


@pytest.mark.rule("N7")
async def test_unfinished_commands_of_strangers_hold_little_memory(tmp_path):
    async with gateway(tmp_path, max_connections=500) as house:
        await house.service.create()
        stream = b"PUB $JS.API.STREAM.CREATE.s %d\r\n"
        stranger = await house.raw()
        stranger.write(stream % 1_000_000)
        assert (await stranger.rest()).splitlines()[1:] == [b"-ERR 'Authorization Violation'"]
        peers = [await house.raw() for _ in range(400)]
        for number, peer in enumerate(peers):
            request = b"PUB $mq9.AI.MSG.SEND.task _INBOX.p%d.1 %%d\r\n" % number
            peer.write(b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\nSUB _INBOX.p%d.* 1\r\n' % number)
            peer.write((stream if number % 2 else request) % 250_000 + bytes(100_000))
        await until(lambda: house.gateway.context.unfinished.total > MAX_UNFINISHED - 1_000_000)
        client = await house.client()
        reply = await client.request("$mq9.AI.MSG.SEND.task", bytes(200_000), timeout=30)
        assert json.loads(reply.data)["msg_id"] == 0
        assert house.gateway.context.unfinished.total <= MAX_UNFINISHED + 400 * MAX_LINE
        for peer in peers:
            peer.writer.close()
        await until(lambda: house.gateway.context.unfinished.total == 0)
