"""What operators see of NATS clients, and disconnecting them: a running service with two tenants."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest

from mediator.nats.client import ClientInfo
from mediator.nats.door import MAX_NAME, MAX_RECENT, RecentRequests
from tests.harness.app import TENANTS, App, app
from tests.harness.waiting import until

TOKENS = {role: f"token-of-a-{role}-role" for role in ("read", "operate")}
OPERATORS = {"tokens": [{"name": role, "token": token, "roles": [role]} for role, token in TOKENS.items()]}
V1 = "/api/v1"


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[App]:
    async with app(tmp_path, tenants=TENANTS, operators=OPERATORS) as made:
        yield made


async def listed(service: App, path: str = "/nats/clients", role: str = "read") -> dict[str, Any]:
    answer = await service.call("GET", V1 + path, token=TOKENS[role])
    assert answer.status == 200, answer.data
    return answer.json


async def test_clients_are_listed_with_what_is_known_of_them(service: App) -> None:
    named = await nats.connect(service.service.nats_url, user="ada", password="pw-ada", name="order shop")
    try:
        await named.request("$mq9.AI.MAILBOX.CREATE", b'{"name": "box"}', timeout=5)
        await service.done("MAILBOX.CREATE", {"name": "box"}, "bob")
        found = await listed(service)
        assert (found["total"], found["gateway"]) == (2, True)
        by_tenant = {each["tenant"]: each for each in found["clients"]}
        acme = by_tenant["acme"]
        assert (acme["name"], acme["user"], acme["state"], acme["subscriptions"]) == ("order shop", "ada", "ok", 0)
        assert acme["address"].startswith("127.0.0.1:")
        assert (await listed(service, "/nats/clients?tenant=globex"))["clients"] == [by_tenant["globex"]]
        assert len((await listed(service, "/nats/clients?skip=1&limit=1"))["clients"]) == 1
    finally:
        await named.close()
    await until(lambda: gone(service), what="the client has gone")


async def gone(service: App) -> bool:
    return bool((await listed(service))["total"] == 1)


@pytest.mark.rule("A6", "A10")
async def test_a_mailbox_tells_who_fills_and_reads_it(service: App) -> None:
    made = await service.done("MAILBOX.CREATE", {"name": "box"}, "ada")
    await service.done("MAILBOX.CREATE", {"name": "box"}, "bob")
    for address in ("box", made["send_address"]):
        await service.done(f"MSG.SEND.{address}", b"x", "ada")
    await service.done("MSG.FETCH.box", {"group_name": "g", "config": {"max_wait_ms": 0}}, "bob")
    client = await service.nats("ada")
    await client.subscribe("$mq9.AI.MAILBOX.MSG.box.*", queue="workers")
    await client.flush()
    of_ada = (await listed(service, "/mailboxes/box/clients?tenant=acme"))["clients"]
    assert [(each["action"], each["user"], each["queue"], each["requests"]) for each in of_ada] == [
        ("sends", "ada", "", 2),
        ("subscribes", "ada", "workers", None),
    ]
    [known] = {each["client"] for each in of_ada}
    assert known in {each["client"] for each in (await listed(service))["clients"]}
    [of_bob] = (await listed(service, "/mailboxes/box/clients?tenant=globex"))["clients"]
    assert (of_bob["action"], of_bob["user"]) == ("fetches", "bob")
    assert made["send_address"] not in str(of_ada)


async def test_a_client_is_disconnected_and_who_may_not_is_refused(service: App) -> None:
    closed = asyncio.Event()

    async def on_close() -> None:
        closed.set()

    victim = await nats.connect(
        service.service.nats_url,
        user="ada",
        password="pw-ada",
        allow_reconnect=False,
        closed_cb=on_close,
    )
    await service.done("MAILBOX.CREATE", {"name": "box"}, "bob")
    ids = {each["tenant"]: each["client"] for each in (await listed(service))["clients"]}
    path = f"{V1}/nats/clients/{ids['acme']}"
    assert (await service.call("DELETE", path)).status == 401
    assert (await service.call("DELETE", path, token=TOKENS["read"])).status == 403
    assert victim.is_connected
    answer = await service.call("DELETE", path, token=TOKENS["operate"])
    assert answer.json == {"client": ids["acme"], "disconnected": 1}
    await asyncio.wait_for(closed.wait(), 5)
    assert "disconnected by an operator" in str(victim.last_error)
    again = await service.call("DELETE", path, token=TOKENS["operate"])
    assert again.json["disconnected"] == 0
    assert [each["client"] for each in (await listed(service))["clients"]] == [ids["globex"]]
    entries = (await listed(service, "/audit?operation=client-disconnect"))["entries"]
    assert [(each["result"], each["fields"]) for each in reversed(entries)] == [
        ("not_allowed", {"client": ids["acme"]}),
        ("ok", {"client": ids["acme"]}),
        ("ok", {"client": ids["acme"]}),
    ]


class _Pending:
    def __init__(self, address: str) -> None:
        self.tenant, self.sent_to, self.tail, self.verb, self.started = "default", address, "", "SEND", 1e12


def test_what_is_remembered_of_clients_is_bounded() -> None:
    recent = RecentRequests()
    for number in range(MAX_RECENT + 1):
        recent.record(_Pending(f"box{number}"), ClientInfo("c", "n" * (MAX_NAME + 1)))  # type: ignore[arg-type]
    assert recent.of("default", {"box0"}) == []
    [last] = recent.of("default", {f"box{MAX_RECENT}"})
    assert last.client == ClientInfo("c", "n" * MAX_NAME)
    assert sum(bool(recent.of("default", {f"box{number}"})) for number in range(0, MAX_RECENT, 100)) == 50
