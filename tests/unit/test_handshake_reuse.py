"""Out-of-band: a connection that is there already, and invitations of others."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from mediator.errors import NoSuchInvitationError, NotEnrolledError, UnsupportedMessageError
from pickup.message import DIDCOMM
from pickup.protocols import handshakes
from pickup.protocols.handshakes import refuse_invitation as received
from pickup.protocols.handshakes import reuse
from pickup.rules.records import Invitation
from pickup.rules.tables import MediationTransaction
from tests.harness.handshaking import Peer, Setup, exchange, only, setup


@pytest.fixture
async def door() -> AsyncIterator[Setup]:
    async with setup() as made:
        yield made


async def connected(door: Setup, invitation: Invitation) -> Peer:
    peer = Peer()
    await handshakes.exchange_dids(await door.call(exchange(1, peer.peer_4(), invitation), peer.key, invitation.key))
    return peer


def reusing(pthid: str | None, version: str = "1.1") -> dict[str, Any]:
    thread = {"thid": "reuse-1"} | ({} if pthid is None else {"pthid": pthid})
    return {"@type": f"{DIDCOMM}out-of-band/{version}/handshake-reuse", "@id": "reuse-1", "~thread": thread}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_connection_is_used_again(door: Setup, version: str) -> None:
    first, second = await door.invitations.make("default"), await door.invitations.make("default")
    peer = await connected(door, first)
    before = await door.connection(peer.key)
    reply = only(await reuse(await door.call(reusing(second.id, version), peer.key, second.key)))
    assert str(reply.type) == f"{DIDCOMM}out-of-band/{version}/handshake-reuse-accepted"
    assert (reply.thid, reply.pthid) == ("reuse-1", second.id)
    assert await door.connection(peer.key) == before


async def test_a_connection_without_invitation_gets_the_reused_one(door: Setup) -> None:
    first, second = await door.invitations.make("default"), await door.invitations.make("default", uses=1)
    peer = await connected(door, first)
    before = await door.kept(peer.key)
    alone = replace(before, invitation=None)
    await door.context.mediation.write(lambda tx, _now: tx.table(MediationTransaction).connections.save(alone))

    for _ in range(2):
        await reuse(await door.call(reusing(second.id), peer.key, second.key))
    assert await door.connection(peer.key) == replace(before, invitation=second.id)
    assert await door.uses(second) == 1


@pytest.mark.rule("D8", "D12")
async def test_who_is_not_connected_cannot_reuse(door: Setup) -> None:
    invitation = await door.invitations.make("default")
    for sender in (Peer().key, None):
        with pytest.raises(NotEnrolledError):
            await reuse(await door.call(reusing(invitation.id), sender, invitation.key))


@pytest.mark.rule("A6", "D12")
async def test_only_invitations_of_ours_are_reused() -> None:
    async with setup("default", "acme") as door:
        peer = await connected(door, await door.invitations.make("default"))
        other = await door.invitations.make("acme")
        for pthid in ("nobody's", None, other.id):
            with pytest.raises(NoSuchInvitationError):
                await reuse(await door.call(reusing(pthid), peer.key, door.identity.key))


@pytest.mark.rule("D12")
async def test_invitations_of_others_are_not_followed(door: Setup) -> None:
    raw = {"@type": f"{DIDCOMM}out-of-band/1.1/invitation", "@id": "1", "services": ["did:example:elsewhere"]}
    with pytest.raises(UnsupportedMessageError):
        await received(await door.call(raw, Peer().key, door.identity.key))
