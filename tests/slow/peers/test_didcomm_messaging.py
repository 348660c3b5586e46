"""A wallet made of the quickstart that didcomm-messaging has for beginners (v2)."""

import uuid
from typing import Any

import aiohttp
import pytest
from didcomm_messaging import DIDCommMessaging, quickstart

from pickup.base64url import decode
from pickup.client.handshake import MediatorInvitation
from tests.harness.didcomm_service import Door, Invites

PICKUP = "https://didcomm.org/messagepickup/3.0"
NOTE = "https://didcomm.org/basicmessage/2.0/message"


class Quickstart:
    """One that knows the DID of the mediator and nothing else."""

    def __init__(self, messaging: DIDCommMessaging, mine: str, mediator: str, relayed: str) -> None:
        self.messaging = messaging
        self.mine = mine
        self.mediator = mediator
        self.relayed = relayed

    @classmethod
    async def connected(cls, mediator: str) -> "Quickstart":
        mine, keys = quickstart.generate_did()
        messaging = await quickstart.setup_default(mine, keys)
        relayed = await quickstart.setup_relay(messaging, mine, mediator, *keys)
        assert relayed is not None
        return cls(messaging, mine, mediator, relayed)

    async def ask(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        message = {"type": f"{PICKUP}/{name}", "body": body, "from": self.mine, "to": [self.mediator]}
        answer: dict[str, Any] = await quickstart.send_http_message(
            self.messaging, self.mine, message, target=self.mediator
        )
        return answer

    async def write(self, to: str, text: str) -> None:
        message = {"id": str(uuid.uuid4()), "type": NOTE, "from": self.mine, "to": [to], "body": {"content": text}}
        packed = await self.messaging.pack(message=message, to=to, frm=self.mine)
        async with (
            aiohttp.ClientSession() as session,
            session.post(packed.get_endpoint("http"), data=packed.message) as answer,
        ):
            assert answer.ok, await answer.text()

    async def fetch(self) -> list[str]:
        """What the quickstart's fetch_relayed_messages does, which reads no attachments in base64."""
        delivered = await self.ask("delivery-request", {"limit": 10})
        attached = delivered.get("attachments", [])
        opened = [await self.messaging.unpack(decode(item["data"]["base64"]).decode()) for item in attached]
        if attached:
            await self.ask("messages-received", {"message_id_list": [item["id"] for item in attached]})
        return [item.message["body"]["content"] for item in opened]


@pytest.mark.rule("D2", "D3", "D4", "D7")
async def test_the_quickstart_of_didcomm_messaging(door: Door, invites: Invites):
    mediator = MediatorInvitation.parse(invites.v2).did
    assert mediator is not None
    alice, bob = await Quickstart.connected(mediator), await Quickstart.connected(mediator)
    texts = [f"note {number}" for number in range(3)]
    for text in texts:
        await alice.write(bob.relayed, text)
    assert (await bob.ask("status-request", {}))["body"]["message_count"] == 3
    assert await bob.fetch() == texts
    assert (await bob.ask("status-request", {}))["body"]["message_count"] == 0
    await bob.write(alice.relayed, "thanks")
    assert await alice.fetch() == ["thanks"]
