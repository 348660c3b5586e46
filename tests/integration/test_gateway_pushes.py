"""Subscriptions to stored mail through the gateway, by real clients and plain sockets (E6, E7, N10)."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from mediator.errors import UnavailableError
from mediator.mailboxes import pushing
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.message import Draft
from mediator.mailboxes.pushing import WINDOW
from mediator.mailboxes.sending import Send
from mediator.nats.accounts import AccountUser, TenantAccount
from mediator.nats.connection import NatsConnection
from mediator.settings.sections import PushSettings
from mediator.store.base import Transaction
from tests.harness.door import Service
from tests.harness.gateway import House, gateway
from tests.harness.waiting import until
from tests.harness.wire import flushed

BOX = "$mq9.AI.MAILBOX.MSG.orders"
PATIENCE = 10


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with gateway(tmp_path) as made:
        await made.service.create("orders")
        yield made


async def taken(subscription: Any, count: int) -> list[Any]:
    return [await subscription.next_msg(timeout=PATIENCE) for _ in range(count)]


async def problem_of(client: Any) -> str:
    return str(await asyncio.wait_for(client.problems.get(), PATIENCE))


async def leases(service: Service) -> int:
    """Return how many messages the members of the queue ``workers`` hold."""

    def count(tx: Transaction, now: int) -> int:
        group = tx.groups.find(get_live_mailbox(tx, "default", "orders", now), "workers", push=True)
        assert group is not None
        return tx.leases.count(group, now).running

    return await service.broker.read(count)


async def settled(service: Service, count: int = 0) -> None:
    async def reached() -> bool:
        return await leases(service) == count

    await until(reached)


@pytest.mark.rule("E6")
async def test_a_push_comes_on_the_subject_that_the_client_knows(house: House) -> None:
    client = await house.client()
    subscription = await client.subscribe(f"{BOX}.*")
    await house.service.send(b"SUB a 1\r\nPING\r\n", "orders", priority="urgent", key="k")
    (message,) = await taken(subscription, 1)
    assert (message.subject, message.data) == (f"{BOX}.urgent", b"SUB a 1\r\nPING\r\n")
    assert message.headers == {"mq9-msg-id": "0", "mq9-priority": "urgent", "mq9-key": "k"}
    assert not client.problems.qsize()


@pytest.mark.rule("E6")
async def test_a_client_without_headers_gets_payloads(house: House) -> None:
    await house.service.send(b"mail", "orders")
    raw = await house.raw()
    raw.write(b'CONNECT {"verbose":false}\r\nSUB %b.* 1\r\n' % BOX.encode())
    assert await raw.until(b"MSG") == b"MSG %b.normal 1 4" % BOX.encode()
    assert await raw.line() == b"mail"


@pytest.mark.rule("E7")
async def test_what_the_client_has_read_is_confirmed(house: House) -> None:
    client = await house.client()
    subscription = await client.subscribe(f"{BOX}.*", queue="workers")
    for _ in range(50):
        await house.service.send(b"x" * 1000, "orders")
    await taken(subscription, 50)
    await settled(house.service)
    await house.service.confirmed()
    await subscription.unsubscribe()
    await house.service.serves(0)
    assert client.is_connected


@pytest.mark.rule("E7")
async def test_unread_pushes_are_not_confirmed_nor_slow_others(house: House) -> None:
    lazy = await house.reader(b"SUB %b.* workers 1" % BOX.encode())
    lazy.writer.transport.pause_reading()
    for _ in range(20):
        await house.service.send(b"x" * 300_000, "orders")
    await until(lambda: house.service.metric("mediator_push_waiting") > 0)
    busy = await house.client()
    alone = await busy.subscribe(f"{BOX}.*")
    await taken(alone, 20)
    worker = await busy.subscribe(f"{BOX}.*", queue="workers")
    held = [int(message.headers["mq9-msg-id"]) for message in await taken(worker, 10)]
    assert 0 not in held, "what the lazy one was given is still its own"
    lazy.writer.close()
    while len(held) < 20:
        held += [int(message.headers["mq9-msg-id"]) for message in await taken(worker, 1)]
    assert sorted(held) == list(range(20))


@pytest.mark.rule("E7", "N7")
async def test_slow_subscribers_keep_nobody_from_sending(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(10):
        await house.service.send(b"x" * 300_000, "orders")
    lazy = await house.raw()
    lazy.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
    await lazy.until(b"INFO")
    lazy.writer.transport.pause_reading()
    for number in range(50):
        lazy.write(b"SUB %b.* %d\r\n" % (BOX.encode(), number))
    await house.service.serves(50)
    waiting = [client.transport.get_write_buffer_size for client in house.gateway.clients]
    await until(lambda: max(size() for size in waiting) > 300_000)
    monkeypatch.setattr("mediator.nats.admission.MAX_HELD_BYTES", 200_000)
    assert house.service.door.held_bytes == 0
    await house.service.send(b"x", "orders")


@pytest.mark.rule("E7")
async def test_after_an_end_without_a_word_mail_comes_again(house: House) -> None:
    first = await house.client()
    subscription = await first.subscribe(f"{BOX}.*", queue="workers")
    for _ in range(3):
        await house.service.send(b"", "orders")
    await taken(subscription, 3)
    await settled(house.service)
    await house.service.done("MSG.DELETE.orders.1")
    await first.close()
    second = await (await house.client()).subscribe(f"{BOX}.*", queue="workers")
    got = [message.headers["mq9-msg-id"] for message in await taken(second, 2)]
    assert got == ["0", "2"]


@pytest.mark.rule("E7")
async def test_after_a_drain_nothing_comes_again(house: House) -> None:
    first = await house.client()
    subscription = await first.subscribe(f"{BOX}.*", queue="workers")
    await house.service.send(b"one", "orders")
    await taken(subscription, 1)
    await settled(house.service)
    await first.drain()
    await house.service.serves(0)
    second = await (await house.client()).subscribe(f"{BOX}.*", queue="workers")
    await house.service.send(b"two", "orders")
    assert [message.data for message in await taken(second, 1)] == [b"two"]


@pytest.mark.rule("E7")
async def test_a_maximum_ends_when_the_last_push_is_confirmed(house: House) -> None:
    client = await house.client()
    for _ in range(5):
        await house.service.send(b"", "orders")
    subscription = await client.subscribe(f"{BOX}.*", queue="workers")
    await subscription.unsubscribe(limit=3)
    assert [message.headers["mq9-msg-id"] for message in await taken(subscription, 3)] == ["0", "1", "2"]
    await house.service.serves(0)
    rest = await (await house.client()).subscribe(f"{BOX}.*", queue="workers")
    assert [message.headers["mq9-msg-id"] for message in await taken(rest, 2)] == ["3", "4"]


@pytest.mark.rule("E6", "E7")
async def test_a_window_is_filled_again_as_it_is_confirmed(house: House) -> None:
    for number in range(WINDOW + 50):
        await house.service.broker.send(_mail(b"%d" % number))
    raw = await house.raw()
    raw.write(b'CONNECT {"verbose":false,"headers":true}\r\nSUB %b.* 1\r\n' % BOX.encode())
    for _ in range(WINDOW):
        await raw.until(b"HMSG")
    await until(lambda: house.service.metric("mediator_push_waiting") == WINDOW)
    assert await raw.until(b"PING") == b"PING"
    while house.service.metric("mediator_push_waiting"):
        raw.write(b"PONG\r\n")
        await flushed(await house.client())
    for _ in range(50):
        await raw.until(b"HMSG")


def refusal(subject: str, reason: str) -> bytes:
    return f"-ERR 'Permissions Violation for Subscription to \"{subject}\": {reason}'".encode()


@pytest.mark.rule("N10")
async def test_a_missing_mailbox_is_an_error_on_a_live_connection(house: House) -> None:
    raw = await house.raw()
    raw.write(b'CONNECT {"verbose":false}\r\nSUB $mq9.AI.MAILBOX.MSG.none.* 1\r\n')
    assert await raw.until(b"-ERR") == refusal("$mq9.AI.MAILBOX.MSG.none.*", "mailbox none does not exist")
    raw.write(b"SUB foo 2\r\nPUB foo 2\r\nhi\r\n")
    assert await raw.until(b"MSG") == b"MSG foo 2 2"


@pytest.mark.rule("N10")
async def test_a_client_stays_connected_when_a_mailbox_is_missing(house: House) -> None:
    client = await house.client()
    subscription = await client.subscribe(f"{BOX}.*")
    await client.subscribe("$mq9.AI.MAILBOX.MSG.none.*")
    assert "mailbox none does not exist" in await problem_of(client)
    await house.service.send(b"mail", "orders")
    assert [message.data for message in await taken(subscription, 1)] == [b"mail"]
    assert client.is_connected


@pytest.mark.rule("N10", "E9")
async def test_a_pong_waits_for_the_store_but_not_for_ever(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.gateway.subscriptions.ANSWER_SECONDS", 1.0)
    begin, away = pushing.open_cursor, True

    def fail(*args: Any) -> Any:
        if away:
            raise UnavailableError("disk I/O error")
        return begin(*args)

    monkeypatch.setattr(pushing, "open_cursor", fail)
    raw = await house.raw()
    raw.write(b'CONNECT {"verbose":false}\r\nSUB %b.* 1\r\nPING\r\nSUB a 2\r\nPUB a 1\r\nx\r\n' % BOX.encode())
    assert await raw.until(b"MSG") == b"MSG a 2 1", "other messages do not wait"
    assert house.service.metric("mediator_gateway_waiting") == 1
    assert await raw.line() == b"x"
    assert await raw.line() == b"PONG"
    away = False
    await house.service.send(b"mail", "orders")
    assert await raw.until(b"MSG") == b"MSG %b.normal 1 4" % BOX.encode()
    assert house.service.metric("mediator_gateway_waiting") == 0


@pytest.mark.rule("N10")
async def test_a_subscription_waits_for_who_knows_the_client(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.gateway.identity.ANSWER_SECONDS", 0.3)
    real, lost = NatsConnection.seal, 0

    def seal(self: NatsConnection, subject: str, body: bytes) -> tuple[bytes, bytes]:
        nonlocal lost
        if lost < 2:
            lost += 1
            return real(self, "mq9ctl.nobody", body)
        return real(self, subject, body)

    monkeypatch.setattr(NatsConnection, "seal", seal)
    client = await house.client()
    subscription = await client.subscribe(f"{BOX}.*")
    await house.service.send(b"mail", "orders")
    assert (await taken(subscription, 1))[0].data == b"mail"
    assert lost == 2
    assert not client.problems.qsize()


@pytest.mark.rule("N10")
@pytest.mark.parametrize(
    "subject", [">", "_INBOX.>", "$mq9.AI.MAILBOX.MSG.*", "$mq9.AI.MSG.SEND.x", "$mq9.PUSH.>", "mq9ctl.push.*", "*.>"]
)
async def test_a_wildcard_over_others_is_refused_and_nothing_else(house: House, subject: str) -> None:
    client = await house.client()
    await client.subscribe(subject)
    assert f'permissions violation for subscription to "{subject.lower()}"' in await problem_of(client)
    assert client.is_connected
    await flushed(client)


@pytest.mark.rule("E6")
@pytest.mark.parametrize("subject", [f"$mq9.PUSH.gateway.{BOX}.normal", "$mq9.AI.PUSH.OPEN", "mq9ctl.gateway.x"])
async def test_nobody_can_speak_as_the_service_or_as_a_gateway(house: House, subject: str) -> None:
    client, liar = await house.client(), await house.client()
    subscription = await client.subscribe(f"{BOX}.*")
    await flushed(client)
    for way in ({}, {"headers": {"a": "b"}}):
        await liar.publish(subject, json.dumps({"token": "a" * 26, "tenant": "x"}).encode(), **way)
        assert "permissions violation for publish to" in await problem_of(liar)
    await liar.publish("foo", b"x", reply=subject)
    assert "permissions violation for publish to" in await problem_of(liar)
    await flushed(liar)
    await house.service.send(b"true", "orders")
    (message,) = await taken(subscription, 1)
    assert message.data == b"true"


@pytest.mark.rule("A6")
async def test_the_tenant_is_that_of_the_clients_login(tmp_path: Path) -> None:
    tenants = (TenantAccount("acme", (AccountUser("a", "pw"),)), TenantAccount("other", (AccountUser("b", "pw"),)))
    async with gateway(tmp_path, tenants=tenants) as house:
        clients = [await house.client(user=user, password="pw") for user in "ab"]
        for client in clients:
            await house.service.ask("MAILBOX.CREATE", {"name": "orders"}, client=client)
        subscriptions = [await client.subscribe(f"{BOX}.*") for client in clients]
        for client, payload in zip(clients, (b"for a", b"for b"), strict=True):
            await house.service.ask("MSG.SEND.orders", payload, client=client)
        for client, subscription, payload in zip(clients, subscriptions, (b"for a", b"for b"), strict=True):
            (message,) = await taken(subscription, 1)
            assert message.data == payload
            await flushed(client)
            assert subscription.pending_msgs == 0


@pytest.mark.rule("E6")
@pytest.mark.parametrize("allowed", [True, False])
async def test_permissions_for_a_mailbox_hold_for_what_is_pushed(tmp_path: Path, allowed: bool) -> None:
    subscribe = (f"{BOX}.*", "_INBOX.>") if allowed else ("_INBOX.>",)
    limited = AccountUser("a", "pw", publish=("x",), subscribe=subscribe)
    tenants = (TenantAccount("acme", (limited, AccountUser("b", "pw"))),)
    # Where users have rights of their own, requests do not pass nats-server by.
    async with gateway(tmp_path, tenants=tenants, short_way=False) as house:
        other = await house.client(user="b", password="pw")
        for name in ("orders", "others"):
            await house.service.ask("MAILBOX.CREATE", {"name": name}, client=other)
        for verbose in (False, True):
            client = await house.client(user="a", password="pw", verbose=verbose)
            subscription = await client.subscribe(f"{BOX}.*")
            await client.subscribe("$mq9.AI.MAILBOX.MSG.others.*")
            if not allowed:
                assert f'subscription to "{BOX.lower()}.*"' in await problem_of(client)
            problem = await problem_of(client)
            assert 'subscription to "$mq9.ai.mailbox.msg.others.*"' in problem
            assert "push" not in problem
            await flushed(client)
            assert not client.problems.qsize()
            await house.service.serves(1 if allowed else 0)
            if allowed:
                await house.service.ask("MSG.SEND.orders", b"mail", client=other)
                assert (await taken(subscription, 1))[0].data == b"mail"
            await client.close()
            await house.service.serves(0)


@pytest.mark.rule("E6")
@pytest.mark.parametrize("pedantic", [False, True])
async def test_a_verbose_client_gets_one_ok_for_each_command(house: House, pedantic: bool) -> None:
    options = json.dumps({"verbose": True, "pedantic": pedantic, "headers": True}).encode()
    raw = await house.raw()
    await raw.until(b"INFO")
    raw.write(b"CONNECT %b\r\nSUB %b.* 1\r\nPUB a 1\r\nx\r\nPUB b 1\r\nx\r\nPING\r\n" % (options, BOX.encode()))
    assert [await raw.line() for _ in range(5)] == [b"+OK"] * 4 + [b"PONG"]
    await house.service.send(b"", "orders")
    assert (await raw.until(b"HMSG")).startswith(b"HMSG %b.normal 1 " % BOX.encode())
    await raw.until(b"PING")
    raw.write(b"PONG\r\n")
    await house.service.confirmed()
    raw.write(b"UNSUB 1\r\nPUB $mq9.PUSH.x 1\r\nx\r\nSUB $mq9.AI.MAILBOX.MSG.none.* 2\r\nPING\r\n")
    lines: list[bytes] = []
    while lines.count(b"PONG") < 2:
        lines.append(await raw.line())
        if b"mailbox none does not exist" in lines[-1]:
            raw.write(b"PING\r\n")
    assert lines.count(b"+OK") == 2
    assert sum(line.startswith(b"-ERR") for line in lines) == 2


async def test_a_subscription_of_the_same_number_is_the_first_one(house: House) -> None:
    box = BOX.encode()
    raw = await house.reader(b"SUB %b.* 1" % box, b"SUB %b.* 1" % box, b"SUB foo 1")
    await house.service.serves(1)
    raw.write(b"PUB foo 1\r\nx\r\nPING\r\n")
    assert await raw.line() == b"PONG"


async def test_subscriptions_beyond_the_bound_are_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path, max_subscriptions=10) as house:
        for number in (*range(10), 20_000):
            await house.service.create(f"m{number}")
        raw = await house.raw()
        raw.write(b'CONNECT {"verbose":false}\r\n')
        raw.write(b"".join(b"SUB $mq9.AI.MAILBOX.MSG.m%d.* %d\r\n" % (n, n) for n in range(10_000)) + b"PING\r\n")
        refused = 0
        while (line := await raw.line()) != b"PONG":
            refused += line.endswith(b"\": maximum subscriptions exceeded'")
        assert refused == 9990
        await house.service.serves(10)
        raw.write(b"UNSUB 3\r\nSUB $mq9.AI.MAILBOX.MSG.m20000.* 20000\r\nPING\r\n")
        await raw.until(b"PONG")
        await house.service.serves(10)
        await house.service.send(b"mail", "m20000")
        assert await raw.until(b"MSG") == b"MSG $mq9.AI.MAILBOX.MSG.m20000.normal 20000 4"


@pytest.mark.rule("A7")
@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"tenant_subscriptions": 2}, "quota_exceeded: subscriptions of the tenant, limit 2, in use 2"),
        ({"max_subscriptions": 2}, "server busy: 2 subscriptions are open"),
    ],
)
async def test_there_are_so_many_subscriptions_and_no_more(tmp_path: Path, limits: dict[str, int], error: str) -> None:
    async with gateway(tmp_path, push=PushSettings(**limits)) as house:
        await house.service.create("orders")
        one = await house.reader(b"SUB %b.* 1" % BOX.encode(), b"SUB %b.* 2" % BOX.encode())
        two = await house.raw()
        two.write(b'CONNECT {"verbose":false}\r\nSUB %b.* 1\r\n' % BOX.encode())
        assert await two.until(b"-ERR") == refusal(f"{BOX}.*", error)
        one.write(b"UNSUB 1\r\nPING\r\n")
        await one.until(b"PONG")
        await house.service.serves(1)
        two.write(b"SUB %b.* 1\r\n" % BOX.encode())
        await house.service.send(b"mail", "orders")
        assert await two.until(b"MSG") == b"MSG %b.normal 1 4" % BOX.encode()


@pytest.mark.rule("N10")
async def test_no_stream_takes_in_requests_or_replies(house: House) -> None:
    client = await house.client()
    for subjects in (["$mq9.>"], ["ok", "_INBOX.>"], [">"], ["$mq9.AI.MSG.SEND.*"]):
        with pytest.raises((nats.errors.Error, asyncio.TimeoutError)):
            await client.jetstream(timeout=0.2).add_stream(name="s", subjects=subjects)
        assert 'permissions violation for publish to "$js.api.stream.create.s"' in await problem_of(client)


# What nats-server shows.


async def shown(house: House, folder: Path) -> str:
    """Return all that nats-server tells its operator of connections, subscriptions and itself."""
    config = (folder / "nats" / "nats-server.conf").read_text()
    password = re.search(r'user: "sys", password: "([^"]+)"', config)
    assert password is not None
    client = await nats.connect(house.server.url, user="sys", password=password[1])
    body = json.dumps({"subscriptions": True, "subscriptions_detail": True, "auth": True}).encode()
    asked = ["SERVER.PING.CONNZ", "SERVER.PING.SUBSZ", "SERVER.PING.VARZ", "ACCOUNT.DEFAULT.CONNZ"]
    asked += ["ACCOUNT.DEFAULT.SUBSZ", "ACCOUNT.MEDIATOR.CONNZ", "SERVER.PING.ACCOUNTZ"]
    try:
        answers = [await client.request(f"$SYS.REQ.{each}", body, timeout=PATIENCE) for each in asked]
    finally:
        await client.close()
    return "".join(answer.data.decode() for answer in answers)


@pytest.mark.rule("A7", "N10")
async def test_nats_server_shows_no_address_and_no_token(house: House, tmp_path: Path) -> None:
    client, worker = await house.client(name="known"), await house.client()
    subscriptions = [
        await client.subscribe(f"{BOX}.*"),
        await worker.subscribe(f"{BOX}.*", queue="workers"),
        await client.subscribe("$mq9.AI.INBOX.orders.normal"),
    ]
    await client.subscribe("$mq9.AI.PUBLIC.LIST")
    await client.subscribe("plain.subject")
    await house.service.send(b"mail", "orders")
    for subscription in subscriptions:
        await taken(subscription, 1)
    told = await shown(house, tmp_path)
    # It is asked for what clients and the service do subscribe to.
    assert "plain.subject" in told
    assert "mq9.*.$mq9.AI." in told
    assert '"known"' in told
    for secret in ("orders", "$mq9.PUSH.", "PUBLIC.LIST", "MAILBOX.MSG", "mq9gateway"):
        assert secret not in told, secret


def _mail(payload: bytes) -> Send:
    return Send("default", "orders", Draft(payload))


@pytest.mark.rule("E6")
async def test_a_client_without_echo_gets_its_own_stored_mail(house: House) -> None:
    client = await house.client(no_echo=True)
    subscription = await client.subscribe(f"{BOX}.*")
    await flushed(client)
    await client.publish(f"{BOX}.normal", b"mine")
    assert [message.data for message in await taken(subscription, 1)] == [b"mine"]
