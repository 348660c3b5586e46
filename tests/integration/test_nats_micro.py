"""NATS's own tools find the service, and a tenant learns of its own requests only (N12)."""

import json
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.errors import NoRespondersError
from nats.micro import add_service
from nats.micro.service import EndpointStats, ServiceConfig

from mediator import __version__
from mediator.nats.accounts import AccountUser, TenantAccount
from tests.harness.door import PATIENCE, serving

ACCOUNTS = (
    TenantAccount("acme", (AccountUser("ann", "secret-a"),)),
    TenantAccount("globex", (AccountUser("bob", "secret-b"),)),
    TenantAccount("other", (AccountUser("eve", "secret-e"),)),
)
MAPPED = {"ACME": "acme", "GLOBEX": "globex"}


async def ask(client: Client, question: str) -> dict[str, Any]:
    answer = await client.request(f"$SRV.{question}", b"", timeout=PATIENCE)
    return dict(json.loads(answer.data))


async def figures(client: Client) -> dict[str, EndpointStats]:
    """Return what nats-py reads in the figures that a client gets."""
    stats = await ask(client, "STATS.mq9")
    return {each["name"]: EndpointStats.from_dict({"data": None, **each}) for each in stats["endpoints"]}


@pytest.mark.rule("N12")
async def test_a_client_finds_the_service_and_its_verbs(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        client = await service.client()
        pong = await ask(client, "PING")
        assert (pong["type"], pong["name"]) == ("io.nats.micro.v1.ping_response", "mq9")
        assert pong["version"] == __version__
        info = await ask(client, f"INFO.mq9.{pong['id']}")
        subjects = {each["name"]: each["subject"] for each in info["endpoints"]}
        assert subjects["SEND"] == "$mq9.AI.MSG.SEND.>"
        assert subjects["CREATE"] == "$mq9.AI.MAILBOX.CREATE"
        assert {each["queue_group"] for each in info["endpoints"]} == {"mediator"}


@pytest.mark.rule("N12")
async def test_requests_errors_and_times_are_counted(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.create("task")
        for _ in range(3):
            assert (await service.ask("MSG.SEND.task", b"1"))["error"] == ""
        assert (await service.ask("MSG.SEND.nosuch", b"1"))["error"]
        found = await figures(await service.client())
        assert (found["SEND"].num_requests, found["SEND"].num_errors) == (4, 1)
        assert found["SEND"].last_error == "mailbox_not_found"
        assert found["SEND"].average_processing_time == found["SEND"].processing_time // 4 > 0
        assert (found["CREATE"].num_requests, found["CREATE"].last_error) == (1, "")
        assert found["FETCH"].num_requests == found["FETCH"].average_processing_time == 0


@pytest.mark.rule("N12", "A6")
async def test_a_tenant_learns_of_its_own_requests_only(tmp_path: Path) -> None:
    async with serving(tmp_path, tenants=ACCOUNTS, mapped=MAPPED, names=["acme", "globex"]) as service:
        ann, bob = await service.client("ann", "secret-a"), await service.client("bob", "secret-b")
        await service.ask("MAILBOX.CREATE", {"name": "task"}, client=ann)
        assert (await figures(ann))["CREATE"].num_requests == 1
        assert (await figures(bob))["CREATE"].num_requests == 0
        # What a client names in the subject is of its own account, whichever it writes.
        for subject in ("mq9.ACME.$SRV.STATS.mq9", "mq9.ACME.$SRV.STATS"):
            with pytest.raises(NoRespondersError):
                await bob.request(subject, b"", timeout=PATIENCE)


@pytest.mark.rule("N12", "A6")
async def test_an_account_of_no_tenant_gets_no_figures(tmp_path: Path) -> None:
    async with serving(tmp_path, tenants=ACCOUNTS, mapped=MAPPED, names=["acme", "globex"]) as service:
        eve = await service.client("eve", "secret-e")
        inbox = eve.new_inbox()
        answers = await eve.subscribe(inbox)
        for verb in ("PING", "INFO", "STATS"):
            await eve.publish(f"$SRV.{verb}", b"", reply=inbox)
        # Requests of one connection are answered in their order: the three would have come before this one.
        await service.ask("MAILBOX.CREATE", {}, client=eve)
        assert answers.pending_msgs == 0


@pytest.mark.rule("N12", "N10")
async def test_services_of_clients_are_found_beside_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        client = await service.client()
        made = await add_service(client, ServiceConfig(name="reverser", version="1.0.0", description="turns round"))
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        await client.publish("$SRV.PING", b"", reply=inbox)
        found = {json.loads((await answers.next_msg(PATIENCE)).data)["name"] for _ in range(2)}
        assert found == {"mq9", "reverser"}
        assert (await ask(client, "PING.reverser"))["name"] == "reverser"
        await made.stop()
        for question in ("PING.reverser", "INFO.nosuch"):
            with pytest.raises(NoRespondersError):
                await ask(client, question)


@pytest.mark.rule("N12")
async def test_a_service_that_stops_is_found_no_more(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        client = await service.client()
        await ask(client, "PING.mq9")
        await service.stop(PATIENCE)
        with pytest.raises(NoRespondersError):
            await ask(client, "PING.mq9")
