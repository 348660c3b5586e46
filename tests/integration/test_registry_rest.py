"""The registry over HTTP through the real service: cards, pages, tokens, cards by URL, and what OpenAPI says of it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openapi_spec_validator import validate
from yarl import URL

from mediator.http.guard import Guard
from registry.api.codec import MAX_STATUS
from registry.api.doors import RegistryApi
from registry.api.openapi import document
from registry.cards.card import MAX_CARD
from tests.harness.app import ADA, BOB, TENANTS, Answer, App, app, card

ODD = b' {"mailbox":"mq9://broker/odd.a",  "n": 1.10, "n": 2, "\\u00e9": "\xf0\x9f\x98\x80"}\n'
AGENTS = "/agents"


def refused(answer: Answer, status: int, begins: str, code: str = "bad_request") -> None:
    """Check an error: JSON with one sentence and a code, whatever came."""
    assert answer.headers["Content-Type"].startswith("application/json")
    body = answer.json
    assert (answer.status, body["code"]) == (status, code), body
    assert body.keys() == {"error", "code"}
    assert body["error"].startswith(begins), body
    assert body["error"].isprintable()


async def listed(service: App, query: str = "", token: str | None = None) -> list[str]:
    answer = await service.call("GET", AGENTS + query, token=token)
    assert answer.status == 200, answer
    return [agent["mailbox"] for agent in answer.json["agents"]]


@pytest.mark.rule("G1", "G3")
async def test_a_card_is_registered_shown_replaced_and_removed(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        made = await service.call("POST", AGENTS, ODD)
        assert (made.status, made.headers["Location"]) == (201, "/agents/odd.a")
        told = made.json
        assert told == {
            "mailbox": "odd.a",
            "name": "",
            "edition": 1,
            "registered_at": told["registered_at"],
            "updated_at": told["registered_at"],
            "warnings": [],
            "created": True,
        }
        assert abs(told["registered_at"] - service.service.broker.clock() // 1000) < 60
        shown = await service.call("GET", made.headers["Location"])
        assert (shown.data, shown.headers["Content-Type"]) == (ODD, "application/json")
        assert (await service.call("GET", "/agents/mq9%3A%2F%2Fbroker%2Fodd.a")).data == ODD
        again = await service.call("POST", AGENTS, card("odd.a", "Ann"), Content_Type="application/agent-card+json")
        assert (again.status, "Location" in again.headers) == (200, False)
        assert (again.json["edition"], again.json["created"], again.json["name"]) == (2, False, "Ann")
        assert (await service.done("AGENT.DISCOVER"))["agents"] == [card("odd.a", "Ann")], "one registry, two doors"
        gone = await service.call("DELETE", "/agents/odd.a")
        assert (gone.status, gone.data) == (204, b"")
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/report")):
            answer = await service.call(method, f"/agents/odd.a{path}", {} if path else None)
            refused(answer, 404, "agent odd.a is not registered", "agent_not_found")


@pytest.mark.rule("G2", "G3")
async def test_a_record_has_all_fields_of_an_agent(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        wrong = card("a.b", "Ann", protocolVersion="0.3.0", url="x", skills=5)
        made = (await service.call("POST", AGENTS, wrong)).json
        seen = await service.call("POST", "/agents/a.b/report", b'{"load":  0.5}')
        assert (seen.status, seen.json["mailbox"]) == (200, "a.b")
        record = await service.call("GET", "/agents/a.b?view=record")
        assert b'"status":{"load":  0.5}' in record.data
        assert made["warnings"]
        assert record.json == {
            **{name: made[name] for name in ("mailbox", "name", "edition", "registered_at", "updated_at", "warnings")},
            "card": wrong,
            "state": "alive",
            "last_seen": seen.json["last_seen"],
            "status": {"load": 0.5},
        }
        for empty in (b"", b"null", b'""'):
            assert (await service.call("POST", "/agents/a.b/report", empty)).status == 200
        assert (await service.call("GET", "/agents/a.b?view=record")).json["status"] == {}
        refused(await service.call("GET", "/agents/a.b?view=all"), 400, 'view: expected card or record, got "all"')
        other = await service.call("POST", "/agents/a.b/report", {"mailbox": "mq9://x/c.d"})
        refused(other, 400, "mailbox: expected a.b as in the path")


async def test_a_card_that_is_known_is_not_sent_again(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        await service.call("POST", AGENTS, ODD)
        tag = (await service.call("GET", "/agents/odd.a")).headers["ETag"]
        for known in (tag, f'"x", W/{tag}', "*"):
            same = await service.call("GET", "/agents/odd.a", If_None_Match=known)
            assert (same.status, same.data, same.headers["ETag"]) == (304, b"", tag)
        await service.call("POST", AGENTS, ODD + b" ")
        changed = await service.call("GET", "/agents/odd.a", If_None_Match=tag)
        assert (changed.status, changed.data) == (200, ODD + b" ")
        assert changed.headers["ETag"] != tag
        assert "no-cache" in changed.headers["Cache-Control"]


@pytest.mark.rule("G3", "N4")
async def test_pages_are_linked_and_searches_are_as_at_the_other_door(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        for no in range(45):
            does = "pays" if no % 2 else "counts"
            skills = [{"id": "pay", "name": "Pay", "tags": ["Money"]}] if no % 3 == 0 else []
            await service.done("AGENT.REGISTER", card(f"a{no}", description=does, skills=skills))
        every = [f"a{no}" for no in range(45)]
        assert await listed(service) == every[:20]
        assert await listed(service, "?limit=0&page=3&text=&state=") == every[40:]
        assert await listed(service, "?limit=10000000000000000&unknown=1") == every
        assert await listed(service, "?tag=money&skill=pay&limit=50") == every[::3]
        assert await listed(service, "?state=stale&state=gone") == []
        path, got = "/agents?limit=10&with_state=true", []
        while path:
            answer = await service.call("GET", path)
            got += [agent["mailbox"] for agent in answer.json["agents"]]
            assert [state["state"] for state in answer.json["states"]] == ["alive"] * len(answer.json["agents"])
            path = ""
            if "next" in answer.json:
                path, _, rel = answer.headers["Link"].partition(">")
                path = path[1:]
                assert rel == '; rel="next"'
                assert URL(path).query["cursor"] == answer.json["next"]
            else:
                assert "Link" not in answer.headers
        assert got == every
        for query in ({"text": "pays", "with_scores": True}, {"semantic": "who counts?", "limit": 3, "explain": True}):
            over_nats = await service.done("AGENT.DISCOVER", query)
            over_http = (await service.call("GET", str(URL(AGENTS).with_query(_texts(query))))).json
            for reply in (over_nats, over_http):
                reply.pop("error", None)
                reply.pop("next", None)
            assert over_http == over_nats


def _texts(query: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) if isinstance(value, bool) else str(value) for name, value in query.items()}


@pytest.mark.rule("G3")
async def test_a_page_of_large_cards_ends_early_and_continues(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        for no in range(20):
            made = await service.call("POST", AGENTS, card(f"a{no}", filler="x" * 200_000))
            assert made.status == 201
        path, got = "/agents?limit=100", []
        while path:
            answer = await service.call("GET", path)
            assert len(answer.data) < 1_100_000
            got += [agent["mailbox"] for agent in answer.json["agents"]]
            path = answer.headers.get("Link", "").partition(">")[0][1:]
        assert got == [f"a{no}" for no in range(20)]


@pytest.mark.rule("G1", "G2", "G3", "N3")
async def test_bad_input_is_named_and_changes_nothing(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        await service.call("POST", AGENTS, card("kept"))
        before = await service.call("GET", "/agents/kept?view=record")
        bodies: list[tuple[bytes | dict[str, Any], str]] = [
            (b"", "card: "),
            (b"[]", "card: "),
            (b"{", "card: "),
            (b"\xff", "card: "),
            (b"[" * 200_000, "card: "),
            (b"{}", "mailbox: "),
            ({"description": "Ann"}, "mailbox: "),
            ({"name": "A\nB"}, "name: "),
            ({"mailbox": "A B"}, "mailbox: "),
            ({"mailbox": "public"}, "mailbox: "),
            ({"url": 5}, "url: "),
            ({"url": "", "mailbox": "a.b"}, "url: "),
            ({"url": "https://x.example/" + "y" * 2048}, "url: "),
            ({"url": "https://x.example", "mailbox": "A"}, "mailbox: "),
            (b'{"url": "https://x.example"', "card: "),
        ]
        for body, begins in bodies:
            refused(await service.call("POST", AGENTS, body), 400, begins)
        for size in (MAX_CARD + 1, 10_000_000):
            refused(await service.call("POST", AGENTS, b"x" * size), 413, "request", "request_entity_too_large")
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"):
            for path in (AGENTS, "/agents/kept/report"):
                answer = await service.call("POST", path, b"{}", Content_Type=kind)
                refused(answer, 400, f'content-type: expected application/json, got "{kind}"')
        report = {"x": "y" * MAX_STATUS}
        refused(await service.call("POST", "/agents/kept/report", report), 400, "body: expected a report of at most")
        refused(await service.call("POST", "/agents/kept/report", b"[1]"), 400, "body: expected a JSON object")
        for query, field in (("limit=-1", "limit"), ("page=x", "page"), ("min_score=x", "min_score")):
            refused(await service.call("GET", f"/agents?{query}"), 400, f"{field}: ")
        for cursor in ("nope", "nope.1", "%FF", "%00", "." * 50):
            refused(await service.call("GET", f"/agents?cursor={cursor}"), 400, "cursor: ")
        for name in ("A", "a%20b", "%FF", "%00", "a..b", "x" * 129, "public", "..%2F..%2Fetc"):
            refused(await service.call("GET", f"/agents/{name}"), 400, "mailbox: ")
        too_long = await service.call("GET", "/agents?text=" + "x" * 100_000)
        assert too_long.status == 400
        after = await service.call("GET", "/agents/kept?view=record")
        assert after.data == before.data
        assert await listed(service) == ["kept"]


@pytest.mark.rule("G3")
async def test_any_query_is_answered_soundly(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        await service.call("POST", AGENTS, card("pay", description="Pays invoices"))
        for text in ('" OR NEAR(', "支付", "💸", "\x00", "é" * 500, "%", "+"):
            for how in ("text", "semantic"):
                answer = await service.call("GET", str(URL(AGENTS).with_query({how: text})))
                assert answer.status == 200, (how, text)
                assert answer.json["mode"] == how
        for invalid in ("%FF%FE", "%ED%A0%80", "%"):
            assert (await service.call("GET", f"/agents?text={invalid}")).status == 200
        assert await listed(service, "?text=name:pay*") == ["pay"]
        assert await listed(service, "?text=%20%09") == ["pay"], "nothing asked for is all"


async def test_options_names_the_methods_of_a_path(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        await service.call("POST", AGENTS, ODD)
        for path, methods in (
            ("/agents", {"GET", "HEAD", "POST", "OPTIONS"}),
            ("/agents/odd.a", {"GET", "HEAD", "DELETE", "OPTIONS"}),
            ("/agents/odd.a/report", {"POST", "OPTIONS"}),
        ):
            options = await service.call("OPTIONS", path, Origin="https://evil.example")
            assert (options.status, options.data) == (204, b"")
            assert not [name for name in options.headers if name.lower().startswith("access-control-")]
            assert set(options.headers["Allow"].split(", ")) == methods
            refused(await service.call("PUT", path, b"{}"), 405, "method not allowed", "method_not_allowed")
        head, got = [await service.call(method, "/agents/odd.a") for method in ("HEAD", "GET")]
        assert (head.status, head.data) == (200, b"")
        for name in ("ETag", "Content-Length", "Content-Type", "Cache-Control"):
            assert head.headers[name] == got.headers[name]


@pytest.mark.rule("A6")
async def test_a_token_reaches_the_agents_of_its_tenant_alone(tmp_path: Path) -> None:
    async with app(tmp_path, tenants=TENANTS) as service:
        for token in (None, "", ADA[:-1]):
            for method, path, body in (
                ("GET", "/agents", None),
                ("POST", "/agents", {"mailbox": "same"}),
                ("GET", "/agents/same", None),
                ("DELETE", "/agents/same", None),
                ("POST", "/agents/same/report", {}),
            ):
                answer = await service.call(method, path, body, token=token)
                refused(answer, 401, "expected the API token of a tenant", "not_authenticated")
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        for token, word in ((ADA, "sheep"), (BOB, "goats")):
            made = await service.call("POST", AGENTS, card("same", description=word), token=token)
            assert (made.status, made.json["created"]) == (201, True)
            await service.call("POST", AGENTS, card(f"of.{word}"), token=token)
        for token, word, others in ((ADA, "sheep", "goats"), (BOB, "goats", "sheep")):
            assert (await service.call("GET", "/agents/same", token=token)).json["description"] == word
            assert await listed(service, f"?text={others}", token) == []
            assert await listed(service, "?tenant=acme&limit=1000", token) == ["same", f"of.{word}"]
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/report")):
                answer = await service.call(method, f"/agents/of.{others}{path}", {} if path else None, token=token)
                refused(answer, 404, f"agent of.{others} is not registered", "agent_not_found")
        tag = (await service.call("GET", "/agents/same", token=ADA)).headers["ETag"]
        assert (await service.call("GET", "/agents/same", token=BOB, If_None_Match=tag)).status == 200
        cursor = (await service.call("GET", "/agents?limit=1", token=ADA)).json["next"]
        refused(await service.call("GET", f"/agents?cursor={cursor}", token=BOB), 400, "cursor: ")
        await service.call("DELETE", "/agents/same", token=ADA)
        assert (await service.call("GET", "/agents/same", token=BOB)).status == 200
        over_nats = await service.done("AGENT.DISCOVER", user="bob")
        assert [agent["mailbox"] for agent in over_nats["agents"]] == ["same", "of.goats"], "one tenant, two doors"


@pytest.mark.rule("A6")
async def test_a_name_that_leads_to_this_machine_is_refused(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        answer = await service.call("GET", "/agents", Host="evil.example")
        refused(answer, 401, "expected the API token of a tenant", "not_authenticated")
        assert (await service.call("GET", "/agents", Host="localhost:1234")).status == 200


@asynccontextmanager
async def publishing(cards: dict[str, bytes]) -> AsyncIterator[str]:
    """Serve cards on this machine, and yield where."""

    async def serve(request: web.Request) -> web.Response:
        if request.path not in cards:
            raise web.HTTPNotFound
        return web.Response(body=cards[request.path], content_type="application/json")

    site = web.Application()
    site.router.add_get("/{path:.*}", serve)
    async with TestServer(site) as server:
        yield str(server.make_url("/")).rstrip("/")


@pytest.mark.rule("G1")
async def test_a_card_is_fetched_from_its_url(tmp_path: Path) -> None:
    own = b'{"name": "Own" ,"mailbox":"of.own"}'
    plain = b'{ "name" : "Plain",  "url": "https://plain.example", "skills": [] }'
    cards = {"/own.json": own, "/.well-known/agent-card.json": plain, "/list.json": b"[]"}
    private = {"semantic": False, "outbound_networks": ["127.0.0.0/8"]}
    async with publishing(cards) as origin, app(tmp_path, registry=private) as service:
        made = await service.call("POST", AGENTS, {"url": f"{origin}/own.json"})
        assert (made.status, made.headers["Location"]) == (201, "/agents/of.own")
        assert (await service.call("GET", "/agents/of.own")).data == own
        made = await service.call("POST", AGENTS, {"url": origin, "mailbox": "mq9://x/plain"})
        assert (made.status, made.json["mailbox"]) == (201, "plain")
        shown = await service.call("GET", "/agents/plain")
        assert shown.data == b'{"mailbox":"plain",' + plain[1:]
        named = await service.call("POST", AGENTS, {"url": origin})
        assert (named.status, named.json["mailbox"], named.headers["Location"]) == (
            201,
            "name:Plain",
            "/agents/name:Plain",
        )
        assert (await service.call("GET", "/agents/name:Plain")).data == plain
        assert (await service.call("POST", "/agents/name:Plain/report", {})).json["mailbox"] == "name:Plain"
        assert (await service.call("DELETE", "/agents/name:Plain")).status == 204
        refused(
            await service.call("GET", "/agents/name:Plain"),
            404,
            "agent name:Plain is not registered",
            "agent_not_found",
        )
        other = await service.call("POST", AGENTS, {"url": f"{origin}/own.json", "mailbox": "other"})
        refused(other, 400, "mailbox: the card names another, of.own")
        for path in ("none.json", "list.json"):
            refused(await service.call("POST", AGENTS, {"url": f"{origin}/{path}"}), 502, "url: ", "unreachable")
        itself = card("of.itself", url=f"{origin}/own.json")
        assert (await service.call("POST", AGENTS, itself)).json["mailbox"] == "of.itself", (
            "a card with a url is a card"
        )
        assert await listed(service) == ["of.own", "plain", "of.itself"]


@pytest.mark.rule("D10")
async def test_no_card_is_fetched_from_the_operators_own_network(tmp_path: Path) -> None:
    async with publishing({"/own.json": b'{"mailbox":"of.own"}'}) as origin, app(tmp_path) as service:
        for url in (f"{origin}/own.json", "http://169.254.169.254/", "file:///etc/passwd", "http://[::1]/", "nonsense"):
            refused(await service.call("POST", AGENTS, {"url": url}), 400, "url: ", "address_refused")
        assert await listed(service) == []


def test_openapi_describes_every_route_and_no_other() -> None:
    described = document()
    validate(described)
    app = web.Application()
    RegistryApi(None, None, Guard()).add_routes(app)
    routes = {(route.resource.canonical, route.method) for route in app.router.routes() if route.resource is not None}
    own = {route for route in routes if route[1] not in ("HEAD", "OPTIONS")}
    methods = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}
    told = {(path, method.upper()) for path, item in described["paths"].items() for method in item if method in methods}
    elsewhere = {(path, "GET") for path in ("/livez", "/readyz", "/metrics")}
    assert told == own | elsewhere


async def test_openapi_is_served_to_everybody(tmp_path: Path) -> None:
    async with app(tmp_path, tenants=TENANTS) as service:
        answer = await service.call("GET", "/openapi.json")
        assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
        assert answer.json == document()
        for path in answer.json["paths"]:
            if not path.startswith("/agents"):
                assert (await service.call("GET", path)).status == 200


async def test_the_service_follows_its_openapi_document(tmp_path: Path) -> None:
    described = document()
    agents = described["paths"]["/agents"]
    # No test calls what it finds on the Internet, cursors and query ids cannot be made up, and a line has an end.
    del described["paths"]["/agents/{mailbox}/feedback"]
    agents["post"]["requestBody"]["content"]["application/json"]["schema"] = {"$ref": "#/components/schemas/Card"}
    agents["get"]["parameters"] = [each for each in agents["get"]["parameters"] if each["name"] != "cursor"]
    for each in agents["get"]["parameters"]:
        if each["name"] in ("tag", "skill"):
            each["schema"]["maxItems"] = each["schema"]["items"]["maxLength"] = 8
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(described))
    async with app(tmp_path / "data", tenants=TENANTS) as service:
        command = [
            Path(sys.executable).with_name("schemathesis"),
            "run",
            file,
            "--url",
            f"http://127.0.0.1:{service.service.http_port}",
        ]
        bounds = [
            "--phases=coverage,fuzzing",
            "--max-examples=10",
            "--seed=7",
            "--generation-database=none",
            # A health check would measure the machine.
            "--suppress-health-check=too_slow",
            "--include-path-regex=^/agents",
        ]
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            *bounds,
            # Much that is wrong by the letter means absent (N4); what is refused has tests of its own.
            "--exclude-checks=negative_data_rejection",
            f"--header=Authorization: Bearer {ADA}",
            "--no-color",
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


@pytest.mark.rule("G4", "A10")
async def test_a_card_is_shown_by_the_address_it_was_found_with(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        made = await service.done("MAILBOX.CREATE", {})
        own, to = made["mail_address"], made["send_address"]
        data = json.dumps({"mailbox": f"mq9://host/{own}", "name": "Ann"}).encode()
        registered = await service.call("POST", AGENTS, data)
        assert (registered.status, registered.headers["Location"]) == (201, f"/agents/{own}")
        shown = data.replace(own.encode(), to.encode())
        assert (await service.call("GET", f"/agents/{own}")).data == data
        assert (await service.call("GET", f"/agents/{to}")).data == shown
        assert (await service.call("GET", AGENTS)).json["agents"] == [json.loads(shown)]
        record = await service.call("GET", f"/agents/{to}?view=record")
        assert own.encode() not in record.data
        assert (record.json["mailbox"], record.json["card"]) == (to, json.loads(shown))
        assert (await service.call("GET", f"/agents/{own}?view=record")).json["mailbox"] == own
        only = f"mailbox {to} is send-only: "
        refused(await service.call("DELETE", f"/agents/{to}"), 403, only, "send_only")
        refused(await service.call("POST", f"/agents/{to}/report", b"{}"), 403, only, "send_only")
        refused(await service.call("POST", AGENTS, shown), 403, only, "send_only")
        assert (await service.call("DELETE", f"/agents/{own}")).status == 204
        refused(await service.call("GET", f"/agents/{to}"), 404, f"agent {to} is not registered", "agent_not_found")
