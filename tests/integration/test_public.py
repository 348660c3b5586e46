"""The list of public mailboxes as a subscription, and the mailbox ``public`` (A1, E10)."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mediator.mailboxes import collecting, pushing
from tests.harness.door import Service, serving_two
from tests.harness.pushes import Pushes, Subscriber, pushes, pushes_of, service
from tests.harness.waiting import until

__all__ = ["pushes", "service"]

SUBJECTS = ["PUBLIC.LIST", "MAILBOX.MSG.public", "MAILBOX.MSG.public.*", "MAILBOX.MSG.public.normal"]


def objects(subscriber: Subscriber) -> list[dict[str, Any]]:
    return [json.loads(payload) for payload in subscriber.payloads]


def names(subscriber: Subscriber) -> list[str]:
    return [entry["name"] + (" ended" if "deleted" in entry else "") for entry in objects(subscriber)]


async def listed(service: Service) -> list[dict[str, Any]]:
    return list((await service.done("PUBLIC.LIST"))["mailboxes"])


async def end_expired(service: Service) -> None:
    """Let the clean-up free what is over."""
    await service.broker.write_background(lambda tx, now: collecting.expired_mailboxes(tx, now, 100))


@pytest.mark.rule("E10")
@pytest.mark.parametrize("subject", SUBJECTS)
async def test_a_subscription_gets_the_list_then_every_change(service: Service, pushes: Pushes, subject: str) -> None:
    token = await service.create("board.one", public=True, desc='é "one"', tags=["a", "b"])
    await service.create("private")
    await service.create("board.two", public=True)
    subscriber = await pushes.subscribe(subject)
    await subscriber.got(2)
    assert objects(subscriber) == await listed(service)
    await service.done("MAILBOX.UPDATE.board.one", {"token": token, "desc": "uno", "tags": ["c"]})
    await service.create("board.three", public=True)
    await service.create("hidden", public=False)
    await service.broker.delete_mailbox("default", "board.two")
    await service.broker.delete_mailbox("default", "private")
    await subscriber.got(5)
    entries = {entry["mail_address"]: entry for entry in objects(subscriber)}
    assert entries.pop("board.two") == {
        "mail_address": "board.two",
        "mail_id": "board.two",
        "name": "board.two",
        "deleted": True,
    }
    assert sorted(entries.values(), key=lambda entry: entry["name"]) == await listed(service)
    delivered = subject.replace("*", "normal")
    assert set(subscriber.subjects) == {f"$mq9.AI.{delivered}"}
    assert [message.headers["mq9-key"] for message in subscriber.messages] == [
        entry["name"] for entry in objects(subscriber)
    ]


@pytest.mark.rule("E10", "M1", "A3")
async def test_an_expiry_and_a_new_mailbox_of_the_name_are_pushed(service: Service, pushes: Pushes) -> None:
    subscriber = await pushes.subscribe("PUBLIC.LIST")
    await service.create("soon", public=True, ttl=10)
    await service.create("replaced", public=True, ttl=10)
    await subscriber.got(2)
    service.clock.ahead = 11_000
    late = await pushes.subscribe("PUBLIC.LIST")
    await service.create("replaced", public=True, desc="new")
    await end_expired(service)
    await subscriber.got(4)
    assert names(subscriber) == ["soon", "replaced", "replaced", "soon ended"]
    assert objects(subscriber)[2]["desc"] == "new"
    await late.got(2)
    assert names(late) == ["replaced", "soon ended"]


@pytest.mark.rule("E10")
async def test_who_comes_later_hears_nothing_of_what_ended_before(service: Service, pushes: Pushes) -> None:
    await service.create("gone", public=True)
    await service.broker.delete_mailbox("default", "gone")
    await service.create("here", public=True)
    subscriber = await pushes.subscribe("PUBLIC.LIST")
    await subscriber.got(1)
    await service.broker.delete_mailbox("default", "here")
    await subscriber.got(2)
    assert names(subscriber) == ["here", "here ended"]


@pytest.mark.rule("E10", "E7")
async def test_who_reads_slowly_gets_the_last_state_of_each(service: Service, pushes: Pushes) -> None:
    count = pushing.WINDOW + 20
    await asyncio.gather(*(service.create(f"b{number}", public=True) for number in range(count)))
    tokens = {name: await service.create(name, public=True) for name in ("often", "gone")}
    slow = await pushes.subscribe("PUBLIC.LIST", reads=False)
    await slow.got(pushing.WINDOW)
    for number in range(50):
        await service.done("MAILBOX.UPDATE.often", {"token": tokens["often"], "desc": str(number)})
    await service.broker.delete_mailbox("default", "gone")
    slow.confirm()
    await slow.got(count + 2)
    state = {entry["name"]: entry for entry in objects(slow)}
    assert len(state) == count + 2
    assert state["often"]["desc"] == "49"
    assert state["gone"]["deleted"]


@pytest.mark.rule("E10", "A8")
async def test_a_change_at_one_instance_is_told_at_another(service: Service, pushes: Pushes) -> None:
    async with pushes_of(service) as two:
        subscribers = [await at.subscribe("PUBLIC.LIST") for at in (pushes, two)]
        await service.create("board", public=True)
        for subscriber in subscribers:
            await subscriber.got(1)


@pytest.mark.rule("E10", "E7")
async def test_a_queue_shares_the_changes(service: Service, pushes: Pushes) -> None:
    members = [await pushes.subscribe("PUBLIC.LIST", "watchers") for _ in range(2)]
    for number in range(10):
        await service.create(f"b{number}", public=True)
    await until(lambda: sum(len(member.messages) for member in members) >= 10)
    assert sorted(names(members[0]) + names(members[1])) == [f"b{number}" for number in range(10)]
    assert [len(member.messages) for member in members] == [5, 5]


@pytest.mark.rule("E10", "E11")
async def test_the_python_library_gets_its_shape(service: Service, pushes: Pushes) -> None:
    await service.create("board", public=True)
    subscriber = await pushes.subscribe("MAILBOX.MSG.public.*", python=True)
    await subscriber.got(1)
    [told] = objects(subscriber)
    assert json.loads(base64.b64decode(told["payload"])) == (await listed(service))[0]


@pytest.mark.rule("E10", "A1")
async def test_the_mailbox_public_is_read_only(service: Service) -> None:
    assert await service.query("public") == []
    token = await service.create("board.one", public=True, tags=["a"])
    await service.create("board.two", public=True, tags=["b"])
    for found in (
        await service.query("public"),
        (await service.done("MAILBOX.LIST.public"))["messages"],
        await service.fetch("public"),
        await service.fetch("public", group_name="g"),
    ):
        assert [json.loads(base64.b64decode(each["payload"])) for each in found] == await listed(service)
        assert [each["key"] for each in found] == ["board.one", "board.two"]
    assert [each["key"] for each in await service.query("public", tag="b")] == ["board.two"]
    for subject, body in {
        "MSG.SEND.public": b"x",
        "MAILBOX.MSG.public": b"x",
        "MAILBOX.MSG.public.normal": b"x",
        "INBOX.public": b"x",
        "MSG.DELETE.public.0": None,
        "MAILBOX.DELETE.public.0": None,
        "MAILBOX.CREATE": {"name": "public"},
        "MAILBOX.UPDATE.public": {"token": token, "desc": "mine"},
        "MAILBOX.QUERY.public": {"token": token},
    }.items():
        assert (await service.ask(subject, body))["error"], subject
    assert len(await service.query("public")) == 2


@pytest.mark.rule("A6", "E10")
async def test_each_tenant_has_a_list_of_its_own(tmp_path: Path) -> None:
    async with serving_two(tmp_path) as (service, ann, bob), pushes_of(service) as pushes:
        subscribers = [await pushes.subscribe("PUBLIC.LIST", tenant=each) for each in ("acme", "globex")]
        await service.ask("MAILBOX.CREATE", {"name": "ours", "public": True}, client=ann)
        await service.ask("MAILBOX.CREATE", {"name": "theirs", "public": True}, client=bob)
        for subscriber, name in zip(subscribers, ("ours", "theirs"), strict=True):
            await subscriber.got(1)
            assert names(subscriber) == [name]
