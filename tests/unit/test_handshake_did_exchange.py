"""DID exchange 1.0 and 1.1: who is connected, under which key, and how the answer is signed."""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace

import base58
import did_peer_4
import orjson
import pytest

from mediator.errors import BadRequestError, NoSuchInvitationError, NotEnrolledError, UnresolvedDidError
from pickup.message import OLD, DidcommMessage, write
from pickup.protocols.handshakes import exchange_dids
from pickup.rules.records import Generation, Invitation
from tests.harness.handshaking import PUBLIC_URL, Peer, Setup, checked_attachment, exchange, only, setup


@pytest.fixture
async def door() -> AsyncIterator[Setup]:
    async with setup() as made:
        yield made


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
async def invitation(door: Setup) -> Invitation:
    return await door.invitations.make("default")


@pytest.mark.rule("D8")
async def test_1_1_gets_our_did_signed_by_the_invitation_key(door: Setup, peer: Peer, invitation: Invitation) -> None:
    did = peer.peer_4()
    call = await door.call(exchange(1, did, invitation), peer.key, invitation.key)
    reply = only(await exchange_dids(call))

    plain = write(reply, Generation.V1, "", "")
    assert plain["@type"] == "https://didcomm.org/didexchange/1.1/response"
    assert plain["~thread"] == {"thid": "request-1", "pthid": invitation.id}
    assert "did_doc~attach" not in plain
    assert checked_attachment(plain["did_rotate~attach"], invitation.key).decode() == plain["did"]
    assert plain["did_rotate~attach"]["mime-type"] == "text/string"
    document = did_peer_4.resolve(plain["did"])
    endpoints = [
        service["serviceEndpoint"] for service in document["service"] if service["type"] == "did-communication"
    ]
    assert PUBLIC_URL in endpoints
    assert "wss://mediator.example/didcomm" in endpoints

    kept = await door.kept(peer.key)
    assert call.connection == kept
    assert (kept.their_did, kept.my_did) == (did, plain["did"])
    assert (kept.callers, kept.keys) == ((peer.key,), (peer.key,))
    assert (kept.label, kept.endpoint, kept.invitation) == ("wallet", None, invitation.id)
    assert door.context.identities.known_as(kept.my_did) == door.identity


@pytest.mark.parametrize("alphabet", ["standard", "url"])
async def test_1_0_with_a_document_gets_a_signed_document(
    door: Setup, peer: Peer, alphabet: str, invitation: Invitation
) -> None:
    attached = peer.attach(peer.old_document("https://peer.example/in"), alphabet=alphabet)
    raw = exchange(0, peer.nym, invitation, **{"did_doc~attach": attached})
    reply = only(await exchange_dids(await door.call(raw, peer.key, invitation.key)))

    plain = write(reply, Generation.V1, "", "")
    assert "did_rotate~attach" not in plain
    document = orjson.loads(checked_attachment(plain["did_doc~attach"], invitation.key))
    assert document["id"] == plain["did"]
    assert document == did_peer_4.resolve(plain["did"])
    kept = await door.kept(peer.key)
    assert (kept.their_did, kept.endpoint, kept.keys) == (peer.nym, "https://peer.example/in", (peer.key,))


async def test_a_wallet_with_did_peer_1_gets_a_did_peer_1(door: Setup, peer: Peer, invitation: Invitation) -> None:
    theirs = peer.genesis_document()
    raw = exchange(0, theirs["id"], invitation, **{"did_doc~attach": peer.attach(theirs)})
    plain = write(only(await exchange_dids(await door.call(raw, peer.key, invitation.key))), Generation.V1, "", "")

    document = orjson.loads(checked_attachment(plain["did_doc~attach"], invitation.key))
    assert document.pop("id") == plain["did"]
    digest = hashlib.sha256(orjson.dumps(document, option=orjson.OPT_SORT_KEYS)).digest()
    assert plain["did"] == "did:peer:1z" + base58.b58encode(b"\x12\x20" + digest).decode()
    [method] = document["authentication"]
    mine = base58.b58decode(door.identity.key.removeprefix("did:key:z"))[2:]
    assert base58.b58decode(method["publicKeyBase58"]) == mine
    assert [service["serviceEndpoint"] for service in document["service"]] == [
        PUBLIC_URL,
        "wss://mediator.example/didcomm",
    ]
    kept = await door.kept(peer.key)
    # Nothing but the key proves who this is.
    assert kept.their_did == peer.key
    assert door.context.identities.known_as(kept.my_did) == door.identity


async def test_old_type_prefixes_are_answered_in_kind(door: Setup, peer: Peer, invitation: Invitation) -> None:
    raw = exchange(1, peer.peer_4(), invitation) | {"@type": f"{OLD}didexchange/1.1/request"}
    reply = only(await exchange_dids(await door.call(raw, peer.key, invitation.key)))
    assert str(reply.type) == f"{OLD}didexchange/1.1/response"


async def test_a_did_key_is_a_did_like_any_other(door: Setup, peer: Peer, invitation: Invitation) -> None:
    await exchange_dids(await door.call(exchange(1, peer.key, invitation), peer.key, invitation.key))
    kept = await door.kept(peer.key)
    assert kept.keys == (peer.key,)


async def test_an_endpoint_and_the_mediators_in_front_of_it_are_kept(
    door: Setup, peer: Peer, invitation: Invitation
) -> None:
    other = Peer()
    did = peer.peer_4("http://peer.example:8000", f"{other.key}#{other.key.removeprefix('did:key:')}")
    await exchange_dids(await door.call(exchange(1, did, invitation), peer.key, invitation.key))
    kept = await door.kept(peer.key)
    assert (kept.endpoint, kept.routing_keys) == ("http://peer.example:8000", (other.key,))


@pytest.mark.rule("D12")
async def test_the_same_request_again_changes_nothing_and_counts_once(door: Setup, peer: Peer) -> None:
    invitation = await door.invitations.make("default", uses=1)
    raw = exchange(1, peer.peer_4(), invitation)
    first = only(await exchange_dids(await door.call(raw, peer.key, invitation.key)))
    kept = await door.connection(peer.key)
    again = only(await exchange_dids(await door.call(raw, peer.key, invitation.key)))
    assert (again.body, again.thid) == (first.body, first.thid)
    assert await door.connection(peer.key) == kept
    assert (await door.count(), await door.uses(invitation)) == (1, 1)


@pytest.mark.rule("D8")
async def test_the_key_that_sealed_must_be_one_of_the_document(door: Setup, peer: Peer, invitation: Invitation) -> None:
    thief = Peer()
    for raw in (
        exchange(1, peer.peer_4(), invitation),
        exchange(0, peer.nym, invitation, **{"did_doc~attach": peer.attach(peer.old_document())}),
    ):
        with pytest.raises(BadRequestError, match="key the message was sealed with"):
            await exchange_dids(await door.call(raw, thief.key, invitation.key))
    assert await door.count() == 0
    assert await door.uses(invitation) == 0


@pytest.mark.rule("D8")
async def test_other_keys_of_a_document_are_not_believed(door: Setup, peer: Peer, invitation: Invitation) -> None:
    victim = Peer()
    await exchange_dids(await door.call(exchange(1, victim.peer_4(), invitation), victim.key, invitation.key))
    before = await door.connection(victim.key)

    stolen = peer.old_document()
    stolen["publicKey"] += victim.old_document()["publicKey"]
    stolen["service"][0]["recipientKeys"].append(victim.verkey)
    raw = exchange(0, peer.nym, invitation, **{"did_doc~attach": peer.attach(stolen)})
    await exchange_dids(await door.call(raw, peer.key, invitation.key))

    assert await door.connection(victim.key) == before
    kept = await door.kept(peer.key)
    assert kept.callers == (peer.key,)


@pytest.mark.rule("D8")
async def test_a_did_that_only_its_document_proves_is_not_used(door: Setup, peer: Peer, invitation: Invitation) -> None:
    trusted = Peer()
    raw = exchange(0, trusted.nym, invitation, **{"did_doc~attach": peer.attach(peer.old_document(did=trusted.nym))})
    await exchange_dids(await door.call(raw, peer.key, invitation.key))
    kept = await door.kept(peer.key)
    assert kept.their_did == peer.key


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda jws: jws.update(signature="A" * 86), "signature is wrong"),
        (lambda jws: jws.update(protected=jws["protected"][:-4]), "did_doc~attach"),
        (lambda jws: jws.pop("protected"), "protected header"),
        (lambda jws: jws["header"].update(kid=Peer().key), "one Ed25519 key"),
        (lambda jws: jws.update(signatures=[]), "1 to 8 signatures"),
        (lambda jws: jws.update(signatures=[dict(jws)] * 9), "1 to 8 signatures"),
        (lambda jws: jws.update(signatures="all"), "1 to 8 signatures"),
    ],
)
async def test_a_document_whose_signature_is_not_right_is_refused(door, peer, spoil, said, invitation) -> None:
    attached = peer.attach(peer.old_document())
    spoil(attached["data"]["jws"])
    raw = exchange(0, peer.nym, invitation, **{"did_doc~attach": attached})
    with pytest.raises(BadRequestError, match=said):
        await exchange_dids(await door.call(raw, peer.key, invitation.key))
    assert await door.count() == 0


@pytest.mark.rule("D12")
async def test_a_document_changed_after_it_was_signed_is_refused(
    door: Setup, peer: Peer, invitation: Invitation
) -> None:
    attached = peer.attach(peer.old_document())
    attached["data"]["base64"] = peer.attach(peer.old_document("https://elsewhere.example"))["data"]["base64"]
    raw = exchange(0, peer.nym, invitation, **{"did_doc~attach": attached})
    with pytest.raises(BadRequestError, match="signature is wrong"):
        await exchange_dids(await door.call(raw, peer.key, invitation.key))


@pytest.mark.rule("D12")
async def test_a_document_signed_by_a_stranger_is_refused(door: Setup, peer: Peer, invitation: Invitation) -> None:
    raw = exchange(0, peer.nym, invitation, **{"did_doc~attach": Peer().attach(peer.old_document())})
    with pytest.raises(BadRequestError, match="signature by keys of the document"):
        await exchange_dids(await door.call(raw, peer.key, invitation.key))


async def test_all_signatures_of_a_document_must_be_valid(door: Setup, peer: Peer, invitation: Invitation) -> None:
    second = Peer()
    document = peer.old_document()
    document["publicKey"] += [
        {
            "id": f"{peer.nym}#2",
            "type": "Ed25519VerificationKey2018",
            "controller": peer.nym,
            "publicKeyBase58": second.verkey,
        }
    ]
    attached = peer.attach(document)
    payload = orjson.dumps(document)
    attached["data"]["jws"] = {"signatures": [peer.jws(payload), second.jws(payload)]}
    raw = exchange(0, peer.nym, invitation, **{"did_doc~attach": attached})
    await exchange_dids(await door.call(raw, peer.key, invitation.key))
    assert await door.connection(peer.key) is not None

    attached["data"]["jws"]["signatures"][1]["signature"] = attached["data"]["jws"]["signatures"][0]["signature"]
    with pytest.raises(BadRequestError, match="signature is wrong"):
        await exchange_dids(await door.call(raw, peer.key, invitation.key))


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "attached",
    [
        None,
        "text",
        {},
        {"data": {}},
        {"data": {"base64": "e30="}},
        {"data": {"base64": "%%%", "jws": {}}},
        {"data": {"base64": 7, "jws": {}}},
        {"data": {"base64": "A" * 100_000, "jws": {}}},
        {"data": {"json": {}, "jws": {}}},
        {"data": {"links": ["https://elsewhere.example"], "jws": {}}},
    ],
)
async def test_an_attachment_that_is_none_is_refused(
    door: Setup, peer: Peer, attached: object, invitation: Invitation
) -> None:
    raw = exchange(0, peer.nym, invitation, **{"did_doc~attach": attached})
    with pytest.raises(BadRequestError, match="did_doc~attach"):
        await exchange_dids(await door.call(raw, peer.key, invitation.key))
    assert await door.count() == 0


@pytest.mark.rule("D12")
async def test_a_document_of_another_did_or_none_is_refused(door: Setup, peer: Peer, invitation: Invitation) -> None:
    for document in ({}, [], {"id": 7}, {"id": peer.nym}, peer.old_document(did=Peer().nym)):
        raw = exchange(0, peer.nym, invitation, **{"did_doc~attach": peer.attach(document)})
        with pytest.raises(BadRequestError):
            await exchange_dids(await door.call(raw, peer.key, invitation.key))


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("did", "error"),
    [
        ("", BadRequestError),
        (None, BadRequestError),
        (7, BadRequestError),
        ("did:peer:4" + "z" * 9000, BadRequestError),
        ("did:peer:4zQmNothing", UnresolvedDidError),
        ("did:example:nobody", UnresolvedDidError),
    ],
)
async def test_a_did_that_leads_nowhere_is_refused(
    door: Setup, peer: Peer, did: object, error: type, invitation: Invitation
) -> None:
    raw = exchange(1, "x", invitation) | {"did": did}
    with pytest.raises(error):
        await exchange_dids(await door.call(raw, peer.key, invitation.key))


@pytest.mark.rule("D8")
async def test_who_says_nothing_of_itself_is_refused(door: Setup, peer: Peer, invitation: Invitation) -> None:
    call = await door.call(exchange(1, peer.peer_4(), invitation), None, invitation.key)
    with pytest.raises(NotEnrolledError):
        await exchange_dids(call)


async def test_a_request_to_our_key_names_its_invitation(door: Setup, peer: Peer, invitation: Invitation) -> None:
    raw = exchange(1, peer.peer_4(), invitation)
    reply = only(await exchange_dids(await door.call(raw, peer.key, door.identity.key)))
    checked_attachment(reply.decorators["did_rotate~attach"], invitation.key)
    with pytest.raises(NoSuchInvitationError):
        await exchange_dids(await door.call(exchange(1, peer.peer_4(), None), peer.key, door.identity.key))
    strange = exchange(1, peer.peer_4(), None) | {"~thread": {"pthid": "nobody's"}}
    with pytest.raises(NoSuchInvitationError):
        await exchange_dids(await door.call(strange, peer.key, door.identity.key))


async def test_an_invitation_that_is_not_open_connects_nobody_new(door: Setup, peer: Peer) -> None:
    short = await door.invitations.make("default", ttl=1000)
    once = await door.invitations.make("default", uses=1)
    await exchange_dids(await door.call(exchange(1, peer.peer_4(), once), peer.key, once.key))
    door.clock.now += 1000
    for invitation in (short, once):
        late = Peer()
        with pytest.raises(NoSuchInvitationError):
            await exchange_dids(await door.call(exchange(1, late.peer_4(), invitation), late.key, invitation.key))
        assert await door.connection(late.key) is None
    # Who came by it before may repeat.
    await exchange_dids(await door.call(exchange(1, peer.peer_4(), once), peer.key, once.key))


@pytest.mark.rule("A6")
async def test_an_invitation_of_another_tenant_is_none(peer: Peer) -> None:
    async with setup("default", "acme") as door:
        invitation = await door.invitations.make("acme")
        raw = exchange(1, peer.peer_4(), invitation)
        with pytest.raises(NoSuchInvitationError):
            await exchange_dids(await door.call(raw, peer.key, door.identity.key))
        call = await door.call(raw, peer.key, invitation.key, tenant="acme")
        await exchange_dids(call)
        assert call.connection.tenant == "acme"
        assert await door.connection(peer.key) is None


async def test_a_label_is_cut_and_never_needed(door: Setup, invitation: Invitation) -> None:
    for label, kept_as in (("x" * 500, "x" * 128), (7, ""), (None, "")):
        peer = Peer()
        raw = exchange(1, peer.peer_4(), invitation) | {"label": label}
        await exchange_dids(await door.call(raw, peer.key, invitation.key))
        kept = await door.kept(peer.key)
        assert kept.label == kept_as


async def test_a_thread_of_its_own_is_kept_to(door: Setup, peer: Peer, invitation: Invitation) -> None:
    call = await door.call(exchange(1, peer.peer_4(), invitation), peer.key, invitation.key)
    message: DidcommMessage = replace(call.message, thid=None)
    call.message = message
    assert only(await exchange_dids(call)).thid == "request-1"
