"""A tenant is added, used, bounded, rotated and removed while others work, none of whose requests fails (A6, S7)."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from mediator.nats.accounts import TenantAccount, snippet
from mediator.operate.control import send_command
from tests.harness.postgres import Server
from tests.harness.service import Service, Services
from tests.harness.waiting import until

SECONDS = 40.0
NO_DIDCOMM = {"MEDIATOR_DIDCOMM__ENABLED": "false"}
"""Instances on one database would have to share the key of DIDComm."""
PREFIX = "$mq9.AI."


async def told(service: Service, operation: str, **fields: Any) -> dict[str, Any]:
    """Ask for an operation that succeeds."""
    answer = await send_command(service.data_dir, operation, within=SECONDS, **fields)
    assert answer["error"] == "", answer
    return answer


async def ask(client: Client, verb: str, body: bytes = b"{}") -> dict[str, Any]:
    answer = json.loads((await client.request(PREFIX + verb, body, timeout=SECONDS)).data)
    assert isinstance(answer, dict)
    return answer


@contextlib.asynccontextmanager
async def logged_in(service: Service, password: str | None = None, user: str = "ann") -> AsyncIterator[Client]:
    """Connect, once: who is disconnected stays so."""

    async def ignore(_error: Exception) -> None:
        pass

    login = {} if password is None else {"user": user, "password": password}
    client = await nats.connect(service.nats_url, allow_reconnect=False, error_cb=ignore, **login)
    try:
        yield client
    finally:
        await client.close()


class Others:
    """Clients of other tenants: requests, a subscription to stored mail, and HTTP, until :meth:`end`."""

    def __init__(self, service: Service, token: str) -> None:
        self.rounds = self.calls = self.pushed = 0
        self._service = service
        self._headers = {"Authorization": f"Bearer {token}"}
        self._ended = asyncio.Event()

    async def work(self) -> None:
        """Send, fetch and acknowledge; every reply must be a success, on connections that never break."""
        async with logged_in(self._service) as client, logged_in(self._service) as subscriber:
            assert (await ask(client, "MAILBOX.CREATE", b'{"name":"others"}'))["error"] == ""
            await subscriber.subscribe(f"{PREFIX}MAILBOX.MSG.others.*", cb=self._note)
            await subscriber.flush(timeout=30)
            while not self._ended.is_set():
                number = (await ask(client, "MSG.SEND.others", b"x"))["msg_id"]
                found = await ask(client, "MSG.FETCH.others", b'{"group_name":"g","deliver":"earliest"}')
                assert [message["msg_id"] for message in found["messages"]] == [number]
                done = await ask(client, "MSG.ACK.others", json.dumps({"group_name": "g", "msg_id": number}).encode())
                assert done["error"] == ""
                self.rounds += 1
            await until(lambda: self.pushed == self.rounds, what="all was pushed")

    async def call(self) -> None:
        """Ask the registry over one HTTP connection."""
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self._service.http_port}") as session:
            while not self._ended.is_set():
                async with session.get("/agents", headers=self._headers) as answer:
                    assert answer.status == 200
                self.calls += 1

    async def _note(self, _message: Msg) -> None:
        self.pushed += 1

    async def go_on(self) -> None:
        """Wait until they have done something since."""
        rounds, calls = self.rounds, self.calls
        await until(lambda: self.rounds > rounds + 1 and self.calls > calls + 1, what="others go on")

    def end(self) -> None:
        self._ended.set()


@pytest.mark.rule("A6", "S7")
async def test_a_tenant_comes_and_goes_while_others_work(services: Services) -> None:
    service = await services.running()
    shop = await told(service, "tenant-add", tenant="shop", tokens=["t"])
    others = Others(service, shop["tokens"]["t"])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(others.work())
        tasks.create_task(others.call())
        await others.go_on()
        await live_and_die(service, others)
        await others.go_on()
        others.end()
    assert service.complaints() == []


async def live_and_die(service: Service, others: Others) -> None:
    fields = {"tenant": "acme", "users": ["ann"], "tokens": ["t"], "quotas": {"messages": 2}}
    made = await told(service, "tenant-add", **fields)
    old, token = made["passwords"]["ann"], made["tokens"]["t"]
    async with logged_in(service, old) as ann:
        assert (await ask(ann, "MAILBOX.CREATE", b'{"name":"others"}'))["created"], "a mailbox of its own"
        assert [(await ask(ann, "MSG.SEND.others", b"x"))["msg_id"] for _ in range(2)] == [0, 1]
        refused = (await ask(ann, "MSG.SEND.others", b"x"))["error"]
        assert refused == "quota_exceeded: messages in the tenant, limit 2, in use 2"
        await told(service, "tenant-set", tenant="acme", quotas={"messages": None, "rate": 1, "burst": 1})
        replies = [await ask(ann, "MSG.SEND.others", b"x") for _ in range(20)]
        assert any("messages a second in the tenant, limit 1" in reply["error"] for reply in replies)
        assert await status(service, token) == 200
        await others.go_on()

        rotated = await told(service, "tenant-rotate", tenant="acme", grace_ms=3_600_000)
        new = rotated["passwords"]["ann"]
        async with logged_in(service, new) as newer, logged_in(service, old) as older:
            for client in (ann, newer, older):
                assert (await ask(client, "MSG.QUERY.others"))["error"] == ""
            for valid in (token, rotated["tokens"]["t"]):
                assert await status(service, valid) == 200
            # A user and a token at once: the former ones end with their connections.
            await told(service, "tenant-user-add", tenant="acme", user="bob")
            await told(service, "tenant-user-remove", tenant="acme", user="ann")
            for client in (ann, newer, older):
                await until(lambda client=client: client.is_closed, what="a removed user is disconnected")
        await others.go_on()

    bob = (await told(service, "tenant-rotate", tenant="acme", users=["bob"]))["passwords"]["bob"]
    async with logged_in(service, bob, "bob") as client:
        assert (await ask(client, "MSG.QUERY.others"))["error"] == ""
        gone = await told(service, "tenant-remove", tenant="acme")
        assert (gone["mailboxes"], gone["deleted"]) == (1, 0)
        await until(lambda: client.is_closed, what="users of a removed tenant are disconnected")
    assert await status(service, rotated["tokens"]["t"]) == 401
    assert (await told(service, "tenant-remove", tenant="acme", delete_mail=True))["deleted"] == 1


async def status(service: Service, token: str) -> int:
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{service.http_port}/agents"
        async with session.get(url, headers={"Authorization": f"Bearer {token}"}) as answer:
            return answer.status


async def accepts(service: Service, user: str, password: str) -> bool:
    """Whether a login is good; by hand, since nats-py leaves the socket of a refused connection open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.nats_port)
    login = {"verbose": False, "user": user, "pass": password}
    writer.write(f"CONNECT {json.dumps(login)}\r\nPING\r\n".encode())
    try:
        await reader.readline()
        return (await reader.readline()) == b"PONG\r\n"
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.postgres
@pytest.mark.rule("A6")
async def test_another_instance_with_its_own_nats_server_follows(services: Services, postgres: Server) -> None:
    with postgres.database(migrated=True) as url:
        one, two = (services.new(name, database_url=url) for name in ("one", "two"))
        for service in (one, two):
            service.environment |= NO_DIDCOMM
            await service.serve()
        password = (await told(one, "tenant-add", tenant="acme", users=["ann"]))["passwords"]["ann"]

        await until(lambda: accepts(two, "ann", password), what="the tenant is at the other instance too")
        async with logged_in(two, password) as ann:
            assert (await ask(ann, "MAILBOX.CREATE"))["created"]
            await told(one, "tenant-remove", tenant="acme")
            await until(lambda: ann.is_closed, what="its user is disconnected there")
        assert (two.complaints(), one.complaints()) == ([], [])
        services.close()


@pytest.mark.postgres
@pytest.mark.rule("A6", "S7")
async def test_instances_behind_a_server_with_accounts(services: Services, postgres: Server) -> None:
    accounts = snippet([TenantAccount("default"), TenantAccount("acme")])
    logins = {"DEFAULT": "d", "ACME": "a"}
    for account, user in logins.items():
        accounts = accounts.replace(
            f'  "{account}": {{\n', f'  "{account}": {{\n    users: [ {{user: "{user}", password: "{user}"}} ]\n'
        )
    config = services.folder / "server.conf"
    config.write_text(accounts.replace("$MQ9_PASSWORD", '"mq9"'))
    server = await services.nats_server("-c", str(config))
    settings = {
        **NO_DIDCOMM,
        "MEDIATOR_NATS_ACCOUNTS": "true",
        "MEDIATOR_TENANTS": '{"default": {"accounts": ["DEFAULT"]}}',
    }
    with postgres.database(migrated=True) as url:
        both = [
            services.new(name, database_url=url, nats_url=server.replace("://", "://mediator:mq9@"))
            for name in ("one", "two")
        ]
        for service in both:
            service.environment |= settings
            await service.serve()
        async with contextlib.AsyncExitStack() as stack:
            clients = {user: await nats.connect(server, user=user, password=user) for user in logins.values()}
            for client in clients.values():
                stack.push_async_callback(client.close)
            await told(both[0], "tenant-add", tenant="acme", accounts=["ACME"], quotas={"mailboxes": 1})

            async def known_to_all() -> bool:
                listed = [await told(service, "tenant-list") for service in both]
                return all("acme" in [one["name"] for one in view["tenants"]] for view in listed)

            await until(known_to_all)
            assert (await ask(clients["a"], "MAILBOX.CREATE", b'{"name":"box"}'))["created"]
            for _ in range(8):
                assert "limit 1, in use 1" in (await ask(clients["a"], "MAILBOX.CREATE"))["error"]
                assert (await ask(clients["d"], "MAILBOX.CREATE"))["created"]
            await told(both[1], "tenant-remove", tenant="acme")

            async def refused_by_all() -> bool:
                replies = [await ask(clients["a"], "MSG.QUERY.box") for _ in range(8)]
                return all("no tenant" in reply["error"] for reply in replies)

            await until(refused_by_all)
            assert (await ask(clients["d"], "MAILBOX.CREATE"))["created"]
        services.close()
