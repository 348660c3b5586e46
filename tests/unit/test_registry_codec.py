"""What callers ask of the registry is read alike at both doors, and answered with cards as they came."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import MultiDict
from yarl import URL

from mediator.errors import BadRequestError
from mediator.fields import Fields, is_deep, parse_body
from registry.api import codec
from registry.api.codec import MAX_PAGES, MAX_STATUS, parse_discover, parse_query, parse_reference, parse_status
from registry.cards.card import Skill
from registry.index.analysis import MAX_REQUEST
from registry.records import Agent, State
from registry.requests import (
    MAX_PAGE,
    PAGE,
    AgentReference,
    DiscoverRequest,
    DiscoverResult,
    Explanation,
    KeywordMatch,
    VectorMatch,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = ["text", "semantic", "limit", "page", "filter", "min_score", "cursor", "with_scores", "with_state", "explain"]


def asked(body: Any) -> DiscoverRequest:
    return parse_discover(parse_body(body if isinstance(body, bytes) else json.dumps(body).encode()))


def query(text: str) -> DiscoverRequest:
    return parse_query(URL(f"/agents?{text}").query)


def outcome(read: Callable[[Any], DiscoverRequest], given: Any) -> DiscoverRequest | BadRequestError:
    try:
        return read(given)
    except BadRequestError as error:
        return error


def agent(no: int = 1, card: bytes = b"{}", status: bytes | None = None) -> Agent:
    return Agent(no, "default", f"a{no}", "", card, 0, 1, 1000, 2999, 3999, status, no, no)


@pytest.mark.rule("G3", "N4")
@pytest.mark.parametrize("body", [b"", b"{}", b"null", b'""', dict.fromkeys(NAMES), dict.fromkeys(NAMES, "")])
def test_absent_fields_list_all_in_pages_of_20(body: Any) -> None:
    assert asked(body) == DiscoverRequest(limit=20, page=1)


@pytest.mark.rule("G3", "N4")
@pytest.mark.parametrize(
    ("body", "limit", "page"),
    [
        ({"limit": 0, "page": 0}, PAGE, 1),
        ({"limit": 1, "page": 1}, 1, 1),
        ({"limit": 7.0, "page": 2.0}, 7, 2),
        ({"limit": MAX_PAGE + 1, "page": MAX_PAGES + 1}, MAX_PAGE, MAX_PAGES),
        ({"limit": 10**18, "page": 10**18}, MAX_PAGE, MAX_PAGES),
        ({"limit": 1e300}, MAX_PAGE, 1),
    ],
)
def test_limit_and_page_are_absent_at_0_and_clamped(body: Any, limit: int, page: int) -> None:
    assert (asked(body).limit, asked(body).page) == (limit, page)


@pytest.mark.rule("G3", "N3")
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"limit": -1}, "limit: expected 1 to 1000, got -1"),
        ({"limit": 1.5}, "limit: expected a whole number, got 1.5"),
        ({"limit": "x"}, 'limit: expected a whole number, got "x"'),
        ({"limit": True}, "limit: expected a whole number, got true"),
        ({"page": -1}, "page: expected 1 to 1000000, got -1"),
        ({"page": [1]}, "page: expected a whole number, got a list"),
        ({"text": 5}, "text: expected a string, got 5"),
        ({"semantic": ["a"]}, "semantic: expected a string, got a list"),
        ({"filter": "fast"}, 'filter: expected an object, got "fast"'),
        ({"filter": {"tags": 5}}, "filter.tags: expected a list of strings, got 5"),
        ({"filter": {"skills": [1]}}, "filter.skills: expected a list of strings, got a list"),
        ({"filter": {"state": "dead"}}, 'filter.state: expected alive or stale or gone, got "dead"'),
        ({"filter": {"state": ["alive", "Gone"]}}, 'filter.state: expected alive or stale or gone, got "Gone"'),
        ({"min_score": -0.1}, "min_score: expected a number from 0 to 1, got -0.1"),
        ({"min_score": "high"}, 'min_score: expected a number from 0 to 1, got "high"'),
        ({"min_score": True}, "min_score: expected a number from 0 to 1, got true"),
        ({"cursor": 7}, "cursor: expected a string, got 7"),
        ({"cursor": "x" * 257}, "cursor: expected at most 256 characters, got 257"),
        ({"with_scores": "yes"}, 'with_scores: expected true or false, got "yes"'),
        ({"with_state": 1}, "with_state: expected true or false, got 1"),
        (b"[]", "body: expected a JSON object, got a list"),
        (b'{"text": "\xff"}', "body: expected JSON, "),
        (b"[" * 100_000, "body: expected JSON, "),
        (b'{"text": "' + b"x" * 1024 * 1024 + b'"}', "body: expected at most 1048576 bytes, "),
    ],
)
def test_an_invalid_field_is_named(body: Any, problem: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        asked(body)
    assert str(caught.value).startswith(problem)


@pytest.mark.rule("G3")
def test_filters_are_lists_or_strings_with_commas() -> None:
    lists = {"tags": ["fast", " safe "], "skills": ["pay"], "state": ["alive", "gone"]}
    strings = {"tags": "fast,safe,fast", "skills": "pay", "state": "gone, alive"}
    for body in (lists, strings):
        found = asked({"filter": body, "min_score": 0.5})
        assert (found.tags, found.skills, found.min_score) == (("fast", "safe"), ("pay",), 0.5)
        assert found.states == {State.ALIVE, State.GONE}
    assert asked({"filter": {"state": []}, "min_score": 7}) == DiscoverRequest(min_score=1.0)
    assert asked({"filter": {}, "min_score": 0}).min_score == 0


@pytest.mark.rule("G3")
def test_a_query_of_white_space_is_none_and_a_long_one_is_cut() -> None:
    assert asked({"text": " \n\t\u3000", "semantic": "  "}) == DiscoverRequest()
    long = asked({"text": " " + "wort " * 20_000, "semantic": "寻" * 100_000})
    assert long.text == ("wort " * 20_000)[:MAX_REQUEST]
    assert long.semantic == "寻" * MAX_REQUEST
    assert asked({"text": 'NEAR(a b) OR "c" col:* \x00'}).text == 'NEAR(a b) OR "c" col:* \x00', (
        "nothing means anything"
    )


@given(st.dictionaries(st.sampled_from([*NAMES, "other"]), json_values, max_size=5))
@pytest.mark.rule("N3")
def test_any_body_is_parsed_or_refused_naming_a_field(body: dict[str, Any]) -> None:
    found = outcome(asked, body)
    if isinstance(found, BadRequestError):
        assert found.field.partition(".")[0] in {*NAMES, "body"}
        assert str(found).isprintable()
    else:
        assert 1 <= found.limit <= MAX_PAGE
        assert 1 <= found.page <= MAX_PAGES


@pytest.mark.rule("G3")
def test_over_http_the_same_is_asked_by_parameters() -> None:
    assert query("") == query("text=&semantic=&limit=&page=0&tag=&state=&with_scores=&other=1") == DiscoverRequest()
    asked_so = query(
        "text=pay%20me&semantic=who%3F&limit=5&page=2&tag=fast&tag=safe,cheap&skill=pay&state=alive,stale"
        "&min_score=0.25&cursor=c&with_scores=true&with_state=1&explain=true"
    )
    assert asked_so == DiscoverRequest(
        text="pay me",
        semantic="who?",
        limit=5,
        page=2,
        tags=("fast", "safe", "cheap"),
        skills=("pay",),
        states=frozenset({State.ALIVE, State.STALE}),
        min_score=0.25,
        cursor="c",
        with_scores=True,
        with_state=True,
        explain=True,
    )
    assert query("limit=999999999999999999&page=999999999999999999") == DiscoverRequest(limit=MAX_PAGE, page=MAX_PAGES)
    assert query("min_score=5e-1").min_score == query("min_score=0.5").min_score
    assert query("with_scores=False&with_state=0&min_score=1") == DiscoverRequest(min_score=1.0)


@pytest.mark.rule("N3")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("limit=-1", 'limit: expected 1 to 1000, got "-1"'),
        ("limit=x", 'limit: expected a whole number, got "x"'),
        ("limit=1.5", 'limit: expected a whole number, got "1.5"'),
        ("limit=%201", 'limit: expected a whole number, got " 1"'),
        ("limit=1&limit=2", "limit: expected once"),
        (f"page={'9' * 31}", "page: expected a whole number, got "),
        ("page=٣", "page: expected a whole number, got "),
        ("min_score=nan", 'min_score: expected a number from 0 to 1, got "nan"'),
        ("min_score=-1", 'min_score: expected a number from 0 to 1, got "-1"'),
        ("min_score=1e4000", "min_score: expected a number from 0 to 1, got "),
        ("explain=yes", 'explain: expected true or false, got "yes"'),
        ("with_scores=yes", 'with_scores: expected true or false, got "yes"'),
        ("state=dead", 'state: expected alive or stale or gone, got "dead"'),
        ("tag=" + ",".join(map(str, range(65))), "tag: expected at most 64, got 65"),
        ("tag=a%00b", "tag: expected no commas or control characters inside"),
    ],
)
def test_over_http_an_invalid_parameter_is_named(text: str, problem: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        query(text)
    assert str(caught.value).startswith(problem)


@given(st.lists(st.tuples(st.sampled_from([*NAMES, "tag", "skill", "state"]), st.text(max_size=20)), max_size=6))
@pytest.mark.rule("N3")
def test_any_query_is_parsed_or_refused(pairs: list[tuple[str, str]]) -> None:
    found = outcome(parse_query, MultiDict(pairs))
    assert isinstance(found, DiscoverRequest) or found.field in dict(pairs)


@pytest.mark.rule("G2")
def test_an_agent_is_named_by_its_mailbox_or_else_by_its_name() -> None:
    both = parse_body(b'{"mailbox": "mq9://broker/a.b", "name": "Ann"}')
    assert parse_reference(both) == AgentReference(address="a.b")
    assert parse_reference(parse_body(b'{"mailbox": "a.b"}')) == AgentReference(address="a.b")
    assert parse_reference(parse_body(b'{"mailbox": "", "name": "Ann"}')) == AgentReference(name="Ann")
    card = {"name": "Ann", "capabilities": {"extensions": [{"uri": "u", "params": {"mailbox": "mq9://x/a.b"}}]}}
    assert parse_reference(Fields(card)) == AgentReference(address="a.b"), "a whole card, as SDKs send"
    for data in (b"", b"{}", b'{"name": null}', b'{"mailbox": "", "name": ""}'):
        with pytest.raises(BadRequestError, match=r"^mailbox: expected the agent's mailbox, or its name$"):
            parse_reference(parse_body(data))
    for data, field in ((b'{"mailbox": 5}', "mailbox"), (b'{"mailbox": "A b"}', "mailbox"), (b'{"name": 5}', "name")):
        with pytest.raises(BadRequestError, match=f"^{field}: "):
            parse_reference(parse_body(data))


@pytest.mark.rule("G2")
def test_a_report_is_bounded_in_bytes_and_levels() -> None:
    body = b'{"mailbox": "a.b", "x": "%b"}'
    fitting = body % (b"x" * (MAX_STATUS - len(body) + 2))
    assert parse_reference(parse_status(fitting)) == AgentReference(address="a.b")
    with pytest.raises(BadRequestError, match=r"^body: expected a report of at most 16384 bytes, got 16385$"):
        parse_status(fitting + b" ")
    levels = b'{"mailbox": "a.b", "x": %b1%b}'
    assert parse_reference(parse_status(levels % (b"[" * 63, b"]" * 63))) == AgentReference(address="a.b")
    with pytest.raises(BadRequestError, match=r"^body: expected at most 64 levels"):
        parse_status(levels % (b"[" * 64, b"]" * 64))
    assert codec.parse_status(b"").values == {}


@given(st.recursive(st.just({}), lambda inner: st.dictionaries(st.text(max_size=2), inner | st.just([{}]), max_size=3)))
def test_levels_are_counted_as_they_stand(value: dict[str, Any]) -> None:
    def levels(part: Any) -> int:
        inside = part.values() if isinstance(part, dict) else part
        return 1 + max((levels(each) for each in inside), default=0)

    assert not is_deep(value, levels(value))
    assert is_deep(value, levels(value) - 1)


@pytest.mark.rule("G3")
def test_cards_and_reports_are_answered_byte_for_byte() -> None:
    card, status = b'{ "b":1.10,\n"a" : "\\u00e9", "b": 2}', b'{"mailbox" :  "a1"}'
    page = DiscoverResult(
        [agent(1, card, status), agent(2)], [0.123456, 0.0], [State.ALIVE, State.GONE], 7, "c.2", "text", "why"
    )
    plain = codec.encode_page(page, DiscoverRequest())
    assert plain.keys() == {"agents", "mode", "total", "next", "note"}
    data = orjson.dumps(codec.encode_page(page, DiscoverRequest(with_scores=True, with_state=True)))
    assert data == (
        b'{"agents":[%b,{}],"mode":"text","total":7,"scores":[0.1235,0.0],'
        b'"states":[{"state":"alive","last_seen":3,"status":%b},{"state":"gone","last_seen":3,"status":null}],'
        b'"next":"c.2","note":"why"}'
    ) % (card, status)
    keywords, vectors = KeywordMatch(0.12341, ("pay",)), VectorMatch(0.2, 0.5, Skill(name="Pay"), 0.75)
    page = replace(page, explanations=[Explanation(keywords, vectors), Explanation(vectors=VectorMatch(0.1))])
    assert codec.encode_page(page, DiscoverRequest())["explanations"] == [
        {
            "keywords": {"score": 0.1234, "words": ["pay"]},
            "vectors": {"score": 0.2, "card": 0.5, "skill": {"name": "Pay", "cosine": 0.75}},
        },
        {"vectors": {"score": 0.1}},
    ]
    last = codec.encode_page(DiscoverResult([], [], [], 0, None, "list"), DiscoverRequest())
    assert orjson.dumps(last) == b'{"agents":[],"mode":"list","total":0}'
