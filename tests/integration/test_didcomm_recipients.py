"""Forwards whose senders name the recipient otherwise than it registered itself, with holders that are real."""

from pathlib import Path

import orjson
import pytest

from pickup.client.sender import forward_v1, forward_v2
from pickup.dids.document import keys_inside
from pickup.dids.resolver import read
from pickup.rules import names
from pickup.rules.records import Generation
from tests.harness.didcomm_service import note, note_v2
from tests.integration.test_didcomm_bad_input import Mediator, mediating

V1, V2 = Generation.V1, Generation.V2


async def forward(door: Mediator, routing: str, next: str, envelope: bytes, generation: Generation) -> None:
    """Send a forward as its sender writes it."""
    sender = await door.sender()
    envelopes = sender.resources.envelopes
    if generation is V1:
        packed = await envelopes.seal_v1(orjson.dumps(forward_v1(next, envelope)), [routing], None)
    else:
        packed = await envelopes.seal_v2(forward_v2(next, [envelope], routing), routing, None)
    await sender.deliver(packed, door.url, generation)


@pytest.mark.rule("D3", "D4")
async def test_mail_for_a_key_inside_the_registered_did_arrives(tmp_path: Path):
    async with mediating(tmp_path) as door:
        holder, did = await door.holder(V2)
        (routing,) = (await holder.mediate()).routing
        signing, agreeing = keys_inside(read(did))
        sender = await door.sender()
        inner = await sender.resources.envelopes.seal_v2(note_v2("v2"), did, None)
        for next in (signing, agreeing, f"{agreeing}#{agreeing.removeprefix('did:key:')}", f"{did}#key-2"):
            await forward(door, routing, next, inner, V2)
        # Older senders write v1 envelopes for the signing key, and name it in base58.
        v1_inner = await sender.resources.envelopes.seal_v1(orjson.dumps(note("v1")), [signing], None)
        await forward(door, await mediators_key(door), names.base58(names.verkey(signing)), v1_inner, V1)
        assert (await holder.status(did)).count == 5
        assert (await holder.status()).count == 5
        assert await holder.keys() == [did]


@pytest.mark.rule("D4", "D9")
async def test_an_unknown_recipient_is_found_by_its_envelope(tmp_path: Path):
    async with mediating(tmp_path) as door:
        holder, did = await door.holder(V2)
        other, _ = await door.holder(V2)
        (routing,) = (await holder.mediate()).routing
        sender = await door.sender()
        inner = await sender.resources.envelopes.seal_v2(note_v2("hello"), did, None)
        for next in ("did:example:other", "what is this", "did:web:nowhere.example"):
            await forward(door, routing, next, inner, V2)
        mails = await holder.fetch()
        assert [(await holder.open(mail)).message["body"] for mail in mails] == [{"content": "hello"}] * 3
        assert (await other.status()).count == 0
        stranger = await sender.resources.envelopes.seal_v2(note_v2("x"), sender.did, None)
        await forward(door, routing, "did:example:other", stranger, V2)
        assert door.forwarded("unroutable") == 1


async def mediators_key(door: Mediator) -> str:
    """Return the mediator's routing key of v1."""
    holder = await door.connected(V1)
    (key,) = (await holder.mediate()).routing
    return key
