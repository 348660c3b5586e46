"""v1 envelopes, held against Askar both ways, and what is refused of them."""

import json
from typing import Any

import orjson
import pytest

from mediator.errors import EnvelopeError
from pickup.envelope.library import LibraryEnvelopes
from pickup.envelope.reading import MAX_V1_RECIPIENTS
from pickup.envelope.v2 import JoseLibrary
from pickup.rules.names import base58, from_verkey, verkey
from pickup.rules.records import Generation
from tests.harness import askar
from tests.harness.people import MemoryResolver, MemorySecrets, Person, b64, unb64

US, THEM, STRANGER = Person.make("us"), Person.make("them"), Person.make("stranger")
MESSAGE = {"@type": "https://didcomm.org/trust_ping/1.0/ping", "@id": "1", "comment": "Grüße, 漢字 und 🎈"}
PLAINTEXT = orjson.dumps(MESSAGE)


def envelopes(*ours: Person) -> LibraryEnvelopes:
    return LibraryEnvelopes(MemoryResolver(), MemorySecrets(ours or [US]), max_bytes=1 << 20, v2=JoseLibrary())


def raw(person: Person) -> bytes:
    return verkey(person.key)


def changed(envelope: bytes, **protected: Any) -> bytes:
    """The envelope with other fields in its protected header."""
    fields = json.loads(envelope)
    fields["protected"] = b64(json.loads(unb64(fields["protected"])) | protected)
    return orjson.dumps(fields)


@pytest.mark.rule("D8")
@pytest.mark.parametrize("padded", [True, False])
async def test_what_askar_seals_from_a_key_is_opened_as_from_that_key(padded):
    opened = await envelopes().open(askar.seal_v1(PLAINTEXT, [raw(US)], THEM.seed, padded=padded))
    assert (opened.generation, opened.plaintext) == (Generation.V1, MESSAGE)
    assert (opened.recipient, opened.sender) == (US.key, THEM.key)


@pytest.mark.rule("D8")
@pytest.mark.parametrize("padded", [True, False])
async def test_what_askar_seals_anonymously_is_opened_as_from_nobody(padded):
    opened = await envelopes().open(askar.seal_v1(PLAINTEXT, [raw(US)], None, padded=padded))
    assert (opened.plaintext, opened.recipient, opened.sender) == (MESSAGE, US.key, None)


@pytest.mark.parametrize("sender", [US, None])
async def test_askar_opens_what_we_seal(sender):
    sealed = await envelopes().seal_v1(PLAINTEXT, [THEM.key, STRANGER.key], sender and sender.key)
    # Some peers look: more than 16 bytes are what the library makes of text that is not ASCII.
    assert len(unb64(json.loads(sealed)["tag"])) == 16
    for receiver in (THEM, STRANGER):
        plaintext, key = askar.open_v1(sealed, receiver.seed)
        assert orjson.loads(plaintext) == MESSAGE
        assert key == (sender and raw(sender))


@pytest.mark.parametrize("sender", [THEM, None])
async def test_an_envelope_for_several_is_opened_by_whichever_is_ours(sender):
    to = [raw(Person.make(str(number))) for number in range(MAX_V1_RECIPIENTS - 1)]
    sealed = askar.seal_v1(PLAINTEXT, [*to, raw(US)], sender and sender.seed)
    opened = await envelopes().open(sealed)
    assert (opened.recipient, opened.sender) == (US.key, sender and sender.key)


@pytest.mark.rule("D12")
async def test_unknown_key_and_broken_envelope_get_one_error():
    not_ours = askar.seal_v1(PLAINTEXT, [raw(STRANGER)], THEM.seed)
    fields = json.loads(askar.seal_v1(PLAINTEXT, [raw(US)], THEM.seed))
    fields["tag"] = b64(bytes(16))
    texts = set()
    for data in (not_ours, orjson.dumps(fields)):
        with pytest.raises(EnvelopeError) as caught:
            await envelopes().open(data)
        texts.add(str(caught.value))
    assert len(texts) == 1


@pytest.mark.rule("D8")
async def test_a_sender_cannot_be_put_on_an_anonymous_envelope():
    # What the header says is protected by the content's tag; what it would say must be consistent before that.
    sealed = askar.seal_v1(PLAINTEXT, [raw(US)], None)
    with pytest.raises(EnvelopeError, match="sender"):
        await envelopes().open(changed(sealed, alg="Authcrypt"))
    sealed = askar.seal_v1(PLAINTEXT, [raw(US)], THEM.seed)
    with pytest.raises(EnvelopeError, match="no sender"):
        await envelopes().open(changed(sealed, alg="Anoncrypt"))


@pytest.mark.rule("D8")
async def test_a_sender_who_is_named_but_did_not_seal_is_refused():
    """Someone else's key inside the sealed ``sender``, with a content key sealed by the forger."""
    forged, real = (
        json.loads(unb64(json.loads(askar.seal_v1(PLAINTEXT, [raw(US)], person.seed))["protected"]))
        for person in (THEM, STRANGER)
    )
    forged["recipients"][0]["encrypted_key"] = real["recipients"][0]["encrypted_key"]
    forged["recipients"][0]["header"]["iv"] = real["recipients"][0]["header"]["iv"]
    envelope = changed(askar.seal_v1(PLAINTEXT, [raw(US)], STRANGER.seed), **forged)
    with pytest.raises(EnvelopeError):
        await envelopes().open(envelope)


@pytest.mark.rule("D8")
@pytest.mark.parametrize("after", [" ", "\n", "1", "\0", "#key"])
async def test_a_sender_whose_name_is_no_key_is_refused(after):
    with pytest.raises(EnvelopeError):
        await envelopes().open(askar.seal_v1(PLAINTEXT, [raw(US)], THEM.seed, after_sender=after))


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "protected",
    [
        {"alg": "None"},
        {"alg": 7},
        {"recipients": []},
        {"recipients": {}},
        {"recipients": None},
        {"recipients": ["x"]},
        {"recipients": [{"encrypted_key": "AAAA"}]},
        {"recipients": [{"encrypted_key": "AAAA", "header": {}}]},
        {"recipients": [{"encrypted_key": 1, "header": {"kid": "x"}}]},
        {"recipients": [{"encrypted_key": "+/==", "header": {"kid": "x"}}]},
        {"recipients": [{"encrypted_key": "AAAA", "header": {"kid": "x" * 10_000}}]},
        {"recipients": [{"encrypted_key": "AAAA", "header": {"kid": base58(bytes(32))}}]},
        {"recipients": [{"encrypted_key": "AAAA", "header": {"kid": "did:example:1"}}]},
        {"recipients": [{"encrypted_key": "AAAA", "header": {"kid": "x"}}] * (MAX_V1_RECIPIENTS + 1)},
        {"recipients": [{"encrypted_key": "AAAA", "header": {"kid": "x"}}] * 1000},
        {"zip": "DEF"},
        {"crit": ["zip"]},
        {"padding": "x" * 60_000},
        {"deep": json.loads("[" * 100 + "]" * 100)},
    ],
    ids=lambda protected: str(protected)[:40],
)
async def test_headers_that_are_wrong_are_refused(protected):
    sealed = askar.seal_v1(PLAINTEXT, [raw(US)], None)
    with pytest.raises(EnvelopeError):
        await envelopes().open(changed(sealed, **protected))


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "plaintext",
    [b"", b"x", b"[]", b"1", b"null", b'{"a": "\xff"}', b'{"a": NaN}', b"[" * 5000, b'{"a":' * 100 + b"1" + b"}" * 100],
    ids=lambda plaintext: str(plaintext[:12]),
)
async def test_a_plaintext_that_is_deep_or_no_object_is_refused(plaintext):
    with pytest.raises(EnvelopeError):
        await envelopes().open(askar.seal_v1(plaintext, [raw(US)], THEM.seed))


async def test_many_shallow_objects_are_not_deep():
    message = {"@type": "x", "updates": [{"recipient_key": str(number)} for number in range(1000)]}
    opened = await envelopes().open(askar.seal_v1(orjson.dumps(message), [raw(US)], THEM.seed))
    assert opened.plaintext == message


async def test_it_is_sealed_for_and_from_keys_only():
    small_order = from_verkey(bytes(32))
    for to, sender in (("did:example:1", None), (small_order, None), (THEM.key, THEM.key), (THEM.key, "did:example:1")):
        with pytest.raises(EnvelopeError):
            await envelopes().seal_v1(PLAINTEXT, [to], sender)
