"""ACA-Py as a holder: it has an endpoint of its own, asks for mediation, and expects its mail to be brought to it."""

import base64
import json
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.harness.didcomm_service import Door
from tests.harness.service import Services
from tests.harness.waiting import until
from tests.slow.peers.acapy import Agent

pytestmark = pytest.mark.timeout(300)
HANDSHAKES = ("connections/1.0", "didexchange/1.0", "didexchange/1.1")
REGISTERED_WITHIN = 30.0
QUEUED_WITHIN = 20.0
RELAYED_WITHIN = 60.0


@pytest.fixture
async def door(services: Services, stack: AsyncExitStack) -> Door:
    """A service of the test's own: it looks at all that is there."""
    return await Door.opened(services, stack)


def invitation_in(url: str, handshake: str) -> Any:
    """Read an invitation as a wallet does; of the handshakes it offers, leave one."""
    text = parse_qs(urlsplit(url).query)["oob"][0]
    invitation = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    offered = invitation["handshake_protocols"]
    invitation["handshake_protocols"] = [uri for uri in offered if uri.endswith(handshake)]
    assert len(invitation["handshake_protocols"]) == 1, offered
    return invitation


async def waiting(door: Door, label: str, messages: int) -> bool:
    """Whether the mediator keeps so many messages for a peer."""
    said = await door.command("connections", "list", "--json", "--data-dir", str(door.service.data_dir))
    (one,) = [row for row in json.loads(said)["connections"] if row["label"] == label]
    assert one["relayed"]
    return bool(one["messages"] == messages)


@pytest.mark.parametrize("handshake", HANDSHAKES)
@pytest.mark.rule("D5", "D7", "D10")
async def test_mail_is_relayed_also_what_came_while_it_was_down(
    services: Services, stack: AsyncExitStack, door: Door, handshake: str
):
    alice = await Agent.running("alice", services, stack)
    bob = await Agent.running("bob", services, stack)
    invites = await door.invite()
    to_mediator = await alice.accept(invitation_in(invites.v1, handshake))
    mediation = await alice.mediated(to_mediator)

    # Bob knows alice by an invitation that leads through the mediator alone.
    invitation = await alice.invite(mediation)
    (service,) = invitation["services"]
    assert service["serviceEndpoint"] == door.url
    assert service["routingKeys"]
    await until(lambda: alice.keylist(to_mediator), REGISTERED_WITHIN, "the mediator's answer to keylist-update is in")
    to_alice = await bob.accept(invitation)
    await bob.write(to_alice, "first")
    await alice.has(["first"])

    await alice.stop()
    for number in range(3):
        await bob.write(to_alice, f"while down {number}")
    await until(lambda: waiting(door, "alice", 3), QUEUED_WITHIN, "what cannot be relayed waits in the queue")
    await alice.start()
    await bob.write(to_alice, "after")
    await alice.has(["after", *(f"while down {number}" for number in range(3))], RELAYED_WITHIN)
    assert alice.received[0] == "first"
    # The relay's 2xx is the acknowledgement.
    await until(lambda: waiting(door, "alice", 0), QUEUED_WITHIN, "what was relayed is removed")
    assert not door.service.complaints()
