"""Message pickup 1.0 (RFC 0212), which has no acknowledgement: a message goes when it surely came (D7)."""

import asyncio

import orjson
import pytest

from pickup.message import OLD
from pickup.protocols import message_pickup
from tests.harness.mediation import key
from tests.harness.protocols import SECONDS, Answer, Door, Peer, Wire, envelope, marks

HELD = key(500)


def batch(answer: Answer) -> list[str]:
    assert answer.name in ("batch", "list-response")
    return [item["message"]["ciphertext"] for item in answer.body["messages~attach"]]


async def queue(peer: Peer) -> list[str]:
    return marks(await peer.queued())


@pytest.mark.rule("D1")
async def test_status_counts_what_waits(door: Door) -> None:
    """`message_count` is the only required attribute."""
    peer = await door.holder(1, HELD)
    empty = await peer.ask("messagepickup/1.0/status-request")
    assert empty.body == {"message_count": 0, "total_size": 0}
    await door.forward(HELD, envelope("a"), envelope("b"))
    door.now += 90_500
    answer = await peer.ask("messagepickup/1.0/status-request")
    assert (answer.name, answer.thid) == ("status", peer.last)
    assert answer.body == {
        "message_count": 2,
        "total_size": 2 * len(envelope("a")),
        "duration_waited": 90,
        "last_added_time": "2026-01-01 00:00:00Z",
    }


@pytest.mark.rule("D7")
async def test_the_next_request_confirms_an_http_batch(door: Door) -> None:
    """The holder's next pickup request after an HTTP batch removes it."""
    peer = await door.holder(1, HELD)
    await door.forward(HELD, *(envelope(mark) for mark in "abc"))
    answer = await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 2})
    assert batch(answer) == ["a", "b"]
    assert answer.thid == peer.last
    assert await queue(peer) == ["a", "b", "c"]
    assert batch(await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 2})) == ["c"]
    assert await queue(peer) == ["c"]
    assert batch(await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 2})) == []
    assert await queue(peer) == []


@pytest.mark.rule("D7")
@pytest.mark.parametrize(
    ("type", "body"),
    [
        ("messagepickup/1.0/noop", {}),
        ("messagepickup/1.0/status-request", {}),
        ("messagepickup/1.0/list-pickup", {"message_ids": []}),
        ("messagepickup/2.0/delivery-request", {"limit": 1}),
        ("messagepickup/2.0/messages-received", {"message_id_list": []}),
        ("messagepickup/2.0/live-delivery-change", {"live_delivery": False}),
        ("message-pickup/4.0/delivery-request", {"message_count_limit": 1}),
    ],
)
async def test_any_pickup_request_settles_the_batch_before_it(door: Door, type: str, body: dict[str, object]) -> None:
    peer = await door.holder(1, HELD)
    await door.forward(HELD, envelope("a"), envelope("b"))
    await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1})
    await peer.tell(type, body)
    assert await queue(peer) == ["b"]


@pytest.mark.rule("D7", "D13")
async def test_a_status_request_of_later_versions_settles_no_batch(door: Door) -> None:
    """It is not remembered, so nobody may gain by recording it."""
    peer = await door.holder(1, HELD)
    await door.forward(HELD, envelope("a"))
    await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1})
    assert (await peer.ask("messagepickup/2.0/status-request")).body["message_count"] == 1
    assert await queue(peer) == ["a"]


@pytest.mark.rule("D7")
async def test_requests_of_others_and_of_other_kinds_settle_nothing(door: Door) -> None:
    peer, other = await door.holder(1, HELD), await door.holder(2)
    await door.forward(HELD, envelope("a"))
    await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1})
    await other.ask("messagepickup/1.0/status-request")
    await peer.ask("trust_ping/1.0/ping")
    await peer.ask("coordinate-mediation/1.0/mediate-request")
    assert await queue(peer) == ["a"]


# What the holder could not take.


def about(batch: Answer, request: str, how: str) -> dict[str, str]:
    """Return the threads by which a problem report speaks of a batch."""
    return {
        "its message": {"thid": str(batch.raw["@id"])},
        "its message as parent": {"pthid": str(batch.raw["@id"])},
        "the request": {"thid": request},
        "its message in a thread of its own": {"thid": "mine", "pthid": str(batch.raw["@id"])},
        "nothing": {},
    }[how]


REPORT = {"description": {"code": "message-parse-failure", "en": "Error validating message"}}
ways = pytest.mark.parametrize(
    "how", ["its message", "its message as parent", "the request", "its message in a thread of its own", "nothing"]
)


@pytest.mark.rule("D7")
@ways
@pytest.mark.parametrize("report", ["notification/1.0", "report-problem/1.0", "messagepickup/1.0"])
async def test_a_problem_report_keeps_a_batch_queued(door: Door, how: str, report: str) -> None:
    peer = await door.holder(1, HELD)
    await door.forward(HELD, *(envelope(mark) for mark in "abc"))
    first = await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 2})
    threads = about(first, peer.last, how)
    assert await peer.tell(f"{report}/problem-report", REPORT, **threads) == []
    await peer.ask("messagepickup/1.0/status-request")
    assert await queue(peer) == ["a", "b", "c"]
    again = await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 2})
    assert batch(again) == ["a", "b"]
    # One that is taken is confirmed as ever.
    assert batch(await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 2})) == ["c"]
    assert await queue(peer) == ["c"]


@pytest.mark.rule("D7")
async def test_a_report_on_a_socket_keeps_listed_messages(door: Door) -> None:
    peer = await door.holder(1, HELD)
    await door.forward(HELD, envelope("a"))
    ids = list((await peer.ask("messagepickup/2.0/delivery-request", {"limit": 1})).attached)
    given = await peer.ask("messagepickup/1.0/list-pickup", {"message_ids": ids})
    threads = about(given, peer.last, "its message as parent")
    await peer.tell("notification/1.0/problem-report", REPORT, wire=Wire(persistent=True), **threads)
    await peer.tell("messagepickup/1.0/noop")
    assert await queue(peer) == ["a"]


@pytest.mark.rule("D7")
async def test_unrelated_reports_do_not_keep_a_batch(door: Door) -> None:
    peer, other = await door.holder(1, HELD), await door.holder(2)
    await door.forward(HELD, envelope("a"))
    given = await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1})
    await other.tell("notification/1.0/problem-report", REPORT, pthid=str(given.raw["@id"]))
    await peer.tell("notification/1.0/problem-report", REPORT, thid="an issuance")
    await peer.ask("messagepickup/1.0/status-request")
    assert await queue(peer) == []


@pytest.mark.rule("D7")
async def test_a_report_that_comes_too_late_changes_nothing(door: Door) -> None:
    """Only the last batch waits for its confirmation."""
    peer = await door.holder(1, HELD)
    await door.forward(HELD, *(envelope(mark) for mark in "abc"))
    first = await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1})
    await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1})
    await peer.tell("notification/1.0/problem-report", REPORT, pthid=str(first.raw["@id"]))
    await peer.ask("messagepickup/1.0/status-request")
    assert await queue(peer) == ["c"]


@pytest.mark.rule("D7")
async def test_a_repeated_request_gets_the_same_batch(door: Door) -> None:
    """Who repeats a request, perhaps sealed anew, has not read its answer."""
    peer = await door.holder(1, HELD)
    await door.forward(HELD, *(envelope(mark) for mark in "abc"))
    first = await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 2})
    peer.asked -= 1
    second = await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 2})
    assert second.body == first.body
    await peer.tell("notification/1.0/problem-report", REPORT, pthid=str(first.raw["@id"]))
    await peer.ask("messagepickup/1.0/status-request")
    assert await queue(peer) == ["a", "b", "c"]
    assert batch(await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 2})) == ["a", "b"]
    peer.asked -= 1
    assert batch(await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 2})) == ["a", "b"]
    assert batch(await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 2})) == ["c"]
    assert await queue(peer) == ["c"]


@pytest.mark.rule("D7")
@pytest.mark.parametrize("wire", [Wire(alive=False), Wire(persistent=True, alive=False)], ids=["http", "socket"])
async def test_a_batch_that_could_not_be_sent_comes_again(door: Door, wire: Wire) -> None:
    peer = await door.holder(1, HELD)
    await door.forward(HELD, envelope("a"))
    assert await peer.tell("messagepickup/1.0/batch-pickup", {"batch_size": 1}, wire=wire) == []
    assert batch(await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1})) == ["a"]


@pytest.mark.rule("D7")
async def test_a_batch_without_return_route_comes_again(door: Door) -> None:
    peer = await door.holder(1, HELD)
    await door.forward(HELD, envelope("a"))
    assert await peer.tell("messagepickup/1.0/batch-pickup", {"batch_size": 1}, route="none") == []
    assert batch(await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1})) == ["a"]


@pytest.mark.rule("D7")
async def test_a_batch_over_a_socket_goes_when_the_socket_confirms_it(door: Door) -> None:
    """The WebSocket pong after the frame removes the message."""
    peer, wire = await door.holder(1, HELD), Wire(persistent=True)
    await door.forward(HELD, envelope("a"), envelope("b"))
    wire.pongs.set()
    assert batch(await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1}, wire=wire)) == ["a"]
    assert await queue(peer) == ["b"]


@pytest.mark.rule("D7")
async def test_a_batch_that_a_socket_lost_comes_again_on_the_next(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_pickup, "CONFIRM_SECONDS", 0.01)
    peer, wire = await door.holder(1, HELD), Wire(persistent=True)
    await door.forward(HELD, envelope("a"))
    await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1}, wire=wire)
    wire.alive = False
    wire.pongs.set()
    again = Wire(persistent=True)
    again.pongs.set()
    assert batch(await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1}, wire=again)) == ["a"]
    assert await queue(peer) == []


@pytest.mark.rule("D7")
async def test_a_late_confirmation_removes_only_its_batch(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """The confirmation may stand behind what the peer sends next, which is handled meanwhile."""
    monkeypatch.setattr(message_pickup, "CONFIRM_SECONDS", 0.01)
    peer, wire = await door.holder(1, HELD), Wire(persistent=True)
    await door.forward(HELD, envelope("a"))
    await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1}, wire=wire)
    await door.forward(HELD, envelope("b"))
    status = await peer.ask("messagepickup/1.0/status-request", wire=wire)
    assert status.body["message_count"] == 2
    gone = asyncio.Event()
    door.broker.listen(lambda committed: gone.set() if committed.events else None)
    wire.pongs.set()
    await asyncio.wait_for(gone.wait(), SECONDS)
    assert await queue(peer) == ["b"]


@pytest.mark.rule("D3", "D7")
async def test_listed_messages_are_handed_out_and_go_as_a_batch_does(door: Door) -> None:
    """A request to read messages with an array of message ids."""
    peer, other = await door.holder(1, HELD), await door.holder(2, key(501))
    await door.forward([HELD, key(501)], *(envelope(mark) for mark in "abc"))
    theirs = await other.ask("messagepickup/2.0/delivery-request", {"limit": 3})
    ids = list((await peer.ask("messagepickup/2.0/delivery-request", {"limit": 3})).attached)
    wanted = [ids[2], "nonsense", *theirs.attached, ids[0]]
    answer = await peer.ask("messagepickup/1.0/list-pickup", {"message_ids": wanted})
    assert answer.name == "list-response"
    assert batch(answer) == ["a", "c"]
    assert await peer.tell("messagepickup/1.0/noop") == []
    assert await queue(peer) == ["b"]
    assert len(await other.queued()) == 3


@pytest.mark.rule("D3")
async def test_batch_items_have_both_ids_and_a_json_envelope(door: Door) -> None:
    peer = await door.holder(1, HELD)
    await door.forward(HELD, envelope("a"))
    (id,) = (await peer.ask("messagepickup/2.0/delivery-request", {"limit": 1})).attached
    answer = await peer.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1})
    assert answer.body["messages~attach"] == [{"@id": id, "id": id, "message": orjson.loads(envelope("a"))}]


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("name", "body", "field"),
    [
        ("batch-pickup", {}, "batch_size"),
        ("batch-pickup", {"batch_size": 0}, "batch_size"),
        ("batch-pickup", {"batch_size": "ten"}, "batch_size"),
        ("list-pickup", {}, "message_ids"),
        ("list-pickup", {"message_ids": "1-0"}, "message_ids"),
        ("list-pickup", {"message_ids": ["x"] * 1001}, "message_ids"),
    ],
)
async def test_wrong_fields_are_named(door: Door, name: str, body: dict[str, object], field: str) -> None:
    answer = await (await door.holder(1)).ask(f"messagepickup/1.0/{name}", body)
    assert answer.problem[1].startswith(f"{field}: ")


@pytest.mark.rule("D8")
@pytest.mark.parametrize("name", ["status-request", "batch-pickup", "list-pickup", "noop"])
async def test_who_has_no_mediation_is_told_so(door: Door, name: str) -> None:
    answer = await (await door.connect(1)).ask(f"messagepickup/1.0/{name}")
    assert answer.problem[0] == "e.p.trust.not-enrolled"


@pytest.mark.rule("D12")
async def test_the_earliest_names_have_underscores_and_another_prefix(door: Door) -> None:
    peer = await door.holder(1, HELD)
    await door.forward(HELD, envelope("a"))
    answer = await peer.ask("messagepickup/1.0/batch_pickup", {"batch_size": 1}, prefix=OLD)
    assert answer.type == f"{OLD}messagepickup/1.0/batch"
    assert batch(answer) == ["a"]
