"""Attacks on the gateway, before the managed nats-server and one without accounts: each worked once (N10, E7, E9)."""

import asyncio
import json
import re
import ssl

import nats
import pytest
import pytest_asyncio

from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.nats.accounts import AccountUser, TenantAccount
from tests.harness.certificates import issue
from tests.harness.door import PATIENCE, parsed
from tests.harness.edge import Edge, Peer, edge

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOX = b"$mq9.AI.MAILBOX.MSG.%b.*"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["managed", "external"])
async def tried(request, tmp_path_factory):
    async with edge(tmp_path_factory.mktemp(request.param), managed=request.param == "managed") as made:
        yield made


async def send(edge: Edge, address: str, count: int) -> None:
    for number in range(count):
        await edge.broker.send(Send("default", address, Draft(b"mail %d" % number)))


def pushes(lines: list[bytes]) -> int:
    return sum(line.startswith(b"HMSG $mq9.AI.MAILBOX.MSG.") for line in lines)


async def deafen(edge: Edge, peer: Peer) -> None:
    """Have a client read nothing, so that the gateway does not read what the server has for it either."""
    sender = await edge.peer()
    await peer.settled(b"SUB flood 99\r\n")
    peer.writer.transport.pause_reading()
    for _ in range(20):
        await sender.settled(b"PUB flood 1000000\r\n%b\r\n" % (b"x" * 1_000_000))


async def flood(peer: Peer, data: bytes) -> None:
    """Write for as long as anybody takes it."""
    while True:
        peer.write(data)
        await peer.writer.drain()


# Past the gateway (B2).


@pytest.mark.rule("N10")
async def test_no_sid_carries_a_broad_subscription_past_the_gateway(tried: Edge) -> None:
    await tried.create("bait")
    thief, victim = await tried.peer(), await tried.peer()
    await thief.settled(b"SUB %b 1\r\nUNSUB 1 5\r\n" % (BOX % b"bait"))
    await deafen(tried, thief)
    await send(tried, "bait", 5)
    await victim.settled()
    thief.write(b"SUB > 1\r\n")
    thief.writer.transport.resume_reading()
    told = await thief.settled()
    await victim.settled(b"PUB secret 1\r\nx\r\n")
    assert not [line for line in await thief.settled() if line.startswith(b"MSG secret ")]
    assert b"-ERR 'Permissions Violation for Subscription to \">\"'" in told


@pytest.mark.rule("E7")
async def test_a_maximum_is_exact_and_frees_its_sid(tried: Edge) -> None:
    await tried.create("exact")
    await send(tried, "exact", 9)
    client = await tried.peer()
    client.write(b"SUB %b 1\r\nUNSUB 1 5\r\n" % (BOX % b"exact"))
    got: list[bytes] = []
    while pushes(got) < 5:
        got += await client.until(b"HMSG")
    assert pushes(await client.settled()) == 0, "none too many"
    got = await client.settled(b"SUB %b 1\r\n" % (BOX % b"exact"))
    while pushes(got) < 9:
        got += await client.until(b"HMSG")


# What a PONG says (C2, C4).


@pytest.mark.rule("N10")
async def test_refusals_behind_an_unread_payload_do_not_pile_up(tried: Edge, monkeypatch) -> None:
    monkeypatch.setattr("mediator.gateway.server.UNREAD_BYTES", 8 << 20)
    flooder = await tried.peer()
    await deafen(tried, flooder)
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(flood(flooder, b"SUB > 1\r\n" * 10_000), PATIENCE)


@pytest.mark.rule("N10")
async def test_who_has_its_pong_knows_that_the_mailbox_does_not_exist(tried: Edge) -> None:
    await tried.create("there")
    client = await tried.peer()
    for number in range(0, 40, 2):
        client.write(b"SUB %b %d\r\nPING\r\n" % (BOX % b"there", number))
        told = await client.settled(b"SUB %b %d\r\n" % (BOX % b"missing", number + 1))
        told += await client.until(b"PONG")
        assert any(line.endswith(b"\": mailbox missing does not exist'") for line in told), number


# What nats-server tells (B1).


@pytest.mark.rule("N10", "A7")
@pytest.mark.parametrize("asked", [b"ACCOUNT.PING.CONNZ", b"SERVER.PING.CONNZ", b"ACCOUNT.PING.STATZ", b"USER.INFO"])
async def test_nobody_is_told_what_others_subscribe_to(tried: Edge, asked: bytes) -> None:
    client = await tried.peer()
    body = b'{"subscriptions":true}'
    for frame in (
        b"PUB $SYS.REQ.%b _INBOX.me 22\r\n%b\r\n" % (asked, body),
        b"HPUB $SYS.REQ.%b _INBOX.me 12 34\r\nNATS/1.0\r\n\r\n%b\r\n" % (asked, body),
        b"PUB anything $SYS.REQ.%b 22\r\n%b\r\n" % (asked, body),
    ):
        assert b"-ERR 'Permissions Violation for Publish to \"$SYS.REQ.%b\"'" % asked in await client.settled(frame)


@pytest.mark.rule("N10", "A7")
@pytest.mark.parametrize("tried", ["managed"], indirect=True)
async def test_nor_on_the_managed_server_itself(tried: Edge) -> None:
    client = await tried.peer(tried.behind)
    told = await client.settled(b"PUB $SYS.REQ.ACCOUNT.PING.CONNZ _INBOX.me 0\r\n\r\n")
    assert b"-ERR 'Permissions Violation for Publish to \"$SYS.REQ.ACCOUNT.PING.CONNZ\"'" in told


@pytest.mark.rule("N10")
async def test_no_client_listens_to_replies_of_another(tried: Edge) -> None:
    victim, thief = await tried.peer(), await tried.peer()
    await victim.settled(b"SUB _INBOX.kept.* 1\r\n")
    for number, subject in enumerate((b"_INBOX.kept.*", b"_INBOX.kept.>", b"_INBOX.kept.7")):
        told, _ = await asyncio.gather(thief.settled(b"SUB %b %d\r\n" % (subject, number)), victim.until(b"PING"))
        assert b"-ERR 'Permissions Violation for Subscription to \"%b\"'" % subject in told
    await thief.settled(b"PUB _INBOX.kept.7 2\r\nhi\r\n")
    assert b"MSG _INBOX.kept.7 1 2" in await victim.settled()
    assert not [line for line in await thief.settled() if line.startswith(b"MSG")]


@pytest.mark.rule("N10")
async def test_a_client_that_comes_back_is_not_kept_from_its_inbox(tried: Edge, monkeypatch) -> None:
    monkeypatch.setattr("mediator.gateway.inboxes.ANSWER_SECONDS", 0.1)
    old = await tried.peer()
    await old.settled(b"SUB _INBOX.again.* 1\r\n")
    client = await tried.peer()
    # The old connection is silent, though not over; what the new one writes waits, in its order.
    told = await client.settled(b"SUB _INBOX.again.* 1\r\nPUB _INBOX.again.1 2\r\nhi\r\n")
    assert b"MSG _INBOX.again.1 1 2" in told


@pytest.mark.rule("N10", "A6")
async def test_the_same_inbox_in_two_tenants_is_two(tmp_path) -> None:
    tenants = tuple(TenantAccount(name, (AccountUser(name, "pw"),)) for name in ("one", "two"))
    async with edge(tmp_path, managed=True, tenants=tenants) as made:
        for tenant in tenants:
            client = await made.peer(user=tenant.name, **{"pass": "pw"})
            told = await client.settled(b"SUB _INBOX.same.* 1\r\nPUB _INBOX.same.1 2\r\nhi\r\n")
            assert b"MSG _INBOX.same.1 1 2" in told


# TLS (B11).


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return issue(tmp_path_factory.mktemp("tls"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def encrypted(tmp_path_factory, certificate):
    files = {"tls_cert": certificate.cert, "tls_key": certificate.key}
    async with edge(tmp_path_factory.mktemp("encrypted"), managed=True, **files) as made:
        yield made


async def test_tls_clients_do_all_that_plain_ones_do(encrypted: Edge, certificate) -> None:
    context = ssl.create_default_context(cafile=certificate.authority)
    for scheme in ("tls", "nats"):
        client = await nats.connect(f"{scheme}://localhost:{encrypted.gateway.port}", tls=context)
        reply = parsed((await client.request("$mq9.AI.MAILBOX.CREATE", b"", timeout=PATIENCE)).data)
        subscription = await client.subscribe(f"$mq9.AI.MAILBOX.MSG.{reply['mail_address']}.*")
        body = b"x" * 900_000
        await client.request(f"$mq9.AI.MSG.SEND.{reply['mail_address']}", body, timeout=PATIENCE)
        assert (await subscription.next_msg(timeout=PATIENCE)).data == body
        await client.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "certificate verify failed"),
        ({"tls_hostname": "example.org"}, "Hostname mismatch"),
        # NATS has no way for a server to offer both; clients learn from INFO that they have to encrypt.
        ({"tls_handshake_first": True}, "wrong version number|record layer failure|unexpected eof|closed"),
    ],
)
async def test_a_client_without_the_authority_is_told_why(encrypted: Edge, certificate, options, problem) -> None:
    authority = certificate.authority if options else None
    context = ssl.create_default_context(cafile=authority)
    problems: list[Exception] = []

    async def failed(error: Exception) -> None:
        problems.append(error)

    with pytest.raises((nats.errors.Error, OSError)) as refused:
        async with asyncio.timeout(PATIENCE):
            await nats.connect(
                f"tls://localhost:{encrypted.gateway.port}",
                tls=context,
                allow_reconnect=False,
                max_reconnect_attempts=0,
                connect_timeout=PATIENCE,
                error_cb=failed,
                **options,
            )
    assert any(re.search(problem, str(error)) for error in (*problems, refused.value)), (problems, refused.value)


@pytest.mark.parametrize("early", [True, False])
async def test_a_client_in_the_clear_is_told_to_encrypt(encrypted: Edge, early: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", encrypted.gateway.port)
    hello = b'CONNECT {"verbose":false}\r\nPING\r\n'
    if early:
        writer.write(hello)
    told = json.loads((await reader.readline())[5:])
    assert (told["tls_required"], told["port"]) == (True, encrypted.gateway.port)
    writer.write(hello)
    async with asyncio.timeout(PATIENCE):
        assert await reader.read() == b"-ERR 'Secure Connection - TLS Required'\r\n"
    writer.close()
