"""Which cards claim to be A2A, and what they lack, as the SDK of A2A sees it too."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from a2a.client.card_resolver import parse_agent_card
from a2a.compat.v0_3.types import AgentCard
from a2a.utils.errors import InvalidParamsError
from a2a.utils.proto_utils import validate_proto_required_fields
from google.protobuf.json_format import ParseError
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from registry.cards.a2a import MAX_ITEMS, MAX_WARNINGS, CardFormat, check, detect_format
from registry.cards.card import read_card

SKILL = {
    "id": "plan-dough",
    "name": "Plan a dough",
    "description": "Flour, water, salt.",
    "tags": ["baking"],
    "examples": ["How much salt?"],
    "inputModes": ["text/plain"],
}
SHARED = {
    "name": "Bread Baker",
    "description": "Plans doughs.",
    "version": "1.0.0",
    "provider": {"url": "https://baker.example", "organization": "Bakers"},
    "documentationUrl": "https://baker.example/docs",
    "capabilities": {
        "streaming": False,
        "extensions": [{"uri": "https://mq9.example", "required": True, "params": {"mailbox": "a", "n": [1, None]}}],
    },
    "defaultInputModes": ["text/plain"],
    "defaultOutputModes": ["text/plain"],
    "skills": [SKILL, {**SKILL, "id": "oven-times"}],
}
V1_0: dict[str, Any] = {
    **SHARED,
    "supportedInterfaces": [
        {"url": "https://baker.example/a2a", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"},
        {"url": "https://baker.example/rpc", "protocolBinding": "GRPC", "protocolVersion": "1.0", "tenant": "t"},
    ],
}
V0_3: dict[str, Any] = {
    **SHARED,
    "url": "https://baker.example/a2a",
    "protocolVersion": "0.3.0",
    "preferredTransport": "JSONRPC",
    "additionalInterfaces": [{"url": "https://baker.example/rpc", "transport": "GRPC"}],
}


@pytest.mark.parametrize(
    ("card", "kind"),
    [
        (V1_0, CardFormat.A2A_1_0),
        (V0_3, CardFormat.A2A_0_3),
        ({**V0_3, **V1_0}, CardFormat.A2A_1_0),
        ({"supportedInterfaces": None}, CardFormat.A2A_1_0),
        ({"url": "https://a.example", "protocolVersion": "1.0"}, CardFormat.A2A_1_0),
        ({"protocolVersion": "0.2.5"}, CardFormat.A2A_0_3),
        ({"url": 5, "preferredTransport": None}, CardFormat.A2A_0_3),
        ({"url": "https://a.example", "defaultInputModes": []}, CardFormat.A2A_0_3),
        ({}, CardFormat.OTHER),
        ({"name": "a", "description": "b", "skills": ["c"]}, CardFormat.OTHER),
        ({"name": "a", "url": "https://a.example"}, CardFormat.OTHER),
        # What an MCP server says of itself.
        (
            {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "a"}},
            CardFormat.OTHER,
        ),
        ({"protocolVersion": 0.3}, CardFormat.OTHER),
    ],
)
def test_the_format_follows_from_fields_only_one_version_has(card: dict[str, Any], kind: CardFormat) -> None:
    assert detect_format(card) is kind
    if kind is CardFormat.OTHER:
        assert check(card, kind) == []


def changed(card: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> list[str]:
    card = copy.deepcopy(card)
    change(card)
    return check(card, detect_format(card))


@pytest.mark.parametrize(
    ("card", "change", "warnings"),
    [
        (V1_0, lambda card: None, []),
        (V0_3, lambda card: None, []),
        (V1_0, lambda card: card.pop("version"), ["version: missing"]),
        (V0_3, lambda card: card.pop("url"), ["url: missing"]),
        (V1_0, lambda card: card.update(name=""), ["name: expected some text"]),
        (V0_3, lambda card: card.update(name=""), []),
        (V1_0, lambda card: card["skills"][1].update(tags=[]), ["skills[1].tags: expected at least one"]),
        (V0_3, lambda card: card["skills"][1].update(tags=[]), []),
        (V1_0, lambda card: card["skills"][0].update(tags=["a", 5]), ["skills[0].tags[1]: expected a string"]),
        (V1_0, lambda card: card["skills"].append("knead"), ["skills[2]: expected an object"]),
        (V1_0, lambda card: card.update(capabilities=["streaming"]), ["capabilities: expected an object"]),
        (V1_0, lambda card: card.update(capabilities={}), []),
        (
            V1_0,
            lambda card: card["capabilities"].update(streaming="yes"),
            ["capabilities.streaming: expected true or false"],
        ),
        (
            V1_0,
            lambda card: card["supportedInterfaces"][0].pop("url"),
            ["supportedInterfaces[0].url: missing"],
        ),
        (V1_0, lambda card: card["provider"].pop("url"), ["provider.url: missing"]),
        (V1_0, lambda card: card.update(provider=None), []),
        (V1_0, lambda card: card.update(skills={}), ["skills: expected a list"]),
        # What secures an agent is for those who call it.
        (V1_0, lambda card: card.update(signatures=5, securitySchemes=[], securityRequirements="none"), []),
    ],
)
def test_a_missing_field_is_named_with_its_path(
    card: dict[str, Any], change: Callable[[dict[str, Any]], object], warnings: list[str]
) -> None:
    assert changed(card, change) == warnings


def test_warnings_are_bounded() -> None:
    faults = check({**V1_0, "skills": [{} for _ in range(1000)]}, CardFormat.A2A_1_0)
    assert len(faults) == MAX_WARNINGS
    assert faults[:2] == ["skills[0].id: missing", "skills[0].name: missing"]
    assert check({**V1_0, "skills": [SKILL] * MAX_ITEMS + [{}]}, CardFormat.A2A_1_0) == []


# Where the SDK and this cannot agree, and what is therefore not generated: it also takes names_with_underscores, and
# the top level of 0.3 when a card of 1.0 has no interfaces; it looks into security schemes and signatures; here only
# the first items of long lists are looked at.


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a card, but for what is inside the parameters of an extension, which may be anything."""
    found = [path] if path else []
    if path and path[-1] == "params":
        return found
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        found += places(item, (*path, key))
    return found


DROPPED = object()
WRONG = (DROPPED, None, "", "text", 5, 0.5, True, [], ["text"], [""], [None], [5], [{}], {}, {"a": 1})


@st.composite
def mutated(draw: st.DrawFn, card: dict[str, Any], wrong: tuple[Any, ...] = WRONG) -> dict[str, Any]:
    card = copy.deepcopy(card)
    for _ in range(draw(st.integers(0, 3))):
        *path, last = draw(st.sampled_from(places(card) or [("name",)]))
        inside: Any = card
        for key in path:
            inside = inside[key]
        value = draw(st.sampled_from(wrong))
        if value is not DROPPED:
            inside[last] = copy.deepcopy(value)
        else:
            del inside[last]
    return card


def sdk_accepts_1_0(card: dict[str, Any]) -> bool:
    try:
        validate_proto_required_fields(parse_agent_card(copy.deepcopy(card)))
    except (ParseError, InvalidParamsError, TypeError):
        return False
    return True


@given(mutated(V1_0))
@settings(max_examples=100, deadline=None)
def test_cards_of_1_0_have_warnings_where_the_sdk_refuses_them(card: dict[str, Any]) -> None:
    card.setdefault("supportedInterfaces", None)
    faults = check(card, CardFormat.A2A_1_0)
    # For an object the SDK takes whatever can be iterated, a string too.
    certain = [fault for fault in faults if not fault.endswith("expected an object")]
    if certain or not faults:
        assert sdk_accepts_1_0(card) == (not faults), faults


def sdk_accepts_0_3(card: dict[str, Any]) -> bool:
    try:
        AgentCard.model_validate_json(json.dumps(card))
    except ValidationError:
        return False
    return True


# The SDK reads numbers as flags.
@given(mutated(V0_3, tuple(value for value in WRONG if not isinstance(value, float | int))))
@settings(max_examples=100, deadline=None)
def test_cards_of_0_3_have_warnings_where_the_sdk_refuses_them(card: dict[str, Any]) -> None:
    assert (check(card, CardFormat.A2A_0_3) == []) == sdk_accepts_0_3(card)


@pytest.mark.rule("G1")
@given(mutated(V1_0) | mutated(V0_3))
@settings(deadline=None)
def test_a_card_with_faults_is_still_read(card: dict[str, Any]) -> None:
    card["mailbox"] = "bread.baker"
    read = read_card(json.dumps(card).encode())
    assert read.address == "bread.baker"
    assert read.format is detect_format(card)
    assert set(check(card, read.format)) <= set(read.warnings)
