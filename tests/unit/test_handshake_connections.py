"""Connections 1.0: documents of old agents, and the field that the invitation's key signs."""

from collections.abc import AsyncIterator

import base58
import pytest

from mediator.errors import BadRequestError, MediatorError, NoSuchInvitationError, NotEnrolledError
from pickup.message import OLD, write
from pickup.protocols.handshakes import exchange_documents
from pickup.rules.records import Generation, Invitation
from tests.harness.handshaking import PUBLIC_URL, START, Peer, Setup, checked_field, connecting, only, setup


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
async def test_the_invitation_key_signs_our_document(door: Setup, peer: Peer, invitation: Invitation) -> None:
    call = await door.call(connecting(peer), peer.key, invitation.key)
    plain = write(only(await exchange_documents(call)), Generation.V1, "", "")

    assert plain["@type"] == "https://didcomm.org/connections/1.0/response"
    assert plain["~thread"] == {"thid": "request-1"}
    assert "connection" not in plain
    signed = plain["connection~sig"]
    assert signed["@type"] == "https://didcomm.org/signature/1.0/ed25519Sha512_single"
    value, seconds = checked_field(signed, invitation.key)
    assert seconds == START // 1000

    raw = base58.b58decode(door.identity.key.removeprefix("did:key:z"))[2:]
    verkey, did = base58.b58encode(raw).decode(), base58.b58encode(raw[:16]).decode()
    document = value["DIDDoc"]
    assert value["DID"] == document["id"] == did
    assert document["@context"] == "https://w3id.org/did/v1"
    assert [key["publicKeyBase58"] for key in document["publicKey"]] == [verkey]
    assert document["authentication"][0]["publicKey"] == document["publicKey"][0]["id"]
    services = document["service"]
    assert [(service["type"], service["priority"]) for service in services] == [("IndyAgent", 0), ("IndyAgent", 1)]
    assert [service["serviceEndpoint"] for service in services] == [PUBLIC_URL, "wss://mediator.example/didcomm"]
    assert all(service["recipientKeys"] == [verkey] for service in services)

    kept = await door.kept(peer.key)
    assert call.connection == kept
    assert (kept.their_did, kept.callers, kept.keys) == (peer.nym, (peer.key,), (peer.key,))
    assert (kept.label, kept.endpoint, kept.invitation) == ("wallet", None, invitation.id)
    assert door.context.identities.known_as(kept.my_did) == door.identity


async def test_old_prefixes_are_answered_in_kind(door: Setup, peer: Peer, invitation: Invitation) -> None:
    call = await door.call(connecting(peer, prefix=OLD), peer.key, invitation.key)
    reply = only(await exchange_documents(call))
    assert str(reply.type) == f"{OLD}connections/1.0/response"
    assert reply.decorators["connection~sig"]["@type"] == f"{OLD}signature/1.0/ed25519Sha512_single"


async def test_qualified_dids_and_keys_by_reference_are_read(door: Setup, invitation: Invitation) -> None:
    for brought, written in (("", ""), ("did:sov:", "did:sov:"), ("", "did:sov:"), ("did:sov:", "")):
        peer = Peer()
        document = peer.old_document("http://peer.example", did=written + peer.nym)
        document["service"][0]["recipientKeys"] = [f"{written}{peer.nym}#1"]
        raw = connecting(peer, connection={"DID": brought + peer.nym, "DIDDoc": document})
        await exchange_documents(await door.call(raw, peer.key, invitation.key))
        kept = await door.kept(peer.key)
        assert (kept.their_did, kept.keys) == (brought + peer.nym, (peer.key,))
        assert kept.endpoint == "http://peer.example"


async def test_documents_of_newer_agents_are_read(door: Setup, peer: Peer, invitation: Invitation) -> None:
    document = {
        "@context": "https://www.w3.org/ns/did/v1",
        "id": peer.nym,
        "verificationMethod": [
            {"id": "#1", "type": "Ed25519VerificationKey2018", "controller": peer.nym, "publicKeyBase58": peer.verkey}
        ],
        "authentication": ["#1"],
        "service": [
            {
                "id": "#ws",
                "type": "did-communication",
                "priority": 1,
                "recipientKeys": [f"{peer.key}#{peer.key.removeprefix('did:key:')}"],
                "routingKeys": [],
                "serviceEndpoint": "wss://peer.example",
            },
            {
                "id": "#http",
                "type": "did-communication",
                "priority": 0,
                "recipientKeys": ["#1"],
                "routingKeys": [Peer().verkey],
                "serviceEndpoint": "https://peer.example",
            },
        ],
    }
    raw = connecting(peer, connection={"DID": peer.nym, "DIDDoc": document})
    await exchange_documents(await door.call(raw, peer.key, invitation.key))
    kept = await door.kept(peer.key)
    assert (kept.endpoint, kept.keys, len(kept.routing_keys)) == ("https://peer.example", (peer.key,), 1)


@pytest.mark.rule("D12")
async def test_the_same_request_again_changes_nothing(door: Setup, peer: Peer) -> None:
    invitation = await door.invitations.make("default", uses=1)
    first = only(await exchange_documents(await door.call(connecting(peer), peer.key, invitation.key)))
    kept = await door.connection(peer.key)
    again = only(await exchange_documents(await door.call(connecting(peer), peer.key, invitation.key)))
    assert checked_field(first.decorators["connection~sig"], invitation.key) == checked_field(
        again.decorators["connection~sig"], invitation.key
    )
    assert await door.connection(peer.key) == kept
    assert await door.uses(invitation) == 1


@pytest.mark.rule("D8")
async def test_who_brings_a_document_without_its_own_key_is_refused(
    door: Setup, peer: Peer, invitation: Invitation
) -> None:
    thief = Peer()
    with pytest.raises(BadRequestError, match="key the message was sealed with"):
        await exchange_documents(await door.call(connecting(peer), thief.key, invitation.key))
    with pytest.raises(NotEnrolledError):
        await exchange_documents(await door.call(connecting(peer), None, invitation.key))
    assert await door.count() == 0


@pytest.mark.rule("D8")
async def test_a_did_that_is_not_made_from_the_key_is_not_believed(
    door: Setup, peer: Peer, invitation: Invitation
) -> None:
    other = Peer()
    raw = connecting(peer, connection={"DID": other.nym, "DIDDoc": peer.old_document(did=other.nym)})
    await exchange_documents(await door.call(raw, peer.key, invitation.key))
    kept = await door.kept(peer.key)
    assert kept.their_did == peer.key


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "brought",
    [
        None,
        "text",
        {},
        {"DID": "x"},
        {"DID": 7, "DIDDoc": {}},
        {"DID": "", "DIDDoc": {}},
        {"DID": "x", "DIDDoc": {"id": "y"}},
        {"DID": "x", "DIDDoc": {"id": "x"}},
        {"DID": "x", "DIDDoc": {"id": "x", "publicKey": [7], "service": "all", "authentication": {"a": 1}}},
        {"DID": "x", "DIDDoc": {"id": "x", "service": [{"type": "IndyAgent", "recipientKeys": ["0OIl"]}]}},
    ],
)
async def test_what_is_no_introduction_is_refused(
    door: Setup, peer: Peer, brought: object, invitation: Invitation
) -> None:
    with pytest.raises(MediatorError) as caught:
        await exchange_documents(await door.call(connecting(peer, connection=brought), peer.key, invitation.key))
    assert caught.value.status == 400
    assert await door.count() == 0


async def test_a_request_that_answers_no_invitation_is_refused(door: Setup, peer: Peer) -> None:
    with pytest.raises(NoSuchInvitationError):
        await exchange_documents(await door.call(connecting(peer), peer.key, door.identity.key))
