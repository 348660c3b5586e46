"""Return routes: RFC 0092 for v1, the return_route extension for v2 (D5)."""

from typing import Any

import pytest

from pickup.channels import MAX_THREADS
from pickup.rules.records import Generation
from tests.harness.mediation import key
from tests.harness.protocols import V1, V2, Door, Peer, Wire, envelope

HELD = key(500)
HOME = "https://peer.example/agent"
PING = {V1: "trust_ping/1.0/ping", V2: "trust-ping/2.0/ping"}
MEDIATE = {V1: "coordinate-mediation/1.0/mediate-request", V2: "coordinate-mediation/3.0/mediate-request"}
STATUS = {V1: "messagepickup/2.0/status-request", V2: "messagepickup/3.0/status-request"}
both = pytest.mark.parametrize("generation", [V1, V2], ids=["v1", "v2"])


async def reachable(door: Door, generation: Generation) -> Peer:
    """Return a peer that has an endpoint of its own."""
    peer = await door.connect(1, generation, HOME)
    door.phonebook.endpoints[peer.sender] = HOME
    return peer


@both
@pytest.mark.rule("D5")
@pytest.mark.parametrize("route", ["all", "thread"])
@pytest.mark.parametrize("persistent", [False, True], ids=["http", "socket"])
async def test_all_and_thread_bring_the_answer_back(
    door: Door, generation: Generation, route: str, persistent: bool
) -> None:
    """`all`: Send all messages for this key over the connection. `thread`: those that match the thread."""
    peer = await reachable(door, generation)
    answer = await peer.ask(PING[generation], route=route, wire=Wire(persistent=persistent))
    assert answer.thid == peer.last
    assert door.outbox.sent == []


@both
@pytest.mark.rule("D5")
@pytest.mark.parametrize("route", [None, "none"])
@pytest.mark.parametrize("kind", [PING, MEDIATE], ids=["ping", "mediation"])
async def test_by_default_nothing_comes_back_on_the_connection(
    door: Door, generation: Generation, route: str | None, kind: dict[Generation, str]
) -> None:
    """`none`: Default. No messages should be returned over this connection: they go to the sender's endpoint."""
    peer = await reachable(door, generation)
    assert await peer.tell(kind[generation], route=route, wire=Wire(persistent=True)) == []
    ((endpoint, answer),) = door.outbox.sent
    assert (endpoint, answer.thid) == (HOME, peer.last)


@both
@pytest.mark.rule("D5")
async def test_who_cannot_be_reached_is_not_answered(door: Door, generation: Generation) -> None:
    peer = await door.connect(1, generation)
    assert await peer.tell(PING[generation], route=None, wire=Wire(persistent=True)) == []
    assert door.outbox.sent == []


@both
@pytest.mark.rule("D5")
async def test_a_pickup_request_without_route_is_answered_as_if_all(door: Door, generation: Generation) -> None:
    peer = await reachable(door, generation)
    await peer.ask(MEDIATE[generation])
    assert (await peer.ask(STATUS[generation], route=None)).name == "status"
    assert await peer.tell(STATUS[generation], route="none") == []
    assert door.outbox.sent == []


@both
@pytest.mark.rule("D5")
async def test_all_holds_for_the_key_as_long_as_the_socket_does(door: Door, generation: Generation) -> None:
    """The header must be set each time the communication channel is established: once per established websocket."""
    peer, wire = await reachable(door, generation), Wire(persistent=True)
    await peer.ask(PING[generation], route="all", wire=wire)
    assert (await peer.ask(PING[generation], route=None, wire=wire)).thid == peer.last
    assert await peer.tell(PING[generation], route=None, wire=Wire(persistent=True)) == []
    assert await peer.tell(PING[generation], route="none", wire=wire) == []
    assert await peer.tell(PING[generation], route=None, wire=wire) == []
    assert len(door.outbox.sent) == 3


@both
@pytest.mark.rule("D5")
@pytest.mark.parametrize("route", ["none", "", "elsewhere"])
async def test_a_message_without_a_reply_ends_the_route(door: Door, generation: Generation, route: str) -> None:
    peer, wire = await reachable(door, generation), Wire(persistent=True)
    await peer.ask(PING[generation], route="all", wire=wire)
    silent = {"response_requested": False}
    if generation is Generation.V1:
        assert await peer.tell(PING[generation], **silent, route=route, wire=wire) == []
    else:
        assert await peer.tell(PING[generation], silent, route=route, wire=wire) == []
    assert await peer.tell(PING[generation], route=None, wire=wire) == []


@both
@pytest.mark.rule("D5")
async def test_thread_holds_for_its_message_alone(door: Door, generation: Generation) -> None:
    peer, wire = await reachable(door, generation), Wire(persistent=True)
    await peer.ask(PING[generation], route="thread", wire=wire)
    assert await peer.tell(PING[generation], route=None, wire=wire) == []


def of_thread(generation: Generation, thread: str) -> dict[str, Any]:
    """Return what asks for the replies of a thread."""
    if generation is V1:
        return {"~transport": {"return_route": "thread", "return_route_thread": thread}}
    return {"return_route": "thread", "return_route_thread": thread}


@both
@pytest.mark.rule("D5")
async def test_thread_brings_its_thread_alone(door: Door, generation: Generation) -> None:
    """`thread`: Send all messages matching the key and thread specified in `return_route_thread`."""
    peer, wire = await reachable(door, generation), Wire(persistent=True)
    asked = of_thread(generation, "t")
    assert await peer.tell(PING[generation], route=None, wire=wire, **asked) == []
    assert (await peer.ask(PING[generation], route=None, wire=wire, thid="t")).thid == "t"
    assert await peer.tell(PING[generation], route=None, wire=wire, thid="u") == []
    # A refusal in the thread, too.
    assert (await peer.ask("nonsense/1.0/x", route=None, wire=wire, thid="t")).name == "problem-report"
    assert await peer.tell(PING[generation], route="none", wire=wire, thid="t") == []
    assert await peer.tell(PING[generation], route=None, wire=wire, thid="t") == []
    assert len(door.outbox.sent) == 4


@both
@pytest.mark.rule("D5")
async def test_http_answers_no_other_thread(door: Door, generation: Generation) -> None:
    peer = await reachable(door, generation)
    assert await peer.tell(PING[generation], route=None, **of_thread(generation, "t")) == []
    assert (await peer.ask(PING[generation], route=None, thid="t", **of_thread(generation, "t"))).thid == "t"
    await peer.ask(MEDIATE[generation])
    assert await peer.tell(STATUS[generation], route=None, **of_thread(generation, "t")) == []
    assert len(door.outbox.sent) == 1


@pytest.mark.rule("D5")
async def test_thread_takes_the_place_of_all(door: Door) -> None:
    peer, wire = await reachable(door, V2), Wire(persistent=True)
    await peer.ask(PING[V2], route="all", wire=wire)
    await peer.ask(PING[V2], route="thread", wire=wire)
    assert await peer.tell(PING[V2], route=None, wire=wire) == []


@pytest.mark.rule("D5")
async def test_a_channel_remembers_the_last_threads(door: Door) -> None:
    peer, wire = await reachable(door, V2), Wire(persistent=True)
    for number in range(MAX_THREADS + 1):
        await peer.ask(PING[V2], route="thread", wire=wire, thid=f"{number}")
    assert await peer.tell(PING[V2], route=None, wire=wire, thid="0") == []
    assert (await peer.ask(PING[V2], route=None, wire=wire, thid="1")).thid == "1"


@pytest.mark.rule("D12")
async def test_a_thread_that_is_no_text_is_named(door: Door) -> None:
    peer = await door.connect(1, V2)
    answer = await peer.ask(PING[V2], route="all", return_route_thread=7)
    assert answer.problem[1].startswith("return_route_thread: ")


@pytest.mark.rule("D5", "D8")
async def test_the_route_of_one_key_is_not_for_another(door: Door) -> None:
    """Send all messages for this cryptographic key over the connection."""
    one, two, wire = await door.connect(1), await door.connect(2), Wire(persistent=True)
    await one.ask(PING[V1], route="all", wire=wire)
    assert await two.tell(PING[V1], route=None, wire=wire) == []


@pytest.mark.rule("D5", "D10")
async def test_http_carries_at_most_one_message_back(door: Door) -> None:
    """HTTP transports will only be able to receive at most one message at a time."""
    peer, wire = await door.holder(1, HELD), Wire()
    await door.forward(HELD, envelope("a"), envelope("b"))
    (answer,) = await peer.tell("messagepickup/2.0/delivery-request", {"limit": 10}, wire=wire)
    assert answer.marks == ["a", "b"]
    assert len(wire.frames) == 1
