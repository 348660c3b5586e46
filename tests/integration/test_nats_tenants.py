"""Tenants at the NATS door: the account decides, and nothing a client writes (A6)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from mediator.nats.accounts import AccountUser, TenantAccount
from tests.harness.door import EMPTY, Service, both_ways, ids, payloads, raw, serving

__all__ = ["both_ways"]
pytestmark = pytest.mark.usefixtures("both_ways")

ACCOUNTS = (
    TenantAccount("default"),
    TenantAccount("acme", (AccountUser("ann", "secret-a"),)),
    TenantAccount("globex", (AccountUser("bob", "secret-b"),)),
)
REFUSED = "no tenant: this account is not mapped to one"


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    mapped = {"ACME": "acme", "GLOBEX": "globex"}
    async with serving(tmp_path, tenants=ACCOUNTS, mapped=mapped, names=["acme", "globex"]) as running:
        yield running


@pytest.fixture
async def ann(service: Service) -> Client:
    return await service.client("ann", "secret-a")


@pytest.fixture
async def bob(service: Service) -> Client:
    return await service.client("bob", "secret-b")


@pytest.mark.rule("A6")
async def test_the_same_address_in_two_tenants_is_two_mailboxes(service: Service, ann: Client, bob: Client) -> None:
    for client in (ann, bob):
        assert (await service.ask("MAILBOX.CREATE", {"name": "task"}, client=client))["created"] is True
    assert (await service.ask("MSG.SEND.task", b"for ann", client=ann))["msg_id"] == 0
    assert (await service.ask("MSG.SEND.task", b"for bob", client=bob))["msg_id"] == 0
    assert (await service.ask("MSG.SEND.task", b"more", {"mq9-dedup-id": "d"}, client=bob))["msg_id"] == 1
    assert (await service.ask("MSG.SEND.task", b"more", {"mq9-dedup-id": "d"}, client=ann))["msg_id"] == 1
    for client, expected in ((ann, [b"for ann", b"more"]), (bob, [b"for bob", b"more"])):
        body = {"group_name": "g", "deliver": "earliest"}
        assert payloads((await service.ask("MSG.FETCH.task", body, client=client))["messages"]) == expected
    await service.ask("MSG.ACK.task", {"group_name": "g", "msg_id": 1}, client=ann)
    assert (await service.ask("MSG.DELETE.task.0", client=ann))["deleted"] is True
    reply = await service.ask("MSG.FETCH.task", {"group_name": "g"}, client=bob)
    assert ids(reply["messages"]) == [0, 1], "what one does moves nothing of the other"


@pytest.mark.rule("A6", "N1")
async def test_an_account_that_is_not_mapped_is_refused(service: Service) -> None:
    requests = {
        "MAILBOX.CREATE": "MAILBOX.CREATE",
        "MAILBOX.UPDATE": "MAILBOX.UPDATE.task",
        "MSG.SEND": "MSG.SEND.task",
        "MSG.BATCH": "MSG.BATCH.task",
        "MSG.FETCH": "MSG.FETCH.task",
        "MSG.ACK": "MSG.ACK.task",
        "MSG.NACK": "MSG.NACK.task",
        "MSG.EXTEND": "MSG.EXTEND.task",
        "MSG.QUERY": "MSG.QUERY.task",
        "MSG.DELETE": "MSG.DELETE.task.0",
    }
    for verb, subject in requests.items():
        assert await service.ask(subject, {}) == {"error": REFUSED, **EMPTY[verb]}, verb


@pytest.mark.rule("A6")
async def test_no_header_and_no_body_selects_a_tenant(service: Service, ann: Client, bob: Client) -> None:
    await service.ask("MAILBOX.CREATE", {"name": "task"}, client=ann)
    forged = '{"acc": "ACME", "account": "ACME"}'
    for headers in ({"Nats-Request-Info": forged}, {"tenant": "acme", "mq9-tenant": "acme"}):
        reply = await service.ask("MSG.SEND.task", b"", headers, client=bob)
        assert reply["error"] == "mailbox task does not exist"
    body = {"tenant": "acme", "account": "ACME"}
    reply = await service.ask("MSG.QUERY.task", body, client=bob)
    assert reply["error"] == "mailbox task does not exist"
    async with raw(service) as wire:
        for subject in (b"mq9.ACME.$mq9.AI.MSG.SEND.task", b"mq9out.ACME.x", b"$mq9.AI.MSG.SEND.task\x0b1"):
            reply_or_none = await wire.ask(subject, b"")
            assert reply_or_none is None or reply_or_none["error"] == REFUSED, subject
    assert (await service.ask("MSG.QUERY.task", {}, client=ann))["messages"] == []


@pytest.mark.rule("A6", "N9")
async def test_a_reader_learns_nothing_of_the_sender(service: Service, ann: Client) -> None:
    await service.ask("MAILBOX.CREATE", {"name": "task"}, client=ann)
    await service.ask("MSG.SEND.task", b"", {"own": "1"}, client=ann)
    await service.ask("MSG.SEND.task", b"", client=ann)
    one, two = (await service.ask("MSG.QUERY.task", {}, client=ann))["messages"]
    assert one["headers"] == {"own": "1"}
    assert set(two) == {"msg_id", "payload", "priority", "create_time"}


@pytest.mark.rule("A6")
@pytest.mark.parametrize("names", [[], ["default"]])
async def test_alone_everybody_is_the_default_tenant(tmp_path: Path, names: list[str]) -> None:
    async with serving(tmp_path, tenants=ACCOUNTS, names=names) as service:
        ann = await service.client("ann", "secret-a")
        await service.create("task")
        assert (await service.ask("MSG.SEND.task", b"1", client=ann))["msg_id"] == 0
        assert payloads(await service.query()) == [b"1"]


@pytest.mark.rule("A6")
async def test_a_mapped_account_reaches_its_tenant(tmp_path: Path) -> None:
    mapped = {"DEFAULT": "acme", "ACME": "acme", "GLOBEX": "default"}
    async with serving(tmp_path, tenants=ACCOUNTS, mapped=mapped, names=["acme", "default"]) as service:
        await service.create("task")
        ann = await service.client("ann", "secret-a")
        bob = await service.client("bob", "secret-b")
        assert (await service.ask("MSG.SEND.task", b"1", client=ann))["error"] == ""
        assert (await service.ask("MSG.SEND.task", b"1", client=bob))["error"] == "mailbox task does not exist"
        assert await service.broker.read(lambda tx, now: tx.mailboxes.find("acme", "task")) is not None
