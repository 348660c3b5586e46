"""aries-staticagent as a holder (v1): its own envelopes and no more, so the handshake is made here, step by step."""

import json
from typing import Any

import aries_staticagent as static
import pytest
from aries_staticagent import crypto

from pickup.base64url import decode
from pickup.client.handshake import MediatorInvitation, services
from pickup.rules import names
from tests.harness.didcomm_service import Door, Invites

PREFIX = "https://didcomm.org"


async def ask(connection: static.StaticConnection, message: dict[str, Any]) -> static.Message:
    answer = await connection.send_and_await_reply_async(message, return_route="all", timeout=10)
    assert "problem-report" not in answer.type, answer
    return answer


@pytest.mark.rule("D2", "D3", "D5", "D7")
async def test_a_static_agent_gets_its_mail(door: Door, invites: Invites):
    invitation = MediatorInvitation.parse(invites.v1)
    keys = crypto.create_keypair()
    verkey, did = crypto.bytes_to_b58(keys[0]), crypto.bytes_to_b58(keys[0][:16])
    document = {
        "@context": "https://www.w3.org/ns/did/v1",
        "id": did,
        "publicKey": [
            {"id": f"{did}#1", "type": "Ed25519VerificationKey2018", "controller": did, "publicKeyBase58": verkey}
        ],
        "authentication": [],
        "service": [],
    }
    inviter = static.StaticConnection.from_parts(
        keys, their_vk=names.verkey(invitation.key), endpoint=invitation.endpoint
    )
    request = {
        "@type": f"{PREFIX}/connections/1.0/request",
        "label": "static",
        "connection": {"DID": did, "DIDDoc": document},
        "~thread": {"pthid": invitation.id},
    }
    response = await ask(inviter, request)
    signer, signed = crypto.verify_signed_message_field(response["connection~sig"])
    assert names.canonical(signer) == invitation.key
    key, endpoints = services(signed["DIDDoc"])
    mediator = static.StaticConnection.from_parts(keys, their_vk=names.verkey(key), endpoint=endpoints[0])

    grant = await ask(mediator, {"@type": f"{PREFIX}/coordinate-mediation/1.0/mediate-request"})
    recipient = static.StaticConnection.random()
    updates = [{"recipient_key": recipient.verkey_b58, "action": "add"}]
    await ask(mediator, {"@type": f"{PREFIX}/coordinate-mediation/1.0/keylist-update", "updates": updates})
    sender = static.StaticConnection.random(
        static.Target(
            their_vk=recipient.verkey,
            routing_keys=[names.verkey(names.canonical(key)) for key in grant["routing_keys"]],
            endpoint=grant["endpoint"],
        )
    )
    for number in range(3):
        await sender.send_async({"@type": f"{PREFIX}/basicmessage/1.0/message", "content": f"note {number}"})
    status = await ask(mediator, {"@type": f"{PREFIX}/messagepickup/2.0/status-request"})
    assert status["message_count"] == 3
    delivery = await ask(mediator, {"@type": f"{PREFIX}/messagepickup/2.0/delivery-request", "limit": 10})
    opened = [recipient.unpack(json.loads(decode(item["data"]["base64"]))) for item in delivery["~attach"]]
    assert [message["content"] for message in opened] == ["note 0", "note 1", "note 2"]
    assert {message.mtc.sender for message in opened} == {sender.verkey_b58}
    received = {"@type": f"{PREFIX}/messagepickup/2.0/messages-received"}
    status = await ask(mediator, received | {"message_id_list": [item["@id"] for item in delivery["~attach"]]})
    assert status["message_count"] == 0
