"""The registry at the NATS door: AGENT.* as agents and SDKs call it, with all that they get wrong (G1–G3)."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from registry.api.codec import MAX_STATUS
from registry.cards.card import MAX_CARD
from tests.harness.app import TENANTS, App, app, card

AGENT = "AGENT."
PAGE = Path(__file__).parents[2] / "docs" / "registry.md"
EXAMPLE = re.compile(r"nats request --raw '\$mq9\.AI\.(\S+)' '(.*)'\n(\{.*\})")
EMPTY: dict[str, dict[str, Any]] = {
    "REGISTER": {},
    "UNREGISTER": {},
    "REPORT": {},
    "FEEDBACK": {},
    "DISCOVER": {"agents": []},
}
"""What each verb's reply holds besides ``error`` when it failed (N1), written down apart from the service."""
PAY = {"description": "Pays invoices", "skills": [{"id": "pay", "name": "Pay", "description": "", "tags": ["Money"]}]}
ODD = [
    b'{"mailbox":"odd.a"}',
    b' {\r\n\t"mailbox" :"mq9://broker/odd.b" , "n": 1.10, "m": -0, "e": 1E+2 } \n',
    b'{"mailbox":"odd.c","a":1,"a":2,"":null,"\\u0061\\/":"\\u00e9\xc3\xa9\\ud83d\\ude00\xf0\x9f\x98\x80"}',
    b'{"mailbox":"odd.d","big":123456789012345678901234567890,"deep":' + b"[" * 60 + b"]" * 60 + b"}",
]
QUERIES = [
    '"',
    '" OR NEAR(',
    "*",
    "col:",
    "name:pay*",
    "(",
    "a AND NOT",
    "'; DROP TABLE agent; --",
    "%_\\",
    "\x00\x01",
    "the of and",
    "支付发票",
    "ادفع الفواتير",
    "💸🧾",
    "\u202e\ufeff",
    "é" * 5000,
    "pay " * 25_000,
    "x" * 100_000,
]


async def found(service: App, user: str = "", **query: Any) -> list[str]:
    """DISCOVER, and return the mailboxes in their order."""
    reply = await service.done("AGENT.DISCOVER", query, user)
    return [agent["mailbox"].rpartition("/")[2] for agent in reply["agents"]]


@pytest.mark.rule("G1", "G3")
async def test_any_card_with_a_mailbox_comes_back_byte_for_byte(tmp_path: Path) -> None:
    large = b'{"mailbox":"odd.e","x":"%b"}'
    large %= b"x" * (MAX_CARD - len(large) + 2)
    async with app(tmp_path) as service:
        for data in (*ODD, large):
            assert (await service.done("AGENT.REGISTER", data))["mailbox"].startswith("odd.")
        reply = await service.ask_raw("AGENT.DISCOVER", b"")
        assert reply.startswith(b'{"error":"","agents":[' + b",".join([*ODD, large]) + b"],")
        too_large = await service.ask("AGENT.REGISTER", large + b" ")
        assert too_large == {"error": f"card: expected at most {MAX_CARD} bytes, got {MAX_CARD + 1}"}


@pytest.mark.rule("G1")
async def test_both_spellings_of_a_mailbox_are_one_agent(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        first = await service.done("AGENT.REGISTER", card("mq9://broker/pay.inbox", "Ann"))
        assert first == {"error": "", "mailbox": "pay.inbox", "warnings": []}
        await service.done("AGENT.REPORT", {"mailbox": "pay.inbox"})
        later = card("pay.inbox", "Bea", description="Counts sheep")
        assert (await service.done("AGENT.REGISTER", later))["mailbox"] == "pay.inbox"
        assert (await service.done("AGENT.DISCOVER"))["agents"] == [later]
        assert await found(service, text="Ann") == []
        assert await found(service, text="sheep") == ["pay.inbox"]
        warned = await service.done("AGENT.REGISTER", card("two", protocolVersion="0.3.0", url="x", skills=5))
        assert warned["warnings"], "registered, and told what is wrong with it"
        assert await found(service) == ["pay.inbox", "two"]
        assert (await service.ask("MSG.QUERY.two"))["error"] == "mailbox two does not exist", "none was made"


@pytest.mark.rule("G2")
async def test_report_and_unregister_by_mailbox_or_unique_name(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        for no in range(3):
            await service.done("AGENT.REGISTER", card(f"twin{no}", "Twin"))
        whole = card("mq9://x/ann", "Ann", capabilities={}, skills=[])
        await service.done("AGENT.REGISTER", whole)
        for verb in ("AGENT.REPORT", "AGENT.UNREGISTER"):
            reply = await service.ask(verb, {"name": "Twin"})
            assert reply == {"error": "name: 3 agents match; give mailbox"}
        for body, who in (({"name": "Nobody"}, "Nobody"), ({"mailbox": "mq9://x/no.one", "name": "Ann"}, "no.one")):
            assert await service.ask("AGENT.REPORT", body) == {"error": f"agent {who} is not registered"}
            gone = {"error": "", "mailbox": who if "mailbox" in body else "", "removed": False}
            assert await service.done("AGENT.UNREGISTER", body) == gone
        status = b'{"name":"Ann", "load":0.50,  "queue":[]}'
        assert await service.done("AGENT.REPORT", status) == {"error": "", "mailbox": "ann"}
        raw = await service.ask_raw("AGENT.DISCOVER", {"with_state": True})
        assert b'"status":' + status + b"}" in raw
        before = (await service.done("AGENT.DISCOVER", {"with_state": True}))["states"]
        assert [state["status"] for state in before] == [None, None, None, json.loads(status)]
        assert await service.done("AGENT.REPORT", whole) == {"error": "", "mailbox": "ann"}, "SDKs send the whole card"
        after = (await service.done("AGENT.DISCOVER", {"with_state": True}))["states"]
        assert after[3]["status"] == whole
        assert after[3]["last_seen"] >= before[3]["last_seen"]
        assert await service.done("AGENT.UNREGISTER", whole) == {"error": "", "mailbox": "ann", "removed": True}
        assert await service.done("AGENT.UNREGISTER", whole) == {"error": "", "mailbox": "ann", "removed": False}
        assert await service.ask("AGENT.REPORT", whole) == {"error": "agent ann is not registered"}
        assert (await service.done("AGENT.UNREGISTER", {"mailbox": "twin1"}))["removed"] is True
        assert await found(service, text="twin") == ["twin0", "twin2"]


@pytest.mark.rule("G1", "G2", "G3")
async def test_cards_without_a_mailbox_live_under_their_names(tmp_path: Path) -> None:
    inside = json.dumps({"description": "Forecasts storms", "skills": [{"id": "gale", "name": "Gale warnings"}]})
    cards = [
        {"name": "Weather / Äther", "payload": inside},
        {"name": "Pastry", "description": "Bakes", "url": "https://a.example", "version": "1", "skills": []},
    ]
    async with app(tmp_path) as service:
        for each in (*cards, *cards):
            reply = await service.done("AGENT.REGISTER", each)
            assert reply["mailbox"] == f"name:{each['name']}"
            assert reply["note"].endswith("nobody can send to this agent here")
        assert (await service.done("AGENT.DISCOVER"))["agents"] == cards
        for words, at in (("storms", 0), ("gale", 0), ("pastry", 1)):
            assert (await service.done("AGENT.DISCOVER", {"text": words}))["agents"] == [cards[at]]
        # Somebody with a mailbox has that name too.
        await service.done("AGENT.REGISTER", card("a.one", "Pastry"))
        for body in (cards[1], {"name": "Pastry", "load": 1}, {"mailbox": "name:Pastry"}):
            assert (await service.done("AGENT.REPORT", body))["mailbox"] == "name:Pastry"
        assert (await service.ask("MSG.SEND.name:Pastry", b""))["error"].startswith("mail_address: expected ")
        assert (await service.ask("AGENT.REGISTER", {"payload": inside}))["error"].startswith("mailbox: expected ")
        for body, removed in ((cards[1], True), ({"mailbox": "name:Weather / Äther"}, True), (cards[0], False)):
            assert (await service.done("AGENT.UNREGISTER", body))["removed"] is removed
        assert await found(service) == ["a.one"]


@pytest.mark.rule("G3", "N4")
async def test_pages_cursors_and_filters(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        for no in range(45):
            await service.done(
                "AGENT.REGISTER", card(f"a{no}", description="pays" if no % 2 else "counts", **_skill(no))
            )
        every = [f"a{no}" for no in range(45)]
        first = await service.done("AGENT.DISCOVER", {"limit": 0, "page": None, "text": " ", "semantic": ""})
        assert (len(first["agents"]), first["total"], first["mode"]) == (20, 45, "list")
        assert {"error", "agents", "total", "mode", "next"} == first.keys()
        assert await found(service, page=2) == every[20:40]
        assert await found(service, page=3) == every[40:]
        assert await found(service, page=4) == await found(service, page=10**18) == []
        assert await found(service, limit=10**18) == every
        assert await found(service, limit=7, page=2) == every[7:14]
        got = [agent["mailbox"] for agent in first["agents"]]
        await service.done("AGENT.UNREGISTER", {"mailbox": "a0"})
        await service.done("AGENT.REGISTER", card("new"))
        for _ in range(2):
            reply = await service.done("AGENT.DISCOVER", {"cursor": first["next"], "limit": 20})
            got += [agent["mailbox"] for agent in reply["agents"]]
            first = reply
        assert (got, "next" in reply) == (every, False), "as it was when it was ranked"
        assert await found(service, filter={"tags": "MONEY"}, limit=100) == [f"a{no}" for no in range(3, 45, 3)]
        assert await found(service, filter={"tags": ["money"], "skills": ["s6"]}) == ["a6"]
        assert await found(service, filter={"state": "stale,gone"}) == []
        scored = await service.done("AGENT.DISCOVER", {"text": "pays", "with_scores": True, "with_state": True})
        assert (scored["mode"], scored["total"]) == ("text", 22)
        assert len(scored["scores"]) == len(scored["states"]) == len(scored["agents"]) == 20
        assert scored["scores"] == sorted(scored["scores"], reverse=True)
        assert scored["states"][0]["state"] == "alive"
        both = await service.done("AGENT.DISCOVER", {"text": "counts", "semantic": "who pays"})
        assert both["mode"] == "semantic"
        assert all(agent["description"] == "pays" for agent in both["agents"]), "semantic wins"
        assert "keywords" in both["note"], "and says when its meaning was not looked at"
        assert await found(service, text="pays", min_score=1.0, limit=1000) != []


def _skill(no: int) -> dict[str, Any]:
    return {"skills": [{"id": f"s{no}", "name": f"S {no}", "tags": ["Money"]}]} if no % 3 == 0 else {}


@pytest.mark.rule("G1", "G2", "G3", "N1", "N3")
async def test_bad_input_is_named_in_a_whole_reply(tmp_path: Path) -> None:
    """Which values are refused is in tests/unit/test_registry_cards.py and test_registry_codec.py."""
    wrong: dict[str, list[tuple[Any, str]]] = {
        "REGISTER": [
            (b"", "card"),
            (b"\xff\xfe", "card"),
            (b"x" * 10_000_000, "card"),
            (b"[" * 200_000, "card"),
            ({"description": "Ann"}, "mailbox"),
            ({"name": " "}, "name"),
            ({"mailbox": "http://x/a"}, "mailbox"),
            ({"mailbox": "public"}, "mailbox"),
            ({"mailbox": "a.b", "ttl": "soon"}, "ttl"),
        ],
        "UNREGISTER": [(b"", "mailbox"), (b"[1]", "body"), (b"\xff", "body"), ({"mailbox": 1}, "mailbox")],
        "REPORT": [
            (b"", "mailbox"),
            ({"name": ["Ann"]}, "name"),
            ({"mailbox": "kept", "x": "y" * MAX_STATUS}, "body"),
            (b'{"mailbox":"kept","x":' + b"[" * 100 + b"]" * 100 + b"}", "body"),
            (b"x" * 10_000_000, "body"),
        ],
        "DISCOVER": [
            (b"\xff", "body"),
            (b"[" * 200_000, "body"),
            (b"x" * 10_000_000, "body"),
            ({"limit": -1}, "limit"),
            ({"page": "x"}, "page"),
            ({"filter": {"state": "dead"}}, "filter.state"),
            *[({"cursor": value}, "cursor") for value in (5, "nope", "nope.1", "." * 50, "\x00", "é.1", "x" * 300)],
            ({"text": {}}, "text"),
        ],
    }
    async with app(tmp_path) as service:
        kept = card("kept", **PAY)
        await service.done("AGENT.REGISTER", kept)
        before = await service.ask_raw("AGENT.DISCOVER", {"with_state": True})
        for verb, cases in wrong.items():
            for body, field in cases:
                reply = await service.ask(AGENT + verb, body)
                case = f"{verb} {str(body)[:60]}: {reply}"
                assert reply["error"].startswith(f"{field}: "), case
                assert reply["error"].isprintable(), case
                assert len(reply["error"]) < 400, case
                assert reply == {"error": reply["error"], **EMPTY[verb]}, case
        assert await service.ask_raw("AGENT.DISCOVER", {"with_state": True}) == before


@pytest.mark.rule("G3")
async def test_any_query_is_answered_soundly(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        cards = [
            card("pay", **PAY),
            card("zh", description="支付发票"),
            card("ar", description="ادفع الفواتير"),
            card("nil"),
        ]
        for each in cards:
            await service.done("AGENT.REGISTER", each)
        for query in QUERIES:
            for how in ("text", "semantic"):
                reply = await service.done("AGENT.DISCOVER", {how: query, "with_scores": True})
                case = f"{how} {query[:20]!r}"
                assert reply["mode"] == how, case
                assert reply["total"] == len(reply["agents"]) == len(reply["scores"]), case
                assert all(0 <= score <= 1 for score in reply["scores"]), case
                assert all(agent in cards for agent in reply["agents"]), case
        assert await found(service, text="pay " * 25_000) == ["pay"]
        assert await found(service, text='name:pay* OR "') == ["pay"], "no query language"
        assert await found(service, text="支付") == ["zh"]
        assert await found(service, text="الفواتير") == ["ar"]
        assert await found(service, text="the of and") == []
        assert await found(service, text="   ") == ["pay", "zh", "ar", "nil"], "nothing asked for is all"


@pytest.mark.rule("G3", "N7")
async def test_a_page_stops_at_the_size_of_a_reply_and_continues(tmp_path: Path) -> None:
    async with app(tmp_path, max_message_bytes=1024) as service:
        room = (await service.nats()).max_payload
        assert room < 100_000, "what the smallest messages leave"
        cards = [card(f"a{no}", description="pays", filler="x" * (no * 700)) for no in range(60)]
        random.Random(5).shuffle(cards)
        for each in cards:
            await service.done("AGENT.REGISTER", each)
            await service.done("AGENT.REPORT", {"mailbox": each["mailbox"], "filler": "y" * 9000})
        for query in ({}, {"text": "pays"}):
            asked: dict[str, Any] = {**query, "limit": 1000, "with_state": True, "with_scores": True}
            got, pages = [], 0
            while True:
                data = await service.ask_raw("AGENT.DISCOVER", asked)
                assert len(data) <= room
                reply = json.loads(data)
                assert reply["error"] == ""
                assert reply["total"] == 60
                assert reply["agents"], "one at least"
                assert len(reply["states"]) == len(reply["scores"]) == len(reply["agents"])
                got += [agent["mailbox"] for agent in reply["agents"]]
                pages += 1
                if "next" not in reply:
                    break
                asked["cursor"] = reply["next"]
            assert sorted(got) == sorted(each["mailbox"] for each in cards), "each once"
            assert 10 < pages < 60


@pytest.mark.rule("A6", "G1", "G2", "G3")
async def test_agents_are_separated_by_tenant(tmp_path: Path) -> None:
    async with app(tmp_path, tenants=TENANTS) as service:
        for user, word in (("ada", "sheep"), ("bob", "goats")):
            await service.done("AGENT.REGISTER", card("same", "Same", description=f"counts {word}"), user)
            await service.done("AGENT.REGISTER", card(f"of.{user}", f"Of {user}", description="counts"), user)
        for user, other, word, others in (("ada", "bob", "sheep", "goats"), ("bob", "ada", "goats", "sheep")):
            assert await found(service, user) == ["same", f"of.{user}"]
            assert await found(service, user, text=word) == ["same"]
            assert await found(service, user, text=others) == []
            assert await found(service, user, semantic=f"of {other}", limit=1000, tenant=other) != [f"of.{other}"]
            for body in ({"mailbox": f"of.{other}"}, {"name": f"Of {other}"}):
                assert (await service.ask("AGENT.REPORT", body, user))["error"].endswith("is not registered")
                assert (await service.done("AGENT.UNREGISTER", body, user))["removed"] is False
        cursor = (await service.done("AGENT.DISCOVER", {"limit": 1}, "ada"))["next"]
        stolen = await service.ask("AGENT.DISCOVER", {"cursor": cursor}, "bob")
        assert stolen["error"].startswith("cursor: ")
        await service.done("AGENT.REPORT", {"mailbox": "same", "of": "ada"}, "ada")
        await service.done("AGENT.UNREGISTER", {"name": "Same"}, "ada")
        left = await service.done("AGENT.DISCOVER", {"with_state": True}, "bob")
        assert [agent["description"] for agent in left["agents"]] == ["counts goats", "counts"]
        assert [state["status"] for state in left["states"]] == [None, None]


@pytest.mark.rule("N2")
async def test_unknown_verbs_and_requests_without_reply_subject(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        for verb in ("AGENT", "AGENT.LIST", "AGENT.REGISTER.a", "AGENT.register", "AGENT.DISCOVER.a.b"):
            reply = await service.ask(verb, card("a"))
            assert reply == {"error": f"unknown subject $mq9.AI.{verb}"}
        client = await service.nats()
        await client.publish("$mq9.AI.AGENT.REGISTER", json.dumps(card("quiet")).encode())
        await service.done("AGENT.REGISTER", card("loud"))
        assert "quiet" in await found(service)


@pytest.mark.rule("N2")
async def test_with_the_registry_turned_off_its_subjects_are_unknown(tmp_path: Path) -> None:
    async with app(tmp_path, registry={"enabled": False}) as service:
        for verb in EMPTY:
            reply = await service.ask(AGENT + verb, card("a"))
            assert reply == {"error": f"unknown subject $mq9.AI.AGENT.{verb}"}
        assert (await service.call("GET", "/agents")).status == 404
        assert (await service.call("GET", "/openapi.json")).status == 404
        assert (await service.call("GET", "/livez")).status == 200


async def test_the_examples_on_the_page_are_answered_as_it_says(tmp_path: Path) -> None:
    examples = EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))
    # The id of a search is another one each time.
    assert {subject for subject, _, _ in examples} == {AGENT + verb for verb in EMPTY if verb != "FEEDBACK"}
    async with app(tmp_path) as service:
        for subject, body, reply in examples:
            assert (await service.ask_raw(subject, body.encode())).decode() == reply


@pytest.mark.rule("G4", "A10")
async def test_who_discovers_an_agent_may_write_and_not_read(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        made = await service.done("MAILBOX.CREATE", {})
        own, to = made["mail_address"], made["send_address"]
        assert (await service.done("AGENT.REGISTER", card(own, "Ann")))["mailbox"] == own
        assert (await service.done("AGENT.REPORT", {"mailbox": own, "load": 1}))["mailbox"] == own
        for asked in ({}, {"text": "Ann"}):
            reply = await service.ask_raw("AGENT.DISCOVER", json.dumps({**asked, "with_state": True}).encode())
            assert own.encode() not in reply
            page = json.loads(reply)
            assert [agent["mailbox"] for agent in page["agents"]] == [to]
            assert page["states"][0]["status"] == {"mailbox": to, "load": 1}
        assert await service.done(f"MSG.SEND.{to}", {}) == {"error": "", "msg_id": 0}
        only = f"mailbox {to} is send-only: this address takes SEND and nothing else"
        assert (await service.ask(f"MSG.QUERY.{to}"))["error"] == only
        for verb, body in (("REGISTER", card(to, "Eve")), ("REPORT", {"mailbox": to}), ("UNREGISTER", {"mailbox": to})):
            assert (await service.ask(AGENT + verb, body))["error"] == only, verb
        # A name is known to all, so the reply to it is what all may know.
        assert (await service.done("AGENT.REPORT", {"name": "Ann"}))["mailbox"] == to
        assert (await service.done("AGENT.UNREGISTER", {"name": "Ann"}))["mailbox"] == to
        assert await found(service) == []
        await service.done("AGENT.REGISTER", {"mailbox": own, "send_only": False})
        assert await found(service) == [own]
        assert (await service.done("AGENT.UNREGISTER", {"mailbox": own}))["mailbox"] == own
