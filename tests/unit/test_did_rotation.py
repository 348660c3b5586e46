"""DIDs that wallets rotate: what a message with ``from_prior`` changes, and who is refused (DIDComm v2.1, D14)."""

from typing import Any

import orjson
import pytest

from mediator.errors import BadRequestError
from pickup.rules.connecting import ROTATION_PAUSE
from pickup.rules.records import Generation
from tests.harness.mediation import key
from tests.harness.protocols import V2, V2_DID, Answer, Door, Peer, Wire, envelope, from_prior

HELD, HELD_2 = "did:example:held", "did:example:held-2"
STATUS = "messagepickup/3.0/status-request"
FETCH = "messagepickup/3.0/delivery-request"
LIVE = "messagepickup/3.0/live-delivery-change"
PING = "trust-ping/2.0/ping"
EMPTY = "empty/1.0/empty"


async def rotated(door: Door, peer: Peer, name: str = "new", **more: Any) -> tuple[Peer, dict[str, str]]:
    """Return the peer under a new DID, and the header of its messages."""
    new = Peer(door, V2, f"did:example:{name}")
    return new, {"from_prior": from_prior(peer.sender, new.sender, door.now // 1000, **more)}


@pytest.mark.rule("D14")
async def test_a_wallet_keeps_all_when_it_rotates_its_did(door: Door) -> None:
    old = await door.holder(1, HELD, generation=V2)
    no = (await old.connected()).id
    await door.forward(HELD, envelope("before"))
    new, header = await rotated(door, old)
    # It goes on with the header until it hears from us.
    assert (await new.ask(STATUS, **header)).body["message_count"] == 1
    assert (await new.ask(FETCH, {"limit": 9}, **header)).marks == ["before"]
    await door.forward(HELD, envelope("after"))
    answer = await new.ask(FETCH, {"limit": 9})
    assert answer.marks == ["before", "after"]
    assert answer.raw["to"] == [new.sender]
    assert (await new.connected()).id == no
    assert (await new.ask("messagepickup/3.0/messages-received", {"message_id_list": list(answer.attached)})).body[
        "message_count"
    ] == 0
    listed = await new.ask("coordinate-mediation/3.0/recipient-query")
    assert listed.body["dids"] == [{"recipient_did": HELD}]
    added = await new.ask(
        "coordinate-mediation/3.0/recipient-update", {"updates": [{"recipient_did": HELD_2, "action": "add"}]}
    )
    assert added.body["updated"][0]["result"] == "success"
    assert (await new.ask("coordinate-mediation/3.0/mediate-request")).name == "mediate-grant"
    assert (await new.connected()).id == no


@pytest.mark.rule("D14")
async def test_the_old_did_is_a_stranger_afterwards(door: Door) -> None:
    old = await door.holder(1, HELD, generation=V2)
    new, header = await rotated(door, old)
    await new.ask(PING, **header)
    assert (await old.ask(STATUS)).problem[0] == "e.p.trust.not-enrolled"


@pytest.mark.rule("D5", "D6", "D14")
async def test_live_mode_goes_on_under_the_new_did(door: Door) -> None:
    old, socket = await door.holder(1, HELD, generation=V2), Wire(persistent=True)
    await old.ask(LIVE, {"live_delivery": True}, wire=socket)
    new, header = await rotated(door, old)
    # The return route of the old DID on the socket is that of the new one too.
    assert (await new.ask(PING, wire=socket, route=None, **header)).name == "ping-response"
    await door.forward(HELD, envelope("live"))
    pushed = Answer(orjson.loads((await socket.count(3))[2]))
    assert (pushed.marks, pushed.raw["to"]) == (["live"], [new.sender])
    assert (await new.ask(STATUS, wire=socket)).body["live_delivery"] is True


@pytest.mark.rule("D14")
async def test_a_wallet_rotates_again_and_again(door: Door) -> None:
    peer = await door.holder(1, HELD, generation=V2)
    no = (await peer.connected()).id
    for name in "abc":
        peer, header = await rotated(door, peer, name)
        await peer.ask(STATUS, **header)
        await peer.ask(STATUS, **header)
        door.now += ROTATION_PAUSE
    assert (await peer.connected()).id == no


@pytest.mark.rule("D14")
@pytest.mark.parametrize(
    ("forge", "why"),
    [
        ({"signer": "did:example:thief"}, "signature"),
        ({"sub": "did:example:somebody"}, "sub"),
        ({"sub": 7}, "sub"),
        ({"sub": "text"}, "sub"),
        ({"iss": "did:example:thief"}, "iss"),
        ({"iss": 7}, "iss"),
        ({"iat": "soon"}, "iat"),
        ({"iat": None}, "iat"),
        ({"iat": 1_767_225_600 + 301}, "iat"),
        ({"iat": 1_767_225_600 - 301}, "older"),
        ({"sub": ""}, "sub"),
    ],
)
async def test_a_forged_rotation_is_refused(door: Door, forge: dict[str, Any], why: str) -> None:
    victim = await door.holder(1, HELD, generation=V2)
    thief = Peer(door, V2, "did:example:new")
    claims = {"sub": thief.sender, "seconds": door.now // 1000} | forge
    header = from_prior(victim.sender, claims.pop("sub"), claims.pop("seconds"), **claims)
    answer = await thief.ask(FETCH, {"limit": 9}, from_prior=header)
    assert answer.problem[0] == "e.p.msg"
    assert answer.problem[1].startswith("from_prior: ")
    assert why in answer.problem[1]
    assert await door.connection(thief.sender) is None
    assert (await victim.ask(STATUS)).name == "status"


@pytest.mark.rule("D12", "D14")
@pytest.mark.parametrize("text", ["", "a", "a.b", "a.b.c", "a.b.c.d", "e30.e30.e30", "..", 7, {}, "é.é.é"])
async def test_what_is_no_jwt_is_refused(door: Door, text: Any) -> None:
    peer = await door.holder(1, generation=V2)
    answer = await peer.ask(STATUS, from_prior=text)
    assert answer.problem[1].startswith("from_prior: ")


@pytest.mark.rule("D14")
async def test_a_rotation_cannot_be_used_by_another_did(door: Door) -> None:
    """Others see the header when the wallet tells them of its new DID; they cannot seal with that."""
    victim = await door.holder(1, HELD, generation=V2)
    _, header = await rotated(door, victim)
    for thief in (Peer(door, V2, "did:example:thief"), await door.holder(3, generation=V2)):
        assert (await thief.ask(STATUS, **header)).problem[1].startswith("from_prior: expected a sub")
    assert (await victim.ask(STATUS)).name == "status"


@pytest.mark.rule("D13", "D14")
async def test_a_recorded_rotation_does_nothing_when_it_comes_again(door: Door) -> None:
    first = await door.holder(1, HELD, generation=V2)
    second, header = await rotated(door, first, "second")
    await second.ask(STATUS, **header)
    recorded = door.last
    door.now += ROTATION_PAUSE
    third, header = await rotated(door, second, "third")
    await third.ask(STATUS, **header)
    door.now += ROTATION_PAUSE
    back = Peer(door, V2, first.sender)
    await back.ask(STATUS, from_prior=from_prior(third.sender, back.sender, door.now // 1000))
    door.restart()
    door.last = recorded
    wire = Wire()
    await door.again(wire)
    assert [answer.name for answer in wire.answers] == ["problem-report"]
    assert (await back.ask(STATUS)).name == "status"


@pytest.mark.rule("D14")
async def test_a_did_with_a_connection_of_its_own_is_refused(door: Door) -> None:
    one, two = await door.holder(1, HELD, generation=V2), await door.holder(2, HELD_2, generation=V2)
    await door.forward(HELD, envelope("of one"))
    answer = await two.ask(FETCH, {"limit": 9}, from_prior=from_prior(one.sender, two.sender, door.now // 1000))
    assert answer.problem[1].startswith("from_prior: its sub, the new DID, has a connection of its own")
    assert (await one.ask(STATUS)).body["message_count"] == 1
    assert (await two.ask(STATUS)).body["message_count"] == 0


@pytest.mark.rule("D9", "D14")
async def test_a_forward_rotates_nothing_and_says_nothing(door: Door) -> None:
    old = await door.holder(1, HELD, generation=V2)
    new, header = await rotated(door, old)
    attached = [{"data": {"json": orjson.loads(envelope())}}]
    assert await new.tell("routing/2.0/forward", {"next": HELD}, attachments=attached, **header) == []
    assert await door.connection(new.sender) is None


@pytest.mark.rule("D14")
async def test_a_message_that_has_expired_rotates_nothing(door: Door) -> None:
    old = await door.holder(1, HELD, generation=V2)
    new, header = await rotated(door, old)
    answer = await new.ask(STATUS, expires_time=door.now // 1000 - 301, **header)
    assert answer.problem[1].startswith("expires_time: ")
    assert await door.connection(new.sender) is None


@pytest.mark.rule("D14")
async def test_v1_knows_no_from_prior(door: Door) -> None:
    peer = await door.holder(1, key(500), generation=Generation.V1)
    assert (await peer.ask("messagepickup/2.0/status-request", from_prior=7)).name == "status"


# Endings.


@pytest.mark.rule("D14")
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "anonymous"])
async def test_a_wallet_ends_its_connection(door: Door, sealed: bool) -> None:
    peer, socket = await door.holder(1, HELD, generation=V2), Wire(persistent=True)
    await peer.ask(LIVE, {"live_delivery": True}, wire=socket)
    no = (await peer.connected()).id
    more = {} if sealed else {"aud": V2_DID}
    header = from_prior(peer.sender, None, door.now // 1000, **more)
    who = peer if sealed else Peer(door, V2, None)  # type: ignore[arg-type]
    assert await who.tell(EMPTY, from_prior=header) == []
    assert await door.connection(peer.sender) is None
    assert not door.sessions.has(no)
    # Sent again, it has ended already.
    assert await who.tell(EMPTY, from_prior=header) == []


@pytest.mark.rule("D14")
@pytest.mark.parametrize("audience", [None, "did:example:other-mediator", ["did:example:other-mediator", 7]])
async def test_an_ending_that_others_were_told_ends_nothing_here(door: Door, audience: Any) -> None:
    """Whoever was told that a DID is no more could tell us too, and remove the mail."""
    peer = await door.holder(1, HELD, generation=V2)
    header = from_prior(peer.sender, None, door.now // 1000, aud=audience)
    thief = await door.holder(2, generation=V2)
    assert (await thief.ask(EMPTY, from_prior=header)).problem[1].startswith("from_prior: an ending has to be sealed")
    with pytest.raises(BadRequestError, match="from_prior: an ending has to be sealed"):
        await Peer(door, V2, None).tell(EMPTY, from_prior=header)  # type: ignore[arg-type]
    assert (await peer.ask(STATUS)).name == "status"


@pytest.mark.rule("D14")
async def test_a_forged_ending_is_refused(door: Door) -> None:
    peer = await door.holder(1, HELD, generation=V2)
    header = from_prior(peer.sender, None, door.now // 1000, signer="did:example:thief", aud=V2_DID)
    with pytest.raises(BadRequestError, match="from_prior: the signature"):
        await Peer(door, V2, None).tell(EMPTY, from_prior=header)  # type: ignore[arg-type]
    assert (await peer.ask(STATUS)).name == "status"
