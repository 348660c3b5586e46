"""The questions and answers: queues, ids, times, tags, lists, names, tenants (E1–E3, E7, E10).

Answers that are about storage alone, or that refuse to be a feature, have nothing to be seen.
"""

import asyncio
import base64
import json
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from nats.errors import NoRespondersError

from tests.acceptance.editions.stock import PATIENCE, PREFIX, Stock, bodies, id_of, taken, word_of
from tests.acceptance.service import Service, Services, until
from tests.wire import flushed

LIMIT = 10 * 1024 * 1024


async def listed(stock: Stock, box: str, **fields: Any) -> list[dict[str, Any]]:
    """What LIST shows."""
    messages: list[dict[str, Any]] = (await stock.ask(f"MAILBOX.LIST.{box}", fields))["messages"]
    return messages


def shown(messages: list[dict[str, Any]]) -> list[bytes]:
    return [base64.b64decode(message["payload"], validate=True) for message in messages]


# Sending.


@pytest.mark.rule("S3", "E3")
async def test_a_repeat_is_stored_once_if_its_sender_says_that_it_is_one(stock: Stock):
    box = await stock.create(ttl=1800)
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    first = await stock.ask(f"MAILBOX.MSG.{box}.normal", b"pay 10", dedup_id="tx-81")
    again = await stock.ask(f"MAILBOX.MSG.{box}.normal", b"pay 10", dedup_id="tx-81")
    assert again["msg_id"] == first["msg_id"] == 0
    other = await stock.ask(f"MAILBOX.MSG.{box}.normal", b"pay 10")
    assert other["msg_id"] == 1
    # The reader may tell repeats of its own by the same id.
    pushed = await taken(reader, 2)
    assert [message.headers.get("dedup_id") for message in pushed if message.headers] == ["tx-81", None]
    assert [message.get("dedup_id") for message in await listed(stock, box)] == ["tx-81", None]
    # It lives as long as its message.
    await stock.ask(f"MAILBOX.DELETE.{box}.0")
    assert (await stock.ask(f"MAILBOX.MSG.{box}.normal", b"pay 10", dedup_id="tx-81"))["msg_id"] == 2


@pytest.mark.rule("E1", "E6")
async def test_high_comes_before_normal_and_normal_before_low_each_in_its_order(stock: Stock):
    box = await stock.create(ttl=1800)
    for number, word in enumerate(("low", "normal", "high", "critical", "urgent", "low", "normal")):
        await stock.ask(f"MAILBOX.MSG.{box}.{word}", b"%d" % number)
    await stock.ask(f"MAILBOX.MSG.{box}", b"7")
    assert await bodies(await stock.subscribe(f"MAILBOX.MSG.{box}.*"), 8) == [
        b"2", b"3", b"4", b"1", b"6", b"7", b"0", b"5"
    ]  # fmt: skip
    high = await taken(await stock.subscribe(f"MAILBOX.MSG.{box}.high"), 3)
    assert [(word_of(message), message.data) for message in high] == [("high", b"2"), ("high", b"3"), ("high", b"4")]
    assert await bodies(await stock.subscribe(f"MAILBOX.MSG.{box}.low"), 2) == [b"0", b"5"]


@pytest.mark.rule("S4", "S5", "E3", "E6")
async def test_what_is_sent_for_later_is_seen_by_nobody_until_then(stock: Stock):
    box = await stock.create(ttl=1800)
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    due = int(time.time()) + 2
    sent = await stock.ask(f"MAILBOX.MSG.{box}.high", b"later", send_at=str(due), expire_at=str(due + 600))
    assert sent["msg_id"] == -1
    await stock.ask(f"MAILBOX.MSG.{box}.low", b"now")
    assert await bodies(reader, 1) == [b"now"]
    assert shown(await listed(stock, box)) == [b"now"]
    assert time.time() < due
    assert await bodies(reader, 1) == [b"later"]
    assert time.time() >= due
    assert (await listed(stock, box))[-1]["expire_at"] == due + 600
    assert "milliseconds" in await stock.refused(f"MAILBOX.MSG.{box}", b"", send_at=str(due * 1000))


@pytest.mark.rule("S5", "E8")
async def test_what_has_expired_is_listed_and_pushed_no_more(stock: Stock):
    box = await stock.create(ttl=1800)
    await stock.ask(f"MAILBOX.MSG.{box}.high", b"brief", expire_at=str(int(time.time()) + 2))
    await stock.ask(f"MAILBOX.MSG.{box}.low", b"lasting")
    assert await bodies(await stock.subscribe(f"MAILBOX.MSG.{box}.*"), 2) == [b"brief", b"lasting"]

    async def only_one() -> bool:
        return shown(await listed(stock, box)) == [b"lasting"]

    await until(only_one, PATIENCE, "it expires")
    assert await bodies(await stock.subscribe(f"MAILBOX.MSG.{box}.*"), 1) == [b"lasting"]


@pytest.mark.rule("N7", "E8")
async def test_a_message_may_be_large_and_not_too_large(stock: Stock):
    box = await stock.create(ttl=1800)
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    said = await stock.refused(f"MAILBOX.MSG.{box}", bytes(LIMIT + 1))
    assert str(LIMIT) in said
    await stock.ask(f"MAILBOX.MSG.{box}", bytes(LIMIT - 1000))
    [message] = await taken(reader, 1)
    assert (id_of(message), len(message.data)) == (0, LIMIT - 1000)


async def test_a_body_is_any_bytes_and_comes_as_it_was(stock: Stock):
    box = await stock.create(ttl=1800)
    letters = [b'{"jsonrpc": "2.0",  "method":"tasks/send"}', b"\xff\x00\r\nSUB x 1\r\n", b""]
    for letter in letters:
        await stock.ask(f"MAILBOX.MSG.{box}.normal", letter)
    assert await bodies(await stock.subscribe(f"MAILBOX.MSG.{box}.normal"), 3) == letters
    assert shown(await listed(stock, box)) == letters


# Reading.


@pytest.mark.rule("E7")
async def test_a_queue_name_is_a_position_of_its_own(stock: Stock):
    box = await stock.create(ttl=1800)
    for number in range(3):
        await stock.ask(f"MAILBOX.MSG.{box}", b"%d" % number)
    expected = [b"0", b"1", b"2"]
    one, two = [await stock.subscribe(f"MAILBOX.MSG.{box}.*", queue) for queue in ("billing", "audit")]
    assert [await bodies(each, 3) for each in (one, two)] == [expected, expected]
    await stock.ask(f"MAILBOX.MSG.{box}", b"3")
    assert [await bodies(each, 1) for each in (one, two)] == [[b"3"], [b"3"]]
    # A new name begins with the oldest; all at once is there for the asking.
    assert await bodies(await stock.subscribe(f"MAILBOX.MSG.{box}.*", "new"), 4) == [*expected, b"3"]
    assert shown(await listed(stock, box)) == [*expected, b"3"]


@pytest.mark.rule("E6", "E7")
async def test_back_again_a_queue_goes_on_and_who_has_none_begins_anew(
    stock: Stock, service: Service, stack: AsyncExitStack
):
    box = await stock.create(ttl=1800)
    for number in range(2):
        await stock.ask(f"MAILBOX.MSG.{box}", b"%d" % number)
    before = await Stock.connect(service.nats_url, stack)
    queued, alone = [await before.subscribe(f"MAILBOX.MSG.{box}.*", queue) for queue in ("billing", "")]
    assert [await bodies(each, 2) for each in (queued, alone)] == [[b"0", b"1"]] * 2
    await before.drain()
    await stock.ask(f"MAILBOX.MSG.{box}", b"2")
    after = await Stock.connect(service.nats_url, stack)
    assert await bodies(await after.subscribe(f"MAILBOX.MSG.{box}.*", "billing"), 1) == [b"2"]
    assert await bodies(await after.subscribe(f"MAILBOX.MSG.{box}.*"), 3) == [b"0", b"1", b"2"]


@pytest.mark.rule("E7")
async def test_without_a_queue_everybody_gets_it_and_with_one_somebody(
    stock: Stock, service: Service, stack: AsyncExitStack
):
    box = await stock.create(ttl=1800)
    everybody = [await stock.subscribe(f"MAILBOX.MSG.{box}.*") for _ in range(2)]
    got: list[list[tuple[str, bytes]]] = [[], []]
    for mine in got:

        async def take(message: Any, mine: list[tuple[str, bytes]] = mine) -> None:
            mine.append((word_of(message), message.data))

        member = await Stock.connect(service.nats_url, stack)
        await member.client.subscribe(f"{PREFIX}MAILBOX.MSG.{box}.*", queue="crew", cb=take)
        await flushed(member.client)

    async def both_are_there() -> bool:
        await stock.ask(f"MAILBOX.MSG.{box}.low", b"ready")
        return all(got)

    await until(both_are_there, PATIENCE, "both have a part")
    warmed = sum(len(mine) for mine in got)
    await asyncio.gather(*(stock.ask(f"MAILBOX.MSG.{box}.{word}", b"%d" % n)
                           for n in range(10) for word in ("low", "high")))  # fmt: skip
    await until(lambda: sum(len(mine) for mine in got) >= warmed + 20, PATIENCE, "everything has come")
    shared = sorted(one for mine in got for one in mine if one[1] != b"ready")
    assert shared == sorted((word, b"%d" % n) for n in range(10) for word in ("low", "critical"))
    assert abs(len(got[0]) - len(got[1])) <= 1
    for each in everybody:
        assert len(await taken(each, warmed + 20)) == warmed + 20


@pytest.mark.rule("E7", "E1")
async def test_a_crew_takes_what_is_high_first_whoever_it_is(stock: Stock):
    box = await stock.create(ttl=1800)
    for number in range(4):
        for word in ("low", "normal", "high"):
            await stock.ask(f"MAILBOX.MSG.{box}.{word}", b"%d" % number)
    orders: list[list[str]] = [[], []]
    for order in orders:

        async def take(message: Any, order: list[str] = order) -> None:
            order.append(word_of(message))

        await stock.client.subscribe(f"{PREFIX}MAILBOX.MSG.{box}.*", queue="crew", cb=take)
    await until(lambda: sum(map(len, orders)) >= 12, PATIENCE, "everything has come")
    lanes = ["critical", "normal", "low"]
    assert [sorted(order, key=lanes.index) for order in orders] == orders
    assert Counter(orders[0] + orders[1]) == dict.fromkeys(lanes, 4)


@pytest.mark.rule("E1", "Q1")
async def test_a_list_is_filtered_by_tag_and_bounded(stock: Stock):
    box = await stock.create(ttl=1800)
    for number in range(6):
        tags = {"tags": "[billing, v2]"} if number % 2 else {"tags": "travel"}
        await stock.ask(f"MAILBOX.MSG.{box}.high", b"%d" % number, **(tags if number else {}))
    assert shown(await listed(stock, box)) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert shown(await listed(stock, box, tag="billing")) == [b"1", b"3", b"5"]
    assert shown(await listed(stock, box, tag="billing,v2", max_count=2)) == [b"3", b"5"]
    assert await listed(stock, box, tag="nobody") == []
    heads = await listed(stock, box, headers_only=True)
    assert [(head["payload"], head["size"] > 0, head["priority"]) for head in heads] == [("", True, "high")] * 6
    assert [head["msg_id"] for head in heads] == list(range(6))
    for _ in range(100):
        await stock.publish(f"MAILBOX.MSG.{box}.low", b"x")
    await stock.ask(f"MAILBOX.MSG.{box}.low", b"last")
    recent = await listed(stock, box)
    assert (len(recent), shown(recent)[-1], recent[-1]["msg_id"]) == (100, b"last", 106)


@pytest.mark.rule("A3", "Q2")
async def test_messages_are_numbered_in_each_mailbox_and_deleted_one_by_one(stock: Stock):
    boxes = [await stock.create(ttl=1800) for _ in range(2)]
    for box in boxes:
        ids = [(await stock.ask(f"MAILBOX.MSG.{box}.{word}", b""))["msg_id"] for word in ("low", "high", "normal")]
        assert ids == [0, 1, 2]
    await stock.ask(f"MAILBOX.DELETE.{boxes[0]}.1")
    assert [message["msg_id"] for message in await listed(stock, boxes[0])] == [0, 2]
    assert [message["msg_id"] for message in await listed(stock, boxes[1])] == [0, 1, 2]
    assert (await stock.ask(f"MAILBOX.MSG.{boxes[0]}.high", b""))["msg_id"] == 3


# Talking.


@pytest.mark.rule("A7", "A2")
async def test_many_write_to_one_and_are_read_in_the_order_in_which_they_came(
    stock: Stock, service: Service, stack: AsyncExitStack
):
    """Whoever knows an address may write to it; what it collects is read in the order of the writing."""
    box = await stock.create(ttl=1800)
    voters = [await Stock.connect(service.nats_url, stack) for _ in range(3)]
    cast = await asyncio.gather(*(voter.ask(f"MAILBOX.MSG.{box}", b"%d" % n) for n, voter in enumerate(voters * 5)))
    order = {answer["msg_id"]: b"%d" % n for n, answer in enumerate(cast)}
    read = await taken(await stock.subscribe(f"MAILBOX.MSG.{box}.*"), 15)
    assert [(id_of(message), message.data) for message in read] == sorted(order.items())


@pytest.mark.rule("N8")
async def test_an_answer_goes_to_an_address_and_a_receipt_to_the_reply_subject(stock: Stock):
    asker, worker = [await stock.create(ttl=1800) for _ in range(2)]
    inbox = await stock.subscribe(f"MAILBOX.MSG.{worker}.*")
    receipt = await stock.ask(f"MAILBOX.MSG.{worker}.normal", b"5 + 5", **{"mq9-reply-to": asker})
    assert receipt["msg_id"] == 0
    [task] = await taken(inbox, 1)
    assert task.headers is not None
    # Online it is a conversation; offline it would be mail. To hand it on is the reader's affair.
    await stock.ask(f"MAILBOX.MSG.{task.headers['mq9-reply-to']}.normal", b"10, for " + task.data)
    assert shown(await listed(stock, asker)) == [b"10, for 5 + 5"]


async def test_requests_between_clients_are_those_of_nats(stock: Stock, service: Service, stack: AsyncExitStack):
    other = await Stock.connect(service.nats_url, stack)

    async def answer(message: Any) -> None:
        await message.respond(message.data[::-1])

    with pytest.raises(NoRespondersError):
        await stock.client.request("reverse", b"abc", timeout=PATIENCE)
    await other.client.subscribe("reverse", cb=answer)
    await flushed(other.client)
    assert (await stock.client.request("reverse", b"abc", timeout=PATIENCE)).data == b"cba"


# Addresses, and the list of public ones.


@pytest.mark.rule("A1", "M2")
async def test_an_address_is_chosen_or_given_and_there_is_one_of_it(stock: Stock):
    given = [await stock.create(ttl=1800) for _ in range(3)]
    assert len(set(given)) == 3
    assert await stock.create(name="clerk.invoices", ttl=1800) == "clerk.invoices"
    assert await stock.refused("MAILBOX.CREATE", {"name": "clerk.invoices"}) == "mailbox clerk.invoices already exists"
    for name in ("public", "invoice-clerk", "Clerk", "clerk_2", "clerk..x", "a@b", "über"):
        assert await stock.refused("MAILBOX.CREATE", {"name": name}), name
        assert await stock.refused("MAILBOX.CREATE", {"name": name, "public": True}), name


@pytest.mark.rule("E10", "M4")
async def test_public_mailboxes_are_found_by_tag_and_described_anew_and_never_renamed(stock: Stock):
    made = {}
    for name, tags in (("agent.ledger", ["money", "eu"]), ("agent.wire", ["money"]), ("agent.maps", ["travel"])):
        fields = {"name": name, "public": True, "ttl": 1800, "desc": f"about {name}", "tags": tags}
        made[name] = await stock.ask("MAILBOX.CREATE", fields)

    async def found(tag: str) -> dict[str, str]:
        entries = (await stock.ask("PUBLIC.LIST", {"tag": tag}))["mailboxes"]
        return {entry["mail_address"]: entry["desc"] for entry in entries}

    assert await found("money") == {name: f"about {name}" for name in ("agent.ledger", "agent.wire")}
    assert set(await found("money,eu")) == {"agent.ledger"}
    assert set(await found("travel")) == {"agent.maps"}
    change = {"token": made["agent.wire"]["token"], "desc": "transfers, faster", "name": "agent.cash"}
    await stock.ask("MAILBOX.UPDATE.agent.wire", change)
    assert (await found("money"))["agent.wire"] == "transfers, faster"
    assert "token" in await stock.refused("MAILBOX.UPDATE.agent.wire", {"token": "mine", "desc": "forged"})


@pytest.mark.rule("E10", "A1")
async def test_nobody_writes_into_the_list_of_public_mailboxes(stock: Stock):
    forged = {"mail_address": "bank", "desc": "send me your money"}
    for subject in ("MAILBOX.MSG.public", "MAILBOX.MSG.public.high", "INBOX.public.normal", "MSG.SEND.public"):
        assert await stock.refused(subject, forged)
    for fields in ({"name": "public"}, {"name": "public", "public": True, "ttl": 60}):
        assert await stock.refused("MAILBOX.CREATE", fields)
    entries = (await stock.ask("PUBLIC.LIST", {"limit": 1000}))["mailboxes"]
    assert not [entry for entry in entries if entry["mail_address"] in ("bank", "public")]


@pytest.mark.rule("M4", "E10")
async def test_a_mailbox_that_an_operator_deletes_is_gone_at_once(stock: Stock, service: Service):
    box = await stock.create(name="agent.retired", public=True, ttl=1800, tags=["leaving"])
    await stock.ask(f"MAILBOX.MSG.{box}", b"x")
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    assert await bodies(reader, 1) == [b"x"]
    board = await stock.subscribe("MAILBOX.MSG.public.*")
    command = [sys.executable, "-m", "mediator", "mailbox", "delete", box, "--yes", "--data-dir", str(service.data_dir)]
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 0
    assert await stock.refused(f"MAILBOX.LIST.{box}") == f"mailbox {box} does not exist"
    assert (await stock.ask("PUBLIC.LIST", {"tag": "leaving"}))["mailboxes"] == []
    told: dict[str, Any] = {}
    while (told.get("mail_address"), told.get("deleted")) != (box, True):
        told = json.loads((await bodies(board, 1))[0])


@pytest.mark.rule("A6")
async def test_tenants_log_in_and_never_see_each_other(services: Services, stack: AsyncExitStack):
    """A user and password say who one is; nothing in a message does, and equal addresses are two mailboxes."""
    service = services.new()
    tenants = {name: {"users": [{"name": name, "password": f"{name}-pw"}]} for name in ("north", "south")}
    service.environment |= {"MEDIATOR_REGISTRY__SEMANTIC": "false", "MEDIATOR_TENANTS": json.dumps(tenants)}
    service.start()
    await service.ready()
    north, south = [
        await Stock.connect(service.nats_url, stack, user=name, password=f"{name}-pw") for name in ("north", "south")
    ]
    for each, text in ((north, b"from north"), (south, b"from south")):
        await each.create(name="desk", public=True, ttl=1800, desc=text.decode())
        await each.ask("MAILBOX.MSG.desk.high", text)
    for each, text in ((north, b"from north"), (south, b"from south")):
        entries = (await each.ask("PUBLIC.LIST"))["mailboxes"]
        assert [entry["desc"] for entry in entries] == [text.decode()]
        reader = await each.subscribe("MAILBOX.MSG.desk.*")
        assert await bodies(reader, 1) == [text]
        await each.ask("MAILBOX.MSG.desk.low", b"end")
        assert await bodies(reader, 1) == [b"end"]
