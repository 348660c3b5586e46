"""Mail pushed to subscriptions without a queue: replay, live mail, windows, ends (E1, E6, E8, E11, N10)."""

import asyncio
import base64
import json
from pathlib import Path

import pytest

from mediator.config.sections import PushSettings
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.nats import control_messages
from mediator.push import protocol
from mediator.push.subscriber import WINDOW, WINDOW_BYTES
from tests.harness.door import Service, serving, serving_two
from tests.harness.gateway_double import Gateway, gateway, gateway_to, service
from tests.harness.waiting import until
from tests.harness.wire import flushed, transport_of

__all__ = ["gateway", "service"]


async def fill(service: Service, *words: str) -> None:
    for word in words:
        await service.send(word.encode(), priority=word)


@pytest.mark.rule("E6", "E1")
async def test_stored_mail_comes_in_lane_order_then_new_mail(service: Service, gateway: Gateway) -> None:
    await service.create()
    await fill(service, "low", "normal", "urgent", "critical", "normal", "critical")
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*")
    await subscriber.got(6)
    assert subscriber.ids == [3, 5, 2, 1, 4, 0]
    # What waits together comes in lane order, so each is to have come before the next.
    for total, word in ((7, "low"), (8, "critical")):
        await fill(service, word)
        await subscriber.got(total)
    assert subscriber.ids[6:] == [6, 7]
    words = ["critical", "critical", "urgent", "normal", "normal", "low", "low", "critical"]
    assert subscriber.subjects == [f"$mq9.AI.MAILBOX.MSG.task.{word}" for word in words]


@pytest.mark.rule("E6", "N9")
async def test_a_push_has_its_headers_and_its_bytes(service: Service, gateway: Gateway) -> None:
    await service.create()
    client = await service.client()
    headers = {"mq9-key": "k", "mq9-tags": "a,b", "mq9-reply-to": "back", "Trace": "é 1", "mq9-priority": "urgent"}
    payload = b"SUB x 1\r\n\x00\xff"
    await client.request("$mq9.AI.MSG.SEND.task", payload, headers=headers)
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*")
    await subscriber.got(1)
    [message] = subscriber.messages
    assert message.data == payload
    assert message.headers == {"mq9-msg-id": "0", **headers}
    assert next(iter(message.headers)) == "mq9-msg-id"
    assert message.reply == ""


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
async def test_each_edition_has_its_words(
    service: Service, gateway: Gateway, subject: str, expected: list[str]
) -> None:
    await service.create()
    await fill(service, "critical", "urgent", "normal", "low")
    subscriber = await gateway.subscribe(subject)
    await subscriber.got(len(expected))
    base = "$mq9.AI." + ".".join(subject.split(".")[: 3 if subject.startswith("MAILBOX") else 2])
    assert subscriber.subjects == [f"{base}.{word}" if word else base for word in expected]


@pytest.mark.rule("E6")
async def test_every_subscriber_gets_everything_also_a_late_one(service: Service, gateway: Gateway) -> None:
    await service.create()
    await fill(service, "normal", "normal")
    one = await gateway.subscribe("MAILBOX.MSG.task.*")
    await one.got(2)
    await fill(service, "critical")
    two = await gateway.subscribe("MAILBOX.MSG.task.*")
    await two.got(3)
    await fill(service, "normal")
    await one.got(4)
    await two.got(4)
    assert one.ids == [0, 1, 2, 3]
    assert two.ids == [2, 0, 1, 3]


@pytest.mark.rule("E6")
async def test_mail_during_many_subscribes_comes_exactly_once(service: Service, gateway: Gateway) -> None:
    await service.create()
    subscribers = []
    for _ in range(20):
        await fill(service, "normal", "critical", "low")
        subscribers.append(await gateway.subscribe("MAILBOX.MSG.task.*"))
    for subscriber in subscribers:
        await subscriber.got(60)
        assert sorted(subscriber.ids) == list(range(60))


@pytest.mark.rule("N10", "A7")
async def test_a_mailbox_that_does_not_exist_is_named(service: Service, gateway: Gateway) -> None:
    subscriber = await gateway.subscribe("MAILBOX.MSG.nobody.*")
    assert subscriber.opened[-1].error == "mailbox nobody does not exist"
    assert service.pushes.count == 0


@pytest.mark.rule("N10")
@pytest.mark.parametrize("subject", ["MSG.SEND.task", "MAILBOX.MSG.*.*", "MAILBOX.MSG.>", "FOO"])
async def test_what_is_no_subscription_to_stored_mail_is_refused(
    service: Service, gateway: Gateway, subject: str
) -> None:
    await service.create()
    subscriber = await gateway.subscribe(subject)
    assert "Permissions Violation for Subscription" in subscriber.opened[-1].error


@pytest.mark.rule("E7")
async def test_a_client_that_confirms_nothing_gets_one_window(service: Service, gateway: Gateway) -> None:
    await service.create()
    for number in range(1, WINDOW + 51):
        await service.broker.send(_message(str(number).encode()))
    slow = await gateway.subscribe("MAILBOX.MSG.task.*", reads=False)
    fast = await gateway.subscribe("MAILBOX.MSG.task.*")
    await fast.got(WINDOW + 50)
    await slow.got(WINDOW)
    await fill(service, "critical")
    await fast.got(WINDOW + 51)
    await gateway.settled(slow.owner)
    await slow.got(WINDOW)
    await slow.confirm(10)
    await slow.got(WINDOW + 10)
    await slow.confirm()
    await slow.got(WINDOW + 51)
    assert slow.ids[:-1] == list(range(WINDOW + 50))


@pytest.mark.rule("E7")
async def test_a_window_also_counts_bytes_and_one_message_always_goes(service: Service, gateway: Gateway) -> None:
    await service.create()
    big = b"x" * (2 * WINDOW_BYTES)
    some = b"x" * (WINDOW_BYTES // 2)
    for payload in (big, big, some, some, some):
        await service.broker.send(_message(payload))
    slow = await gateway.subscribe("MAILBOX.MSG.task.*", reads=False)
    for total in (1, 2, 4, 5):
        await slow.got(total)
        await gateway.settled(slow.owner)
        await slow.got(total)
        await slow.confirm()


@pytest.mark.rule("E7")
async def test_live_mail_beyond_the_window_comes_when_there_is_room(service: Service, gateway: Gateway) -> None:
    await service.create()
    slow = await gateway.subscribe("MAILBOX.MSG.task.*", reads=False)
    for number in range(WINDOW + 20):
        await service.broker.send(_message(str(number).encode()))
    await slow.got(WINDOW)
    await slow.confirm()
    await slow.got(WINDOW + 20)
    assert slow.ids == list(range(WINDOW + 20))


@pytest.mark.rule("E8", "S4", "S5")
async def test_what_is_not_visible_is_not_pushed(service: Service, gateway: Gateway) -> None:
    await service.create()
    await service.send(b"later", delay=60)
    await service.send(b"expired", ttl=5)
    await service.send(b"deleted")
    await service.done("MSG.DELETE.task.1")
    service.clock.ahead = 10_000
    await service.send(b"here")
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*")
    await subscriber.got(1)
    service.clock.ahead = 61_000
    assert await service.release() == 1
    await subscriber.got(2)
    assert subscriber.payloads == [b"here", b"later"]


@pytest.mark.rule("E8", "A3", "N10")
async def test_a_mailbox_that_ends_leaves_its_subscriptions_silent(service: Service, gateway: Gateway) -> None:
    await service.create()
    old = await gateway.subscribe("MAILBOX.MSG.task.*")
    await fill(service, "normal")
    await old.got(1)
    await service.broker.delete_mailbox("default", "task")
    await service.create()
    await fill(service, "normal", "normal")
    new = await gateway.subscribe("MAILBOX.MSG.task.*")
    await new.got(2)
    await fill(service, "normal")
    await new.got(3)
    await old.got(1)


@pytest.mark.rule("A8", "E6")
async def test_opened_anew_elsewhere_it_goes_on_where_it_stood(service: Service, gateway: Gateway) -> None:
    await service.create()
    await fill(service, "critical", "normal", "normal", "critical")
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*", after={"critical": 0, "normal": 1})
    await subscriber.got(2)
    assert subscriber.ids == [3, 2]


@pytest.mark.rule("A8", "E6")
async def test_where_two_lanes_share_a_word_it_goes_on_in_both(service: Service, gateway: Gateway) -> None:
    await service.create()
    await fill(service, "low", "normal", "low", "normal", "low")
    subscriber = await gateway.subscribe("MAILBOX.MSG.task", after={"normal": 1, "low": 2})
    await subscriber.got(2)
    assert subscriber.ids == [3, 4]


@pytest.mark.rule("A8")
async def test_a_mark_from_elsewhere_hides_nothing_that_is_to_come(service: Service, gateway: Gateway) -> None:
    await service.create()
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*", after={"normal": 1_000_000, "critical": -5})
    await fill(service, "normal", "critical")
    await subscriber.got(2)


@pytest.mark.rule("E6")
async def test_opened_twice_it_is_served_once(service: Service, gateway: Gateway) -> None:
    await service.create()
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*")
    await subscriber.open()
    await fill(service, "normal")
    await subscriber.got(1)
    assert [opened.error for opened in subscriber.opened] == ["", ""]
    assert service.pushes.count == 1


@pytest.mark.rule("E7")
async def test_an_instance_reports_subscriptions_it_lost(service: Service, gateway: Gateway) -> None:
    await service.create()
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*")
    await gateway.tell(subscriber.owner, credits={"z" * 26: 5, subscriber.token: 0})
    await until(lambda: any(signs.closed for signs in gateway.signs))
    assert {token for signs in gateway.signs for token in signs.closed} == {"z" * 26}
    assert not any(signs.leaving for signs in gateway.signs)
    async with gateway_to(service) as stranger:
        assert (await stranger.settled(subscriber.owner)).leaving


@pytest.mark.rule("E7")
async def test_a_gateway_ends_only_what_it_opened(service: Service, gateway: Gateway) -> None:
    await service.create()
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*")
    async with gateway_to(service) as stranger:
        await stranger.tell(subscriber.owner, closed={subscriber.token: "unsub"})
        await stranger.settled(subscriber.owner)
    await fill(service, "normal")
    await subscriber.got(1)


@pytest.mark.rule("E7")
async def test_a_gateway_that_is_silent_is_dead_with_all_it_had(
    service: Service, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.create()
    other = await gateway.subscribe("MAILBOX.MSG.task.*")
    async with gateway_to(service) as dying:
        await dying.subscribe("MAILBOX.MSG.task.*")
    assert service.pushes.count == 2
    monkeypatch.setattr(protocol, "DEAD_SECONDS", 1.5)
    await until(lambda: service.pushes.count == 1)
    await fill(service, "normal")
    await other.got(1)


@pytest.mark.rule("E7")
async def test_the_end_of_an_instance_is_told(service: Service, gateway: Gateway) -> None:
    await service.create()
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*")
    await service.pushes.close(5)
    await until(lambda: gateway.signs and gateway.signs[-1].leaving)
    assert gateway.signs[-1].sender == subscriber.owner
    assert service.pushes.count == 0


@pytest.mark.rule("E11")
async def test_the_python_client_gets_the_shapes_it_knows(service: Service, gateway: Gateway) -> None:
    await service.create()
    await fill(service, "urgent", "critical", "low")
    await service.send(b"")
    client = await service.client(name="robustmq-mq9-python-1")
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*", client=client)
    await subscriber.got(4)
    assert [subject.rpartition(".")[2] for subject in subscriber.subjects] == ["high", "high", "normal", "low"]
    assert subscriber.payloads.pop(2) == b""
    bodies = [json.loads(payload) for payload in subscriber.payloads if payload]
    assert [body["msg_id"] for body in bodies] == [1, 0, 2]
    assert [base64.b64decode(body["payload"]) for body in bodies] == [b"critical", b"urgent", b"low"]


@pytest.mark.rule("A6", "E6")
async def test_tenants_are_apart(tmp_path: Path) -> None:
    async with serving_two(tmp_path) as (service, ann, bob), gateway_to(service) as gateway:
        for client in (ann, bob):
            await service.ask("MAILBOX.CREATE", {"name": "task"}, client=client)
        hers = await gateway.subscribe("MAILBOX.MSG.task.*", client=ann)
        his = await gateway.subscribe("MAILBOX.MSG.task.*", client=bob)
        await service.ask("MSG.SEND.task", b"for ann", client=ann)
        await service.ask("MSG.SEND.task", b"for bob", client=bob)
        await hers.got(1)
        await his.got(1)
        assert (hers.payloads, his.payloads) == ([b"for ann"], [b"for bob"])
        # Who knows the token of another tenant takes nothing over.
        stolen = protocol.encode(protocol.OpenRequest(gateway.name, hers.token, his.subject))
        await bob.publish("$mq9.AI.PUSH.OPEN", stolen)
        await flushed(bob)
        await service.ask("MSG.SEND.task", b"more", client=bob)
        await his.got(2)
        await hers.got(1)


@pytest.mark.rule("A7")
async def test_there_are_so_many_subscriptions_and_no_more(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, push=PushSettings(max_subscriptions=10, tenant_subscriptions=2)) as service,
        gateway_to(service) as gateway,
    ):
        await service.create()
        first = await gateway.subscribe("MAILBOX.MSG.task.*")
        await gateway.subscribe("MAILBOX.MSG.task.*")
        third = await gateway.subscribe("MAILBOX.MSG.task.*")
        assert third.opened[-1].error == "quota_exceeded: subscriptions of the tenant, limit 2, in use 2"
        await first.end("unsub")
        await until(lambda: service.pushes.count == 1)
        await third.open()
        assert third.opened[-1].error == ""


@pytest.mark.rule("A8", "E6")
async def test_after_a_reconnect_everything_is_opened_again(service: Service, gateway: Gateway) -> None:
    await service.create()
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*")
    await fill(service, "normal")
    await subscriber.got(1)
    lost = service.lost
    transport_of(service.connection.client).abort()
    await until(lambda: service.lost > lost and gateway.signs and gateway.signs[-1].leaving)
    assert service.pushes.count == 0
    await subscriber.open(after={"normal": 0})
    await fill(service, "normal")
    await subscriber.got(2)
    assert subscriber.ids == [0, 1]


@pytest.mark.rule("E4")
async def test_what_was_confirmed_is_read(service: Service, gateway: Gateway) -> None:
    await service.create()
    await fill(service, "normal", "critical", "normal")
    slow = await gateway.subscribe("MAILBOX.MSG.task.*", reads=False)
    await slow.got(3)
    assert await _unread(service) == 3
    await slow.confirm(2)
    await fill(service, "low")
    await _until_unread(service, 2)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"gateway": 1}', b'{"gateway": "g", "token": "t", "subject": "x"}', b'{"after": {"normal": "1"}}'],
)
async def test_what_is_no_open_harms_nobody(service: Service, gateway: Gateway, body: bytes) -> None:
    await service.create()
    client = await service.client()
    await client.publish("$mq9.AI.PUSH.OPEN", body)
    await flushed(client)
    subject = control_messages.PUSH + service.pushes.instance
    for signs in (body, b'{"sender": "' + b"a" * 26 + b'", "credits": {"x": -1}}', b'{"sender": "x"}'):
        await service.connection.publish([service.connection.seal(subject, signs)])
    subscriber = await gateway.subscribe("MAILBOX.MSG.task.*")
    await fill(service, "normal")
    await subscriber.got(1)


def _message(payload: bytes) -> Send:
    return Send("default", "task", Draft(payload))


async def _unread(service: Service) -> int:
    return await service.broker.read(
        lambda tx, now: tx.pushed.unread(get_live_mailbox(tx, "default", "task", now), now)
    )


async def _until_unread(service: Service, count: int) -> None:
    async with asyncio.timeout(10):
        while await _unread(service) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
