"""mediator.client against a running service: what its methods promise about mail and agents."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mediator.client import Client, Delivery, Mailbox, Outgoing
from mediator.errors import (
    BadRequestError,
    MailboxExistsError,
    MessageTooLargeError,
    NoSuchAgentError,
    NoSuchMailboxError,
    NoSuchMessageError,
    PartlyRefusedError,
    QuotaExceededError,
    SetupError,
    UnreachableError,
)
from tests.harness.service import Service, Services, free_port
from tests.harness.waiting import until


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service("service", tmp_path_factory.mktemp("service"))
    running.start()
    try:
        asyncio.run(running.ready())
        yield running
    finally:
        running.discard()


@pytest.fixture
async def box(service: Service) -> AsyncIterator[Mailbox]:
    async with Mailbox.open(service.nats_url, create=True) as opened:
        yield opened


async def test_a_message_arrives_with_all_that_was_said_about_it(box: Mailbox) -> None:
    end = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    options: Any = {"priority": "urgent", "key": "k", "tags": ["a", "b"], "headers": {"x-own": "ü"}, "dedup_id": "once"}
    assert await box.send(b"\x00\xff", reply_to="other.inbox", expires_at=end, **options) == 0
    assert await box.send(b"\x00\xff", **options) == 0
    (message,) = await box.fetch()
    assert (message.msg_id, message.payload, message.priority, message.size) == (0, b"\x00\xff", "urgent", 2)
    assert (message.key, message.tags, dict(message.headers)) == ("k", ("a", "b"), {"x-own": "ü"})
    assert (message.reply_to, message.expires_at, message.dedup_id) == ("other.inbox", end, "once")
    assert abs(message.created_at - datetime.now(UTC)) < timedelta(minutes=5)


async def test_payloads_are_bytes_text_or_json(box: Mailbox) -> None:
    for payload in (b"bytes", "tëxt", {"a": [1, "ü"]}, [1, 2]):
        await box.send(payload)
    one, two, three, four = await box.fetch()
    assert (one.payload, two.text, three.json(), four.json()) == (b"bytes", "tëxt", {"a": [1, "ü"]}, [1, 2])
    with pytest.raises(BadRequestError, match="payload: expected bytes, text"):
        await box.send({"a": object()})


async def test_a_delayed_message_has_no_number_yet(box: Mailbox) -> None:
    assert await box.send("later", delay=3600) is None
    assert await box.send("then", send_at=datetime.now(UTC) + timedelta(hours=1)) is None
    assert await box.fetch(wait=0) == []


@pytest.mark.parametrize(
    "options", [{"key": "two\nlines"}, {"headers": {"a:b": "x"}}, {"send_at": datetime(2100, 1, 1)}]
)
async def test_what_no_header_can_hold_is_refused(box: Mailbox, options: Any) -> None:
    with pytest.raises(BadRequestError):
        await box.send("x", **options)
    assert await box.query() == []


async def test_a_batch_keeps_order_and_says_what_was_refused(box: Mailbox) -> None:
    assert await box.send_many(str(number) for number in range(1200)) == list(range(1200))
    wrong: Any = Outgoing("y", priority="bogus")
    with pytest.raises(PartlyRefusedError, match="1 of 4 messages were refused") as raised:
        await box.send_many(["x", wrong, Outgoing("z", priority="critical"), Outgoing("w", delay=9)])
    assert raised.value.msg_ids == [1200, None, 1201, None]
    (refused,) = raised.value.errors.items()
    assert refused[0] == 1
    assert isinstance(refused[1], BadRequestError)
    assert refused[1].field == "mq9-priority"
    newest = await box.query(limit=2)
    assert [(message.text, message.priority) for message in newest] == [("x", "normal"), ("z", "critical")]


async def test_a_reply_goes_where_it_is_wanted(box: Mailbox) -> None:
    other = await box.client.create()
    await other.send("question", reply_to=box.address)
    (question,) = await other.fetch()
    await other.reply(question, "answer")
    (answer,) = await box.fetch()
    assert answer.text == "answer"
    with pytest.raises(BadRequestError, match="asks for no answer"):
        await box.reply(answer, "more")


async def test_groups_keep_a_position_and_start_where_they_are_told(box: Mailbox) -> None:
    await box.send_many(["a", "b", "c"])
    assert [message.text for message in await box.fetch(group="g", limit=2)] == ["a", "b"]
    assert await box.ack(1, group="g") == 2
    assert [message.text for message in await box.fetch(group="g", wait=0)] == ["c"]
    assert [message.text for message in await box.fetch(group="g", start=1, reset=True)] == ["b", "c"]
    assert [message.text for message in await box.fetch(group="h", start=datetime.now(UTC) - timedelta(hours=1))] == [
        "a",
        "b",
        "c",
    ]
    assert await box.fetch(group="i", start="latest", wait=0) == []


async def test_leases_are_given_back_and_lengthened(box: Mailbox) -> None:
    await box.send("x")
    (message,) = await box.fetch(group="g", lease=60)
    assert message.deliveries == 1
    assert await box.fetch(group="g", lease=60, wait=0) == []
    assert await box.extend(message, group="g", lease=120) == 1
    assert await box.nack(message, group="g") == 1
    assert await box.extend(message, group="g", lease=120) == 0
    (again,) = await box.fetch(group="g", lease=60)
    assert again.deliveries == 2
    assert await box.ack(again, group="g") == 1


async def test_queries_filter_and_dead_messages_show(box: Mailbox) -> None:
    await box.send("a", key="k", tags=["t"])
    await box.send("b", tags=["t", "u"])
    assert [message.text for message in await box.query(tags=["t", "u"])] == ["b"]
    assert [message.text for message in await box.query(key="k")] == ["a"]
    (one,) = await box.query(limit=1, headers_only=True)
    assert (one.payload, one.size) == (b"", 1)
    for _ in range(2):
        (first, _second) = await box.fetch(group="g", lease=60, max_deliver=2)
        await box.nack(first, group="g")
        await box.nack(1, group="g")
    assert await box.fetch(group="g", lease=60, wait=0) == []
    assert [message.text for message in await box.query(dead_for="g")] == ["a", "b"]
    await box.delete(first)
    with pytest.raises(NoSuchMessageError):
        await box.delete(first)


async def test_a_block_acknowledges_or_gives_back(box: Mailbox) -> None:
    await box.send_many(["good", "bad"])
    done = []

    async def work() -> None:
        async for message in box.consume(group="g", lease=60):
            async with message:
                done.append((message.text, message.deliveries))
                if message.text == "bad":
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()
    assert done == [("good", 1), ("bad", 1)]
    # It waits for a second, not for its lease.
    async for message in box.consume(group="g", lease=60):
        async with message:
            assert (message.text, message.deliveries) == ("bad", 2)
            break
    assert await box.fetch(group="g", lease=60, wait=0) == []


async def test_a_lease_is_extended_while_its_block_runs(box: Mailbox) -> None:
    await box.send("long work")
    async for message in box.consume(group="g", lease=2):
        async with message:
            # Half as long again as the lease: nobody else gets it meanwhile.
            assert await box.fetch(group="g", lease=2, wait=3) == []
        break
    assert await box.fetch(group="g", lease=60, wait=0) == []


async def test_what_was_settled_inside_its_block_stays_so(box: Mailbox) -> None:
    await box.send_many(["a", "b"])
    async for message in box.consume(group="g", lease=60, prefetch=2):
        async with message:
            await (message.ack() if message.text == "a" else message.nack(delay=3600))
        if message.text == "b":
            break
    assert await box.fetch(group="g", lease=60, wait=0) == []
    assert [message.text for message in await box.query()] == ["a", "b"]


async def test_an_early_end_gives_back_what_was_fetched_ahead(service: Service, box: Mailbox) -> None:
    await box.send_many(["a", "b", "c"])
    async with Mailbox.open(service.nats_url, box.address) as worker:
        async for message in worker.consume(group="g", lease=3600, prefetch=3):
            async with message:
                break
    assert [message.text for message in await box.fetch(group="g", lease=60)] == ["b", "c"]


@pytest.mark.rule("F7")
async def test_nothing_is_dead_that_nobody_saw(service: Service, box: Mailbox) -> None:
    await box.send_many(["a", "b", "c"])
    seen = []
    for _ in range(3):
        async with Mailbox.open(service.nats_url, box.address) as worker:
            async for message in worker.consume(group="g", lease=3600, prefetch=3, max_deliver=1):
                async with message:
                    seen.append(message.text)
                    break
    assert seen == ["a", "b", "c"]
    assert await box.query(dead_for="g") == []


async def test_a_cancelled_block_gives_back_at_once(box: Mailbox) -> None:
    await box.send("x")
    began = asyncio.Event()

    async def endless() -> None:
        async for message in box.consume(group="g", lease=3600):
            async with message:
                began.set()
                await asyncio.Event().wait()

    task = asyncio.create_task(endless())
    await began.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert [message.text for message in await box.fetch(group="g", lease=60, wait=4.5)] == ["x"]


async def test_workers_share_and_try_again_what_failed(box: Mailbox) -> None:
    await box.send_many(str(number) for number in range(20))
    done: list[str] = []
    together = most = 0

    async def handle(message: Delivery) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        try:
            await asyncio.sleep(0)
            if message.text == "7" and message.deliveries == 1:
                raise ValueError
            done.append(message.text)
        finally:
            together -= 1

    workers = [asyncio.create_task(box.work(handle, group="g", lease=60, concurrency=3)) for _ in range(2)]
    await until(lambda: len(done) >= 20, what="all were handled")
    assert sorted(done, key=int) == [str(number) for number in range(20)]
    assert most <= 6
    for worker in workers:
        worker.cancel()
    await asyncio.wait(workers)
    assert all(worker.cancelled() for worker in workers)


async def test_an_agent_is_found_while_its_block_runs(box: Mailbox) -> None:
    card = {"name": "Parrot", "description": "repeats whatever it hears"}
    async with box.registered(card, ttl=60) as registration:
        await registration.report(load=0.5)
        (found,) = await box.discover("somebody who repeats things", by_words=True, explain=True)
        assert found.explanation == {"keywords": {"score": 1.0, "words": ["repeats"]}}
        assert (found.name, found.score) == ("Parrot", 1.0)
        await box.mailbox(found.address).send("hello")
        # Forgotten by the registry, it registers again.
        await box.client.unregister(registration.address)
        await registration.report()
        assert [agent.name for agent in await box.discover()] == ["Parrot"]
    assert await box.discover() == []
    assert [message.text for message in await box.fetch()] == ["hello"]
    with pytest.raises(NoSuchAgentError):
        await box.client.report("nobody")


async def test_all_pages_of_a_discovery_are_fetched(box: Mailbox) -> None:
    cards = [
        {"name": f"Filler {number}", "mailbox": f"filler.x{number}", "text": "z" * 200_000} for number in range(12)
    ]
    for card in cards:
        await box.register(card)
    try:
        assert [agent.name for agent in await box.discover(limit=100)] == [card["name"] for card in cards]
        explained = await box.discover(limit=11, explain=True)
        assert [agent.explanation for agent in explained] == [{}] * 11
    finally:
        for card in cards:
            await box.client.unregister(card["mailbox"])


async def test_errors_are_of_one_tree(service: Service, box: Mailbox) -> None:
    nowhere = box.mailbox("nobody.here")
    with pytest.raises(NoSuchMailboxError) as missing:
        await nowhere.send("x")
    assert (missing.value.code, str(missing.value)) == ("mailbox_not_found", "mailbox nobody.here does not exist")
    with pytest.raises(NoSuchMailboxError):
        await anext(nowhere.consume(group="g"))
    with pytest.raises(MailboxExistsError):
        await box.client.create(box.address)
    with pytest.raises(BadRequestError) as bad:
        await box.client.create("Bad Name")
    assert bad.value.field == "name"
    with pytest.raises(MessageTooLargeError):
        await box.send(b"x" * 20_000_000)
    assert (await box.client.create(box.address, exist_ok=True)).address == box.address
    async with Client(service.nats_url) as closed:
        pass
    with pytest.raises(BadRequestError, match="client: it is closed"):
        await closed.mailbox("a").send("x")
    with pytest.raises(UnreachableError, match="nothing listens there"):
        async with Client("nats://127.0.0.1:1", patience=0):
            pass
    for url in ("http://host", "nats://", "nats://host:port"):
        with pytest.raises(SetupError, match="url: "):
            Client(url)


@pytest.mark.rule("S7")
async def test_a_quota_that_is_reached_is_raised_at_once(services: Services) -> None:
    service = services.new()
    service.environment["MEDIATOR_QUOTAS__MAILBOX_MESSAGES"] = "1"
    await service.serve()
    async with Mailbox.open(service.nats_url, create=True, patience=3600) as box:
        await box.send("one")
        with pytest.raises(QuotaExceededError, match="limit 1, in use 1"):
            await box.send("two")


async def test_the_log_says_at_once_what_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(UnreachableError):
        async with Client(url, patience=0.5):
            pass
    (said,) = [record.getMessage() for record in caplog.records if record.name == "mediator.client"]
    assert said.startswith(f"cannot connect to {url}: nothing listens there; trying again")
