"""Mail copied by rule in a running service: by all ways that mail comes, by rules of the settings, and who may."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mediator.mailboxes.address import redact
from mediator.mailboxes.message import Door
from mediator.nats.frames import encode_body
from tests.harness.app import App, app
from tests.integration.test_admin_api import OPERATORS, Admin

RULES = "/copy-rules"
AUDIT = "audit.of.mail"


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Admin]:
    async with app(tmp_path, operators=OPERATORS) as service:
        for name in (AUDIT, "box"):
            await service.done("MAILBOX.CREATE", {"name": name})
        yield Admin(service)


async def copies(service: App, address: str = AUDIT) -> list[tuple[bytes, str]]:
    """Return the payloads of copies and what they are copies of."""
    found = (await service.done(f"MSG.QUERY.{address}", {"limit": 1000}))["messages"]
    return [(base64.b64decode(one["payload"]), one["headers"]["mq9-copy-of"]) for one in found]


async def send(service: App, subject: str, payload: bytes, **headers: str) -> None:
    client = await service.nats()
    named = {"mq9-" + name.replace("_", "-"): value for name, value in headers.items()} or None
    await client.request("$mq9.AI." + subject, payload, timeout=30, headers=named)


@pytest.mark.rule("C1", "C2", "E1", "S8", "E9")
async def test_mail_is_copied_whichever_way_it_comes(admin: Admin) -> None:
    service = admin.app
    await admin.done("POST", RULES, {"name": "all", "to_address": AUDIT})
    await send(service, "MSG.SEND.box", b"send", priority="urgent")
    await send(service, "MSG.BATCH.box", encode_body(b"", b"batch"))
    await send(service, "MAILBOX.MSG.box.critical", b"older edition")
    await send(service, "BROADCAST.billing.paid", b"kept", persist="true")
    await send(service, "BROADCAST.billing.paid", b"passing")
    await admin.done("POST", "/mailboxes/box/messages", {"payload": "operator"})
    found = await copies(service)
    assert found == [
        (b"send", "box/0"),
        (b"batch", "box/1"),
        (b"older edition", "box/2"),
        (b"kept", "billing.paid/0"),
        (b"operator", "box/3"),
    ]
    [rule] = (await admin.done("GET", RULES))["rules"]
    assert (rule["matched"], rule["copied"]) == (5, 5)
    metrics = (await service.call("GET", "/metrics")).data.decode()
    assert 'mediator_copies_total{outcome="copied",rule="all",tenant="default"} 5.0' in metrics


@pytest.mark.rule("C3")
async def test_a_refused_copy_is_said_to_the_sender_and_the_operator(admin: Admin) -> None:
    await admin.done("POST", RULES, {"name": "all", "to_address": AUDIT})
    await admin.done("DELETE", f"/mailboxes/{AUDIT}")
    reply = await admin.app.ask("MSG.SEND.box", b"x")
    assert reply["error"].startswith("copy_refused: rule all cannot copy this message: ")
    assert AUDIT not in str(reply)
    [rule] = (await admin.done("GET", RULES))["rules"]
    assert (rule["refused"], rule["state"]) == (1, "the mailbox for copies does not exist")
    found = (await admin.done("GET", "/doctor"))["findings"]
    assert any("Rule all of tenant default cannot copy mail" in one["text"] for one in found)
    await admin.done("DELETE", f"{RULES}/all")
    await admin.app.done("MSG.SEND.box", b"x")


@pytest.mark.rule("C1", "A6")
async def test_a_tenant_that_comes_again_has_no_old_rules(admin: Admin) -> None:
    for _ in range(2):
        await admin.done("POST", "/tenants", {"tenant": "acme"})
        await admin.done("POST", "/mailboxes", {"tenant": "acme", "name": "kept"})
        assert (await admin.done("GET", f"{RULES}?tenant=acme"))["rules"] == []
        rule = {"tenant": "acme", "name": "all", "to_address": "kept", "to_url": "https://example.org/hook"}
        await admin.done("POST", RULES, rule)
        await admin.done("DELETE", "/tenants/acme?delete_mail=true")


@pytest.mark.rule("C4")
@pytest.mark.parametrize("header", ["mq9-copy-of", "MQ9-Copy-Key"])
async def test_no_client_writes_the_headers_of_copies(admin: Admin, header: str) -> None:
    client = await admin.app.nats()
    for subject in (f"MSG.SEND.{AUDIT}", f"MAILBOX.MSG.{AUDIT}.critical", "BROADCAST.a.b"):
        reply = await client.request("$mq9.AI." + subject, b"forged", timeout=30, headers={header: "box/0"})
        assert b"the service alone writes it" in reply.data
    assert (await admin.app.done(f"MSG.QUERY.{AUDIT}", {}))["messages"] == []


@pytest.mark.rule("C6", "A7")
async def test_who_may_not_read_mail_adds_no_rule(admin: Admin) -> None:
    rule = {"name": "spy", "to_address": AUDIT, "address": "box"}
    assert (await admin.app.call("POST", "/api/v1" + RULES, rule, token="")).status == 401
    assert (await admin.app.call("DELETE", f"/api/v1{RULES}/spy", token="")).status == 401
    for role in ("read", "operate", "read-payload"):
        refused = await admin.call("POST", RULES, rule, role)
        assert (refused.status, refused.json["code"]) == (403, "not_allowed"), role
    await admin.app.done("MSG.SEND.box", b"between us")
    assert await copies(admin.app) == []
    await admin.done("POST", RULES, rule)
    for role in ("read", "read-payload"):
        refused = await admin.call("DELETE", f"{RULES}/spy", role=role)
        assert (refused.status, refused.json["code"]) == (403, "not_allowed"), role
    await admin.app.done("MSG.SEND.box", b"for the audit")
    assert len(await copies(admin.app)) == 1
    for role in ("read", "operate"):
        [shown] = (await admin.done("GET", RULES, role=role))["rules"]
        assert (shown["address"], shown["to_address"]) == (redact("box"), redact(AUDIT)), role
    [shown] = (await admin.done("GET", RULES, role="read-payload"))["rules"]
    assert (shown["address"], shown["to_address"]) == ("box", AUDIT)
    await admin.done("DELETE", f"{RULES}/spy", role="operate")
    entries = (await admin.done("GET", "/audit?operation=copy-rule-add"))["entries"]
    assert [each["result"] for each in entries] == ["ok", *["not_allowed"] * 3]
    assert {each["fields"]["to_address"] for each in entries} == {redact(AUDIT)}
    assert [each["result"] for each in (await admin.done("GET", "/audit?operation=copy-rule-remove"))["entries"]] == [
        "ok",
        *["not_allowed"] * 2,
    ]


@pytest.mark.rule("C1", "N3")
@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"name": "no spaces"}, "name"),
        ({"address": "shop.*"}, "address"),
        ({"to_address": "none.there"}, "none.there"),
        ({"tags": ["a" * 200]}, "tags"),
        ({"priorities": ["soon"]}, "priorities[0]"),
        ({"doors": ["smtp"]}, "doors[0]"),
        ({"when_full": "wait"}, "when_full"),
        ({"ttl_seconds": -1}, "ttl_seconds"),
        ({"tenant": "nobody"}, "nobody"),
    ],
)
async def test_a_wrong_rule_names_its_field(admin: Admin, wrong: dict[str, Any], field: str) -> None:
    refused = await admin.call("POST", RULES, {"name": "all", "to_address": AUDIT} | wrong)
    assert refused.status in (400, 404)
    assert field in refused.json["error"]
    assert (await admin.done("GET", RULES))["rules"] == []


@pytest.mark.rule("C1")
async def test_all_fields_of_a_rule_are_kept_over_a_restart(tmp_path: Path) -> None:
    full = {
        "name": "all", "address": "box.>", "tags": ["a", "b"], "priorities": ["urgent", "low"], "doors": [*Door][:2],
        "to_address": AUDIT, "headers_only": True, "when_full": "drop", "ttl_seconds": 60,
    }  # fmt: skip
    async with app(tmp_path, operators=OPERATORS) as service:
        made = await service.done("MAILBOX.CREATE", {"name": AUDIT})
        number = (await Admin(service).done("GET", f"/mailboxes/{made['mail_address']}"))["number"]
        await Admin(service).done("POST", RULES, full | {"to_address": f"id:{number}"})
    configured = [{"name": "more", "to_address": "made.at.start", "priorities": ["critical"]}]
    async with app(tmp_path, operators=OPERATORS, copies=configured) as service:
        [kept, more] = (await Admin(service).done("GET", RULES))["rules"]
        assert {name: kept[name] for name in full} == full
        assert (kept["origin"], more["origin"], more["state"]) == ("database", "settings", "ok")
        await service.done("MAILBOX.CREATE", {"name": "box"})
        await send(service, "MSG.SEND.box", b"now", priority="critical")
        await send(service, "MSG.SEND.box", b"later")
        assert await copies(service, "made.at.start") == [(b"now", "box/0")]
        refused = await Admin(service).call("DELETE", f"{RULES}/more")
        assert (refused.status, "is in the settings" in refused.json["error"]) == (400, True)
