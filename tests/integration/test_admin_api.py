"""The admin API of a running service: each role on each endpoint, payloads, the audit log, and its document."""

import base64
import inspect
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jsonschema
import pytest
from openapi_spec_validator import validate

from docs.generators import admin_api
from mediator.cli import build_app
from mediator.errors import UnavailableError
from mediator.mailboxes import moving, settling
from mediator.mailboxes.address import redact
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.transaction import Transaction
from mediator.operate import message_operations
from mediator.operate.control import send_command
from mediator.operate.examples import ExampleWriter
from mediator.operate.operations import ROLES, Right, check_request
from tests.harness.app import Answer, App, app, card
from tests.harness.waiting import until
from tests.unit.test_cli import commands

TOKENS = {role: f"token-of-a-{role}-role" for role in ROLES}
OPERATORS = {"tokens": [{"name": f"{role}er", "token": token, "roles": [role]} for role, token in TOKENS.items()]}
V1 = "/api/v1"
PAYLOAD = b"what nobody but its readers may see"
FIELDS = defaultdict(lambda: "x", mail_address="box", msg_id="0", connection="1")
"""What stands in a path."""


class Admin:
    """Operators of one service."""

    def __init__(self, service: App) -> None:
        self.app = service
        self.document: dict[str, Any] = {}

    async def call(self, method: str, path: str, body: Any = None, role: str = "admin") -> Answer:
        return await self.app.call(method, V1 + path, body, token=TOKENS[role])

    async def done(self, method: str, path: str, body: Any = None, role: str = "admin") -> Any:
        answer = await self.call(method, path, body, role)
        assert answer.status == 200, answer.data
        return answer.json

    def endpoints(self) -> list[tuple[str, str, dict[str, Any]]]:
        return [
            (method.upper(), path, operation)
            for path, operations in self.document["paths"].items()
            for method, operation in operations.items()
        ]


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Admin]:
    async with app(tmp_path, operators=OPERATORS, didcomm={}) as service:
        made = Admin(service)
        made.document = await made.done("GET", "/openapi.json")
        yield made


async def test_each_role_is_held_to_its_rights_everywhere(admin: Admin) -> None:
    validate(admin.document)
    assert len(admin.endpoints()) > 30
    for method, path, operation in admin.endpoints():
        filled = path.format_map(FIELDS)
        # An unknown field is refused before anything is done, and after the right is known.
        query, body = ("?no-field=1", None) if method in {"GET", "DELETE"} else ("", {"no-field": 1})
        assert (await admin.app.call(method, V1 + filled + query, body)).status == 401
        for role, rights in ROLES.items():
            answer = await admin.call(method, filled + query, body, role)
            expected = (400, "bad_request") if Right(operation["x-right"]) in rights else (403, "not_allowed")
            assert (answer.status, answer.json["code"]) == expected, f"{role}: {method} {path}"


async def test_a_token_without_the_right_sees_no_payload(admin: Admin) -> None:
    await admin.app.done("MAILBOX.CREATE", {"name": "box"})
    await admin.done("POST", "/mailboxes/box/messages", {"payload": PAYLOAD.decode()})
    spent = {"group_name": "g", "deliver": "earliest", "config": {"ack_wait_ms": 1000, "max_deliver": 1}}
    assert (await admin.app.done("MSG.FETCH.box", spent))["messages"]

    async def dead() -> bool:
        listed = await admin.done("GET", "/mailboxes/box/dead?group_name=g", role="read-payload")
        return [base64.b64decode(one["payload_start"]) for one in listed["messages"]] == [PAYLOAD]

    await until(dead)
    shown = await admin.done("GET", "/mailboxes/box/messages/0", role="read-payload")
    assert base64.b64decode(shown["payload"]) == PAYLOAD
    forms = (PAYLOAD, base64.b64encode(PAYLOAD)[:-4])
    order = ["GET", "PATCH", "POST", "DELETE"]
    for method, path, _ in sorted(admin.endpoints(), key=lambda one: order.index(one[0])):
        for role in ("read", "operate"):
            answer = await admin.call(
                method, path.format_map(FIELDS), {} if method in {"POST", "PATCH"} else None, role
            )
            assert not any(form in answer.data for form in forms), f"{role}: {method} {path}"


@pytest.mark.rule("A7")
async def test_roles_without_payloads_see_no_whole_address(admin: Admin) -> None:
    made = await admin.app.done("MAILBOX.CREATE", {"retention": "until_ack"})
    own, to = made["mail_address"], made["send_address"]
    await admin.app.done(f"MSG.SEND.{own}", {"payload": "x"})
    await admin.app.done("AGENT.REGISTER", card(own, description=f"Write to {own}"))
    key = {"key": "did:key:z6MkpTHR8VNsBxYAAWHut2Geadd9jSwuBV8xRoAnwWsdvktH", "mail_address": own}
    await admin.done("POST", "/keys", key)
    invitation = (await admin.done("POST", "/invitations", {}))["id"]
    [listed] = (await admin.done("GET", f"/mailboxes?prefix={own}"))["mailboxes"]
    [agent] = (await admin.done("GET", "/agents"))["agents"]
    named = FIELDS | {"mail_address": f"id:{listed['number']}", "mailbox": f"id:{agent['number']}"}
    filled = defaultdict(lambda: "x", named)
    shown = 0
    order = ["GET", "PATCH", "POST", "DELETE"]
    for method, path, _ in sorted(admin.endpoints(), key=lambda one: (order.index(one[0]), -len(one[1]))):
        for role in ("read", "operate"):
            body = {} if method in {"POST", "PATCH"} else None
            answer = await admin.call(method, path.format_map(filled), body, role)
            assert not any(secret.encode() in answer.data for secret in (own, to)), f"{role}: {method} {path}"
            shown += redact(own).encode() in answer.data
            if role == "read":
                assert invitation.encode() not in answer.data, path
    assert shown > 10
    assert own.encode() not in (await admin.call("GET", f"/mailboxes/{filled['mail_address']}", role="read")).data
    assert not (await admin.done("GET", f"/mailboxes?prefix={own}"))["mailboxes"]


@pytest.mark.rule("A7")
async def test_readers_cannot_guess_an_address_by_parts(admin: Admin) -> None:
    own = (await admin.app.done("MAILBOX.CREATE", {}))["mail_address"]
    for path in ("/mailboxes", "/mailbox-ranking"):
        for text, found in ((own, [redact(own)]), (own[:4], [redact(own)]), (own[:5], []), (own[:-1], [])):
            answer = await admin.done("GET", f"{path}?prefix={text}", role="read")
            assert [one["mail_address"] for one in answer["mailboxes"]] == found, text
            assert answer.get("looked_at", len(found)) == len(found)
    [listed] = (await admin.done("GET", f"/mailboxes?prefix={own}", role="read"))["mailboxes"]
    after = f"after=id:{listed['number']}"
    assert (await admin.done("GET", f"/mailboxes?tenant=default&{after}", role="read"))["mailboxes"] == []
    guessed = await admin.call("GET", f"/mailboxes?tenant=default&after={own[:5]}", role="read")
    assert guessed.json["error"].startswith("after: expected id:")
    assert len((await admin.done("GET", f"/mailboxes?tenant=default&after={own[:5]}"))["mailboxes"]) == 1


async def test_a_mailbox_is_changed_by_its_number(admin: Admin) -> None:
    for name in ("box", "other"):
        await admin.app.done("MAILBOX.CREATE", {"name": name})
    [listed] = (await admin.done("GET", "/mailboxes?prefix=box"))["mailboxes"]
    path = f"/mailboxes/id:{listed['number']}"
    assert (await admin.done("PATCH", path, {"ack_wait_ms": 1000}, "operate"))["mail_address"] == redact("box")
    await admin.done("POST", f"{path}/messages", {"payload": "x"}, "operate")
    assert [each["mail_address"] for each in (await admin.done("GET", "/mailboxes?prefix=box"))["mailboxes"]] == ["box"]
    elsewhere = await admin.call("GET", f"{path}?tenant=acme")
    assert elsewhere.json["code"] == "mailbox_not_found"
    assert (await admin.done("DELETE", path, role="operate"))["deleted"]
    for wrong in (path, "/mailboxes/id:99999999999999999999", "/mailboxes/id:0"):
        gone = await admin.call("DELETE", wrong, role="operate")
        assert gone.json["error"] == f"mailbox {wrong.rpartition('/')[2]} does not exist"
    assert (await admin.call("GET", "/mailboxes/id:x")).status == 404
    entries = (await admin.done("GET", "/audit?operation=mailbox-delete", role="read"))["entries"]
    assert [one["fields"]["mail_address"] for one in reversed(entries)][:2] == [redact("box"), path.rpartition("/")[2]]


async def test_a_mailbox_is_created_and_its_token_shown_once(admin: Admin) -> None:
    body = {"name": "orders", "retention": "until_ack", "ttl_seconds": 3600, "tags": ["eu"], "ack_wait_ms": 30_000}
    made = await admin.done("POST", "/mailboxes", body)
    assert (made["mail_address"], len(made["token"])) == ("orders", 48)
    view = await admin.done("GET", f"/mailboxes/id:{made['number']}")
    assert (view["retention"], view["tags"], view["ack_wait_ms"]) == ("until_ack", ["eu"], 30_000)
    assert round(view["expire_at"] - view["created_at"]) == 3600
    for wrong, code in (
        (body, "mailbox_exists"),
        ({"name": "orders", "public": True}, "mailbox_exists"),
        ({"name": "public"}, "bad_request"),
        ({"name": "Orders"}, "bad_request"),
        ({"ack_wait_ms": 1}, "bad_request"),
        ({"tags": ["a,b"] * 65}, "bad_request"),
        ({"tenant": "nobody", "name": "box"}, "bad_request"),
    ):
        assert (await admin.call("POST", "/mailboxes", wrong)).json["code"] == code, wrong
    own = await admin.done("POST", "/mailboxes", {}, "operate")
    whole = (await admin.done("GET", f"/mailboxes/id:{own['number']}"))["mail_address"]
    assert own["mail_address"] == redact(whole)
    assert made["token"] not in str((await admin.done("GET", "/audit?operation=mailbox-create"))["entries"])


@pytest.mark.rule("A7")
async def test_who_reads_no_payload_moves_none_to_where_it_could(admin: Admin) -> None:
    await admin.app.done("MAILBOX.CREATE", {"name": "secret"})
    await admin.app.done("MSG.SEND.secret", {"payload": PAYLOAD.decode()})
    await admin.done("POST", "/mailboxes", {"name": "mine"}, "operate")
    body = {"to_address": "mine", "msg_ids": [0]}
    for way in ("move", "copy"):
        for role in ("read", "operate", "read-payload"):
            refused = await admin.call("POST", f"/mailboxes/secret/{way}", body, role)
            assert (refused.status, refused.json["code"]) == (403, "not_allowed"), f"{role}: {way}"
    assert not (await admin.done("GET", "/mailboxes/mine/messages"))["messages"]
    assert await admin.done("POST", "/mailboxes/secret/copy", body) == {"copied": 1, "stopped": ""}
    assert await admin.done("POST", "/mailboxes/secret/move", body) == {"moved": 1, "stopped": ""}
    entries = (await admin.done("GET", "/audit?operation=message-move"))["entries"]
    assert [each["result"] for each in entries] == ["ok", *["not_allowed"] * 3]
    assert {each["fields"]["to_address"] for each in entries} == {redact("mine")}


@pytest.mark.rule("A6", "A7")
async def test_messages_leave_no_tenant_and_errors_name_no_address(admin: Admin) -> None:
    await admin.app.done("MAILBOX.CREATE", {"name": "box"})
    await admin.done("POST", "/tenants", {"tenant": "acme"})
    theirs = await admin.done("POST", "/mailboxes", {"tenant": "acme", "name": "theirs"})
    for target in (f"id:{theirs['number']}", "theirs"):
        refused = await admin.call("POST", "/mailboxes/box/move", {"to_address": target, "msg_ids": [0]})
        assert refused.json["error"] == f"mailbox {target} does not exist"
    refused = await admin.call("POST", "/mailboxes/box/move", {"to_address": "", "msg_ids": []})
    assert (refused.status, "to_address" in refused.json["error"]) == (400, True)
    other = await admin.done("POST", "/mailboxes", {"name": "other"})
    numbered = {"to_address": f"id:{other['number']}", "msg_ids": [0]}
    assert await admin.done("POST", "/mailboxes/box/move", numbered) == {"moved": 0, "stopped": ""}


async def test_a_copy_that_fails_halfway_tells_how_far_it_came(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("box", "other"):
        await admin.done("POST", "/mailboxes", {"name": name})
    for _ in range(3):
        await admin.done("POST", "/mailboxes/box/messages", {"payload": "x"})
    transfer = moving.transfer

    def fails_behind_two(tx: Transaction, *others: Any) -> moving.Transferred:
        if others[2].ids == [2]:
            raise UnavailableError("the disk is gone")
        return transfer(tx, *others)

    monkeypatch.setattr(moving, "SLICE", 1)
    monkeypatch.setattr(moving, "transfer", fails_behind_two)
    copy = "/mailboxes/box/copy", {"to_address": "other", "msg_ids": [0, 1, 2]}
    why = "it stopped before message 2: unavailable: the disk is gone"
    assert await admin.done("POST", *copy) == {"copied": 2, "stopped": why}
    refused = await admin.call("POST", copy[0], {"to_address": "other", "msg_ids": [2]})
    assert (refused.status, refused.json["code"]) == (503, "unavailable")
    assert (await admin.done("GET", "/mailboxes/other"))["messages"] == 2


async def test_a_copy_that_takes_long_tells_how_far_it_came(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("box", "other"):
        await admin.done("POST", "/mailboxes", {"name": name})
    for _ in range(3):
        await admin.done("POST", "/mailboxes/box/messages", {"payload": "x"})
    monkeypatch.setattr(moving, "SLICE", 2)
    monkeypatch.setattr(message_operations, "TRANSFER_ENDS", 0.0)
    found = await admin.done("POST", "/mailboxes/box/copy", {"to_address": "other", "msg_ids": [0, 1, 2]})
    assert (found["copied"], found["stopped"][:28]) == (2, "it stopped before message 2:")


@pytest.mark.rule("F6")
async def test_leases_are_given_back_once_though_workers_fetch_again(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admin.app.done("MAILBOX.CREATE", {"name": "box"})
    for text in ("one", "two", "three"):
        await admin.done("POST", "/mailboxes/box/messages", {"payload": text})
    work = {"group_name": "g", "deliver": "earliest", "config": {"ack_wait_ms": 60_000}}
    assert len((await admin.app.done("MSG.FETCH.box", work))["messages"]) == 3
    nack = settling.nack

    def taken_again(tx: Transaction, request: settling.Nack, now: int) -> int:
        leases = settling.running_leases(tx, request.tenant, request.address, request.group, 10, now)
        group = tx.groups.find(get_live_mailbox(tx, request.tenant, request.address, now), request.group)
        released = nack(tx, request, now)
        assert group is not None
        tx.leases.put(group, leases)
        return released

    monkeypatch.setattr(message_operations, "DEAD_SLICE", 1)
    monkeypatch.setattr(settling, "nack", taken_again)
    assert await admin.done("POST", "/mailboxes/box/leases/release", {"group_name": "g"}) == {"released": 3}


async def test_leases_are_given_back_and_dead_mail_is_sent_again(admin: Admin) -> None:
    await admin.app.done("MAILBOX.CREATE", {"name": "box"})
    for text in ("one", "two"):
        await admin.done("POST", "/mailboxes/box/messages", {"payload": text})
    work = {"group_name": "g", "deliver": "earliest", "config": {"ack_wait_ms": 60_000, "max_deliver": 2}}
    for delivered, some in (([0, 1], {"msg_ids": [0]}), ([0], {})):
        found = (await admin.app.done("MSG.FETCH.box", work))["messages"]
        assert [each["msg_id"] for each in found] == delivered
        held = await admin.done("GET", "/mailboxes/box/leases?group_name=g", role="read")
        assert [each["msg_id"] for each in held["leases"]] == [0, 1]
        released = await admin.done("POST", "/mailboxes/box/leases/release", {"group_name": "g", **some}, "operate")
        assert released == {"released": len(some.get("msg_ids", "ab"))}
    dead = await admin.done("GET", "/mailboxes/box/dead?group_name=g", role="read")
    assert [(each["msg_id"], each["deliveries"]) for each in dead["messages"]] == [(0, 2)]
    assert dead["max_deliver"] == 2
    assert "payload_start" not in dead["messages"][0]
    resent = await admin.done(
        "POST", "/mailboxes/box/dead/0/resend", {"group_name": "g", "payload": "one, mended"}, "operate"
    )
    assert resent == {"msg_id": 2}
    shown = await admin.done("GET", "/mailboxes/box/messages/2")
    assert base64.b64decode(shown["payload"]) == b"one, mended"
    gone = await admin.call("POST", "/mailboxes/box/dead/0/resend", {"group_name": "g"}, "operate")
    assert gone.json["code"] == "message_not_found"
    assert "mended" not in str((await admin.done("GET", "/audit"))["entries"])


async def test_a_group_that_nobody_reads_with_is_dropped(admin: Admin) -> None:
    await admin.app.done("MAILBOX.CREATE", {"name": "box"})
    await admin.done("POST", "/mailboxes/box/messages", {"payload": "x"})
    work = {"group_name": "g", "deliver": "earliest", "config": {"ack_wait_ms": 60_000}}
    assert (await admin.app.done("MSG.FETCH.box", work))["messages"]
    path = "/mailboxes/box/groups/drop"
    held = await admin.call("POST", path, {"group_name": "g"}, "operate")
    assert (held.status, "give them back first" in held.json["error"]) == (400, True)
    await admin.done("POST", "/mailboxes/box/leases/release", {"group_name": "g"}, "operate")
    for missing in ({}, {"group_name": "other"}):
        assert (await admin.call("POST", path, missing, "operate")).status == 400
    assert await admin.done("POST", path, {"group_name": "g"}, "operate") == {"group_name": "g"}
    shown = await admin.done("GET", "/mailboxes/box", role="read")
    assert (shown["groups"], shown["messages"]) == ([], 1)
    entries = (await admin.done("GET", "/audit"))["entries"]
    drops = [each for each in entries if each["operation"] == "group-drop"]
    assert (len(drops), drops[0]["result"], drops[0]["fields"]["group_name"]) == (4, "ok", "g")


async def test_a_mailbox_is_purged_of_some_or_all(admin: Admin) -> None:
    await admin.app.done("MAILBOX.CREATE", {"name": "box"})
    for delay in (None, None, None, 60):
        await admin.done("POST", "/mailboxes/box/messages", {"payload": "x", "delay": delay})
    path = "/mailboxes/box/purge"
    assert (await admin.done("POST", path, {"msg_ids": [0, 9]}, "operate"))["purged"] == 1
    assert (await admin.done("POST", path, {"msg_ids": []}, "operate"))["purged"] == 0
    assert (await admin.done("POST", path, {}, "operate"))["purged"] == 3
    view = await admin.done("GET", "/mailboxes/box")
    assert (view["messages"], view["delayed"]["messages"]) == (0, 0)


async def test_what_operators_change_stands_in_the_audit_log(admin: Admin) -> None:
    await admin.app.done("MAILBOX.CREATE", {"name": "box"})
    await admin.done("POST", "/mailboxes/box/messages", {"payload": "secret", "lane": "urgent"}, "operate")
    await admin.done("PATCH", "/mailboxes/box", {"ack_wait_ms": 1000}, "operate")
    await admin.call("DELETE", "/mailboxes/box", role="read")
    await admin.call("DELETE", "/mailboxes/other", role="operate")
    await admin.done("GET", "/mailboxes/box/messages/0", role="read-payload")
    entries = (await admin.done("GET", "/audit", role="read"))["entries"]
    assert [(one["actor"], one["operation"], one["fields"], one["result"]) for one in reversed(entries)] == [
        ("operateer", "message-send", {"mail_address": redact("box"), "lane": "urgent"}, "ok"),
        ("operateer", "mailbox-set", {"mail_address": redact("box"), "ack_wait_ms": 1000}, "ok"),
        ("reader", "mailbox-delete", {"mail_address": redact("box")}, "not_allowed"),
        ("operateer", "mailbox-delete", {"mail_address": redact("other")}, "mailbox_not_found"),
        ("read-payloader", "message-show", {"mail_address": redact("box"), "msg_id": 0}, "ok"),
    ]
    page = await admin.done("GET", "/audit?actor=operateer&limit=1")
    assert (page["entries"][0]["fields"], page["more"]) == ({"mail_address": redact("other")}, True)
    older = await admin.done("GET", f"/audit?operation=mailbox-set&before={page['entries'][0]['no']}")
    assert [one["result"] for one in older["entries"]] == ["ok"]


async def test_refused_acts_are_audited_as_they_were_asked(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.operate.audit.MAX_REFUSED", 1000)
    operations = {operation.name: operation for operation in admin.app.service.operations.all()}
    acts = [each for each in operations.values() if each.is_act and each.path and each.right not in ROLES["read"]]
    assert len(acts) > 20
    for operation in acts:
        path = (operation.path or "").format_map(FIELDS)
        # As it should be, and wrong in every way.
        if operation.method in {"GET", "DELETE"}:
            await admin.call(operation.method, f"{path}?tenant=acme", role="read")
            await admin.call(operation.method, f"{path}?tenant=globex&no-field=1&tenant=globex", role="read")
        else:
            await admin.call(operation.method, path, {"tenant": "acme"}, role="read")
            await admin.call(operation.method, f"{path}?tenant=globex", b"{", role="read")
    entries = (await admin.done("GET", "/audit?actor=reader&limit=1000"))["entries"]
    for operation in acts:
        found = [each for each in entries if each["operation"] == operation.name]
        assert {each["result"] for each in found} == {"not_allowed"}, operation.name
        if "tenant" in operation.fields and "{tenant}" not in (operation.path or ""):
            assert {each["tenant"] for each in found} >= {"acme"}, operation.name
            if operation.method not in {"GET", "DELETE"}:
                assert {each["tenant"] for each in found} == {"acme", "globex"}, operation.name
        if "{mail_address}" in (operation.path or ""):
            assert {each["fields"]["mail_address"] for each in found} == {redact("box")}, operation.name


async def test_messages_are_listed_by_lane_and_in_pages(admin: Admin) -> None:
    await admin.app.done("MAILBOX.CREATE", {"name": "box"})
    for number in range(5):
        lane = "urgent" if number % 2 else "low"
        await admin.done("POST", "/mailboxes/box/messages", {"payload": "x" * number, "lane": lane})
    first = await admin.done("GET", "/mailboxes/box/messages?limit=3")
    assert [one["msg_id"] for one in first["messages"]] == [4, 3, 2]
    rest = await admin.done("GET", f"/mailboxes/box/messages?limit=3&before={first['next']}")
    assert ([one["msg_id"] for one in rest["messages"]], rest["next"]) == ([1, 0], None)
    urgent = await admin.done("GET", "/mailboxes/box/messages?lane=urgent&limit=1")
    assert [(one["msg_id"], one["lane"], one["size"]) for one in urgent["messages"]] == [(3, "urgent", 3)]
    urgent = await admin.done("GET", f"/mailboxes/box/messages?lane=urgent&before={urgent['next']}")
    assert ([one["msg_id"] for one in urgent["messages"]], urgent["next"]) == ([1], None)
    since = first["messages"][1]["created_at"]
    assert (await admin.done("GET", f"/mailboxes/box/messages?since={since}"))["messages"] == first["messages"][:2]
    assert await admin.done("DELETE", "/mailboxes/box/messages/3") == {"msg_id": 3, "deleted": True}
    assert (await admin.call("GET", "/mailboxes/box/messages/3")).json["code"] == "message_not_found"


WRONG: list[tuple[str, str, Any, str]] = [
    ("GET", "/mailboxes?limit=x", None, "limit: expected integer"),
    ("GET", "/mailboxes?limit=0", None, "limit: expected 1 to 1000"),
    ("GET", "/mailboxes?limit=1&limit=2", None, "limit: expected one value"),
    ("GET", "/mailboxes?prefix=%00", None, "prefix: expected text without NUL"),
    ("GET", "/mailboxes?nothing=1", None, "nothing: unknown field"),
    ("GET", "/mailboxes/BOX", None, "mail_address: expected lowercase"),
    ("GET", "/connections/x", None, "connection: expected integer"),
    ("GET", "/connections/99999999999999999999", None, "connection: expected 0 to "),
    ("POST", "/mailboxes/box/messages", {"lane": "low"}, "payload: expected a value, there is none"),
    ("POST", "/mailboxes/box/messages", {"payload": "x", "lane": "no"}, "lane: expected critical, urgent"),
    ("POST", "/mailboxes/box/messages", {"payload": True}, "payload: expected string"),
    ("POST", "/mailboxes/box/messages", {"payload": "x", "mail_address": "a"}, "mail_address: unknown field"),
    ("POST", "/mailboxes/box/dead/drop", {"msg_ids": [1, "x"]}, "msg_ids[1]: expected integer"),
    ("POST", "/mailboxes/box/dead/drop?tenant=x", {}, "tenant: expected in the body"),
    ("POST", "/mailboxes/box/messages", b"{", "body: expected JSON"),
    ("POST", "/mailboxes/box/messages", [], "body: expected a JSON object"),
]


async def test_bad_input_names_the_field(admin: Admin) -> None:
    for method, path, body, error in WRONG:
        answer = await admin.call(method, path, body)
        assert (answer.status, answer.json["code"]) == (400, "bad_request"), path
        assert answer.json["error"].startswith(error), answer.json


@pytest.mark.rule("N4")
async def test_numbers_may_be_text_or_whole_floats(admin: Admin) -> None:
    await admin.app.done("MAILBOX.CREATE", {"name": "box"})
    await admin.app.done("MSG.FETCH.box", {"group_name": "g", "config": {"max_wait_ms": 0}})
    for number in ("7", 7.0, "7.0"):
        dropped = await admin.done("POST", "/mailboxes/box/dead/drop", {"group_name": "g", "msg_ids": [number]})
        assert dropped == {"dropped": 0}
        sent = await admin.done("POST", "/mailboxes/box/messages", {"payload": "eA==", "delay": number})
        assert sent["msg_id"] == -1, number
    await admin.done("GET", "/mailboxes?limit=7.0")
    for wrong in (True, 7.5, "7.5"):
        answer = await admin.call("POST", "/mailboxes/box/messages", {"payload": "eA==", "delay": wrong})
        assert answer.json["error"].startswith("delay: expected integer"), answer.json


async def test_agents_are_listed_found_and_removed(admin: Admin) -> None:
    for name, words in {"sea.tides": "high and low water", "sky.stars": "planets at night"}.items():
        await admin.app.done("AGENT.REGISTER", card(name, description=words))
    everybody = await admin.done("GET", "/agents?limit=1", role="read-payload")
    assert (everybody["mode"], everybody["total"], len(everybody["agents"])) == ("list", 2, 1)
    rest = await admin.done("GET", f"/agents?limit=1&cursor={everybody['next']}", role="read-payload")
    found = {one["mailbox"] for one in everybody["agents"] + rest["agents"]}
    assert (found, rest["next"]) == ({"sea.tides", "sky.stars"}, None)
    searched = await admin.done("GET", "/agents?text=planets&state=alive&state=stale", role="read-payload")
    assert [(one["mailbox"], one["state"], one["status"]) for one in searched["agents"]] == [
        ("sky.stars", "alive", None)
    ]
    shown = await admin.done("GET", "/agents/sky.stars", role="read")
    assert (shown["card"]["description"], shown["edition"]) == ("planets at night", 1)
    await admin.done("DELETE", "/agents/sky.stars", role="operate")
    assert (await admin.call("GET", "/agents/sky.stars")).json["code"] == "agent_not_found"
    assert (await admin.call("GET", "/agents?state=dead")).json["error"].startswith("state[0]: expected alive")


async def test_settings_say_where_they_are_from_without_secrets(admin: Admin) -> None:
    answer = await admin.call("GET", "/settings", role="read")
    options = {one["option"]: (one["value"], one["source"]) for one in answer.json["options"]}
    assert options["operators.audit_days"] == (365, "default")
    assert options["operators.tokens"][0] == "**********"
    assert not any(token.encode() in answer.data for token in TOKENS.values())


async def test_this_machine_needs_a_token_once_there_are_tenants(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        assert (await service.call("GET", f"{V1}/overview")).status == 200
        asked = await send_command(tmp_path, "tenant-add", tenant="acme")
        assert asked["error"] == ""
        assert (await service.call("GET", f"{V1}/overview")).json["code"] == "not_signed_in"


async def test_commands_send_only_fields_that_their_operation_has(admin: Admin) -> None:
    found = {operation.name: operation for operation in admin.app.service.operations.all()}
    asking = [(path, command.callback) for path, command in commands(build_app()) if hasattr(command.callback, "asked")]
    assert len(asking) > 10
    for path, callback in asking:
        operation, fixed = callback.asked
        sent = {*inspect.signature(callback).parameters, *fixed} - {"config", "data_dir", "as_json", "yes"}
        assert sent <= set(found[operation].fields), path


@pytest.mark.rule("S7")
async def test_the_doctor_of_a_mailbox_names_its_tenants_quota(admin: Admin) -> None:
    await admin.done("POST", "/tenants", {"tenant": "small"})
    await admin.done("PATCH", "/tenants/small", {"quotas": {"messages": 3}})
    await admin.done("POST", "/mailboxes", {"tenant": "small", "name": "box"})

    async def send() -> Answer:
        return await admin.call("POST", "/mailboxes/box/messages", {"tenant": "small", "payload": "x"})

    async def said() -> list[tuple[str, str, str]]:
        found = (await admin.done("GET", "/mailboxes/box/doctor?tenant=small"))["findings"]
        return [(each["level"], each["text"], each["link"]) for each in found if "Tenant small" in each["text"]]

    assert (await send()).status == 200
    assert await said() == [("ok", "Tenant small has room for more: 1 of 3 messages.", "/tenants/small")]
    for _ in range(2):
        assert (await send()).status == 200
    assert (await send()).status == 429
    full = "Tenant small is full, 3 of 3 messages: a SEND is refused with quota_exceeded."
    assert await said() == [("problem", full, "/tenants/small")]
    found = (await admin.done("GET", "/doctor?quick=true", role="read"))["findings"]
    assert [each["link"] for each in found if "tenant small 3 of 3 messages" in each["text"]] == ["/tenants/small"]


async def test_each_operation_has_examples_of_its_own(admin: Admin) -> None:
    validate(admin.document)
    operations = admin.app.service.operations
    writer = ExampleWriter(operations.examples)
    missing = []
    for _, _, described in admin.endpoints():
        operation = operations.get(described["operationId"])
        request, answer = writer.request(operation), writer.answer(operation)
        assert check_request(operation, request).items() >= request.items()
        assert set(operation.required) <= set(request)
        for name, value in request.items():
            jsonschema.validate(value, operation.fields[name])
        shown = described["responses"]["200"]["content"]["application/json"]
        assert shown["example"] == answer
        jsonschema.validate(answer, operation.answer)
        jsonschema.validate(answer, shown["schema"])
        body = described.get("requestBody", {}).get("content", {}).get("application/json")
        if body is not None:
            jsonschema.validate(body["example"], body["schema"])
        assert f"\n{writer.command(operation, V1)}\n" in described["description"]
        texts = {*_text_fields("", operation.answer)}
        texts.update(field for name, schema in operation.fields.items() for field in _text_fields(name, schema))
        missing += [f"{operation.name}: {name}" for name in texts if not writer.has(operation, name)]
    assert not missing, "\n".join(sorted(missing))


def _text_fields(name: str, schema: dict[str, Any]) -> Iterator[str]:
    """Yield the names of fields whose text no schema says."""
    if schema.get("type") in ("string", ["string", "null"]) and "enum" not in schema:
        yield name
    for key, inner in schema.get("properties", {}).items():
        yield from _text_fields(key, inner)
    for inner in (schema.get("items"), schema.get("additionalProperties"), *schema.get("anyOf", ())):
        if inner:
            yield from _text_fields(name, inner)


async def test_examples_of_requests_are_understood(admin: Admin) -> None:
    """Run each that the shell would: what is not there is an answer, a field that is wrong is not."""
    for method, path, described in admin.endpoints():
        body = described.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
        given = {each["name"]: each["example"] for each in described["parameters"] if "example" in each}
        named = {name for name in given if f"{{{name}}}" in path}
        query = urlencode({name: value for name, value in given.items() if name not in named}, doseq=True)
        answer = await admin.call(method, path.format_map(given) + (f"?{query}" if query else ""), body)
        wrong = {"unknown field", "expected a value", "expected integer", "expected string"}
        assert not any(each in answer.data.decode() for each in wrong), f"{method} {path}: {answer.data!r}"


async def test_the_page_of_the_docs_has_each_operation(admin: Admin) -> None:
    listed = {operation.name for operation in admin_api.operations()}
    assert listed == {described["operationId"] for _, _, described in admin.endpoints()} - {"journal-rotate"}
