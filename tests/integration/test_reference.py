"""Holds the reference in docs/ to a running service: its replies, its metrics and its routes are those described."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from aiohttp import web

from docs.generators import asyncapi, http, metrics
from mediator.http.app import build_app
from registry.api.openapi import document
from tests.harness.app import App, app
from tests.harness.waiting import until

DOCS = Path(__file__).parents[2] / "docs"
MESSAGES = asyncapi.document()["components"]["messages"]
SCHEMAS = {"components": asyncapi.document()["components"]}
CARD = {"mailbox": "clerk.inbox", "name": "Clerk", "description": "Pays invoices."}
HEADERS = b"NATS/1.0\r\nmq9-priority: urgent\r\nmq9-tags: a,b\r\n\r\n"
REQUESTS: tuple[tuple[str, str, object], ...] = (
    ("MailboxCreate", "MAILBOX.CREATE", {"name": "a.b", "ttl": 60, "tags": ["x"], "ack_wait_ms": 30000}),
    ("MailboxCreate", "MAILBOX.CREATE", {"name": "a.b"}),
    ("MailboxUpdate", "MAILBOX.UPDATE.a.b", {"token": "wrong", "desc": "d"}),
    ("MsgSend", "MSG.SEND.a.b", b"hello"),
    ("MsgSend", "MSG.SEND.nobody", b"hello"),
    ("MsgBatch", "MSG.BATCH.a.b", b"%d %d\r\n%sab\r\n" % (len(HEADERS), len(HEADERS) + 2, HEADERS)),
    ("MsgFetch", "MSG.FETCH.a.b", {"group_name": "g", "deliver": "earliest", "config": {"num_msgs": 1}}),
    ("MsgNack", "MSG.NACK.a.b", {"group_name": "g", "msg_ids": [1]}),
    ("MsgFetch", "MSG.FETCH.a.b", {"group_name": "g", "encoding": "utf8"}),
    ("MsgExtend", "MSG.EXTEND.a.b", {"group_name": "g", "msg_ids": [0], "ack_wait_ms": 60000}),
    ("MsgAck", "MSG.ACK.a.b", {"group_name": "g", "msg_id": 0}),
    ("MsgQuery", "MSG.QUERY.a.b", {"tags": "a", "limit": 5, "headers_only": True}),
    ("MsgDelete", "MSG.DELETE.a.b.0", b""),
    ("MsgDelete", "MSG.DELETE.a.b.77", b""),
    ("Inbox", "INBOX.a.b.urgent", b"hello"),
    ("MailboxMsg", "MAILBOX.MSG.a.b.high", b"hello"),
    ("Broadcast", "BROADCAST.weather.storm", b"hello"),
    ("MailboxList", "MAILBOX.LIST.a.b", {"max_count": 2}),
    ("MailboxQuery", "MAILBOX.QUERY.a.b", {"token": "wrong"}),
    ("MailboxDelete", "MAILBOX.DELETE.a.b.1", b""),
    ("PublicList", "PUBLIC.LIST", {"limit": 1}),
    ("AgentRegister", "AGENT.REGISTER", CARD),
    ("AgentDiscover", "AGENT.DISCOVER", {"text": "invoices", "with_scores": True, "with_state": True, "explain": True}),
    ("AgentFeedback", "AGENT.FEEDBACK", {"query_id": "0" * 24, "mailbox": "clerk.inbox", "useful": True}),
    ("AgentReport", "AGENT.REPORT", {"mailbox": "clerk.inbox", "load": 0.5}),
    ("AgentUnregister", "AGENT.UNREGISTER", {"name": "Clerk"}),
)
"""One request at least to each verb, and the operation that describes it."""


@pytest.fixture(scope="module")
def applications() -> Iterator[list[web.Application]]:
    """The HTTP applications that services make meanwhile."""
    made: list[web.Application] = []

    def build(*given: Any) -> web.Application:
        made.append(build_app(*given))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mediator.app.build_app", build)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory, applications: list[web.Application]) -> AsyncIterator[App]:
    webhook = {"enabled": True, "push_webhook": "https://push.example/ring"}
    folder = tmp_path_factory.mktemp("service")
    series = {"metrics_per_tenant": 10, "metrics_mailboxes": 10}
    async with app(folder, didcomm=webhook, registry={"semantic": True}, **series) as running:
        await until(lambda: shows_backlog(running))
        yield running


async def shows_backlog(service: App) -> bool:
    return b"mediator_stored_messages" in (await service.call("GET", "/metrics")).data


@pytest.mark.asyncio(loop_scope="module")
async def test_replies_are_those_of_the_document(service: App) -> None:
    assert {operation for operation, _, _ in REQUESTS} == {*asyncapi.subjects().values()}
    for operation, verb, body in REQUESTS:
        if isinstance(body, dict):
            jsonschema.validate(body, {**MESSAGES[f"{operation}Request"]["payload"], **SCHEMAS})
        reply = await service.ask(verb, body)
        described = {**MESSAGES[f"{operation}Reply"]["payload"], **SCHEMAS}
        jsonschema.validate(reply, described)
        assert {*reply} <= {*described["properties"]}, verb
        items = SCHEMAS["components"]["schemas"]["Message"]["properties"] if operation.startswith("Msg") else {}
        for message in reply.get("messages", []) if items else []:
            assert {*message} <= {*items}, verb


@pytest.mark.asyncio(loop_scope="module")
async def test_every_series_is_on_the_page(service: App) -> None:
    text = (await service.call("GET", "/metrics")).data.decode()
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    families = re.findall(r"^# TYPE (mediator_\w+)", text, re.MULTILINE)
    assert len(families) > 30
    assert [name for name in families if f"| `{name}` |" not in page] == []


@pytest.mark.asyncio(loop_scope="module")
async def test_the_dashboard_shows_series_that_exist(service: App) -> None:
    text = (await service.call("GET", "/metrics")).data.decode()
    families = dict(re.findall(r"^# TYPE (\w+) (\w+)", text, re.MULTILINE))
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    exposed = {name + part for name, kind in families.items() for part in parts.get(kind, ("",))}
    labels = {series.name: {*series.labels} for series in metrics.find_series()}
    board = json.loads((DOCS / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    shown: set[str] = set()
    for query in queries:
        for name, where in re.findall(r"\b((?:mediator|process)_\w+)({[^}]*})?", query):
            family = re.sub(r"_(bucket|sum|count)$", "", name) if name not in families else name
            grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
            used = grouped | {*re.findall(r"(\w+)!?=~?\"", where)}
            assert name in exposed, query
            assert used <= labels.get(family, set()) | {"instance", "le"}, query
            shown.add(family)
    assert len(shown) > 40
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    bare = [panel["title"] for panel in board["panels"] if panel["type"] != "row" and not panel["description"]]
    assert bare == ["CPU", "Memory", "Open files"], "Prometheus' own series"


@pytest.mark.asyncio(loop_scope="module")
async def test_every_route_is_on_the_page(service: App, applications: list[web.Application]) -> None:
    (application,) = applications
    routes = [(route.method, route.resource.canonical) for route in application.router.routes() if route.resource]
    # The admin API has a document of its own, and the console is for people.
    routes = [(method, path) for method, path in routes if path != "/" and not path.startswith(("/api/", "/console"))]
    described = {(method, path) for method, path, _ in http.operations(document())} | {*http.FOR_WALLETS}
    assert {(method, path) for method, path in routes if method not in ("HEAD", "OPTIONS")} == described
    assert json.loads((await service.call("GET", "/openapi.json")).data) == json.loads(json.dumps(document()))
