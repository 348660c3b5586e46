"""Envelopes that were taken: which are remembered, for how long, and what is told to those that come again (D13)."""

from typing import Any

import orjson
import pytest

from mediator.errors import BadRequestError
from mediator.store.base import Store
from pickup.dispatcher import Dispatcher
from pickup.rules import replays
from pickup.rules.records import Generation
from pickup.rules.replays import KEPT, SeenEnvelope
from pickup.rules.tables import MediationTransaction
from tests.harness.broker import TENANT
from tests.harness.mediation import key
from tests.harness.protocols import V2, Answer, Door, Peer, Wire
from tests.harness.stores import ram_store, within

NOW = 1_767_225_600_000
HELD = key(500)


def made(mark: str = "a", **more: Any) -> SeenEnvelope:
    given = {"tenant": TENANT, "sender": "alice", "kind": "family/name", "digest": mark.encode()}
    return SeenEnvelope(**given | more)


def take(store: Store, envelope: SeenEnvelope, now: int = NOW) -> bool:
    """Take an envelope; True when it was new."""
    with within(store.transaction(), MediationTransaction) as tx:
        return replays.once(tx, envelope, lambda: None, now) is not None


def collect(store: Store, now: int) -> int:
    with within(store.transaction(), MediationTransaction) as tx:
        return replays.forget(tx, now, 1000)


@pytest.mark.rule("D13")
def test_an_envelope_is_handled_once_by_sender_tenant_kind() -> None:
    store = ram_store()
    for envelope in (made(), made(sender="bob"), made(tenant="acme"), made(kind="family/other"), made("b")):
        assert [take(store, envelope), take(store, envelope)] == [True, False]


@pytest.mark.rule("D12", "D13")
def test_what_is_refused_may_be_tried_again() -> None:
    store = ram_store()

    def refuse() -> None:
        raise BadRequestError("field", "is wrong")

    with within(store.transaction(), MediationTransaction) as tx, pytest.raises(BadRequestError):
        replays.once(tx, made(), refuse, NOW)
    assert take(store, made())


@pytest.mark.rule("D13")
@pytest.mark.parametrize(
    ("times", "until"),
    [
        ({}, NOW + KEPT),
        ({"created_at": NOW - 1000}, NOW + KEPT),
        ({"created_at": NOW + 1000}, NOW + 1000 + KEPT),
        ({"expire_at": NOW + 1000}, NOW + 1000),
        ({"expire_at": NOW + 2 * KEPT}, NOW + KEPT),
    ],
)
def test_an_envelope_is_stored_until_expiry_or_a_month(times: dict[str, int], until: int) -> None:
    store = ram_store()
    assert take(store, made(**times))
    assert collect(store, until - 1) == 0
    assert not take(store, made(**times))
    assert collect(store, until) == 1
    assert take(store, made(**times))


@pytest.mark.rule("D13")
def test_the_oldest_envelopes_of_one_sender_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "MAX_KEPT", 3)
    store = ram_store()
    assert take(store, made(sender="bob"))
    for mark in "abcd":
        assert take(store, made(mark))
    assert not any(take(store, made(mark)) for mark in "bcd")
    assert take(store, made("a"))
    assert not take(store, made(sender="bob"))


@pytest.mark.rule("D13")
@pytest.mark.parametrize(("apart", "code"), [(-KEPT - 1000, True), (-KEPT, False), (KEPT, False), (KEPT + 1000, True)])
async def test_a_change_whose_own_time_is_too_far_away_is_refused(door: Door, apart: int, code: bool) -> None:
    peer = await door.holder(1, generation=V2)
    asked = {"created_time": (door.now + apart) // 1000}
    answer = await peer.ask("coordinate-mediation/3.0/mediate-request", **asked)
    assert (answer.name == "problem-report") is code
    if code:
        assert answer.problem[1].startswith("created_time: ")
    # It cannot be told from a replay by its age, but what only reads does no harm.
    assert (await peer.ask("messagepickup/3.0/status-request", **asked)).name == "status"


@pytest.mark.rule("D13")
@pytest.mark.parametrize("created", ["2026-01-01T00:00:00.000Z", "1767225600", 1767225600.5, True, {}])
async def test_a_time_in_another_form_counts_as_none(door: Door, created: Any) -> None:
    peer = await door.holder(1, generation=V2)
    answer = await peer.ask("coordinate-mediation/3.0/mediate-request", created_time=created)
    assert answer.name == "mediate-grant"
    assert [one.name for one in await played_again(door, peer)] == ["mediate-grant"]


@pytest.mark.rule("D12")
async def test_an_expiry_that_is_no_time_is_named(door: Door) -> None:
    peer = await door.holder(1, generation=V2)
    answer = await peer.ask("messagepickup/3.0/status-request", expires_time="tomorrow")
    assert answer.name == "problem-report"
    assert answer.problem[1].startswith("expires_time: ")


@pytest.mark.rule("D12", "D13")
async def test_clocks_may_differ_by_five_minutes(door: Door) -> None:
    peer = await door.holder(1, generation=V2)
    seconds = door.now // 1000
    answer = await peer.ask("coordinate-mediation/3.0/mediate-request", expires_time=seconds - 299)
    assert answer.name == "mediate-grant"
    # The envelope is remembered for as long as it would be taken.
    assert [one.name for one in await played_again(door, peer)] == ["mediate-grant"]
    answer = await peer.ask("messagepickup/3.0/status-request", expires_time=seconds - 300)
    assert answer.problem[1] == f"expires_time: must be in the future; it is {seconds} here, got {seconds - 300}"


@pytest.mark.rule("D12")
@pytest.mark.parametrize("written", ["2025-12-01T00:00:00Z", "1764547200", 1764547200.0])
async def test_an_expiry_may_be_text_or_a_whole_float(door: Door, written: object) -> None:
    peer = await door.holder(1, generation=V2)
    answer = await peer.ask("messagepickup/3.0/status-request", expires_time=written)
    assert answer.problem[1].startswith("expires_time: must be in the future")


async def played_again(door: Door, peer: Peer, wire: Wire | None = None) -> list[Answer]:
    """Send the peer's last envelope again, to a door that has been started since."""
    door.restart()
    wire = wire or Wire()
    await door.again(wire)
    return wire.answers


@pytest.mark.rule("D13")
@pytest.mark.parametrize(
    ("type", "body", "answer"),
    [
        ("coordinate-mediation/1.0/mediate-request", {}, "mediate-grant"),
        ("coordinate-mediation/1.0/keylist-update", {"updates": []}, "keylist-update-response"),
        ("messagepickup/1.0/status-request", {}, "status"),
        ("messagepickup/1.0/batch-pickup", {"batch_size": 1}, "batch"),
        ("messagepickup/1.0/list-pickup", {"message_ids": []}, "list-response"),
        ("messagepickup/2.0/delivery-request", {"limit": 1}, "status"),
        ("messagepickup/2.0/messages-received", {"message_id_list": []}, "status"),
        ("messagepickup/2.0/live-delivery-change", {"live_delivery": False}, "status"),
        ("push-notifications-fcm/1.0/set-device-info", {"device_token": "t", "device_platform": "p"}, "ack"),
    ],
)
async def test_who_tries_again_after_a_restart_gets_its_answer(
    door: Door, type: str, body: dict[str, Any], answer: str
) -> None:
    peer = await door.holder(1)
    assert (await peer.ask(type, body)).name == answer
    assert [one.name for one in await played_again(door, peer)] == [answer]


@pytest.mark.rule("D13")
async def test_a_replay_from_http_opens_no_session_on_a_socket(door: Door) -> None:
    peer, thief = await door.holder(1, HELD), Wire(persistent=True)
    answer = await peer.ask("messagepickup/2.0/live-delivery-change", {"live_delivery": True})
    assert answer.name == "problem-report"
    [again] = await played_again(door, peer, thief)
    assert again.body["live_delivery"] is False
    await peer.tell("trust_ping/1.0/ping", {"response_requested": False})
    await played_again(door, peer, thief)
    assert not door.sessions.has((await peer.connected()).id)


@pytest.mark.rule("D6", "D13")
async def test_an_old_request_ends_no_lease_of_a_live_session(door: Door) -> None:
    peer, socket = await door.holder(1, HELD), Wire(persistent=True)
    await peer.ask("messagepickup/2.0/live-delivery-change", {"live_delivery": True}, wire=socket)
    await door.forward(HELD)
    [id] = Answer(orjson.loads((await socket.count(2))[1])).attached
    await peer.ask("messagepickup/1.0/list-pickup", {"message_ids": [id]})
    await played_again(door, peer, Wire(alive=False))
    assert (await peer.ask("messagepickup/2.0/status-request", wire=socket)).body["message_count"] == 0


@pytest.mark.rule("D13")
async def test_who_has_left_is_not_brought_back(door: Door) -> None:
    peer = await door.connect(1, V2)
    await peer.ask("coordinate-mediation/3.0/mediate-request")
    no = (await peer.connected()).id

    def leave(tx: Any, _now: int) -> None:
        tx.table(MediationTransaction).connections.remove(tx.table(MediationTransaction).connections.get(no))

    await door.broker.write(leave)
    assert [one.name for one in await played_again(door, peer)] == ["mediate-deny"]
    assert await door.connection(peer.sender) is None


@pytest.mark.rule("D13")
def test_only_messages_that_have_a_handler_are_taken_once() -> None:
    with pytest.raises(ValueError, match="nothing"):
        Dispatcher().register("family", {(1, 0)}, {}, generations={Generation.V1}, once={"nothing"})
