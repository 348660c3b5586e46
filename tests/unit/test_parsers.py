"""The parsers of a client's bytes, with any bytes: the twin of ``python -m tests.fuzz`` that needs no fuzzer (N3)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mediator.errors import BadRequestError
from mediator.fields import Fields, StrictFields, has_controls, parse_body, printable, whole_number
from mediator.nats import protocol
from mediator.nats.frames import decode_headers
from mediator.operate.operations import Operation, Right, check_request, read_optional_time, whole
from tests.fuzz import targets
from tests.fuzz.__main__ import main

FIELDS = sorted(
    {name for data in targets.TARGETS["body"][1] if data.startswith(b"{") for name in json.loads(data)}
    | {"archive", "ack_wait_ms", "limit", "headers_only", "from_time"}
)
CONFIG = ("num_msgs", "max_wait_ms", "ack_wait_ms", "max_deliver")
WORDS = ("", "latest", "earliest", "from_time", "from_id", "keep", "until_ack", "standard", "utf8", "a,b", "task")
HEADERS = (*sorted(protocol.SEND_HEADERS), "Own")

text = st.one_of(st.sampled_from(WORDS), st.text(max_size=20), st.text('a.-"\\\x00\x7f\ud800ü', max_size=300))
scalar = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.integers(),
    st.sampled_from([999, 1000, 2**53, 2**63 - 1, 2**63, 2**64, 10**11, 10**11 + 1, 10**30, -(10**30)]),
    st.floats(),
    text,
)
value = st.recursive(scalar, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=3))
bodies = st.dictionaries(
    st.sampled_from(FIELDS), value | st.dictionaries(st.sampled_from(CONFIG), scalar), max_size=8
).map(lambda body: json.dumps(body).encode("utf-8", "surrogatepass"))
numbers = st.one_of(st.integers(-1, 10**19).map(str), st.text("0123456789.+-e_ ", max_size=20))


def header_lines(names: tuple[str, ...]) -> st.SearchStrategy[bytes]:
    """Make lines of headers, many with these names."""
    words = st.sampled_from(["urgent", "archive", "true", "False", "[a, b]"])
    return st.lists(st.tuples(st.sampled_from(names) | st.text(max_size=10), numbers | text | words), max_size=8).map(
        lambda lines: b"".join(f"{name}: {value}\r\n".encode("utf-8", "surrogatepass") for name, value in lines)
    )


headers = header_lines(HEADERS)
plain_headers = header_lines(("dedup_id", "Send_At", "expire_at", "tags", "persist", "mq9-persist", *HEADERS))


@pytest.mark.rule("N3")
@pytest.mark.parametrize("name", targets.TARGETS)
def test_the_seeds_of_each_target(name: str) -> None:
    target, seeds = targets.TARGETS[name]
    for seed in seeds:
        target(seed)


@pytest.mark.rule("N3", "N4")
@given(st.one_of(bodies, st.binary(max_size=200)))
@settings(max_examples=100, deadline=None)
def test_bodies(data: bytes) -> None:
    targets.body(data)


@pytest.mark.rule("N3", "S1", "N7")
@given(st.one_of(headers, st.binary(max_size=200)))
@settings(max_examples=100, deadline=None)
@example(b'mq9-key: "' + b'"' * 511 + b"\r\n" + b'own: "' + b'"' * 9000 + b"\r\n")
def test_headers(data: bytes) -> None:
    targets.draft(data)


@pytest.mark.rule("N3", "E3")
@given(
    st.sampled_from([b"task", b"task.queue.high", b"task.notify", b"public.low", b"A.urgent"]) | st.binary(max_size=20),
    st.sampled_from([b"", b'{"persist": true}', b'{"persist": 1}', b'{"persist"']) | st.binary(max_size=20),
    plain_headers,
)
@settings(max_examples=100, deadline=None)
def test_publishes_of_older_editions(subject: bytes, payload: bytes, lines: bytes) -> None:
    targets.publish(b"\0".join((subject.replace(b"\0", b""), payload.replace(b"\0", b""), lines)))


@pytest.mark.rule("A1")
@given(st.one_of(st.text("a0.", max_size=140), st.text(max_size=20)).map(str.encode) | st.binary(max_size=140))
@settings(max_examples=100, deadline=None)
def test_addresses(data: bytes) -> None:
    targets.address(data)


@pytest.mark.rule("Q2")
@given(st.one_of(st.integers(0, 2**65).map(lambda number: str(number).encode()), st.binary(max_size=24)))
@settings(max_examples=100, deadline=None)
def test_message_ids(data: bytes) -> None:
    targets.message_id(data)


@given(st.one_of(st.text("0123456789.smhdw ", max_size=20).map(str.encode), st.binary(max_size=40)))
@settings(max_examples=100, deadline=None)
def test_spans(data: bytes) -> None:
    targets.span(data)


@pytest.mark.rule("N3")
@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_streams_of_messages(data: bytes) -> None:
    targets.stream(data)


@pytest.mark.rule("N3")
def test_header_bytes_that_are_not_utf_8_are_not_altered() -> None:
    found = decode_headers(b"a: \xff\r\nb:\xc3\xbc\r\n\r\nno colon\r\nc : : d \r\n")
    assert found == {"a": "\udcff", "b": "ü", "no colon": "", "c": ": d"}
    assert [name for name, value in found.items() if has_controls(value)] == ["a"]


@pytest.mark.rule("N3")
@given(st.text())
@settings(deadline=None)
def test_what_an_error_shows_can_be_shown(given_text: str) -> None:
    shown = printable(given_text)
    assert len(shown) <= 60
    assert shown == "" or shown.isprintable()
    shown.encode()


@pytest.mark.rule("N4")
@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda f: f.number("n", 0, 10), 10),
        (lambda f: f.number("n", 0, None), 12),
        (lambda f: f.number("z", 0, 10), 0),
        (lambda f: f.number("z", 1, 10, zero_is_absent=True), None),
        (lambda f: f.number("e", 0, 10), None),
        (lambda f: f.number("none", 0, 10), None),
        (lambda f: f.number("absent", 0, 10), None),
        (lambda f: f.time("z"), None),
        (lambda f: f.time("n"), 12_000),
        (lambda f: f.words("w", 5, 5), ("a", "b")),
        (lambda f: f.fields("none").number("x", 0, 1), None),
    ],
)
def test_ways_to_say_absent(read: Callable[[Fields], Any], expected: Any) -> None:
    fields = parse_body(b'{"n": 12, "z": 0, "e": "", "none": null, "w": " a,,b,a "}')
    assert read(fields) == expected


async def nothing(_request: dict[str, Any]) -> dict[str, Any]:
    return {}


COUNTING = Operation("count", nothing, Right.READ, "", {}, {"n": whole("A number.", 0, 10)})


@pytest.mark.rule("N4")
@pytest.mark.parametrize("written", [7, 7.0, "7", "7.0", "007"])
def test_ways_to_write_a_number(written: object) -> None:
    fields = Fields({"n": written, "ids": [written], "inner": {"n": written}})
    assert fields.number("n", 1, None) == fields.number("n", 1, 10) == 7
    assert fields.numbers("ids", 5) == [7]
    assert fields.fields("inner").number("n", 1, 10) == 7
    assert fields.time("n") == 7_000
    assert fields.fraction("n") == 1.0
    assert StrictFields({"n": written}).count("n") == 7
    assert check_request(COUNTING, {"n": written}) == {"n": 7}
    assert read_optional_time({"n": written}, "n") == 7_000
    assert protocol.read_draft(b"", {"mq9-delay": str(written)}).delay == 7_000


@pytest.mark.rule("N4")
@pytest.mark.parametrize("written", [True, 1.5, "1.5", "seven", "1e3", "0x7", "1_0", " 7", "٧", "", [7], None, 1e300])
def test_what_is_no_whole_number(written: object) -> None:
    assert whole_number(written) is None
    with pytest.raises(BadRequestError):
        StrictFields({"n": written}).count("n") if written != 1e300 else check_request(COUNTING, {"n": written})


@pytest.mark.rule("N4")
@pytest.mark.parametrize("zero", [0, 0.0, "0", "0.0"])
def test_ways_to_write_zero(zero: object) -> None:
    fields = Fields({"n": zero})
    assert fields.number("n", 1, 10, zero_is_absent=True) is None
    assert fields.number("n", 0, 10) == 0
    assert fields.time("n") is None
    for read in (lambda: fields.number("n", 1, 10), lambda: StrictFields({"n": zero}).count("n")):
        with pytest.raises(BadRequestError, match=r"^n: expected"):
            read()


@pytest.mark.rule("N4")
def test_a_fraction_as_text() -> None:
    assert Fields({"n": "0.25"}).fraction("n") == 0.25
    for wrong in ("a", "-1", "nan", "inf", True):
        with pytest.raises(BadRequestError, match=r"^n: "):
            Fields({"n": wrong}).fraction("n")


@pytest.mark.rule("N3")
def test_an_error_inside_an_object_names_the_whole_path() -> None:
    with pytest.raises(BadRequestError, match=r"^config\.num_msgs: expected a whole number, got true$"):
        parse_body(b'{"config": {"num_msgs": true}}').fields("config").number("num_msgs", 1, 10)


def test_without_a_fuzzer_fuzzing_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--seconds", "1"]) == 0
    assert "atheris is not installed" in capsys.readouterr().out
