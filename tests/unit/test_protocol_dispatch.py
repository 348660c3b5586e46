"""The dispatcher: who handles what, and how refusals are told (D8, D12)."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mediator.errors import (
    BadRequestError,
    LiveModeError,
    MediatorError,
    NotEnrolledError,
    UnsupportedMessageError,
)
from pickup.dispatcher import REPORT_COMMENTS, Dispatcher, InboundRequest, explain
from pickup.message import DIDCOMM, OLD, ReplyMessage
from pickup.rules.records import Generation
from tests.harness.mediation import key
from tests.harness.protocols import V1, V2, Door, Json, Peer, Wire

both = pytest.mark.parametrize("generation", [V1, V2], ids=["v1", "v2"])


def plain(generation: Generation, type: str) -> Json:
    return {"@type": DIDCOMM + type, "@id": "m"} if generation is V1 else {"type": DIDCOMM + type, "id": "m"}


@pytest.mark.rule("D8", "D12")
@pytest.mark.parametrize(
    ("generation", "type"),
    [
        (V1, "messagepickup/1.0/batch-pickup"),
        (V1, "messagepickup/1.0/noop"),
        (V1, "messagepickup/2.0/status-request"),
        (V1, "messagepickup/2.0/delivery-request"),
        (V1, "messagepickup/2.0/messages-received"),
        (V1, "messagepickup/2.0/live-delivery-change"),
        (V2, "messagepickup/3.0/delivery-request"),
        (V2, "message-pickup/4.0/delivery-request"),
        (V1, "coordinate-mediation/1.0/mediate-request"),
        (V1, "coordinate-mediation/1.0/keylist-update"),
        (V2, "coordinate-mediation/2.0/keylist-query"),
        (V2, "coordinate-mediation/3.0/mediate-request"),
        (V2, "coordinate-mediation/3.0/recipient-update"),
        (V1, "report-problem/1.0/problem-report"),
        (V1, "connections/1.0/request"),
        (V1, "didexchange/1.1/request"),
        (V1, "push-notifications-fcm/1.0/set-device-info"),
    ],
)
async def test_an_anonymous_message_is_refused(door: Door, generation: Generation, type: str) -> None:
    """Pickup and keylist messages above all: whoever the plaintext says sent them."""
    wire = Wire(persistent=True)
    raw = plain(generation, type)
    if generation is V2:
        raw["from"] = "did:example:peer1"
    with pytest.raises(NotEnrolledError):
        await door.receive(raw, generation, None, wire)
    assert wire.frames == []


@both
@pytest.mark.rule("D12")
async def test_an_anonymous_message_that_nobody_knows_is_refused(door: Door, generation: Generation) -> None:
    with pytest.raises(UnsupportedMessageError):
        await door.receive(plain(generation, "basicmessage/1.0/message"), generation, None, Wire())


@both
@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("type", "more", "field"),
    [
        ("trust-ping/ping", {}, "type: "),
        ("ping", {}, "type: "),
        ("trust-ping/2.0/ping", {"to": "did:example:peer1"}, "to: "),
        ("trust-ping/2.0/ping", {"expires_time": "soon"}, "expires_time: "),
        ("trust-ping/2.0/ping", {"pthid": 7}, "pthid: "),
    ],
)
async def test_a_known_sender_learns_what_cannot_be_read(
    door: Door, generation: Generation, type: str, more: Json, field: str
) -> None:
    peer = await door.connect(1, generation)
    if generation is V1:
        if more:
            type, more, field = "trust_ping/1.0/ping", {"~thread": 7}, "~thread: "
        field = field.replace("type: ", "@type: ")
    answer = await peer.ask(type, **more)
    assert answer.type.endswith("/problem-report")
    assert answer.problem[1].startswith(field)
    assert answer.pthid == peer.last
    # Nobody is told what they cannot be told, and a report is never answered.
    with pytest.raises(BadRequestError):
        await door.receive({**plain(generation, "x"), "to": 7, "~thread": 7}, generation, None, Wire())
    report = "report-problem/2.0/problem-report" if generation is V2 else "report-problem/1.0/problem-report"
    wrong: Json = {"expires_time": "soon"} if generation is V2 else {"~thread": 7}
    assert await peer.tell(report, **wrong) == []


@both
@pytest.mark.rule("D12")
@pytest.mark.parametrize("prefix", [DIDCOMM, OLD])
async def test_a_problem_report_has_the_form_of_its_generation(door: Door, generation: Generation, prefix: str) -> None:
    peer = await door.connect(1, generation)
    answer = await peer.ask("basicmessage/1.0/message", prefix=prefix, thid="thread")
    text = f"type: {prefix}basicmessage/1.0/message is not supported"
    if generation is V1:
        assert answer.type == f"{prefix}report-problem/1.0/problem-report"
        assert answer.body == {"description": {"code": "e.p.msg.unsupported", "en": text}}
        assert (answer.thid, answer.pthid) == ("thread", peer.last)
    else:
        assert answer.type == f"{prefix}report-problem/2.0/problem-report"
        args = ["type", f"{prefix}basicmessage/1.0/message is not supported"]
        assert answer.body == {"code": "e.p.msg.unsupported", "comment": "{1}: {2}", "args": args}
        assert answer.problem == ("e.p.msg.unsupported", text)
        # The thread it names is its parent; which message it is about, it acknowledges.
        assert answer.raw["ack"] == [peer.last]
        assert (answer.thid, answer.pthid) == (None, "thread")
    assert door.meter("mediator_didcomm_problem_reports_total", code="unsupported_message") == 1


@both
@pytest.mark.rule("D12")
async def test_a_stranger_whose_key_is_known_is_told_too(door: Door, generation: Generation) -> None:
    stranger = Peer(door, generation, key(77) if generation is V1 else "did:example:stranger")
    assert (await stranger.ask("nonsense/1.0/x")).problem[0] == "e.p.msg.unsupported"


async def nobody(call: InboundRequest) -> Sequence[ReplyMessage]:
    raise MediatorError


@pytest.mark.rule("D12")
def test_a_message_has_one_handler() -> None:
    dispatcher = Dispatcher()
    dispatcher.register("family", {(1, 0), (1, 2), (2, 0)}, {"name": nobody}, generations={V1})
    dispatcher.register("family", {(1, 0)}, {"other": nobody}, generations={V1})
    with pytest.raises(ValueError, match="registered already"):
        dispatcher.register("family", {(2, 1)}, {"name": nobody}, generations={V2})
    assert [str(one) for one in dispatcher.protocols()] == ["family/1.0", "family/1.2", "family/2.0"]


@pytest.mark.rule("D12")
@pytest.mark.parametrize(("version", "spoken"), [("1.0", True), ("1.1", True), ("1.2", False), ("2.0", False)])
async def test_a_minor_version_up_to_the_newest_is_spoken(door: Door, version: str, spoken: bool) -> None:
    answer = await (await door.connect(1)).ask(f"out-of-band/{version}/handshake-reuse", pthid="none")
    assert (answer.problem[0] != "e.p.msg.unsupported") is spoken


# Acknowledgements.

ASKS = {V1: {"~please_ack": {"on": ["RECEIPT"]}}, V2: {"please_ack": [""]}}
QUIET = {V1: "trust_ping/1.0/ping", V2: "trust-ping/2.0/ping"}


@both
@pytest.mark.rule("D12")
async def test_what_has_no_reply_is_acknowledged_when_asked_for(door: Door, generation: Generation) -> None:
    peer = await door.connect(1, generation)
    assert await peer.tell(QUIET[generation], {"response_requested": False}) == []
    answer = await peer.ask(QUIET[generation], {"response_requested": False}, thid="t", **ASKS[generation])
    assert answer.thid == "t"
    if generation is V1:
        assert (answer.type, answer.body) == (f"{DIDCOMM}notification/1.0/ack", {"status": "OK"})
    else:
        assert (answer.type, answer.body) == (f"{DIDCOMM}empty/1.0/empty", {})
        assert answer.raw["ack"] == [peer.last]


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("asked", "told"), [([""], True), (["message-1"], True), (["older", ""], True), (["older"], False), ([], False)]
)
async def test_the_natural_reply_acknowledges(door: Door, asked: list[str], told: bool) -> None:
    """The appropriate response is the next natural message in the protocol, with an `ack` header added."""
    answer = await (await door.connect(1, V2)).ask(QUIET[V2], please_ack=asked)
    assert answer.name == "ping-response"
    assert answer.raw.get("ack") == (["message-1"] if told else None)


@pytest.mark.rule("D12")
async def test_a_natural_reply_of_v1_is_acknowledgement_enough(door: Door) -> None:
    answer = await (await door.connect(1, V1)).ask(QUIET[V1], **ASKS[V1])
    assert answer.name == "ping_response"
    assert "ack" not in answer.raw


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("generation", "type", "more"),
    [
        (V1, "notification/1.0/ack", {}),
        (V1, "report-problem/1.0/problem-report", {}),
        (V2, "empty/1.0/empty", {"ack": ["a"]}),
        (V2, "trust-ping/2.0/ping-response", {"ack": ["a"]}),
        (V2, "report-problem/2.0/problem-report", {}),
    ],
)
async def test_an_acknowledgement_is_not_acknowledged(
    door: Door, generation: Generation, type: str, more: dict[str, Any]
) -> None:
    """Implementations MUST take reasonable steps to avoid an infinite circle of ACKs."""
    peer = await door.connect(1, generation)
    assert await peer.tell(type, pthid="t", **ASKS[generation], **more) == []


@pytest.mark.rule("D12")
async def test_a_refusal_acknowledges_once(door: Door) -> None:
    answer = await (await door.connect(1, V2)).ask("nonsense/1.0/x", **ASKS[V2])
    assert (answer.name, answer.raw["ack"]) == ("problem-report", ["message-1"])


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("generation", "more"),
    [
        (V1, {"~please_ack": []}),
        (V1, {"~please_ack": {"on": "RECEIPT"}}),
        (V2, {"please_ack": True}),
        (V2, {"please_ack": [7]}),
    ],
)
async def test_a_wrong_request_to_acknowledge_is_named(
    door: Door, generation: Generation, more: dict[str, Any]
) -> None:
    answer = await (await door.connect(1, generation)).ask(QUIET[generation], **more)
    assert "please_ack: expected" in answer.problem[1]


@pytest.mark.rule("D12")
async def test_an_empty_message_is_taken(door: Door) -> None:
    assert await (await door.connect(1, V2)).tell("empty/1.0/empty") == []
    assert door.meter("mediator_didcomm_problem_reports_total", code="unsupported_message") == 0


def codes(error: type[MediatorError]) -> set[str]:
    return {error.problem}.union(*map(codes, error.__subclasses__()))


@pytest.mark.rule("D12")
def test_the_comment_of_a_code_is_always_the_same() -> None:
    """The text MUST be statically associated with `code`; what varies is in `args`."""
    assert REPORT_COMMENTS.keys() == codes(MediatorError)
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    written = dict(re.findall(r"^\| `(e\.[a-z._-]+)` \|.*\| `([^`]+)` \|$", page, re.MULTILINE))
    assert written == REPORT_COMMENTS
    for error, args in (
        (BadRequestError("limit", "expected: more"), ["limit", "expected: more"]),
        (NotEnrolledError("why: {2}"), ["why: {2}"]),
        (LiveModeError(), None),
    ):
        assert explain(error).get("args") == args
        assert explain(error)["comment"] == REPORT_COMMENTS[error.problem]
