"""Trust ping, discover features and problem reports."""

import orjson
import pytest
import structlog.testing

from mediator.errors import BadRequestError
from pickup.message import DIDCOMM, OLD
from pickup.protocols.general import matches
from pickup.rules.records import Generation
from tests.harness.mediation import key
from tests.harness.protocols import MAX_ENVELOPE, V1, V2, Answer, Door, Json, Wire, envelope, marks

HELD = key(500)
PING = {V1: "trust_ping/1.0/ping", V2: "trust-ping/2.0/ping"}
both = pytest.mark.parametrize("generation", [V1, V2], ids=["v1", "v2"])


# Trust ping.


@both
@pytest.mark.rule("D5")
@pytest.mark.parametrize("body", [{}, {"response_requested": True}, {"response_requested": None}])
async def test_a_ping_is_answered(door: Door, generation: Generation, body: Json) -> None:
    """`response_requested`: default is true."""
    peer = await door.connect(1, generation)
    answer = await peer.ask(PING[generation], body)
    response = "trust_ping/1.0/ping_response" if generation is V1 else "trust-ping/2.0/ping-response"
    assert (answer.type, answer.thid) == (DIDCOMM + response, peer.last)


@both
@pytest.mark.rule("D5")
async def test_a_ping_that_wants_no_answer_gets_none(door: Door, generation: Generation) -> None:
    peer = await door.connect(1, generation)
    assert await peer.tell(PING[generation], {"response_requested": False}) == []


@both
@pytest.mark.rule("D12")
async def test_response_requested_is_true_or_false(door: Door, generation: Generation) -> None:
    answer = await (await door.connect(1, generation)).ask(PING[generation], {"response_requested": "no"})
    assert answer.problem[1].startswith("response_requested: ")


@both
@pytest.mark.rule("D8")
async def test_an_anonymous_ping_is_taken_and_cannot_be_answered(door: Door, generation: Generation) -> None:
    wire = Wire(persistent=True)
    raw: Json = {"@type": DIDCOMM + PING[V1], "@id": "p"}
    if generation is V2:
        raw = {"type": DIDCOMM + PING[V2], "id": "p", "return_route": "all"}
    await door.receive(raw, generation, None, wire)
    assert wire.frames == []


@both
@pytest.mark.rule("D7")
async def test_a_ping_without_response_starts_implicit_pickup(door: Door, generation: Generation) -> None:
    """Bare envelopes, the backlog first; each goes when the socket confirms it."""
    recipient = HELD if generation is V1 else "did:web:held.example"
    peer, wire = await door.holder(1, recipient, generation=generation), Wire(persistent=True)
    await door.forward(recipient, envelope("a"))
    await peer.tell(PING[generation], {"response_requested": False}, wire=wire)
    assert marks(await wire.count(1)) == ["a"]
    assert len(await peer.queued()) == 1, "not confirmed yet"
    wire.pongs.set()
    await door.forward(recipient, envelope("b"))
    assert marks(await wire.count(2)) == ["a", "b"]


@pytest.mark.rule("D7", "D10")
@pytest.mark.parametrize("why", ["http", "answer wanted", "no return route", "not enrolled"])
async def test_any_other_ping_picks_nothing_up(door: Door, why: str) -> None:
    peer = await door.connect(1) if why == "not enrolled" else await door.holder(1, HELD)
    await door.forward(HELD)
    wire = Wire(persistent=why != "http")
    route = None if why == "no return route" else "all"
    await peer.tell(PING[V1], {"response_requested": why == "answer wanted"}, wire=wire, route=route)
    assert not door.sessions.has((await peer.connected()).id)
    assert [answer.name for answer in wire.answers] == (["ping_response"] if why == "answer wanted" else [])


# Discover features.


def ids(answer: Answer) -> list[str]:
    return [one["id"] for one in answer.body["disclosures"]]


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (f"{DIDCOMM}messagepickup/*", ["1.0", "2.0", "3.0"]),
        (f"{DIDCOMM}messagepickup/2.0", ["2.0"]),
        ("*/messagepickup/3.*", ["3.0"]),
        (f"{DIDCOMM}basicmessage/*", []),
        (f"{DIDCOMM}messagepickup/2.?", []),
        ("", []),
    ],
)
async def test_a_query_of_1_0_is_answered_with_what_matches(door: Door, pattern: str, found: list[str]) -> None:
    """The `query` field may use the * wildcard."""
    peer = await door.connect(1)
    answer = await peer.ask("discover-features/1.0/query", {"query": pattern, "comment": "why"})
    assert (answer.name, answer.thid) == ("disclose", peer.last)
    assert answer.body["protocols"] == [
        {"pid": f"{DIDCOMM}messagepickup/{version}", "roles": ["mediator"]} for version in found
    ]


EVERY = {
    "connections/1.0",
    "coordinate-mediation/1.0",
    "coordinate-mediation/2.0",
    "coordinate-mediation/3.0",
    "didexchange/1.0",
    "didexchange/1.1",
    "discover-features/1.0",
    "discover-features/2.0",
    "empty/1.0",
    "message-pickup/4.0",
    "messagepickup/1.0",
    "messagepickup/2.0",
    "messagepickup/3.0",
    "out-of-band/1.1",
    "out-of-band/2.0",
    "report-problem/1.0",
    "report-problem/2.0",
    "routing/1.0",
    "routing/2.0",
    "trust_ping/1.0",
    "trust-ping/2.0",
}


@pytest.mark.rule("D12")
async def test_all_protocols_are_disclosed_in_the_queriers_prefix(door: Door) -> None:
    peer = await door.connect(1)
    for prefix in (DIDCOMM, OLD):
        answer = await peer.ask("discover-features/1.0/query", {"query": "*"}, prefix=prefix)
        assert {prefix + one for one in EVERY} <= {one["pid"] for one in answer.body["protocols"]}
    answer = await peer.ask("discover-features/1.0/query", {"query": f"{OLD}messagepickup/2.0"})
    assert [one["pid"] for one in answer.body["protocols"]] == [f"{OLD}messagepickup/2.0"]


OTHERS = ["request-mediate", "return_route", "max_receive_bytes"]


@both
@pytest.mark.rule("D12")
async def test_queries_of_2_0_ask_for_kinds_of_features(door: Door, generation: Generation) -> None:
    peer = await door.connect(1, generation)
    queries = [
        {"feature-type": "protocol", "match": "*/trust-ping/*"},
        {"feature-type": "protocol", "match": "*ing/2.0"},
        {"feature-type": "goal-code", "match": "request-*"},
        {"feature-type": "goal-code", "match": "sell.*"},
        {"feature-type": "header", "match": "return_*"},
        {"feature-type": "header", "match": "lang"},
        {"feature-type": "constraint", "match": "max_*"},
        {"feature-type": "something new", "match": "*"},
    ]
    answer = await peer.ask("discover-features/2.0/queries", {"queries": queries})
    assert answer.name == ("disclosures" if generation is V1 else "disclose")
    assert answer.thid == peer.last
    assert ids(answer) == [f"{DIDCOMM}trust-ping/2.0", f"{DIDCOMM}routing/2.0", *OTHERS]
    assert answer.body["disclosures"][1]["roles"] == ["mediator"]
    assert answer.body["disclosures"][2:4] == [
        {"feature-type": "goal-code", "id": "request-mediate"},
        {"feature-type": "header", "id": "return_route"},
    ]
    assert answer.body["disclosures"][4] == {
        "feature-type": "constraint",
        "id": "max_receive_bytes",
        # What the transports take, which is more than a message may have that is forwarded.
        "max_receive_bytes": str(MAX_ENVELOPE),
    }


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("queries", "field"),
    [
        (None, "queries"),
        ({}, "queries"),
        (["x"], "queries"),
        ([{"feature-type": "protocol"}] * 65, "queries"),
        ([{"feature-type": "protocol"}], "match"),
        ([{"feature-type": "protocol", "match": "*" * 2000}], "match"),
    ],
)
async def test_queries_that_are_none_are_refused(door: Door, queries: object, field: str) -> None:
    answer = await (await door.connect(1)).ask("discover-features/2.0/queries", {"queries": queries})
    assert answer.problem[1].startswith(f"{field}: ")


@pytest.mark.rule("D12")
@pytest.mark.parametrize("query", [None, 1, "*" * 2000])
async def test_a_query_that_is_none_is_refused(door: Door, query: object) -> None:
    answer = await (await door.connect(1)).ask("discover-features/1.0/query", {"query": query})
    assert answer.problem[1].startswith("query: ")


@pytest.mark.parametrize(
    ("pattern", "text", "matched"),
    [
        ("", "", True),
        ("*", "", True),
        ("a*", "abc", True),
        ("*c", "abc", True),
        ("a*c", "abc", True),
        ("a*b*c", "abc", True),
        ("*b*", "abc", True),
        ("ab*bc", "abc", False),
        ("a*a", "a", False),
        ("*b*b*", "abc", False),
        ("a.c", "abc", False),
        ("[a]bc", "abc", False),
        ("**", "abc", True),
        ("*bb*c", "abbc", True),
    ],
)
def test_a_star_stands_for_anything(pattern: str, text: str, matched: bool) -> None:
    assert matches(pattern, text) is matched


# Problem reports of peers.


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("generation", "type", "body"),
    [
        (V1, "report-problem/1.0/problem-report", {"description": {"code": "e.secret"}}),
        (V1, "notification/1.0/problem-report", {"description": "text"}),
        (V1, "report-problem/1.0/problem_report", {}),
        (V2, "report-problem/2.0/problem-report", {"code": "e.p.msg", "comment": "text"}),
        (V2, "report-problem/2.0/problem-report", {"code": "e\n" * 100}),
        (V1, "messagepickup/2.0/problem-report", {}),
        (V1, "coordinate-mediation/1.0/problem-report", {}),
        (V1, "no-such-protocol/9.9/problem-report", {}),
        (V2, "report-problem/3.0/problem-report", {}),
    ],
)
async def test_a_problem_report_is_never_answered(door: Door, generation: Generation, type: str, body: Json) -> None:
    peer = await door.connect(1, generation)
    with structlog.testing.capture_logs() as logs:
        assert await peer.tell(type, body) == []
    assert {entry["log_level"] for entry in logs} == {"debug"}
    assert "text" not in orjson.dumps(logs).decode()
    assert "\\n" not in orjson.dumps(logs).decode()


@pytest.mark.rule("D12")
@pytest.mark.parametrize("name", ["problem-report", "problem_report"])
async def test_a_problem_report_about_a_handshake_is_never_answered(door: Door, name: str) -> None:
    assert await (await door.connect(1)).tell(f"didexchange/1.1/{name}") == []


@pytest.mark.rule("D12")
async def test_errors_of_anonymous_messages_go_to_the_transport(door: Door) -> None:
    raw: Json = {"@type": DIDCOMM + PING[V1], "@id": "p", "response_requested": 1}
    with pytest.raises(BadRequestError, match="response_requested"):
        await door.receive(raw, V1, None, Wire())
