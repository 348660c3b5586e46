"""What nats-py does against nats-server it does through the gateway, beside mail that is pushed to it (N10)."""

import asyncio
import contextlib
from contextlib import AsyncExitStack
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg
from nats.errors import MaxPayloadError, NoRespondersError, SlowConsumerError
from nats.js.api import DeliverPolicy, KeyValueConfig, StreamConfig
from nats.micro import add_service
from nats.micro.request import Request
from nats.micro.service import ServiceConfig

from tests.conftest import ForeignServer
from tests.harness.service import Service, free_port
from tests.harness.stock import PATIENCE, PREFIX, Stock, bodies, taken
from tests.harness.waiting import until
from tests.harness.wire import flushed


async def echo(message: Msg) -> None:
    await message.respond(message.data)


@pytest.fixture
async def pair(elsewhere: ForeignServer, stack: AsyncExitStack) -> tuple[Stock, Stock]:
    """A client through the gateway, and one at nats-server itself."""
    return await Stock.connect(elsewhere.url, stack), await Stock.connect(elsewhere.direct, stack)


async def test_wildcards_inboxes_echoes_and_old_requests(pair: tuple[Stock, Stock], elsewhere: ForeignServer, stack):
    through, direct = pair[0].client, pair[1].client
    one, rest = await through.subscribe("w.*.x"), await through.subscribe("w.>")
    await through.subscribe("echo", cb=echo)
    await flushed(through)
    for subject in ("w.a.x", "w.a.y", "w.b.x"):
        await direct.publish(subject, subject.encode())
    assert await bodies(one, 2) == [b"w.a.x", b"w.b.x"]
    assert await bodies(rest, 3) == [b"w.a.x", b"w.a.y", b"w.b.x"]
    quiet = await Stock.connect(elsewhere.url, stack, no_echo=True, inbox_prefix=b"_INBOX_mine")
    own = await quiet.client.subscribe("w.>")
    await flushed(quiet.client)
    await quiet.client.publish("w.own", b"own")
    await flushed(quiet.client)
    await through.publish("w.other", b"other")
    assert await bodies(own, 1) == [b"other"]
    assert (await quiet.client.request("echo", b"1", timeout=PATIENCE)).data == b"1"
    assert (await quiet.client.request("echo", b"2", timeout=PATIENCE, old_style=True)).data == b"2"
    answers = await asyncio.gather(*(direct.request("echo", b"%d" % n, timeout=PATIENCE) for n in range(200)))
    assert [answer.data for answer in answers] == [b"%d" % n for n in range(200)]


async def test_headers_of_all_kinds_and_messages_in_a_loop(pair: tuple[Stock, Stock]):
    through, direct = pair[0].client, pair[1].client
    subscription = await through.subscribe("h")
    await flushed(through)
    kinds: list[dict[str, str]] = [{"A": "b"}, {"Long": "x" * 3000, "B": "c: d"}, {"Empty": ""}]
    for headers in kinds:
        await direct.publish("h", b"", headers=headers)
    await direct.publish("h", b"none")
    assert [message.headers for message in await taken(subscription, 4)] == [*kinds, None]
    for number in range(4):
        await direct.publish("h", b"%d" % number)
    await subscription.unsubscribe(limit=8)
    assert [message.data async for message in subscription.messages] == [b"0", b"1", b"2", b"3"]


async def test_a_slow_consumer_affects_nobody_else(elsewhere: ForeignServer, stack: AsyncExitStack):
    problems: asyncio.Queue[Exception] = asyncio.Queue()
    slow = await Stock.connect(elsewhere.url, stack, error_cb=problems.put)
    gate = asyncio.Event()

    async def wait(_message: Msg) -> None:
        await gate.wait()

    await slow.client.subscribe("flood", cb=wait, pending_msgs_limit=5)
    calm = await slow.client.subscribe("calm")
    await flushed(slow.client)
    sender = await Stock.connect(elsewhere.url, stack)
    for _ in range(20):
        await sender.client.publish("flood", b"x")
    await sender.client.publish("calm", b"y")
    assert await bodies(calm, 1) == [b"y"]
    assert isinstance(await asyncio.wait_for(problems.get(), PATIENCE), SlowConsumerError)
    gate.set()


@pytest.mark.rule("N7")
async def test_limits_and_names_are_those_of_nats_server(pair: tuple[Stock, Stock], service: Service, stack):
    through, direct = pair[0].client, pair[1].client
    assert through.max_payload == direct.max_payload
    assert through.connected_url.port != direct.connected_url.port
    assert (through.client_id, direct.client_id) != (None, None)
    assert through.client_id != direct.client_id
    with pytest.raises(MaxPayloadError):
        await through.publish("big", bytes(through.max_payload + 1))
    managed = await Stock.connect(service.nats_url, stack)
    assert managed.client.max_payload > 10 * 1024 * 1024


async def test_pings_of_both_sides_pass_while_mail_is_pushed(elsewhere: ForeignServer, stack: AsyncExitStack):
    """The gateway's own PINGs and PONGs are told from those of client and server."""
    lively = await Stock.connect(elsewhere.url, stack, ping_interval=0.01, max_outstanding_pings=1000)
    box = await lively.create()
    reader = await lively.subscribe(f"MAILBOX.MSG.{box}.*")
    for number in range(100):
        await lively.ask(f"MAILBOX.MSG.{box}", b"%d" % number)
        await flushed(lively.client)
    assert await bodies(reader, 100) == [b"%d" % number for number in range(100)]
    assert lively.client.stats["reconnects"] == 0


async def test_services_are_found_and_asked(pair: tuple[Stock, Stock]):
    through, direct = pair[0].client, pair[1].client

    async def reverse(request: Request) -> None:
        await request.respond(request.data[::-1])

    made = await add_service(through, ServiceConfig(name="reverser", version="1.0.0", description="turns round"))
    await made.add_endpoint(name="reverse", subject="reverse", handler=reverse)
    await flushed(through)
    assert (await direct.request("reverse", b"abc", timeout=PATIENCE)).data == b"cba"
    for verb in ("PING", "INFO", "STATS"):
        assert b'"reverser"' in (await direct.request(f"$SRV.{verb}.reverser", b"", timeout=PATIENCE)).data
    await made.stop()
    with pytest.raises(NoRespondersError):
        await through.request("reverse", b"", timeout=PATIENCE)


async def test_streams_are_made_read_and_changed(pair: tuple[Stock, Stock]):
    stream = pair[0].client.jetstream()
    await stream.add_stream(StreamConfig(name="LOG", subjects=["log.>"], allow_direct=True, max_msgs_per_subject=100))
    for number in range(10):
        await stream.publish(f"log.{number % 2}", b"%d" % number)
    assert (await stream.stream_info("LOG")).state.messages == 10
    assert (await stream.get_msg("LOG", 3)).data == b"2"
    assert (await stream.get_last_msg("LOG", "log.1", direct=True)).data == b"9"
    assert await stream.delete_msg("LOG", 1)
    queued = await stream.subscribe("log.*", queue="readers", durable="readers", manual_ack=True)
    for number in range(1, 10):
        message = await queued.next_msg(timeout=PATIENCE)
        assert message.data == b"%d" % number
        await message.ack_sync(timeout=PATIENCE)
    recent = await stream.subscribe("log.0", deliver_policy=DeliverPolicy.LAST, ordered_consumer=True)
    assert await bodies(recent, 1) == [b"8"]
    pull = await stream.pull_subscribe("log.>", "slowly")
    [first] = await pull.fetch(1, timeout=PATIENCE)
    await first.nak()
    again = [message for _ in range(2) for message in await pull.fetch(1, timeout=PATIENCE)]
    assert first.data in [message.data for message in again]
    assert await stream.purge_stream("LOG")
    assert await stream.delete_stream("LOG")


async def test_values_and_objects_are_kept(pair: tuple[Stock, Stock]):
    stream = pair[0].client.jetstream()
    values = await stream.create_key_value(KeyValueConfig(bucket="colours", history=5))
    watcher = await values.watch("sky.>")
    first = await values.create("sky.noon", b"blue")
    await values.update("sky.noon", b"grey", last=first)
    with pytest.raises(nats.js.errors.KeyWrongLastSequenceError):
        await values.update("sky.noon", b"red", last=first)
    await values.delete("sky.noon")
    seen = [await watcher.updates(timeout=PATIENCE) for _ in range(4)]
    assert [entry and (entry.value, entry.operation) for entry in seen] == [
        None, (b"blue", None), (b"grey", None), (b"", "DEL")
    ]  # fmt: skip
    assert len(await values.history("sky.noon")) == 3
    await watcher.stop()
    objects = await stream.create_object_store("pictures")
    picture = bytes(range(256)) * 2000
    await objects.put("one", picture)
    assert (await objects.get("one")).data == picture
    await objects.delete("one")
    with pytest.raises(nats.js.errors.ObjectNotFoundError):
        await objects.get("one")


async def test_publishes_during_a_reconnect_arrive(
    elsewhere: ForeignServer, pair: tuple[Stock, Stock], stack: AsyncExitStack
):
    happened: list[str] = []

    def noting(what: str) -> Any:
        async def note() -> None:
            happened.append(what)

        return note

    nobody = f"nats://127.0.0.1:{free_port()}"
    through = await Stock.connect(
        [nobody, elsewhere.url], stack, disconnected_cb=noting("lost"), reconnected_cb=noting("back"),
        closed_cb=noting("closed"), dont_randomize=True,
    )  # fmt: skip
    heard = await pair[1].client.subscribe("buffered")
    await flushed(pair[1].client)
    mine = await through.client.subscribe("mine")
    await elsewhere.service.kill()
    await until(lambda: "lost" in happened, PATIENCE, "the break is told")
    for number in range(10):
        await through.client.publish("buffered", b"%d" % number)
    elsewhere.service.start()
    await until(lambda: "back" in happened, 40, "the way back is told")
    assert await bodies(heard, 10) == [b"%d" % number for number in range(10)]
    await pair[1].client.publish("mine", b"still")
    assert await bodies(mine, 1) == [b"still"]
    await through.client.close()
    assert happened == ["lost", "back", "lost", "closed"]
    await elsewhere.service.ready()


@pytest.mark.rule("N10")
async def test_a_refused_subscription_costs_nothing_but_itself(service: Service, stack: AsyncExitStack):
    """Written by hand: the library closes the connection at errors it does not know."""
    stock = await Stock.connect(service.nats_url, stack)
    box = await stock.create()
    await stock.ask(f"MAILBOX.MSG.{box}", b"mail")
    reader, writer = await asyncio.open_connection("127.0.0.1", service.nats_port)
    stack.callback(writer.close)
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
    refused = (
        *(f"{PREFIX}{rest}" for rest in ("MAILBOX.MSG.*", "MAILBOX.MSG.a.>", "INBOX.*.urgent", "MAILBOX.*", ">")),
        f"{PREFIX}BROADCAST.sys*",
        "$mq9.>",
        ">",
        "_INBOX.>",
    )
    for number, subject in enumerate(refused):
        writer.write(f"SUB {subject} {number}\r\n".encode())
    writer.write(f"SUB {PREFIX}MAILBOX.MSG.nobody.here 98\r\nSUB {PREFIX}MAILBOX.MSG.{box}.* 99\r\n".encode())
    errors: set[str] = set()
    pushed = b""
    async with asyncio.timeout(PATIENCE):
        while len(errors) < len(refused) + 1 or not pushed:
            line = await reader.readline()
            assert line, f"the connection is over, after {errors}"
            if line.startswith(b"-ERR"):
                errors.add(line.decode().strip())
            elif line.startswith(b"HMSG"):
                pushed = line
    violations = {f"-ERR 'Permissions Violation for Subscription to \"{subject}\"'" for subject in refused}
    missing = f'"{PREFIX}MAILBOX.MSG.nobody.here": mailbox nobody.here does not exist'
    assert errors == {*violations, f"-ERR 'Permissions Violation for Subscription to {missing}'"}
    assert pushed.startswith(f"HMSG {PREFIX}MAILBOX.MSG.{box}.normal 99 ".encode())
    with contextlib.suppress(ConnectionError):
        writer.write(b"PING\r\n")
    assert await taken(await stock.subscribe(f"MAILBOX.MSG.{box}"), 1)
