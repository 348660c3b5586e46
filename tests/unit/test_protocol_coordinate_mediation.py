"""Coordinate mediation 1.0, 2.0 and 3.0: each MUST of their texts, and whose a key is (D1, D8)."""

import pytest

from mediator.mailboxes.bounds import DAY
from pickup.message import DIDCOMM, OLD
from pickup.rules.records import Generation, Invitation, MediationRules, Policy
from pickup.rules.tables import MediationTransaction
from tests.harness.broker import TENANT
from tests.harness.mediation import key
from tests.harness.protocols import OURS, PUBLIC_URL, V1, V2, V2_DID, Answer, Door, Json, Peer, base58, open_door

HELD, OTHER, THIRD = key(500), key(501), key(502)
LONG = "did:peer:4zQmShort:zLong"


class Version:
    """One version, and the names it has for things."""

    def __init__(self, number: str, generation: Generation) -> None:
        self.number, self.generation = number, generation
        self.recipient = "recipient_key" if number == "1.0" else "recipient_did"
        third = number == "3.0"
        self.update_name, self.query_name = (
            ("recipient-update", "recipient-query") if third else ("keylist-update", "keylist-query")
        )
        self.list_name, self.items = ("recipient", "dids") if third else ("keylist", "keys")

    def type(self, name: str) -> str:
        return f"coordinate-mediation/{self.number}/{name}"

    async def request(self, peer: Peer) -> Answer:
        return await peer.ask(self.type("mediate-request"))

    async def update(self, peer: Peer, *updates: tuple[str, str], prefix: str = DIDCOMM) -> Answer:
        body = {"updates": [{self.recipient: one, "action": action} for one, action in updates]}
        return await peer.ask(self.type(self.update_name), body, prefix=prefix)

    async def results(self, peer: Peer, *updates: tuple[str, str]) -> list[str]:
        return [one["result"] for one in (await self.update(peer, *updates)).body["updated"]]

    async def query(self, peer: Peer, paginate: object = None, prefix: str = DIDCOMM) -> Answer:
        body: Json = {} if paginate is None else {"paginate": paginate}
        return await peer.ask(self.type(self.query_name), body, prefix=prefix)

    async def keys(self, peer: Peer) -> list[str]:
        return [one[self.recipient] for one in (await self.query(peer)).body[self.items]]


ONE, TWO, THREE = Version("1.0", V1), Version("2.0", V2), Version("3.0", V2)
each = pytest.mark.parametrize("version", [ONE, TWO, THREE], ids=lambda one: one.number)


async def holder(door: Door, version: Version, number: int = 1) -> Peer:
    peer = await door.connect(number, version.generation)
    assert (await version.request(peer)).name == "mediate-grant"
    return peer


# Grants.


@pytest.mark.rule("D1")
async def test_a_grant_of_1_0_names_endpoint_and_routing_keys(door: Door) -> None:
    """`endpoint`: The endpoint reported to mediation client connections. `routing_keys`: All keys are encoded using
    the did:key method."""
    peer = await door.connect(1)
    answer = await ONE.request(peer)
    assert answer.type == f"{DIDCOMM}coordinate-mediation/1.0/mediate-grant"
    assert answer.body == {"endpoint": PUBLIC_URL, "routing_keys": [OURS]}
    assert answer.thid == peer.last


@pytest.mark.rule("D1", "D12")
async def test_agents_of_old_get_their_prefix_and_keys_in_base58(door: Door) -> None:
    answer = await (await door.connect(1)).ask("coordinate-mediation/1.0/mediate-request", prefix=OLD)
    assert answer.type == f"{OLD}coordinate-mediation/1.0/mediate-grant"
    assert answer.body["routing_keys"] == [base58(1000)]


@pytest.mark.rule("D1")
@pytest.mark.parametrize(("version", "did"), [(TWO, V2_DID), (THREE, [V2_DID])], ids=["2.0", "3.0"])
async def test_a_grant_names_the_routing_did(door: Door, version: Version, did: object) -> None:
    """`routing_did`: DID of the mediator where forwarded messages should be sent; a list of them in 3.0."""
    peer = await door.connect(1, V2)
    answer = await version.request(peer)
    assert (answer.name, answer.body, answer.thid) == ("mediate-grant", {"routing_did": did}, peer.last)


@each
@pytest.mark.rule("D1")
async def test_the_same_request_again_keeps_mailbox_and_keys(door: Door, version: Version) -> None:
    peer = await holder(door, version)
    assert await version.results(peer, (HELD, "add")) == ["success"]
    before = await peer.connected()
    assert (await version.request(peer)).name == "mediate-grant"
    assert (await peer.connected()).mailbox_id == before.mailbox_id
    assert await version.keys(peer) == [HELD]


@each
@pytest.mark.rule("D1")
@pytest.mark.parametrize("policy", [Policy.INVITATION, Policy.ALLOW])
async def test_who_is_not_let_is_denied_and_has_no_mailbox(version: Version, policy: Policy) -> None:
    """If the mediator is willing to route messages, it will respond with a `mediate-grant` message, otherwise with a
    `mediate-deny` message."""
    async with open_door(MediationRules(policy=policy)) as door:
        peer = await door.connect(1, version.generation)
        answer = await version.request(peer)
        assert (answer.name, answer.thid) == ("mediate-deny", peer.last)
        reason = "e.p.req.invitation" if policy is Policy.INVITATION else "e.p.req.denied"
        assert answer.body.get("code") == (None if version.generation is V1 else reason)
        connection = await door.connection(peer.sender)
        if version.generation is V1:
            assert connection.mailbox_id is None
        else:
            assert connection is None, "a stranger leaves nothing behind"


@pytest.mark.rule("D1")
async def test_who_is_on_the_list_is_granted() -> None:
    async with open_door(MediationRules(policy=Policy.ALLOW, allowed=frozenset({key(1), "did:example:peer2"}))) as door:
        assert (await ONE.request(await door.connect(1))).name == "mediate-grant"
        assert (await THREE.request(await door.connect(2, V2))).name == "mediate-grant"
        assert (await THREE.request(await door.connect(3, V2))).name == "mediate-deny"


@pytest.mark.rule("D1")
async def test_a_v2_peer_names_its_invitation_as_parent_thread() -> None:
    async with open_door(MediationRules(policy=Policy.INVITATION)) as door:
        invitation = Invitation("welcome", TENANT, key(900), b"", "", door.now, max_uses=1)
        await door.broker.write(lambda tx, _now: tx.table(MediationTransaction).invitations.put(invitation))
        first, second = await door.connect(1, V2), await door.connect(2, V2)
        for _ in range(2):
            assert (await first.ask(THREE.type("mediate-request"), pthid="welcome")).name == "mediate-grant"
        assert (await second.ask(THREE.type("mediate-request"), pthid="welcome")).name == "mediate-deny"


@pytest.mark.rule("D8")
async def test_a_v1_peer_that_never_shook_hands_is_refused(door: Door) -> None:
    answer = await ONE.request(Peer(door, V1, key(77)))
    assert answer.problem[0] == "e.p.trust.not-enrolled"
    assert await door.connection(key(77)) is None


# Updates.


@each
@pytest.mark.rule("D3", "D8")
@pytest.mark.parametrize("written", [HELD, base58(500), f"{HELD}#z6Mk", "did:web:held.example", LONG])
async def test_each_update_is_echoed_with_its_result(door: Door, version: Version, written: str) -> None:
    """Confirmation of requested updates: recipient, action and `result`: one of client_error, server_error, no_change,
    success."""
    peer = await holder(door, version)
    for action, result in (("add", "success"), ("add", "no_change"), ("remove", "success"), ("remove", "no_change")):
        answer = await version.update(peer, (written, action))
        assert answer.name == f"{version.update_name}-response"
        assert answer.body == {"updated": [{version.recipient: written, "action": action, "result": result}]}
        assert answer.thid == peer.last


@each
@pytest.mark.rule("D8")
async def test_a_key_that_another_holds_cannot_be_registered(door: Door, version: Version) -> None:
    """`client_error`, and nothing is said of its holder."""
    first, second = await holder(door, version), await holder(door, version, 2)
    await version.results(first, (HELD, "add"))
    assert await version.results(second, (HELD, "add"), (HELD, "remove")) == ["client_error", "no_change"]
    assert await version.keys(first) == [HELD]
    door.now += 181 * DAY
    assert await version.results(second, (HELD, "add")) == ["success"]


@each
@pytest.mark.rule("D8")
async def test_whoever_seals_with_a_key_takes_it_over(door: Door, version: Version) -> None:
    """It is free again by proof of possession."""
    squatter, name = await holder(door, version), key(2) if version.generation is V1 else "did:example:peer2"
    assert await version.results(squatter, (name, "add")) == ["success"]
    owner = await holder(door, version, 2)
    assert owner.sender == name
    assert await version.results(owner, (name, "add")) == ["success"]
    assert await version.keys(squatter) == []


@each
@pytest.mark.rule("D8")
async def test_anothers_sealing_key_cannot_be_registered(door: Door, version: Version) -> None:
    owner, other = await holder(door, version), await holder(door, version, 2)
    assert await version.results(other, (owner.sender, "add"), (HELD, "add")) == ["client_error", "success"]
    assert await version.results(owner, (owner.sender, "add")) == ["success"]
    assert await version.results(owner, (owner.sender, "remove")) == ["success"]
    door.now += 181 * DAY
    assert await version.results(other, (owner.sender, "add")) == ["success"], "its connection has been idle"


@each
@pytest.mark.rule("D8")
async def test_a_key_of_the_mediator_cannot_be_registered(door: Door, version: Version) -> None:
    peer = await holder(door, version)
    invited = Invitation("i", "another tenant", OTHER, b"", "", door.now)
    await door.broker.write(lambda tx, _now: tx.table(MediationTransaction).invitations.put(invited))
    ours = [OURS, base58(1000), f"{OURS}#z6Mk", V2_DID, OTHER]
    wishes = [(one, "add") for one in ours]
    assert await version.results(peer, *wishes, (HELD, "add")) == ["client_error"] * len(ours) + ["success"]
    assert await version.keys(peer) == [HELD]


@each
@pytest.mark.rule("D8")
async def test_keylists_are_for_who_has_mediation(door: Door, version: Version) -> None:
    peer = await door.connect(1, version.generation)
    for answer in (await version.update(peer, (HELD, "add")), await version.query(peer)):
        assert answer.problem[0] == "e.p.trust.not-enrolled"


@each
@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "updates",
    [
        None,
        {},
        "add",
        [{}] * 1001,
    ],
)
async def test_updates_that_are_no_list_are_refused(door: Door, version: Version, updates: object) -> None:
    peer = await holder(door, version)
    answer = await peer.ask(version.type(version.update_name), {"updates": updates})
    assert answer.problem[1].startswith("updates: ")


@each
@pytest.mark.rule("D8", "D12")
@pytest.mark.parametrize(
    ("name", "action"),
    [
        (None, "add"),
        (1, "add"),
        ("", "add"),
        ("x" * 8193, "add"),
        (HELD, None),
        (HELD, ["add"]),
        (HELD, "x" * 100),
        ("not an object", None),
    ],
)
async def test_a_malformed_update_is_refused_for_itself_alone(
    door: Door, version: Version, name: object, action: object
) -> None:
    peer = await holder(door, version)
    good = [{version.recipient: one, "action": "add"} for one in (OTHER, THIRD)]
    bad = name if name == "not an object" else {version.recipient: name, "action": action}
    answer = await peer.ask(version.type(version.update_name), {"updates": [good[0], bad, good[1]]})
    first, refused, last = answer.body["updated"]
    assert [first, last] == [{**one, "result": "success"} for one in good]
    assert refused == {
        version.recipient: name if name == HELD else "",
        "action": action if action == "add" else "",
        "result": "client_error",
    }
    assert await version.keys(peer) == [OTHER, THIRD]


# Queries.


@each
@pytest.mark.rule("D1")
async def test_a_query_lists_the_keys_in_pages(door: Door, version: Version) -> None:
    """`paginate` is optional; `pagination`, if present, must include `count`, `offset` and `remaining`."""
    peer = await holder(door, version)
    keys = [key(number) for number in range(500, 505)]
    await version.results(peer, *((one, "add") for one in keys))
    whole = await version.query(peer)
    assert whole.name == version.list_name
    assert sorted(one[version.recipient] for one in whole.body[version.items]) == sorted(keys)
    listed = []
    for offset, count, remaining in ((0, 2, 3), (2, 2, 1), (4, 1, 0), (6, 0, 0)):
        body = (await version.query(peer, {"limit": 2, "offset": offset})).body
        assert body["pagination"] == {"count": count, "offset": offset, "remaining": remaining}
        listed += [one[version.recipient] for one in body[version.items]]
    assert listed == [one[version.recipient] for one in whole.body[version.items]]


@each
@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "paginate",
    [
        [],
        "all",
        {"limit": 0, "offset": 0},
        {"limit": True, "offset": 0},
        {"limit": "one", "offset": 0},
        {"limit": 1.5, "offset": 0},
        {"limit": 1, "offset": -1},
        {"limit": 1, "offset": 2**64},
    ],
)
async def test_a_page_that_is_none_is_refused(door: Door, version: Version, paginate: object) -> None:
    answer = await version.query(await holder(door, version), paginate)
    assert answer.problem[1].startswith("paginate")


@each
@pytest.mark.rule("N4")
async def test_a_page_may_be_text_or_whole_floats(door: Door, version: Version) -> None:
    peer = await holder(door, version)
    whole = (await version.query(peer, {"limit": 1, "offset": 1})).body
    for paginate in ({"limit": "1", "offset": "1"}, {"limit": 1.0, "offset": 1.0}):
        assert (await version.query(peer, paginate)).body == whole


@pytest.mark.parametrize("version", [TWO, THREE], ids=lambda one: one.number)
@pytest.mark.rule("D12")
@pytest.mark.parametrize("paginate", [{}, {"limit": 1}, {"offset": 1}])
async def test_paginate_must_include_limit_and_offset(door: Door, version: Version, paginate: Json) -> None:
    """`paginate`: is optional, and if present must include `limit` and `offset`."""
    answer = await version.query(await holder(door, version), paginate)
    assert answer.problem[1].startswith("paginate.")


@pytest.mark.rule("D1")
async def test_agents_of_1_0_ask_for_all_with_a_limit_below_zero(door: Door) -> None:
    peer = await holder(door, ONE)
    await ONE.results(peer, (HELD, "add"), (OTHER, "add"))
    body = (await ONE.query(peer, {"limit": -1, "offset": 0})).body
    assert body["pagination"] == {"count": 2, "offset": 0, "remaining": 0}


@each
@pytest.mark.rule("D12")
async def test_a_page_has_at_most_a_thousand_keys(version: Version) -> None:
    async with open_door(MediationRules(max_keys=2000)) as door:
        peer = await holder(door, version)
        keys = [key(number) for number in range(2000, 3001)]
        await version.results(peer, *((one, "add") for one in keys[:1000]))
        await version.results(peer, (keys[1000], "add"))
        for paginate in (None, {"limit": 5000, "offset": 0}):
            body = (await version.query(peer, paginate)).body
            assert len(body[version.items]) == 1000
            assert body["pagination"] == {"count": 1000, "offset": 0, "remaining": 1}


@pytest.mark.rule("D12")
async def test_a_stranger_that_is_one_too_many_is_told_so() -> None:
    async with open_door(MediationRules(max_connections=1)) as door:
        first = await door.connect(1, V2)
        assert (await first.ask("coordinate-mediation/3.0/mediate-request")).name == "mediate-grant"
        second = await door.connect(2, V2)
        code, text = (await second.ask("coordinate-mediation/3.0/mediate-request")).problem
        assert code == "e.p.me.res.storage"
        assert text == "There is no room: quota_exceeded: connections in the tenant, limit 1, in use 1"
        assert (await first.ask("coordinate-mediation/3.0/mediate-request")).name == "mediate-grant"


@pytest.mark.rule("D3")
async def test_keys_are_listed_as_the_peer_writes_them(door: Door) -> None:
    peer = await holder(door, ONE)
    await ONE.results(peer, (base58(500), "add"), ("did:web:held.example", "add"))
    for prefix, written in ((DIDCOMM, HELD), (OLD, base58(500))):
        body = (await ONE.query(peer, prefix=prefix)).body
        assert sorted(one["recipient_key"] for one in body["keys"]) == sorted([written, "did:web:held.example"])
