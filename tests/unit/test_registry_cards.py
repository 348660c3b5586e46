"""Cards of every shape: what is refused, what is read of the others, and what is left out (G1)."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mediator.errors import BadRequestError
from registry.api.codec import encode_remarks
from registry.cards.a2a import MAX_WARNINGS
from registry.cards.card import MAX_CARD, MAX_DEPTH, Card, CardFormat, Skill, find_mailbox, mailbox_address, read_card
from registry.cards.sources import with_mailbox
from tests.fuzz import cards as fuzzed


def read(**fields: Any) -> Card:
    return read_card(json.dumps({"mailbox": "bread.baker", **fields}).encode())


def extended(*mailboxes: Any) -> dict[str, Any]:
    return {"extensions": [{"uri": "https://mq9.example", "params": {"mailbox": mailbox}} for mailbox in mailboxes]}


@pytest.mark.rule("G1")
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("bread.baker", "bread.baker"),
        ("mq9://broker/bread.baker", "bread.baker"),
        ("mq9://broker.example:4222/bread.baker", "bread.baker"),
        ("mq9:///bread.baker", "bread.baker"),
        ("MQ9://broker/a1", "a1"),
        ("mq9://broker/some/where/a", "a"),
        ("a" * 128, "a" * 128),
        # No mailbox here is called so, but one elsewhere may be.
        ("bread-baker.no-1", "bread-baker.no-1"),
        ("mq9://broker/bread-baker", "bread-baker"),
    ],
)
def test_both_spellings_of_a_mailbox_are_one_address(text: str, address: str) -> None:
    assert mailbox_address(text) == address
    assert read(mailbox=text).address == address


@pytest.mark.rule("G1", "N3", "A1")
@pytest.mark.parametrize(
    "value",
    [
        5,
        True,
        ["a"],
        {"a": "b"},
        "Bread",
        "bread baker",
        "a" * 129,
        "a-" * 64 + "a",
        "-bread",
        "bread-",
        "bread--baker",
        "bread.-baker",
        "Bread-Baker",
        "mq9://broker/",
        "mq9://broker",
        "mq9://",
        "mq9:bread",
        "nats://broker/bread",
        "https://broker/bread",
        "broker/bread",
        "mq9://broker/bread?x=1",
        "mq9://broker/bread%2Ebaker",
        "mq9://broker/bread ",
        "mq9://broker/bread/",
        "mq9://broker/Bread",
        " bread",
        "bread\n",
        "public",
        "mq9://broker/public",
        "/" * 200_000,
        "\u0000",
    ],
)
def test_an_invalid_mailbox_is_refused_naming_the_field(value: Any) -> None:
    with pytest.raises(BadRequestError, match=r"\Amailbox: ") as raised:
        read(mailbox=value)
    assert raised.value.field == "mailbox"
    with pytest.raises(BadRequestError, match=r"\Amailbox: "):
        read(mailbox="", capabilities=extended(value if isinstance(value, str) else "A"))


@pytest.mark.rule("G1")
def test_the_mailbox_stands_at_the_top_or_in_an_extension() -> None:
    assert read(capabilities=extended("other")).address == "bread.baker"
    for absent in (None, ""):
        assert read(mailbox=absent, capabilities=extended("mq9://b/other")).address == "other"
        assert read(mailbox=absent, capabilities=extended(5, None, "", ["x"], "first", "second")).address == "first"
    assert find_mailbox({"capabilities": {"extensions": [None, 1, {"params": []}, {"params": {}}]}}) is None
    assert find_mailbox({"capabilities": {"extensions": {"mailbox": "a"}}}) is None
    assert find_mailbox({"payload": {"mailbox": "a"}}) is None


@pytest.mark.rule("G1")
@pytest.mark.parametrize("mailbox", [{}, {"mailbox": None}, {"mailbox": ""}])
def test_a_card_without_a_mailbox_is_identified_by_its_name(mailbox: dict[str, Any]) -> None:
    card = read_card(json.dumps({"name": "Bäcker / 1", "payload": '{"description": "rye"}', **mailbox}).encode())
    assert (card.address, card.name, card.description) == ("name:Bäcker / 1", "Bäcker / 1", "rye")
    assert encode_remarks(card)["note"] == "the card names no mailbox: nobody can send to this agent here"
    assert "note" not in encode_remarks(read(mailbox="bread.baker", name="x"))
    for name in ("", None):
        with pytest.raises(BadRequestError, match=r"^mailbox: expected an address, .*, or a name$"):
            read_card(json.dumps({"name": name, **mailbox}).encode())


@pytest.mark.rule("G1", "N3")
@pytest.mark.parametrize("name", [5, True, ["a"], {"a": 1}, " ", "x" * 257, "a\0", "a\nb", "a\x85"])
def test_a_name_that_cannot_identify_an_agent_is_refused(name: Any) -> None:
    with pytest.raises(BadRequestError, match=r"^name: expected a name of 1 to 256 characters"):
        read_card(json.dumps({"name": name}).encode())
    with pytest.raises(BadRequestError, match=r"^mailbox: "):
        read(mailbox="name:x")


@pytest.mark.rule("G1", "N3")
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "expected a JSON object, got nothing"),
        (b"[]", "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b'"bread.baker"', "expected a JSON object"),
        (b"bread.baker", "expected JSON, "),
        (b'{"mailbox": "a"', "expected JSON, "),
        (b'{"mailbox": "a"}{}', "expected JSON, "),
        (b'{"mailbox": "a", "name": "\xff"}', "expected JSON, "),
        (b'{"mailbox": "a", "name": "\xed\xa0\x80"}', "expected JSON, "),
        (b'{"mailbox": "a", "name": "\\ud800"}', "expected JSON, "),
        (b'{"mailbox": "a", "weight": NaN}', "expected JSON, "),
        (b'{"mailbox": "a", "weight": Infinity}', "expected JSON, "),
        (b'{"mailbox": "a", "weight": 1e999}', "expected JSON, "),
        (b"\xff\xfe{\x00}\x00", "expected JSON, "),
        (b'{"mailbox": "a", "x": ' + b"[" * 200 + b"]" * 200 + b"}", f"expected at most {MAX_DEPTH} levels"),
        (b'{"mailbox": "a", "x": ' + b'{"x":' * 200 + b"1" + b"}" * 201, f"expected at most {MAX_DEPTH} levels"),
        (b"[" * MAX_CARD, "expected JSON, "),
        (b'{"a":' * 40_000, "expected JSON, "),
        (b" " * (MAX_CARD + 1), f"expected at most 262144 bytes, got {MAX_CARD + 1}"),
        (b"[" * 10_000_000, "expected at most 262144 bytes, got 10000000"),
    ],
)
def test_what_is_no_card_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        read_card(data)
    assert str(raised.value).startswith(f"card: {problem}")


@pytest.mark.rule("G1")
def test_the_bounds_themselves_are_allowed() -> None:
    levels = MAX_DEPTH - 1
    assert read_card(b'{"mailbox": "a", "x": ' + b"[" * levels + b"]" * levels + b"}").address == "a"
    with pytest.raises(BadRequestError, match="levels"):
        read_card(b'{"mailbox": "a", "x": ' + b"[" * (levels + 1) + b"]" * (levels + 1) + b"}")
    start, end = b'{"mailbox": "a", "x": "', b'"}'
    assert read_card(start + b"x" * (MAX_CARD - len(start) - len(end)) + end) == Card("a")


def test_of_keys_that_are_there_twice_the_last_counts() -> None:
    assert read_card(b'{"mailbox": "a", "name": "x", "mailbox": "b", "name": "y"}') == Card("b", name="y")


@pytest.mark.rule("G1", "N3", "N4")
def test_a_ttl_is_whole_seconds() -> None:
    for absent in (None, ""):
        assert read(ttl=absent).ttl is None
    assert read().ttl is None
    assert read(ttl=0).ttl == 0
    assert read(ttl=60).ttl == read(ttl=60.0).ttl == 60_000
    longest = read(ttl=10**30).ttl
    assert longest == read(ttl=2**63).ttl == 100 * 366 * 24 * 3600 * 1000
    assert read(payload={"ttl": 60}).ttl is None


@pytest.mark.rule("G1", "N3")
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("soon", '"soon"'),
        ("60", '"60"'),
        (-1, "-1"),
        (1.5, "1.5"),
        (True, "true"),
        (False, "false"),
        ([], "[]"),
        ({"a": "\u0000"}, '{"a":"\\u0000"}'),
    ],
)
def test_another_ttl_is_refused(value: Any, shown: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        read(ttl=value)
    assert str(raised.value) == f"ttl: expected whole seconds, got {shown}"


def test_an_a2a_card_is_parsed() -> None:
    card = read(
        name="Bread Baker",
        description="Plans doughs.\nAlso at night.",
        version="1.2.0",
        protocolVersion="0.3.0",
        url="https://baker.example/",
        defaultInputModes=["text/plain"],
        defaultOutputModes=["text/plain"],
        capabilities={"streaming": True},
        skills=[
            {
                "id": "plan-dough",
                "name": "Plan a dough",
                "description": "Flour, water, salt.",
                "tags": ["baking", "food"],
                "examples": ["How much salt?"],
            }
        ],
        signatures=[{"protected": 5}],
    )
    assert card == Card(
        address="bread.baker",
        name="Bread Baker",
        description="Plans doughs.\nAlso at night.",
        version="1.2.0",
        format=CardFormat.A2A_0_3,
        skills=(Skill("plan-dough", "Plan a dough", "Flour, water, salt.", ("baking", "food"), ("How much salt?",)),),
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"skills": ["knead", " rise "]}, {"skills": (Skill(name="knead"), Skill(name="rise"))}),
        ({"skills": "knead, rise"}, {"skills": (Skill(name="knead"), Skill(name="rise"))}),
        ({"capabilities": ["knead", "rise"]}, {"skills": (Skill(name="knead"), Skill(name="rise"))}),
        (
            {"skills": ["knead"], "capabilities": ["knead", "rise"]},
            {"skills": (Skill(name="knead"), Skill(name="rise"))},
        ),
        ({"capabilities": {"tools": {"listChanged": True}}}, {}),
        (
            {"tools": [{"name": "knead", "description": "By hand.", "inputSchema": {"type": "object"}}]},
            {"skills": (Skill(name="knead", description="By hand."),)},
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "knead", "description": "By hand."}}]},
            {"skills": (Skill(name="knead", description="By hand."),)},
        ),
        ({"tags": ["baking", "food", "baking"]}, {"tags": ("baking", "food")}),
        ({"tags": "baking, food,,"}, {"tags": ("baking", "food")}),
        ({"skills": [{"name": "a", "tags": "x, y"}]}, {"skills": (Skill(name="a", tags=("x", "y")),)}),
        ({"skills": [{}, "", {"tags": ["x"]}]}, {}),
        ({"skills": [{"id": "a", "examples": "one"}]}, {"skills": (Skill("a", examples=("one",)),)}),
        ({"description": "Bakes.", "examples": ["Bake!", "", "Now!"]}, {"description": "Bakes.\nBake!\nNow!"}),
        ({"payload": "Bakes."}, {"description": "Bakes."}),
        ({"description": "Bakes.", "payload": "Bread."}, {"description": "Bakes.\nBread."}),
        ({"payload": "{curly} bread"}, {"description": "{curly} bread"}),
        ({"payload": '["bread"]'}, {"description": '["bread"]'}),
        ({"payload": {"name": "Baker", "description": "Bakes."}}, {"name": "Baker", "description": "Bakes."}),
        (
            {"payload": ' {"name": "Baker", "description": "Bakes.", "version": "2"}', "name": "bread.baker"},
            {"name": "bread.baker", "description": "Bakes.", "version": "2"},
        ),
        (
            {
                "payload": {"skills": ["rise"], "tags": ["b"], "examples": ["c"]},
                "skills": ["knead"],
                "tags": ["a", "b"],
            },
            {"skills": (Skill(name="knead"), Skill(name="rise")), "tags": ("a", "b"), "description": "c"},
        ),
        ({"name": None, "description": None, "skills": None, "tags": "", "payload": None, "examples": None}, {}),
        ({"name": "a\u0000b\nc\u0085d\u007f"}, {"name": "a b c d "}),
        ({"description": "a\u0000\nb\tc"}, {"description": "a \nb c"}),
        ({"name": "Bäcker 🥖 烘焙"}, {"name": "Bäcker 🥖 烘焙"}),
    ],
)
def test_other_forms_of_cards_are_parsed_too(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read(**fields) == Card("bread.baker", **expected)


@pytest.mark.rule("G1")
@pytest.mark.parametrize(
    ("fields", "warnings"),
    [
        ({"name": 5}, ["name: expected a string"]),
        ({"description": ["a"]}, ["description: expected a string"]),
        ({"version": 1.0}, ["version: expected a string"]),
        ({"tags": {"a": 1}}, ["tags: expected a list"]),
        ({"tags": ["a", 1]}, ["tags[1]: expected a string"]),
        ({"skills": {"a": 1}}, ["skills: expected a list"]),
        ({"skills": [5]}, ["skills[0]: expected an object or a string"]),
        (
            {"skills": ["a", {"name": 1, "tags": [2], "examples": [{}]}]},
            [
                "skills[1].name: expected a string",
                "skills[1].tags[0]: expected a string",
                "skills[1].examples[0]: expected a string",
            ],
        ),
        ({"payload": 7}, ["payload: expected a string"]),
        (
            {"payload": {"name": 7, "skills": [{"id": 1}]}},
            [
                "payload.name: expected a string",
                "payload.skills[0].id: expected a string",
            ],
        ),
        ({"name": "n" * 257}, ["name: only the first 256 characters are read"]),
        ({"skills": ["a"] * 257}, ["skills: only the first 256 of 257 are read"]),
        (
            {"payload": {"protocolVersion": "1.0"}},
            [
                f"payload.{field}: missing"
                for field in (
                    "name",
                    "description",
                    "version",
                    "defaultInputModes",
                    "defaultOutputModes",
                    "skills",
                    "supportedInterfaces",
                    "capabilities",
                )
            ],
        ),
        (
            {"supportedInterfaces": [], "name": 5},
            [
                "name: expected a string",
                *(
                    f"{field}: missing"
                    for field in (
                        "description",
                        "version",
                        "defaultInputModes",
                        "defaultOutputModes",
                        "skills",
                    )
                ),
                "supportedInterfaces: expected at least one",
                "capabilities: missing",
            ],
        ),
    ],
)
def test_values_of_wrong_types_become_warnings(fields: dict[str, Any], warnings: list[str]) -> None:
    assert list(read(**fields).warnings) == warnings


def test_too_long_values_are_cut() -> None:
    card = read(
        name="n" * 300,
        description="d" * 9000,
        tags=[f"t{no}" for no in range(100)],
        skills=[f"s{no}" for no in range(10_000)],
        examples=["e" * 2000] * 40,
    )
    assert card.name == "n" * 256
    assert card.description == "d" * 8000
    assert card.tags == tuple(f"t{no}" for no in range(64))
    assert card.skills == tuple(Skill(name=f"s{no}") for no in range(256))
    assert len(card.warnings) == MAX_WARNINGS


@pytest.mark.rule("G1")
def test_a_card_is_given_a_mailbox_and_stays_as_it_is() -> None:
    card = b' {\n "name" : "B\\u00e4cker",\t"weight":1.50 , "name": "x"}\n'
    made = with_mailbox(card, "mq9://broker/bread.baker")
    assert made == b' {"mailbox":"bread.baker",\n "name" : "B\\u00e4cker",\t"weight":1.50 , "name": "x"}\n'
    assert read_card(made).address == "bread.baker"
    assert with_mailbox(b"{}", "a") == b'{"mailbox":"a"}'
    assert with_mailbox(b"{ }", "a") == b'{"mailbox":"a" }'


@pytest.mark.rule("G1")
def test_a_card_keeps_the_mailbox_it_names() -> None:
    for card in ({"mailbox": "mq9://b/a"}, {"mailbox": "a"}, {"capabilities": extended("a")}):
        data = json.dumps(card).encode()
        assert with_mailbox(data, "a") == data
        with pytest.raises(BadRequestError, match=r"\Amailbox: the card names another, a\Z"):
            with_mailbox(data, "b")
    for value in (None, "", 5, "B"):
        with pytest.raises(BadRequestError, match=r"\Amailbox: "):
            with_mailbox(json.dumps({"mailbox": value}).encode(), "b")
    with pytest.raises(BadRequestError, match=r"\Amailbox: "):
        with_mailbox(b"{}", "public")
    with pytest.raises(BadRequestError, match=r"\Acard: "):
        with_mailbox(b"[]", "b")


KEYS = (
    *("mailbox", "name", "description", "version", "tags", "skills", "tools", "capabilities", "examples", "payload"),
    *("ttl", "url", "protocolVersion", "supportedInterfaces", "defaultInputModes", "extensions", "params", "function"),
    *("id", "provider"),
)
scalar = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["a", "mq9://b/a", "0.3", "1.0", "a,b", '{"name": "n", "skills": [1]}', "x" * 300])
)
values = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
documents = st.dictionaries(st.sampled_from(KEYS), values).map(
    lambda fields: json.dumps({"mailbox": "a", **fields}).encode("utf-8", "surrogatepass")
)


@pytest.mark.rule("G1")
@given(documents | st.binary(max_size=100))
@example(b'{"mailbox":"a","tags":["' + b" " * 200 + b'a"]}')
@settings(max_examples=100, deadline=None)
def test_any_json_object_is_parsed_or_refused(data: bytes) -> None:
    fuzzed.card(data)
    fuzzed.given_mailbox(data)
