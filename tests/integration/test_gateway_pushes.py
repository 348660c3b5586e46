"""Subscriptions to stored mail through the gateway, before a real nats-server, with a stand-in for the service."""

import asyncio
import json
from typing import Any

import nats.errors
import pytest

from mediator.nats.accounts import AccountUser, TenantAccount
from mediator.push.protocol import Heartbeat
from tests.harness.gateway import House, Instance, Opening, gateway
from tests.harness.waiting import until
from tests.harness.wire import flushed

BOX = "$mq9.AI.MAILBOX.MSG.orders"
PATIENCE = 10


@pytest.fixture
async def house(tmp_path):
    async with gateway(tmp_path) as made:
        yield made


async def opened(instance: Instance, count: int = 1) -> list[Opening]:
    await until(lambda: len(instance.opened) >= count)
    return instance.opened


async def subscribed(house: House, subject: str = f"{BOX}.*", queue: str = "", client: Any = None):
    """Subscribe, and return client, subscription and what the service knows of it."""
    client = client or await house.client()
    before = len(house.service.opened)
    subscription = await client.subscribe(subject, queue=queue)
    return client, subscription, (await opened(house.service, before + 1))[before]


async def taken(subscription, count: int) -> list[Any]:
    return [await subscription.next_msg(timeout=PATIENCE) for _ in range(count)]


@pytest.mark.rule("E6")
async def test_a_push_comes_on_the_subject_that_the_client_knows(house):
    client, subscription, opening = await subscribed(house)
    assert (opening.account, opening.asked.subject, opening.asked.queue) == ("DEFAULT", f"{BOX}.*", "")
    await house.service.push(opening, f"{BOX}.urgent", 7, b"SUB a 1\r\nPING\r\n")
    (message,) = await taken(subscription, 1)
    assert (message.subject, message.data) == (f"{BOX}.urgent", b"SUB a 1\r\nPING\r\n")
    assert message.headers == {"mq9-msg-id": "7"}
    assert not client.problems.qsize()


@pytest.mark.rule("E7")
async def test_what_the_client_has_read_is_told_to_the_owner(house):
    client, subscription, opening = await subscribed(house, queue="workers")
    assert opening.asked.queue == "workers"
    for msg_id in range(50):
        await house.service.push(opening, f"{BOX}.normal", msg_id, b"x" * 1000)
    await taken(subscription, 50)
    await until(lambda: house.service.credits.get(opening.token) == 50)
    await subscription.unsubscribe()
    await until(lambda: house.service.closed == {opening.token: "unsub"})
    assert client.is_connected


@pytest.mark.rule("E7")
async def test_unread_pushes_are_not_confirmed_nor_slow_others(house):
    raw = await house.raw()
    raw.write(b'CONNECT {"verbose":false,"headers":true}\r\nSUB %b.* 1\r\n' % BOX.encode())
    (lazy,) = await opened(house.service)
    for msg_id in range(40):
        await house.service.push(lazy, f"{BOX}.normal", msg_id, b"x" * 100_000)
    _, subscription, busy = await subscribed(house)
    await house.service.push(busy, f"{BOX}.normal", 0)
    await taken(subscription, 1)
    await until(lambda: house.service.credits.get(busy.token) == 1)
    assert lazy.token not in house.service.credits
    raw.writer.close()
    await until(lambda: house.service.closed.get(lazy.token) == "broken")
    assert lazy.token not in house.service.credits


@pytest.mark.rule("E7")
async def test_an_end_without_a_word_is_told_as_broken(house):
    client, _, opening = await subscribed(house)
    await client.close()
    await until(lambda: house.service.closed == {opening.token: "broken"})


@pytest.mark.rule("E7")
async def test_a_drain_is_told_as_an_end_with_a_word(house):
    client, subscription, opening = await subscribed(house)
    await house.service.push(opening, f"{BOX}.normal", 1)
    await taken(subscription, 1)
    await until(lambda: house.service.credits)
    await client.drain()
    await until(lambda: house.service.closed == {opening.token: "unsub"})


@pytest.mark.rule("E7")
async def test_a_maximum_ends_when_the_last_push_is_confirmed(house):
    _, subscription, opening = await subscribed(house)
    await subscription.unsubscribe(limit=3)
    for msg_id in range(5):
        await house.service.push(opening, f"{BOX}.normal", msg_id)
    assert [message.data for message in await taken(subscription, 3)] == [b""] * 3
    await until(lambda: house.service.closed == {opening.token: "unsub"})
    assert house.service.credits[opening.token] == 3


@pytest.mark.rule("N10")
async def test_a_missing_mailbox_is_an_error_on_a_live_connection(house):
    house.service.missing.add(f"{BOX}.*")
    raw = await house.raw()
    raw.write(b'CONNECT {"verbose":false}\r\nSUB %b.* 1\r\n' % BOX.encode())
    assert await raw.until(b"-ERR") == b"-ERR 'mailbox %b.* does not exist'" % BOX.encode()
    raw.write(b"SUB foo 2\r\nPUB foo 2\r\nhi\r\n")
    assert await raw.until(b"MSG") == b"MSG foo 2 2"


@pytest.mark.rule("N10", "E9")
async def test_a_pong_waits_for_the_service_but_not_for_ever(house, monkeypatch):
    monkeypatch.setattr("mediator.push.gateway.instances.ANSWER_SECONDS", 0.5)
    await house.service.crash()
    raw = await house.raw()
    raw.write(b'CONNECT {"verbose":false}\r\nSUB %b.* 1\r\nPING\r\nSUB a 2\r\nPUB a 1\r\nx\r\n' % BOX.encode())
    assert await raw.until(b"MSG") == b"MSG a 2 1", "other messages do not wait"
    assert house.gateway.waiting == 1
    assert await raw.line() == b"x"
    assert await raw.line() == b"PONG"
    (opening,) = await opened(await house.instance("late"))
    assert opening.asked.subject == f"{BOX}.*"


@pytest.mark.rule("N10")
@pytest.mark.parametrize(
    "subject", [">", "_INBOX.>", "$mq9.AI.MAILBOX.MSG.*", "$mq9.AI.MSG.SEND.x", "$mq9.PUSH.>", "mq9ctl.push.*", "*.>"]
)
async def test_a_wildcard_over_others_is_refused_and_nothing_else(house, subject):
    client = await house.client()
    await client.subscribe(subject)
    problem = await asyncio.wait_for(client.problems.get(), PATIENCE)
    assert f'permissions violation for subscription to "{subject.lower()}"' in str(problem)
    assert client.is_connected
    await flushed(client)


@pytest.mark.rule("E6")
@pytest.mark.parametrize(
    "subject", ["$mq9.PUSH.TOKEN.x", "$mq9.AI.PUSH.OPEN", "mq9ctl.push.one", "mq9ctl.gateway.GATEWAY"]
)
async def test_nobody_can_speak_as_the_service_or_as_a_gateway(house, subject):
    _, subscription, opening = await subscribed(house)
    forged = subject.replace("TOKEN.x", f"{opening.token}.{BOX}.normal").replace("GATEWAY", opening.asked.gateway)
    liar = await house.client()
    for way in ({}, {"headers": {"a": "b"}}):
        await liar.publish(forged, json.dumps({"token": opening.token, "sender": "one"}).encode(), **way)
        problem = await asyncio.wait_for(liar.problems.get(), PATIENCE)
        assert "permissions violation for publish to" in str(problem)
    await liar.publish("foo", b"x", reply=forged)
    assert "permissions violation for publish to" in str(await asyncio.wait_for(liar.problems.get(), PATIENCE))
    await flushed(liar)
    await house.service.push(opening, f"{BOX}.normal", 1, b"true")
    (message,) = await taken(subscription, 1)
    assert message.data == b"true"
    assert len(house.service.opened) == 1


@pytest.mark.rule("A6")
async def test_the_tenant_is_that_of_the_clients_login(tmp_path):
    tenants = (TenantAccount("acme", (AccountUser("a", "pw"),)), TenantAccount("other", (AccountUser("b", "pw"),)))
    async with gateway(tmp_path, tenants=tenants) as house:
        for user, account in (("a", "ACME"), ("b", "OTHER")):
            client = await house.client(user=user, password="pw")
            _, subscription, opening = await subscribed(house, client=client)
            assert opening.account == account
            await house.service.push(opening, f"{BOX}.normal", 1, user.encode())
            (message,) = await taken(subscription, 1)
            assert message.data == user.encode()


@pytest.mark.rule("E6")
async def test_permissions_for_a_mailbox_hold_for_what_is_pushed(tmp_path):
    mine = AccountUser("a", "pw", publish=("x",), subscribe=(f"{BOX}.*", "_INBOX.>"))
    async with gateway(tmp_path, tenants=(TenantAccount("acme", (mine,)),)) as house:
        client = await house.client(user="a", password="pw")
        _, subscription, opening = await subscribed(house, client=client)
        await house.service.push(opening, f"{BOX}.normal", 1)
        await taken(subscription, 1)
        await client.subscribe("$mq9.AI.MAILBOX.MSG.others.*")
        problem = await asyncio.wait_for(client.problems.get(), PATIENCE)
        assert 'subscription to "$mq9.ai.mailbox.msg.others.*"' in str(problem)
        assert "push" not in str(problem)
        await until(lambda: len(house.service.opened) == 2)
        await until(lambda: list(house.service.closed) == [house.service.opened[1].token])


@pytest.mark.rule("E6")
async def test_a_login_without_subscribe_is_refused_as_usual(tmp_path):
    limited = AccountUser("a", "pw", publish=("x",), subscribe=("_INBOX.>",))
    async with gateway(tmp_path, tenants=(TenantAccount("acme", (limited,)),)) as house:
        for verbose in (False, True):
            client = await house.client(user="a", password="pw", verbose=verbose)
            await client.subscribe(f"{BOX}.*")
            problem = await asyncio.wait_for(client.problems.get(), PATIENCE)
            assert f'subscription to "{BOX.lower()}.*"' in str(problem)
            await flushed(client)
            assert not client.problems.qsize()
            assert client.is_connected
        assert not house.service.opened


@pytest.mark.rule("E6")
async def test_an_instance_that_dies_is_replaced_where_it_stopped(house, monkeypatch):
    monkeypatch.setattr("mediator.push.protocol.DEAD_SECONDS", 1.5)
    _, subscription, opening = await subscribed(house)
    for msg_id, lane in enumerate(("urgent", "normal", "urgent")):
        await house.service.push(opening, f"{BOX}.{lane}", msg_id, lane=lane)
    await taken(subscription, 3)
    second = await house.instance("two")
    await house.service.crash()
    (again,) = await opened(second)
    assert again.token == opening.token
    assert again.asked.after == {"urgent": 2, "normal": 1}
    await second.push(again, f"{BOX}.normal", 3)
    await taken(subscription, 1)
    await until(lambda: second.credits == {opening.token: 1})


@pytest.mark.rule("E6")
async def test_an_instance_that_leaves_is_replaced_at_once(house):
    _, subscription, opening = await subscribed(house)
    second = await house.instance("two")
    await house.service.subscriptions[0].drop()
    await house.service.connection.settle(5)
    await house.service.say(opening.asked.gateway, Heartbeat("one", leaving=True))
    (again,) = await opened(second)
    await second.push(again, f"{BOX}.normal", 0)
    await taken(subscription, 1)


@pytest.mark.rule("E6")
async def test_a_subscription_lost_by_its_instance_is_reopened(house):
    _, _, opening = await subscribed(house)
    await house.service.say(opening.asked.gateway, Heartbeat("one", closed={opening.token: "broken"}))
    await opened(house.service, 2)
    assert house.service.opened[1].token == opening.token


@pytest.mark.rule("E6")
async def test_without_an_instance_a_subscription_waits_for_one(house):
    await house.service.crash()
    client = await house.client()
    subscription = await client.subscribe(f"{BOX}.*")
    await flushed(client)
    late = await house.instance("late")
    (opening,) = await opened(late)
    await late.push(opening, f"{BOX}.normal", 0)
    await taken(subscription, 1)
    assert not client.problems.qsize()


@pytest.mark.rule("E6")
async def test_a_gateway_that_ends_says_so(house):
    _, _, opening = await subscribed(house)
    await until(lambda: not house.gateway.waiting)
    await house.gateway.stop()
    await until(lambda: house.service.left == {opening.asked.gateway})
    assert house.service.closed == {opening.token: "broken"}


@pytest.mark.rule("E6")
@pytest.mark.parametrize("pedantic", [False, True])
async def test_a_verbose_client_gets_one_ok_for_each_command(house, pedantic):
    house.service.missing.add("$mq9.AI.MAILBOX.MSG.none.*")
    options = json.dumps({"verbose": True, "pedantic": pedantic, "headers": True}).encode()
    raw = await house.raw()
    await raw.until(b"INFO")
    raw.write(b"CONNECT %b\r\nSUB %b.* 1\r\nPUB a 1\r\nx\r\nPUB b 1\r\nx\r\nPING\r\n" % (options, BOX.encode()))
    assert [await raw.line() for _ in range(5)] == [b"+OK"] * 4 + [b"PONG"]
    (opening,) = await opened(house.service)
    await house.service.push(opening, f"{BOX}.normal", 5)
    assert (await raw.until(b"HMSG")).startswith(b"HMSG %b.normal 1 " % BOX.encode())
    await raw.until(b"PING")
    raw.write(b"PONG\r\n")
    await until(lambda: house.service.credits == {opening.token: 1})
    raw.write(b"UNSUB 1\r\nPUB $mq9.PUSH.x 1\r\nx\r\nSUB $mq9.AI.MAILBOX.MSG.none.* 2\r\nPING\r\n")
    lines: list[bytes] = []
    while lines.count(b"PONG") < 2:
        lines.append(await raw.line())
        if lines[-1].startswith(b"-ERR 'mailbox"):
            raw.write(b"PING\r\n")
    assert lines.count(b"+OK") == 2
    assert sum(line.startswith(b"-ERR") for line in lines) == 2


async def test_a_subscription_of_the_same_number_is_the_first_one(house):
    raw = await house.raw()
    raw.write(b'CONNECT {"verbose":false}\r\nSUB %b.* 1\r\nSUB %b.* 1\r\nSUB foo 1\r\nPING\r\n' % ((BOX.encode(),) * 2))
    await raw.until(b"PONG")
    await opened(house.service)
    raw.write(b"PUB foo 1\r\nx\r\nPING\r\n")
    assert await raw.line() == b"PONG"
    assert len(house.service.opened) == 1


async def test_subscriptions_beyond_the_bound_are_refused(tmp_path):
    async with gateway(tmp_path, max_subscriptions=10) as house:
        raw = await house.raw()
        raw.write(b'CONNECT {"verbose":false}\r\n')
        raw.write(b"".join(b"SUB $mq9.AI.MAILBOX.MSG.m%d.* %d\r\n" % (n, n) for n in range(10_000)) + b"PING\r\n")
        refused = 0
        while (line := await raw.line()) != b"PONG":
            refused += line == b"-ERR 'maximum subscriptions exceeded'"
        assert refused == 9990
        await opened(house.service, 10)
        raw.write(b"UNSUB 3\r\nSUB %b.* 20000\r\n" % BOX.encode())
        await opened(house.service, 11)
        assert len(house.service.opened) == 11


@pytest.mark.rule("N10")
async def test_no_stream_takes_in_requests_or_replies(house):
    client = await house.client()
    for subjects in (["$mq9.>"], ["ok", "_INBOX.>"], [">"], ["$mq9.AI.MSG.SEND.*"]):
        with pytest.raises((nats.errors.Error, asyncio.TimeoutError)):
            await client.jetstream(timeout=0.2).add_stream(name="s", subjects=subjects)
        problem = await asyncio.wait_for(client.problems.get(), PATIENCE)
        assert 'permissions violation for publish to "$js.api.stream.create.s"' in str(problem)
