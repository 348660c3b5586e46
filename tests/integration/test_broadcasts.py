"""Broadcasts: fanned out, kept, shared by queues, over instances (E8, E9, N7, N8)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mediator.gateway.broadcasts import BACKLOG
from mediator.mailboxes.broadcasting import HIDDEN
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.pushing import WINDOW
from mediator.nats.subjects import RefusedSubject, classify
from mediator.store.base import Transaction
from tests.harness.door import Service, serving_two
from tests.harness.pushes import Pushes, Subscriber, pushes, pushes_of, service
from tests.harness.waiting import until

__all__ = ["pushes", "service"]

HALF = WINDOW // 2


async def cast(service: Service, name: str, payload: bytes = b"x", **headers: Any) -> int:
    """Broadcast, and return the msg_id of the receipt."""
    named = {key if key == "persist" else "mq9-" + key: str(value) for key, value in headers.items()}
    msg_id: int = (await service.done(f"BROADCAST.{name}", payload, named or None))["msg_id"]
    return msg_id


async def cast_many(service: Service, name: str, count: int, payload: bytes = b"") -> None:
    """Broadcast without waiting for each, and wait until the service has taken all."""
    client = await service.client()
    for number in range(count - 1):
        await client.publish(f"$mq9.AI.BROADCAST.{name}", payload or str(number).encode())
    await client.request(f"$mq9.AI.BROADCAST.{name}", payload or str(count - 1).encode(), timeout=30)


@pytest.mark.rule("E9", "N8")
async def test_a_broadcast_reaches_matching_subscribers_once(service: Service, pushes: Pushes) -> None:
    patterns = ["system.restart", "system.*", "*.restart", "#", ">", "system.#", "task.*", "system.restart.*"]
    subscribers = [await pushes.subscribe(f"BROADCAST.{pattern}") for pattern in patterns]
    assert await cast(service, "system.restart", b"SUB x 1\r\n\x00\xff", tags="a,b") == -1
    assert await cast(service, "task.done") == -1
    for subscriber, count in zip(subscribers, [1, 1, 1, 2, 2, 1, 1, 0], strict=True):
        await subscriber.got(count)
        await pushes.settled()
        await subscriber.got(count)
    assert subscribers[0].subjects == ["$mq9.AI.BROADCAST.system.restart"]
    assert subscribers[3].subjects == ["$mq9.AI.BROADCAST.system.restart", "$mq9.AI.BROADCAST.task.done"]
    [message] = subscribers[0].messages
    assert (message.data, message.headers) == (b"SUB x 1\r\n\x00\xff", {"mq9-tags": "a,b"})
    late = await pushes.subscribe("BROADCAST.#")
    await cast(service, "a.b", b"now")
    await late.got(1)
    assert late.payloads == [b"now"]


@pytest.mark.rule("E9", "E6", "A8")
async def test_stored_broadcasts_are_replayed_first_in_order(service: Service, pushes: Pushes) -> None:
    early = await pushes.subscribe("BROADCAST.system.*")
    kept = [await cast(service, "system.a", b"1", persist="true", Trace="t")]
    kept += [await cast(service, "task.a", json.dumps({"persist": True}).encode())]
    kept += [await cast(service, "system.b", b"3", persist="true", ttl=60)]
    assert kept == [0, 1, 2]
    assert await cast(service, "system.a", b'{"persist": true}', persist="false") == -1
    await early.got(3)
    late = await pushes.subscribe("BROADCAST.system.*")
    await late.got(2)
    await cast(service, "system.a", b"5", persist="true")
    await late.got(3)
    assert (late.ids, late.payloads) == ([0, 2, 3], [b"1", b"3", b"5"])
    assert late.messages[0].headers == {"mq9-msg-id": "0", "mq9-Trace": "t"}
    assert late.subjects == [f"$mq9.AI.BROADCAST.system.{event}" for event in "aba"]


@pytest.mark.rule("E9", "S5")
async def test_what_is_kept_lasts_an_hour_or_as_long_as_it_says(service: Service, pushes: Pushes) -> None:
    await cast(service, "a.b", b"minute", persist="true", ttl=60)
    await cast(service, "a.b", b"hour", persist="true")
    await cast(service, "a.b", b"day", persist="true", ttl=86400)
    for ahead, left in ((0, 3), (61, 2), (3601, 1), (86401, 0)):
        service.clock.ahead = ahead * 1000
        subscriber = await pushes.subscribe("BROADCAST.a.b")
        await subscriber.got(left)
        await pushes.settled()
        await subscriber.got(left)


@pytest.mark.rule("E9", "A1")
async def test_no_client_reaches_what_is_kept_by_another_way(service: Service, pushes: Pushes) -> None:
    await cast(service, "a.b", persist="true")
    for verb in ("MSG.SEND", "MSG.QUERY", "MSG.FETCH", "MAILBOX.LIST", "INBOX"):
        assert "mail_" in (await service.ask(f"{verb}.{HIDDEN}"))["error"]
    assert "name" in (await service.ask("MAILBOX.CREATE", {"name": HIDDEN}))["error"]
    assert isinstance(classify(f"$mq9.AI.MAILBOX.MSG.{HIDDEN}"), RefusedSubject)

    def listed(tx: Transaction, now: int) -> list[str]:
        return [mailbox.address for mailbox in tx.mailboxes.list("default", "", 10, now)]

    assert await service.broker.read(listed) == []


@pytest.mark.rule("E9", "N3", "N7", "E8")
@pytest.mark.parametrize(
    ("name", "headers", "error"),
    [
        ("a", {}, "subject: expected BROADCAST.domain.event, got BROADCAST.a"),
        ("a.*", {}, "subject: expected no wildcards and only printable characters behind BROADCAST."),
        ("a.#", {}, "subject: expected no wildcards and only printable characters behind BROADCAST."),
        ("a." + "b" * 600, {}, "subject: expected at most 512 characters behind BROADCAST."),
        ("a.b", {"persist": "maybe"}, 'persist: expected true or false, got "maybe"'),
        ("a.b", {"mq9-ttl": "soon"}, 'mq9-ttl: expected whole seconds, got "soon"'),
        ("a.b", {"mq9-delay": "5"}, "mq9-delay: has no meaning for a broadcast"),
        ("a.b", {"mq9-key": "k"}, "mq9-key: has no meaning for a broadcast"),
        ("a.b", {"mq9-expire-at": "1"}, "mq9-expire-at: must be in the future"),
    ],
)
async def test_an_invalid_broadcast_reaches_nobody(
    service: Service, pushes: Pushes, name: str, headers: dict[str, str], error: str
) -> None:
    subscriber = await pushes.subscribe("BROADCAST.#")
    for persist in ({}, {"mq9-persist": "true"}):
        if "persist" not in headers:
            headers = headers | persist
        assert await service.ask(f"BROADCAST.{name}", b"x", headers) == {"error": error, "msg_id": -1}
    await cast(service, "a.b", b"last")
    await subscriber.got(1)


@pytest.mark.rule("N7")
async def test_a_broadcast_larger_than_a_message_may_be_is_refused(service: Service, pushes: Pushes) -> None:
    subscriber = await pushes.subscribe("BROADCAST.#")
    large = b"x" * service.broker.bounds.max_message
    for persist in ("true", "false"):
        answer = await service.ask("BROADCAST.a.b", large, {"persist": persist, "own": "1"})
        assert "message_too_large" in answer["error"]
    await cast(service, "a.b", large[:-10])
    await cast(service, "a.b", large[:-10], persist="true")
    await subscriber.got(2)


@pytest.mark.rule("A6", "E9")
async def test_tenants_hear_nothing_of_each_other(tmp_path: Path) -> None:
    async with serving_two(tmp_path) as (service, ann, bob), pushes_of(service) as pushes:
        theirs = await pushes.subscribe("BROADCAST.#", tenant="globex")
        ours = await pushes.subscribe("BROADCAST.#", tenant="acme")
        for headers in (None, {"persist": "true"}):
            await service.ask("BROADCAST.a.b", b"ours", headers, client=ann)
            await service.ask("BROADCAST.a.b", b"theirs", headers, client=bob)
        late = await pushes.subscribe("BROADCAST.#", tenant="globex")
        await ours.got(2)
        await theirs.got(2)
        await late.got(1)
        assert (set(ours.payloads), set(theirs.payloads)) == ({b"ours"}, {b"theirs"})


@pytest.mark.rule("E9", "E7")
async def test_a_slow_subscriber_loses_only_unstored_broadcasts(service: Service, pushes: Pushes) -> None:
    slow = await pushes.subscribe("BROADCAST.a.*", reads=False)
    fast = await pushes.subscribe("BROADCAST.a.*")
    await cast_many(service, "a.b", BACKLOG // 2)
    await fast.got(BACKLOG // 2)
    await cast_many(service, "a.b", BACKLOG // 2 + HALF + 7)
    await fast.got(BACKLOG + HALF + 7)
    assert service.metric("mediator_broadcasts_lost_total") == 7
    await slow.got(HALF)
    for number in range(3):
        await cast(service, "a.c", b"kept %d" % number, persist="true")
    await slow.got(HALF + 3)
    assert slow.payloads[HALF:] == [b"kept 0", b"kept 1", b"kept 2"]
    slow.reads = True
    slow.confirm()
    await slow.got(BACKLOG + HALF + 3)
    assert slow.payloads[HALF + 3 :] == fast.payloads[HALF : BACKLOG + HALF]
    await cast(service, "a.b", b"again")
    await slow.got(BACKLOG + HALF + 4)
    await until(lambda: not pushes.waiting)


@pytest.mark.rule("E9", "A8")
async def test_what_is_kept_waits_for_who_reads_slowly(service: Service, pushes: Pushes) -> None:
    slow = await pushes.subscribe("BROADCAST.a.*", reads=False)
    total = WINDOW + 50
    sent = [
        cast(service, "a.b" if number % 2 else "c.d", b"%d" % number, persist="true") for number in range(2 * total)
    ]
    await asyncio.gather(*sent)
    await slow.got(WINDOW)
    slow.confirm()
    await slow.got(total)
    assert slow.ids == sorted(slow.ids)
    late = await pushes.subscribe("BROADCAST.a.*")
    await late.got(total)
    assert late.ids == slow.ids


@pytest.mark.rule("E9", "E6")
async def test_between_replay_and_live_nothing_is_lost_or_doubled(service: Service, pushes: Pushes) -> None:
    subscribers = []
    for number in range(20):
        await asyncio.gather(*(cast(service, f"a.{each}", b"%d" % number, persist="true") for each in range(5)))
        subscribers.append(await pushes.subscribe("BROADCAST.a.#"))
    for subscriber in subscribers:
        await subscriber.got(100)
        assert subscriber.ids == list(range(100))


async def total(members: list[Subscriber], count: int) -> list[bytes]:
    """Wait until the members have so many together."""
    await until(lambda: sum(len(member.messages) for member in members) >= count)
    payloads = sorted((payload for member in members for payload in member.payloads), key=int)
    assert len(payloads) == count
    return payloads


@pytest.mark.rule("E9")
@pytest.mark.parametrize("persist", ["true", "false"])
async def test_members_of_a_queue_get_each_broadcast_once_in_turn(
    service: Service, pushes: Pushes, persist: str
) -> None:
    members = [await pushes.subscribe("BROADCAST.task.*", "workers") for _ in range(3)]
    others = await pushes.subscribe("BROADCAST.task.*", "others")
    alone = await pushes.subscribe("BROADCAST.task.*")
    for number in range(30):
        await cast(service, "system.x", b"no", persist=persist)
        await cast(service, "task.available", b"%d" % number, persist=persist)
        await total(members, number + 1)
    assert await total(members, 30) == [b"%d" % number for number in range(30)]
    assert [len(member.messages) for member in members] == [10, 10, 10]
    await others.got(30)
    await alone.got(30)


@pytest.mark.rule("E9")
@pytest.mark.parametrize("persist", ["true", "false"])
async def test_a_queue_competes_over_instances(service: Service, pushes: Pushes, persist: str) -> None:
    async with pushes_of(service) as two:
        members = [await at.subscribe("BROADCAST.task.*", "workers") for at in (pushes, two, two)]
        alone = [await at.subscribe("BROADCAST.task.*") for at in (pushes, two)]
        for number in range(100):
            await cast(service, "task.available", b"%d" % number, persist=persist)
        assert await total(members, 100) == [b"%d" % number for number in range(100)]
        for subscriber in alone:
            await subscriber.got(100)
        if persist == "false":
            assert members[0].messages
            assert members[1].messages


@pytest.mark.rule("E9", "E7")
async def test_what_a_member_leaves_goes_to_the_others(service: Service, pushes: Pushes) -> None:
    lazy = await pushes.subscribe("BROADCAST.task.*", "workers", reads=False)
    await cast_many(service, "task.x", HALF + 100)
    for number in range(10):
        await cast(service, "task.y", b"%d" % number, persist="true")
    await lazy.got(HALF + 10)
    heir = await pushes.subscribe("BROADCAST.task.*", "workers")
    lazy.end("broken")
    await heir.got(110)


@pytest.mark.rule("E9")
async def test_the_last_that_listens_leaves_nothing_behind(service: Service, pushes: Pushes) -> None:
    one = await pushes.subscribe("BROADCAST.a.*", reads=False)
    two = await pushes.subscribe("BROADCAST.a.*", "q", reads=False)
    reader = await pushes.subscribe("BROADCAST.a.*")
    await cast_many(service, "a.b", HALF + 10)
    # None of them is still on its way, to reach who subscribes next.
    await reader.got(HALF + 10)
    await one.got(HALF)
    await two.got(HALF)
    reader.end("unsub")
    one.end("unsub")
    two.end("broken")
    assert not pushes.waiting
    again = await pushes.subscribe("BROADCAST.a.*")
    await cast(service, "a.b", b"new")
    await again.got(1)


@pytest.mark.rule("E6", "E9")
@pytest.mark.parametrize("persist", ["true", "false"])
async def test_a_msg_id_that_its_sender_gave_is_not_handed_on(service: Service, pushes: Pushes, persist: str) -> None:
    subscriber = await pushes.subscribe("BROADCAST.a.*")
    await service.done("BROADCAST.a.b", b"x", {"MQ9-Msg-Id": "1000", "mq9-msg-id": "1001", "persist": persist})
    await subscriber.got(1)
    assert (subscriber.messages[0].headers or {}) == ({"mq9-msg-id": "0"} if persist == "true" else {})


@pytest.mark.rule("E9", "N2")
async def test_who_wants_no_receipt_gets_none(service: Service, pushes: Pushes) -> None:
    subscriber = await pushes.subscribe("BROADCAST.#")
    client = await service.client()
    await client.publish("$mq9.AI.BROADCAST.a.b", b"kept", headers={"persist": "true"})
    await client.publish("$mq9.AI.BROADCAST.a", b"wrong")
    await client.publish("$mq9.AI.BROADCAST.a.b", b"not kept")
    await subscriber.got(2)

    def kept(tx: Transaction, now: int) -> int:
        return get_live_mailbox(tx, "default", HIDDEN, now).messages

    assert await service.broker.read(kept) == 1
