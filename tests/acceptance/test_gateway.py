"""The gateway as users run it: inside the service, before the server of its own or of somebody else."""

import asyncio
import json
from contextlib import AsyncExitStack

import nats
import pytest
from nats.aio.client import Client

from tests.harness.postgres import Server
from tests.harness.service import Services, free_port
from tests.harness.stock import Stock, bodies, metric
from tests.harness.waiting import until
from tests.harness.wire import flushed

PATIENCE = 20
BOX = "$mq9.AI.MAILBOX.MSG.orders.*"


async def ask(client: Client, subject: str, body: bytes = b"") -> bytes:
    """Make a request, again while the service is away."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return (await client.request(f"$mq9.AI.{subject}", body, timeout=2)).data
            except nats.errors.Error:
                await asyncio.sleep(0.1)


@pytest.mark.rule("E6")
@pytest.mark.parametrize("short_way", ["true", "false"])
async def test_stored_mail_is_pushed_on_the_public_port(services: Services, short_way: str):
    service = services.new()
    service.environment["MEDIATOR_GATEWAY__SHORT_WAY"] = short_way
    await service.serve()
    client = await nats.connect(service.nats_url)
    await ask(client, "MAILBOX.CREATE", b'{"name":"orders"}')
    await ask(client, "MSG.SEND.orders", b"before")
    subscription = await client.subscribe(BOX)
    assert (await subscription.next_msg(timeout=PATIENCE)).data == b"before"
    await ask(client, "MSG.SEND.orders", b"after")
    assert (await subscription.next_msg(timeout=PATIENCE)).data == b"after"
    await client.close()
    service.terminate()
    assert await service.ended() == 0
    assert not service.complaints()


@pytest.mark.rule("E6")
async def test_before_an_external_server_it_listens_as_set(services: Services):
    url, port = await services.nats_server(), free_port()
    service = services.new(nats_url=url)
    service.environment["MEDIATOR_GATEWAY__LISTEN"] = f"127.0.0.1:{port}"
    await service.serve()
    client, sender = await nats.connect(f"nats://127.0.0.1:{port}"), await nats.connect(url)
    await ask(sender, "MAILBOX.CREATE", b'{"name":"orders"}')
    subscription = await client.subscribe(BOX, queue="workers")
    await ask(sender, "MSG.SEND.orders", b"mail")
    message = await subscription.next_msg(timeout=PATIENCE)
    assert (message.subject, message.data) == (BOX.replace("*", "normal"), b"mail")
    await client.close()
    await sender.close()


@pytest.mark.rule("A8", "E7")
async def test_a_restart_answers_what_it_took_and_keeps_places(services: Services):
    service = await services.running()
    client = await nats.connect(service.nats_url, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
    await ask(client, "MAILBOX.CREATE", b'{"name":"orders"}')
    subscription = await client.subscribe(BOX, queue="workers")
    await flushed(client)
    replies: dict[int, int] = {}
    unanswered: list[int] = []

    async def send(number: int) -> None:
        try:
            answer = await client.request("$mq9.AI.MSG.SEND.orders", b"%d" % number, timeout=20)
        except nats.errors.Error:
            unanswered.append(number)
        else:
            replies[number] = json.loads(answer.data)["msg_id"]

    waiting = asyncio.create_task(
        client.request("$mq9.AI.MSG.FETCH.orders", b'{"deliver":"latest","config":{"max_wait_ms":30000}}', timeout=20)
    )
    sends = [asyncio.create_task(send(number)) for number in range(2000)]
    await until(lambda: len(replies) > 50)
    service.terminate()
    await asyncio.gather(*sends)
    assert (await waiting).data
    assert await service.ended() == 0
    await service.serve()
    stored = {}
    reply = json.loads(await ask(client, "MSG.QUERY.orders", b'{"limit":1000}'))
    for message in reply["messages"]:
        stored[message["msg_id"]] = message
    got: dict[int, bytes] = {}
    total = len(replies)
    while len(got) < total:
        message = await subscription.next_msg(timeout=PATIENCE)
        got[int(message.headers["mq9-msg-id"])] = message.data
    assert {msg_id: got[msg_id] for msg_id in replies.values()} == {
        msg_id: b"%d" % number for number, msg_id in replies.items()
    }
    assert set(got) == set(replies.values()), "what was not answered was not stored"
    assert not service.complaints()
    await client.close()


@pytest.mark.postgres
@pytest.mark.rule("A8", "E6", "E7")
async def test_clients_of_a_killed_instance_go_on_at_another(
    services: Services, postgres: Server, stack: AsyncExitStack
):
    with postgres.database() as database:
        pair = [services.new(name, database_url=database) for name in ("one", "two")]
        for each in pair:
            each.environment["MEDIATOR_DIDCOMM__ENABLED"] = "false"
            each.start()
        for each in pair:
            await each.ready()
        urls = [each.nats_url for each in pair]
        survivor = await Stock.connect(urls[1], stack)
        box = await survivor.create(ttl=3600)
        moving = await Stock.connect(urls, stack, dont_randomize=True)
        alone, queued = [await moving.subscribe(f"MAILBOX.MSG.{box}.*", queue) for queue in ("", "crew")]
        await survivor.ask(f"MAILBOX.MSG.{box}", b"before")
        await moving.ask(f"MAILBOX.MSG.{box}", b"here")
        for each in (alone, queued):
            assert await bodies(each, 2) == [b"before", b"here"]
        mate = await survivor.subscribe(f"MAILBOX.MSG.{box}.*", "crew")
        await pair[0].kill()
        await survivor.ask(f"MAILBOX.MSG.{box}", b"meanwhile")
        # A subscription begins anew; a queue goes on, and what a member had when it broke off may come again.
        assert await bodies(alone, 3) == [b"before", b"here", b"meanwhile"]
        got: list[bytes] = []

        async def one_has_it() -> bool:
            for each in (queued, mate):
                while each.pending_msgs:
                    got.extend(await bodies(each, 1))
            return b"meanwhile" in got

        await until(one_has_it, 60, "a member of the queue gets what is new")

        async def all_are_served() -> bool:
            return await metric(pair[1], "mediator_push_subscriptions") == 3

        await until(all_are_served, PATIENCE)
        assert pair[1].complaints() == []
        pair[1].terminate()
        assert await pair[1].ended() == 0
