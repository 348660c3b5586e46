"""Copies that a rule posts to a URL: signed, in order, again until a 2xx, and into no private network."""

import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from mediator.forwarding.webhook import MAX_ATTEMPTS, Webhook
from mediator.http.guard import Guard
from mediator.mailboxes.copy_rule import CopyRule, new_secret
from mediator.mailboxes.forwarding import Attempt, Batch, OutgoingCopy
from mediator.mailboxes.rows import StoredMessage
from tests.harness.app import app
from tests.harness.waiting import until
from tests.harness.webhook import WebhookServer, signature, webhook_server
from tests.integration.test_admin_api import OPERATORS, Admin
from tests.integration.test_copies import RULES, send
from tests.integration.test_forwarding_nats import rule_of, waiting_in

LOCAL = {"networks": ["127.0.0.1/32"]}


@pytest.fixture
async def hook() -> AsyncIterator[WebhookServer]:
    async with webhook_server() as server:
        yield server


@asynccontextmanager
async def mediator(folder: Path, **options: Any) -> AsyncIterator[Admin]:
    async with app(folder, operators=OPERATORS, **{"forwarding": LOCAL, **options}) as service:
        yield Admin(service)


async def add(admin: Admin, url: str, **fields: Any) -> dict[str, Any]:
    await admin.app.done("MAILBOX.CREATE", {"name": "box"})
    return await admin.done("POST", RULES, {"name": "all", "to_url": url, **fields})  # type: ignore[no-any-return]


@pytest.mark.rule("C8")
async def test_copies_come_signed_and_in_order(tmp_path: Path, hook: WebhookServer) -> None:
    async with mediator(tmp_path) as admin:
        made = await add(admin, hook.url)
        for number in range(20):
            await send(admin.app, "MSG.SEND.box", str(number).encode(), tags="a,ü", reply_to="box")
        await until(lambda: len(hook.taken) == 20)
        assert [body for _, body in hook.taken] == [str(number).encode() for number in range(20)]
        for headers, body in hook.taken:
            assert headers["webhook-signature"] == signature(made["secret"], headers, body)
            assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
            assert made["to_address"] not in str(headers)
        assert len({headers["webhook-id"] for headers, _ in hook.taken}) == 20
        headers = hook.taken[3][0]
        assert (headers["mq9-copy-of"], headers["mq9-tags"], headers["mq9-reply-to"]) == ("box/3", "a,%C3%BC", "box")
        await until(lambda: _is_empty(admin, made["to_address"]))


async def _is_empty(admin: Admin, address: str) -> bool:
    return not await waiting_in(admin.app, address)


@pytest.mark.rule("C8")
async def test_no_sender_writes_headers_of_the_service_or_of_http(tmp_path: Path, hook: WebhookServer) -> None:
    async with mediator(tmp_path) as admin:
        await add(admin, hook.url)
        agent = await admin.app.nats()
        sent = {"webhook-id": "forged", "copy-of": "x/1", "Host": "evil", "Content-Length": "0"}
        await agent.request("$mq9.AI.MSG.SEND.box", b"body", timeout=30, headers=sent)
        await until(lambda: hook.taken)
        headers, body = hook.taken[0]
        assert body == b"body"
        assert headers["webhook-id"] != "forged"
        assert headers["Host"].startswith("127.0.0.1")
        assert (headers["mq9-copy-of"], headers["mq9-header-copy-of"]) == ("box/0", "x/1")


@pytest.mark.rule("C8")
async def test_what_fails_is_tried_again_before_what_follows(tmp_path: Path, hook: WebhookServer) -> None:
    hook.failures = [500, 307]
    async with mediator(tmp_path) as admin:
        made = await add(admin, hook.url)
        for payload in (b"first", b"second"):
            await send(admin.app, "MSG.SEND.box", payload)
        await until(lambda: len(hook.taken) == 2)
        # The redirect was not followed.
        assert hook.tries == [b"first", b"first", b"first", b"second"]
        ids = [headers["webhook-id"] for headers, _ in hook.taken]
        assert ids[0] != ids[1]
        await until(lambda: _is_empty(admin, made["to_address"]))
        assert (await rule_of(admin))["failed"] == 2


@pytest.mark.rule("C8")
async def test_the_delay_survives_a_restart_and_nothing_is_lost(tmp_path: Path, hook: WebhookServer) -> None:
    hook.always = 503
    async with mediator(tmp_path) as admin:
        await add(admin, hook.url)
        await send(admin.app, "MSG.SEND.box", b"once")
        await until(lambda: _says(admin, "the URL answers with status 503"))
        findings = (await admin.done("GET", "/doctor"))["findings"]
        assert any("Rule all of tenant default does not forward" in one["text"] for one in findings)
    hook.always = 0
    async with mediator(tmp_path):
        await until(lambda: hook.taken)
        assert [body for _, body in hook.taken] == [b"once"]


async def _says(admin: Admin, text: str) -> bool:
    return (await rule_of(admin))["state"] == text  # type: ignore[no-any-return]


@asynccontextmanager
async def attempts(hook: WebhookServer) -> AsyncIterator[Callable[[StoredMessage], Awaitable[Attempt]]]:
    """Give what makes one attempt to post a message."""
    guard = Guard([ip_network("127.0.0.1/32")])
    webhook = Webhook(guard, lambda: 0)
    rule = CopyRule("default", "all", "to", to_url=hook.url, secret=new_secret(lambda count: b"k" * count))
    try:
        yield lambda message: webhook.send(rule, Batch([OutgoingCopy("id", message)]))
    finally:
        await guard.close()


def message(deliveries: int = 1, extra: bytes | None = None) -> StoredMessage:
    return StoredMessage(7, 2, 1, 0, None, None, None, None, extra, b"x", deliveries)


@pytest.mark.rule("C8")
@pytest.mark.parametrize("status", [400, 410, 500, 301])
async def test_the_last_attempt_makes_a_dead_letter(hook: WebhookServer, status: int) -> None:
    """By the attempt itself: between sixteen of them stand minutes."""
    hook.always = status
    async with attempts(hook) as send_once:
        for deliveries, refused in ((1, []), (MAX_ATTEMPTS - 1, []), (MAX_ATTEMPTS, [7])):
            attempt = await send_once(message(deliveries))
            assert (list(attempt.refused), attempt.problem) == (refused, f"the URL answers with status {status}")


@pytest.mark.rule("C8")
async def test_what_waits_behind_a_failure_counts_no_attempt(tmp_path: Path, hook: WebhookServer) -> None:
    hook.always = 500
    async with mediator(tmp_path) as admin:
        made = await add(admin, hook.url)
        for payload in (b"first", b"second"):
            await send(admin.app, "MSG.SEND.box", payload)

        async def deliveries() -> dict[int, int]:
            leases = await admin.done("GET", f"/mailboxes/{made['to_address']}/leases?group_name=copy.all")
            return {one["msg_id"]: one["deliveries"] for one in leases["leases"]}

        await until(lambda: hook.tries.count(b"first") == 3)
        assert b"second" not in hook.tries
        await until(lambda: _is_at(deliveries, {0: 3, 1: 0}), what="one more attempt of the first alone")


async def _is_at(deliveries: Callable[[], Awaitable[dict[int, int]]], wanted: dict[int, int]) -> bool:
    return await deliveries() == wanted


@pytest.mark.rule("C8")
async def test_no_header_ends_the_line(hook: WebhookServer) -> None:
    async with attempts(hook) as send_once:
        odd = {"ü b": "100% ü", "a": "1\r\nX-Admin: 1", "c: d\r\nX-Admin": "1"}
        assert (await send_once(message(extra=json.dumps({"h": odd}).encode()))).confirmed == [7]
    headers, _ = hook.taken[0]
    assert headers["mq9-header-%C3%BC%20b"] == "100%25 %C3%BC"
    assert headers["mq9-header-a"] == "1%0D%0AX-Admin: 1"
    assert "X-Admin" not in headers


@pytest.mark.rule("C8", "D10")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.0.0.1", "0x7f000001"])
async def test_no_rule_reaches_into_a_private_network(tmp_path: Path, hook: WebhookServer, host: str) -> None:
    async with mediator(tmp_path, forwarding={}) as admin:
        await add(admin, f"http://{host}:{hook.port}/hook/unguessed")
        await send(admin.app, "MSG.SEND.box", b"x")
        await until(lambda: _has_failed(admin))
        assert hook.tries == []
        # Neither the port's state nor the path is told.
        [rule] = (await admin.done("GET", RULES))["rules"]
        assert "unguessed" not in str(rule)
        assert (
            "private network" in rule["state"]
            or "no proper answer" in rule["state"]
            or "no connection" in rule["state"]
        )


async def _has_failed(admin: Admin) -> bool:
    return (await rule_of(admin))["failed"] > 0  # type: ignore[no-any-return]


@pytest.mark.rule("C8", "C6")
async def test_the_secret_is_shown_once_and_the_url_never(tmp_path: Path, hook: WebhookServer) -> None:
    async with mediator(tmp_path) as admin:
        for role in ("read", "operate", "read-payload"):
            refused = await admin.call("POST", RULES, {"name": "spy", "to_url": hook.url}, role)
            assert (refused.status, refused.json["code"]) == (403, "not_allowed")
        made = await add(admin, hook.url)
        hook.always = 500
        await send(admin.app, "MSG.SEND.box", b"x")
        await until(lambda: _has_failed(admin))
        assert made["secret"].startswith("whsec_")
        for path in (RULES, "/audit", "/doctor", "/settings", "/mailboxes", "/overview", "/log"):
            answer = await admin.call("GET", path)
            assert answer.status == 200, path
            told = answer.data.decode()
            assert made["secret"][6:] not in told, path
            assert "unguessed" not in told, path
        metrics = (await admin.app.call("GET", "/metrics")).data.decode()
        assert made["secret"] not in metrics
        assert "unguessed" not in metrics
        [rule] = (await admin.done("GET", RULES))["rules"]
        assert rule["to_url"] == f"http://127.0.0.1:{hook.port}"
        assert "secret" not in rule


@pytest.mark.rule("C8")
async def test_a_rule_of_the_settings_posts_and_is_masked(tmp_path: Path, hook: WebhookServer) -> None:
    secret = "whsec_" + base64.b64encode(b"s" * 24).decode()
    rule = {"name": "all", "to_address": "kept", "to_url": hook.url, "secret": secret}
    async with mediator(tmp_path, copies=[rule]) as admin:
        await admin.app.done("MAILBOX.CREATE", {"name": "box"})
        await send(admin.app, "MSG.SEND.box", b"x")
        await until(lambda: hook.taken)
        headers, body = hook.taken[0]
        assert headers["webhook-signature"] == signature(secret, headers, body)
        told = json.dumps(await admin.done("GET", "/settings"))
        assert secret not in told
        assert "unguessed" not in told


@pytest.mark.rule("C8")
@pytest.mark.parametrize(
    "url",
    ["ftp://a.example/", "https://", "a.example", "https://u:p@a.example/", "https://a.example:0/",
     "https://a.example:99999/", "https://a.example/" + "a" * 2048, "https://a.example/\r\nX: 1", "http://[::1/"],
)  # fmt: skip
async def test_a_wrong_url_names_its_field(tmp_path: Path, url: str) -> None:
    async with mediator(tmp_path) as admin:
        refused = await admin.call("POST", RULES, {"name": "all", "to_url": url})
        assert (refused.status, refused.json["error"].partition(":")[0]) == (400, "to_url")
        both = {"name": "all", "to_url": "https://a.example/", "to_subject": "a", "to_address": ""}
        assert (await admin.call("POST", RULES, both)).status == 400
        assert (await admin.done("GET", RULES))["rules"] == []
        assert (await admin.done("GET", "/mailboxes"))["mailboxes"] == []


@pytest.mark.rule("C8")
@pytest.mark.parametrize(
    "headers",
    [{"mine": "ü" * 4000}, {"mine": "a" * 9000}, {f"h{number}": "a" * 250 for number in range(60)}],
    ids=["encoded", "long", "many"],
)
async def test_headers_that_no_server_takes_hold_up_nothing(
    tmp_path: Path, hook: WebhookServer, headers: dict[str, str]
) -> None:
    async with mediator(tmp_path) as admin:
        made = await add(admin, hook.url)
        agent = await admin.app.nats()
        reply = await agent.request("$mq9.AI.MSG.SEND.box", b"poison", timeout=30, headers=headers)
        assert not json.loads(reply.data)["error"]
        await send(admin.app, "MSG.SEND.box", b"next")
        await until(lambda: hook.taken)
        assert hook.tries == [b"next"]

        async def is_dead() -> bool:
            dead = await admin.done("GET", f"/mailboxes/{made['to_address']}/dead?group_name=copy.all")
            return [one["msg_id"] for one in dead["messages"]] == [0]

        await until(is_dead)


@pytest.mark.rule("C7")
async def test_of_two_rules_on_a_mailbox_one_says_that_it_waits(tmp_path: Path, hook: WebhookServer) -> None:
    async with mediator(tmp_path) as admin:
        await admin.app.done("MAILBOX.CREATE", {"name": "kept"})
        made = await add(admin, hook.url, to_address="kept")
    second = {"name": "configured", "to_address": "kept", "to_url": hook.url, "secret": made["secret"]}
    async with mediator(tmp_path, copies=[second]) as admin:

        async def says() -> bool:
            rules = (await admin.done("GET", RULES))["rules"]
            states = {rule["name"]: rule["state"] for rule in rules}
            return states == {"all": "rule configured forwards from the same mailbox", "configured": "ok"}

        await until(says)
        findings = (await admin.done("GET", "/doctor"))["findings"]
        assert "copy_forward_default_all" in [one["code"] for one in findings]


@pytest.mark.rule("C1")
async def test_a_service_starts_with_a_rule_that_cannot_be_set_up(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        await service.done("MAILBOX.CREATE", {"name": "box"})
    rule = {"name": "all", "address": "audited.>", "to_address": "kept"}
    async with app(
        tmp_path, copies=[rule], tenants={"default": {"quotas": {"mailboxes": 1}}}, operators=OPERATORS
    ) as service:
        await send(service, "MSG.SEND.box", b"x")
        findings = (await Admin(service).done("GET", "/doctor"))["findings"]
        assert "copy_rule_default_all" in [one["code"] for one in findings]
