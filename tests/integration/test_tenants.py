"""Tenants that come and go while the service runs: their wallets, and their connections to the gateway (A6, S7)."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from yarl import URL

from mediator.operate.control import send_command
from pickup.client import Holder
from pickup.client.plaintext import ClientError, NoAnswerError
from tests.harness.app import App
from tests.harness.app import app as running
from tests.harness.waiting import until


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    async with running(tmp_path, didcomm={"enabled": True}) as app:
        yield app


async def told(folder: Path, operation: str, **fields: Any) -> dict[str, Any]:
    answer = await send_command(folder, operation, **fields)
    assert answer["error"] == "", answer
    return answer


async def use(folder: Path, tenant: str) -> dict[str, int]:
    listed = (await told(folder, "tenant-list"))["tenants"]
    (found,) = [one["use"] for one in listed if one["name"] == tenant]
    return dict(found)


@pytest.mark.rule("A6", "S7")
async def test_wallets_of_a_tenant_that_comes_and_goes(app: App, tmp_path: Path) -> None:
    await told(tmp_path, "tenant-add", tenant="acme", quotas={"sockets": 1, "mailboxes": 1})
    invitation = (await told(tmp_path, "invite", tenant="acme"))["v2_url"]
    async with await Holder.connect(invitation) as one, await Holder.connect(invitation) as other:
        await one.mediate()
        await other.mediate()
        assert (await use(tmp_path, "acme"))["mailboxes"] == 0, "those of wallets have a bound of their own"
        async with one.socket():
            assert (await one.status()).count == 0
            assert (await use(tmp_path, "acme"))["sockets"] == 1
            async with other.socket():
                with pytest.raises(NoAnswerError):
                    await other.status()
            assert (await other.status()).count == 0, "POSTs are no sockets"
            await told(tmp_path, "tenant-remove", tenant="acme")

            async def closed() -> bool:
                return (await use(tmp_path, "acme"))["sockets"] == 0

            await until(closed, what="the socket of a removed tenant is closed")
            with pytest.raises(NoAnswerError):
                await one.status()
        with pytest.raises(ClientError):
            await other.status()


async def logged_in(app: App, password: str, **options: Any) -> Client:
    """Connect without reconnecting; errors are left aside."""

    async def ignore(_error: Exception) -> None:
        pass

    login = {"user": "ann", "password": password, "allow_reconnect": False, "connect_timeout": 30, "error_cb": ignore}
    return await nats.connect(app.service.nats_url, **{**login, **options})


async def everything_said(app: App, password: str) -> bytes:
    """Log in by hand, and return what comes until the connection is closed."""
    url = URL(app.service.nats_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"CONNECT %b\r\nPING\r\n" % json.dumps({"verbose": False, "user": "ann", "pass": password}).encode())
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.rule("A6", "S7")
async def test_connections_and_passwords_at_the_gateway(app: App, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"tenant": "acme", "users": ["ann"], "quotas": {"sockets": 2}}
    old = (await told(tmp_path, "tenant-add", **fields))["passwords"]["ann"]
    first = await logged_in(app, old)
    new = (await told(tmp_path, "tenant-rotate", tenant="acme", grace_ms=3_600_000))["passwords"]["ann"]
    second = await logged_in(app, new)
    for client in (first, second):
        assert b'"created":true' in (await client.request("$mq9.AI.MAILBOX.CREATE", b"{}", timeout=30)).data
    assert (await use(tmp_path, "acme"))["sockets"] == 2

    told_why = b"-ERR 'quota_exceeded: sockets of the tenant, limit 2, in use 2'"
    assert told_why in await everything_said(app, new)
    assert (await use(tmp_path, "acme"))["sockets"] == 2

    await second.close()
    await told(tmp_path, "tenant-user-remove", tenant="acme", user="ann")
    await until(lambda: first.is_closed, what="a removed user is disconnected")
    for password in (old, new):
        assert b"-ERR 'Authorization Violation'" in await everything_said(app, password)
