"""`mediator try`, as the README tells people to."""

import pytest

from pickup.client import Holder, ProblemError
from tests.harness.didcomm_service import Door, Invites

STEPS = ["connected", "granted", "registered", "sent", "waiting", "picked up", "acknowledged", "removed"]


@pytest.mark.parametrize("generation", ["v1", "v2"])
async def test_a_wallets_whole_way(door: Door, invites: Invites, generation: str):
    said = await door.command("try", invites.v1 if generation == "v1" else invites.v2)
    lines = said.splitlines()
    assert [line[:13].strip() for line in lines[:-1]] == STEPS
    assert f"DIDComm {generation}" in lines[0]
    assert '"hello from mediator try"' in lines[5]
    assert "0 messages left" in lines[6]
    assert lines[-1] == "It works: wallets can use this mediator."


async def test_the_service_of_this_machine_leaves_no_traces(door: Door):
    own = ("--data-dir", str(door.service.data_dir))
    before = [await door.command(kind, "list", *own) for kind in ("connections", "invitations")]
    said = (await door.command("try", "--v2", *own)).splitlines()
    assert [line[:13].strip() for line in said[:-1]] == [*STEPS, "cleaned up"]
    assert said[-1] == "It works: wallets can use this mediator."
    assert [await door.command(kind, "list", *own) for kind in ("connections", "invitations")] == before


@pytest.mark.rule("D12")
async def test_what_the_mediator_refuses_is_told_with_its_code(door: Door, invites: Invites):
    holder: Holder = await door.holder(invites.v1)
    with pytest.raises(ProblemError) as refused:
        await holder.add_key()
    assert refused.value.code == "e.p.trust.not-enrolled"
