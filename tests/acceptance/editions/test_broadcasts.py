"""The first edition's broadcasts, and public mailboxes that are followed, by a stock client (E9, E10)."""

import json

import pytest

from tests.acceptance.editions.stock import Stock, taken
from tests.acceptance.service import Service

EVENT = {
    "from": "m004",
    "type": "overload",
    "severity": "high",
    "reply_to": "$mq9.AI.INBOX.m004.normal",
    "payload": {"load": 0.97},
    "ts": 1234567890,
}


@pytest.mark.rule("E9")
async def test_events_reach_who_listens_to_their_domain_or_kind_or_to_all(stock: Stock, service: Service, stack):
    listeners = [await Stock.connect(service.nats_url, stack) for _ in range(3)]
    patterns = ("BROADCAST.system.*", "BROADCAST.*.anomaly", "BROADCAST.#")
    system, anomaly, everything = [
        await listener.subscribe(pattern) for listener, pattern in zip(listeners, patterns, strict=True)
    ]
    await stock.publish("BROADCAST.system.anomaly", EVENT)
    await stock.publish("BROADCAST.data.anomaly", b"2")
    await stock.publish("BROADCAST.system.restart", b"3")
    first, *others = await taken(everything, 3)
    assert (first.subject, json.loads(first.data)) == ("$mq9.AI.BROADCAST.system.anomaly", EVENT)
    assert [message.data for message in others] == [b"2", b"3"]
    assert [json.loads(message.data) for message in await taken(system, 2)] == [EVENT, 3]
    assert [json.loads(message.data) for message in await taken(anomaly, 2)] == [EVENT, 2]


@pytest.mark.rule("E9")
async def test_of_three_workers_one_claims_each_task(stock: Stock, service: Service, stack):
    workers = []
    for _ in range(3):
        client = await Stock.connect(service.nats_url, stack)
        workers.append(await client.subscribe("BROADCAST.task.available", "task.workers"))
    for number in range(6):
        await stock.publish("BROADCAST.task.available", {"task_id": f"t-{number}", "type": "data_analysis"})
    claimed = [json.loads(message.data)["task_id"] for worker in workers for message in await taken(worker, 2)]
    assert sorted(claimed) == [f"t-{number}" for number in range(6)]


@pytest.mark.rule("E9", "A8")
async def test_an_important_broadcast_waits_for_who_is_down(stock: Stock):
    await stock.publish("BROADCAST.capability.query", b"nobody hears this")
    await stock.ask("BROADCAST.capability.response", {"who": "translator", "persist": True})
    await stock.ask("BROADCAST.capability.response", b"second", persist="true")
    subscription = await stock.subscribe("BROADCAST.capability.*")
    first, second = await taken(subscription, 2)
    assert json.loads(first.data)["who"] == "translator"
    assert second.data == b"second"
    await stock.publish("BROADCAST.capability.query", b"now")
    assert [message.data for message in await taken(subscription, 1)] == [b"now"]


@pytest.mark.rule("E10")
@pytest.mark.parametrize(("subject", "name"), [("PUBLIC.LIST", "followed.list"), ("MAILBOX.MSG.public.*", "followed")])
async def test_public_mailboxes_are_followed(stock: Stock, subject: str, name: str):
    await stock.ask("MAILBOX.CREATE", {"name": name, "public": True, "desc": "first", "tags": [name]})
    subscription = await stock.subscribe(subject)
    [entry] = (await stock.ask("PUBLIC.LIST", {"tag": name}))["mailboxes"]
    await stock.create(name=f"{name}.more", public=True)
    seen = {}
    while f"{name}.more" not in seen:
        told = json.loads((await taken(subscription, 1))[0].data)
        seen[told["mail_address"]] = told
    assert seen[name] == entry
