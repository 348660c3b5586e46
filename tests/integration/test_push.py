"""Mail pushed to subscriptions without a queue: replay, live mail, windows, ends (E1, E6, E8, E11, N10)."""

import asyncio
import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mediator.errors import NoSuchMailboxError
from mediator.mailboxes import pushing
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.message import Draft
from mediator.mailboxes.pushing import WINDOW, WINDOW_BYTES
from mediator.mailboxes.sending import Send
from mediator.mailboxes.transaction import Transaction
from tests.harness.door import Service, serving_two
from tests.harness.pushes import Push, Pushes, Subscriber, pushes, pushes_of, service
from tests.harness.waiting import until

__all__ = ["pushes", "service"]


async def fill(service: Service, *words: str) -> None:
    for word in words:
        await service.send(word.encode(), priority=word)


@pytest.mark.rule("E6", "E1")
async def test_stored_mail_comes_in_lane_order_then_new_mail(service: Service, pushes: Pushes) -> None:
    await service.create()
    await fill(service, "low", "normal", "urgent", "critical", "normal", "critical")
    subscriber = await pushes.subscribe("MAILBOX.MSG.task.*")
    await subscriber.got(6)
    assert subscriber.ids == [3, 5, 2, 1, 4, 0]
    # What waits together comes in lane order, so each is to have come before the next.
    for total, word in ((7, "low"), (8, "critical")):
        await fill(service, word)
        await subscriber.got(total)
    assert subscriber.ids[6:] == [6, 7]
    words = ["critical", "critical", "urgent", "normal", "normal", "low", "low", "critical"]
    assert subscriber.subjects == [f"$mq9.AI.MAILBOX.MSG.task.{word}" for word in words]


@pytest.mark.rule("E6")
async def test_mail_that_comes_during_the_first_read_is_pushed(
    service: Service, pushes: Pushes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.create()
    begin, loop = pushing.open_cursor, asyncio.get_running_loop()

    async def send() -> None:
        await service.send(b"late")
        # The feed, if there is one, has done with it before the new subscription is part of it.
        await pushes.settled()

    def begin_slowly(*args: Any) -> Any:
        begun = begin(*args)
        asyncio.run_coroutine_threadsafe(send(), loop).result()
        return begun

    monkeypatch.setattr(pushing, "open_cursor", begin_slowly)
    first = await pushes.subscribe("MAILBOX.MSG.task.*")
    await first.got(1)
    second = await pushes.subscribe("MAILBOX.MSG.task.*")
    await second.got(2)
    # Without one that is live, the feed reads nothing.
    first.full = second.full = True
    await service.send()
    third = await pushes.subscribe("MAILBOX.MSG.task.*")
    await third.got(4)
    assert third.ids == [0, 1, 2, 3]


@pytest.mark.rule("E6")
async def test_mail_of_the_first_read_is_not_read_again(
    service: Service, pushes: Pushes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.create()
    await service.send(b"mail")
    monkeypatch.setattr(pushing, "read_next", None)
    await (await pushes.subscribe("MAILBOX.MSG.task.*")).got(1)
    await pushes.settled()


@pytest.mark.rule("E6", "N9")
async def test_a_push_has_its_headers_and_its_bytes(service: Service, pushes: Pushes) -> None:
    await service.create()
    client = await service.client()
    headers = {"mq9-key": "k", "mq9-tags": "a,b", "mq9-reply-to": "back", "Trace": "é 1", "mq9-priority": "urgent"}
    payload = b"SUB x 1\r\n\x00\xff"
    await client.request("$mq9.AI.MSG.SEND.task", payload, timeout=30, headers=headers)
    subscriber = await pushes.subscribe("MAILBOX.MSG.task.*")
    await subscriber.got(1)
    [message] = subscriber.messages
    assert message.data == payload
    assert message.headers == {"mq9-msg-id": "0", **headers}
    assert next(iter(message.headers)) == "mq9-msg-id"


@pytest.mark.rule("E1", "E2")
@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("MAILBOX.MSG.task", ["", ""]),
        ("MAILBOX.MSG.task.critical", ["critical"]),
        ("MAILBOX.MSG.task.urgent", ["urgent"]),
        ("MAILBOX.MSG.task.high", ["high", "high"]),
        ("MAILBOX.MSG.task.normal", ["normal"]),
        ("MAILBOX.MSG.task.low", ["low"]),
        ("MAILBOX.MSG.task.*", ["critical", "urgent", "normal", "low"]),
        ("INBOX.task", ["", ""]),
        ("INBOX.task.urgent", ["urgent", "urgent"]),
        ("INBOX.task.normal", ["normal"]),
        ("INBOX.task.notify", ["notify"]),
        ("INBOX.task.*", ["urgent", "urgent", "normal", "notify"]),
    ],
)
async def test_each_edition_has_its_words(service: Service, pushes: Pushes, subject: str, expected: list[str]) -> None:
    await service.create()
    await fill(service, "critical", "urgent", "normal", "low")
    subscriber = await pushes.subscribe(subject)
    await subscriber.got(len(expected))
    base = "$mq9.AI." + ".".join(subject.split(".")[: 3 if subject.startswith("MAILBOX") else 2])
    assert subscriber.subjects == [f"{base}.{word}" if word else base for word in expected]


@pytest.mark.rule("E6")
async def test_every_subscriber_gets_everything_also_a_late_one(service: Service, pushes: Pushes) -> None:
    await service.create()
    await fill(service, "normal", "normal")
    one = await pushes.subscribe("MAILBOX.MSG.task.*")
    await one.got(2)
    await fill(service, "critical")
    two = await pushes.subscribe("MAILBOX.MSG.task.*")
    await two.got(3)
    await fill(service, "normal")
    await one.got(4)
    await two.got(4)
    assert one.ids == [0, 1, 2, 3]
    assert two.ids == [2, 0, 1, 3]


@pytest.mark.rule("E6")
async def test_mail_during_many_subscribes_comes_exactly_once(service: Service, pushes: Pushes) -> None:
    await service.create()
    subscribers = []
    for _ in range(20):
        await fill(service, "normal", "critical", "low")
        subscribers.append(await pushes.subscribe("MAILBOX.MSG.task.*"))
    for subscriber in subscribers:
        await subscriber.got(60)
        assert sorted(subscriber.ids) == list(range(60))


@pytest.mark.rule("E6")
async def test_who_leaves_while_others_are_served_gets_nothing(
    service: Service, pushes: Pushes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mediator.gateway.feed.TURN", 1)
    await service.create()
    served = [await pushes.subscribe("MAILBOX.MSG.task.*") for _ in range(5)]
    left: list[Subscriber] = []

    def leave(confirm: Callable[[], None]) -> None:
        # Between the pushes to the first and to the others, its confirmation has a turn.
        if not left:
            left.append(next(each for each in served if not each.ids))
            left[0].end("unsub")
        confirm()

    # Together, which they are once each has read what is stored.
    await pushes.settled()
    for each in served:
        monkeypatch.setattr(each, "confirm", partial(leave, each.confirm))
    await fill(service, "normal")
    late = await pushes.subscribe("MAILBOX.MSG.task.*")
    await fill(service, "normal")
    await until(lambda: left, what="one has left")
    for each in {*served, late} - {*left}:
        await each.got(2)
        assert each.ids == [0, 1]
    assert left[0].ids == []


@pytest.mark.rule("N10", "A7")
async def test_a_mailbox_that_does_not_exist_is_named(service: Service, pushes: Pushes) -> None:
    del service
    with pytest.raises(NoSuchMailboxError, match="mailbox nobody does not exist"):
        await pushes.subscribe("MAILBOX.MSG.nobody.*")


@pytest.mark.rule("E7")
async def test_a_client_that_confirms_nothing_gets_one_window(service: Service, pushes: Pushes) -> None:
    await service.create()
    for number in range(1, WINDOW + 51):
        await service.broker.send(_message(str(number).encode()))
    slow = await pushes.subscribe("MAILBOX.MSG.task.*", reads=False)
    fast = await pushes.subscribe("MAILBOX.MSG.task.*")
    await fast.got(WINDOW + 50)
    await slow.got(WINDOW)
    await fill(service, "critical")
    await fast.got(WINDOW + 51)
    await pushes.settled()
    await slow.got(WINDOW)
    slow.confirm(10)
    await slow.got(WINDOW + 10)
    slow.confirm()
    await slow.got(WINDOW + 51)
    assert slow.ids[:-1] == list(range(WINDOW + 50))


@pytest.mark.rule("E7")
async def test_a_window_also_counts_bytes_and_one_message_always_goes(service: Service, pushes: Pushes) -> None:
    await service.create()
    big = b"x" * (2 * WINDOW_BYTES)
    some = b"x" * (WINDOW_BYTES // 2)
    for payload in (big, big, some, some, some):
        await service.broker.send(_message(payload))
    slow = await pushes.subscribe("MAILBOX.MSG.task.*", reads=False)
    for total in (1, 2, 4, 5):
        await slow.got(total)
        await pushes.settled()
        await slow.got(total)
        slow.confirm()


@pytest.mark.rule("E7")
async def test_live_mail_beyond_the_window_comes_when_there_is_room(service: Service, pushes: Pushes) -> None:
    await service.create()
    slow = await pushes.subscribe("MAILBOX.MSG.task.*", reads=False)
    for number in range(WINDOW + 20):
        await service.broker.send(_message(str(number).encode()))
    await slow.got(WINDOW)
    slow.confirm()
    await slow.got(WINDOW + 20)
    assert slow.ids == list(range(WINDOW + 20))


@pytest.mark.rule("E8", "S4", "S5")
async def test_what_is_not_visible_is_not_pushed(service: Service, pushes: Pushes) -> None:
    await service.create()
    await service.send(b"later", delay=60)
    await service.send(b"expired", ttl=5)
    await service.send(b"deleted")
    await service.done("MSG.DELETE.task.1")
    service.clock.ahead = 10_000
    await service.send(b"here")
    subscriber = await pushes.subscribe("MAILBOX.MSG.task.*")
    await subscriber.got(1)
    service.clock.ahead = 61_000
    assert await service.release() == 1
    await subscriber.got(2)
    assert subscriber.payloads == [b"here", b"later"]


@pytest.mark.rule("E8", "A3", "N10")
async def test_a_mailbox_that_ends_leaves_its_subscriptions_silent(service: Service, pushes: Pushes) -> None:
    await service.create()
    old = await pushes.subscribe("MAILBOX.MSG.task.*")
    await fill(service, "normal")
    await old.got(1)
    await service.broker.delete_mailbox("default", "task")
    await service.create()
    await fill(service, "normal", "normal")
    new = await pushes.subscribe("MAILBOX.MSG.task.*")
    await new.got(2)
    await fill(service, "normal")
    await new.got(3)
    await old.got(1)


@pytest.mark.rule("E11")
async def test_the_python_client_gets_the_shapes_it_knows(service: Service, pushes: Pushes) -> None:
    await service.create()
    await fill(service, "urgent", "critical", "low")
    await service.send(b"")
    subscriber = await pushes.subscribe("MAILBOX.MSG.task.*", python=True)
    await subscriber.got(4)
    assert [subject.rpartition(".")[2] for subject in subscriber.subjects] == ["high", "high", "normal", "low"]
    assert subscriber.payloads.pop(2) == b""
    bodies = [json.loads(payload) for payload in subscriber.payloads if payload]
    assert [body["msg_id"] for body in bodies] == [1, 0, 2]
    assert [base64.b64decode(body["payload"]) for body in bodies] == [b"critical", b"urgent", b"low"]


@pytest.mark.rule("A6", "E6")
async def test_tenants_are_apart(tmp_path: Path) -> None:
    async with serving_two(tmp_path) as (service, ann, bob), pushes_of(service) as pushes:
        for client in (ann, bob):
            await service.ask("MAILBOX.CREATE", {"name": "task"}, client=client)
        hers = await pushes.subscribe("MAILBOX.MSG.task.*", tenant="acme")
        his = await pushes.subscribe("MAILBOX.MSG.task.*", tenant="globex")
        await service.ask("MSG.SEND.task", b"for ann", client=ann)
        await service.ask("MSG.SEND.task", b"for bob", client=bob)
        await hers.got(1)
        await his.got(1)
        assert (hers.payloads, his.payloads) == ([b"for ann"], [b"for bob"])


@pytest.mark.rule("E4")
async def test_what_was_confirmed_is_read(service: Service, pushes: Pushes) -> None:
    await service.create()
    await fill(service, "normal", "critical", "normal")
    slow = await pushes.subscribe("MAILBOX.MSG.task.*", reads=False)
    await slow.got(3)
    assert await _unread(service) == 3
    slow.confirm(2)
    await fill(service, "low")
    await _until_unread(service, 2)


@pytest.mark.rule("E7")
async def test_nothing_is_pushed_to_a_client_that_does_not_read(service: Service, pushes: Pushes) -> None:
    await service.create()
    slow, fast = [await pushes.subscribe("MAILBOX.MSG.task.*") for _ in range(2)]
    await pushes.settled()
    slow.full = True
    await fill(service, "normal", "critical", "low")
    await fast.got(3)
    await pushes.settled()
    await slow.got(0)
    slow.read()
    await slow.got(3)
    # It is served together with the others again.
    await fill(service, "urgent")
    await slow.got(4)
    assert slow.ids == [1, 0, 2, 3]


@pytest.mark.rule("E6")
async def test_a_client_without_headers_gets_the_payload_alone(service: Service, pushes: Pushes) -> None:
    await service.create()
    await fill(service, "normal")
    subscriber = await pushes.subscribe("MAILBOX.MSG.task.*", bare=True)
    await subscriber.got(1)
    assert subscriber.messages == [Push("$mq9.AI.MAILBOX.MSG.task.normal", {}, b"normal")]


def _message(payload: bytes) -> Send:
    return Send("default", "task", Draft(payload))


async def _unread(service: Service) -> int:
    return await service.broker.read(
        lambda tx, now: tx.pushed.unread(get_live_mailbox(tx, "default", "task", now), now)
    )


async def _until_unread(service: Service, count: int) -> None:
    async with asyncio.timeout(30):
        while await _unread(service) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.rule("E6", "A5")
async def test_a_message_that_cannot_be_read_ends_no_feed(service: Service, pushes: Pushes) -> None:
    await service.create()
    live = await pushes.subscribe("MAILBOX.MSG.task.*")

    await service.send(b"before")
    await live.got(1)
    live.full = True
    await service.send(b"damaged")
    await service.broker.write(damage)
    await service.send(b"after")
    live.read()
    await live.got(2)
    late = await pushes.subscribe("MAILBOX.MSG.task.*")
    await late.got(2)
    await service.send(b"last")
    await live.got(3)
    await late.got(3)
    assert live.ids == late.ids == [0, 2, 3]
    # It is still there for whoever repairs it.
    assert await service.broker.read(lambda tx, now: get_live_mailbox(tx, "default", "task", now).messages) == 4


def damage(tx: Transaction, _now: int) -> None:
    """Make the details of message 1 unreadable."""
    tx.session.flush()
    list(tx.session.dialect.execute("UPDATE message SET extra = ? WHERE msg_id = 1 RETURNING msg_id", (b"{",)))
