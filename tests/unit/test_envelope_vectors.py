"""v2 envelopes against the vectors of DIDComm v2.1 (its appendices A and C), and against whatever is malformed."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import EnvelopeError
from pickup.dids.document import Secret
from pickup.envelope.library import DIDCOMM_MESSAGING, LibraryEnvelopes, load_library
from pickup.envelope.reading import Jwe, Jws, read, read_layer
from tests.harness.people import MemoryResolver, MemorySecrets, Person, b64, jwe, public_half, unb64

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "didcomm_v2.json").read_text())
ENCRYPTED: dict[str, dict[str, Any]] = VECTORS["encrypted"]
SUPPORTED = [name for name in ENCRYPTED if "P-521" not in name]
CURVES = ("X25519", "P-256", "P-384")


def person(name: str) -> Person:
    """Return a person of the vectors, with the keys on our curves."""
    secrets = [
        Secret(kid, jwk["crv"], jwk)
        for kid, jwk in VECTORS["secrets"].items()
        if kid.startswith(name) and jwk["crv"] in (*CURVES, "Ed25519")
    ]
    agreement = [secret for secret in secrets if secret.kid.partition("#key-")[2] not in ("1", "2")]
    return Person(name, agreement, [secret for secret in secrets if secret not in agreement])


ALICE, BOB = person("did:example:alice"), person("did:example:bob")


def envelopes(*secrets: Secret) -> LibraryEnvelopes:
    """Return what opens envelopes with some of the keys."""
    holder = replace(BOB, agreement=secrets)
    resolver = MemoryResolver([ALICE, BOB])
    return LibraryEnvelopes(resolver, MemorySecrets([holder]), max_bytes=1 << 20, v2=load_library(DIDCOMM_MESSAGING))


@pytest.mark.rule("D8")
@pytest.mark.parametrize("name", SUPPORTED)
async def test_each_recipient_opens_the_published_envelope(name):
    recipients = [recipient["header"]["kid"] for recipient in ENCRYPTED[name]["recipients"]]
    for secret in BOB.agreement:
        if secret.kid in recipients:
            opened = await envelopes(secret).open(orjson.dumps(ENCRYPTED[name]))
            assert opened.plaintext["body"] == {"messagespecificattribute": "and its value"}
            assert opened.sender == (ALICE.did if "1PU" in name else None)
            assert opened.recipient == secret.kid
            recipients.remove(secret.kid)
    assert not recipients


@pytest.mark.rule("D12")
@pytest.mark.parametrize("name", [name for name in ENCRYPTED if "P-521" in name])
async def test_a_published_envelope_on_p_521_is_refused(name):
    with pytest.raises(EnvelopeError, match="epk on X25519, P-256 or P-384"):
        await envelopes(*BOB.agreement).open(orjson.dumps(ENCRYPTED[name]))


@pytest.mark.rule("D8")
@pytest.mark.parametrize("name", [name for name in SUPPORTED if "1PU" in name])
async def test_a_published_envelope_inside_another_is_opened(name):
    wrapped = jwe(ENCRYPTED[name], [public_half(BOB.agreement[0])], enc="XC20P")
    assert (await envelopes(*BOB.agreement).open(orjson.dumps(wrapped))).sender == ALICE.did


@pytest.mark.rule("D8")
@pytest.mark.parametrize("alg", ["EdDSA", "ES256"])
async def test_the_published_signatures_are_verified(alg):
    signed = read_layer(orjson.dumps(VECTORS["signed"][alg]))
    assert isinstance(signed, Jws)
    assert await envelopes().verify(signed) == ALICE.did


async def test_a_published_signature_on_secp256k1_is_refused():
    with pytest.raises(EnvelopeError, match="alg"):
        read_layer(orjson.dumps(VECTORS["signed"]["ES256K"]))


# The suites by themselves: nothing but what was sealed comes out, and nothing but an EnvelopeError

US, THEM = Person.make("us", "X25519", "P-256"), Person.make("them", "X25519", "P-256")
LIBRARY = load_library(DIDCOMM_MESSAGING)
SEALED = {
    f"{curve} {enc if sender is None else 'authcrypt'}": jwe(
        b'{"id":"1"}', [public_half(US.agreement[at])], sender, enc=enc
    )
    for at, curve in enumerate(CURVES[:2])
    for enc, sender in (
        ("A256CBC-HS512", None),
        ("A256GCM", None),
        ("XC20P", None),
        ("A256CBC-HS512", THEM.agreement[at]),
    )
}
COORDINATES = st.binary(max_size=70) | st.sampled_from([bytes(32), b"\1" + bytes(31), b"\xff" * 32])


def decrypt(envelope: Jwe) -> bytes | None:
    """Return what the library makes of a layer, None when it refused it; all else is raised."""
    secret = next(secret for secret in US.agreement if secret.curve == envelope.curve)
    sender = next(secret for secret in THEM.agreement if secret.curve == envelope.curve)
    try:
        return asyncio.run(LIBRARY.decrypt(envelope, secret, public_half(sender) if envelope.sender_kid else None))
    except EnvelopeError:
        return None


def layer(name: str) -> Jwe:
    read_envelope = read(orjson.dumps(SEALED[name]), 1 << 20)
    assert isinstance(read_envelope, Jwe)
    return read_envelope


every_suite = pytest.mark.parametrize("name", SEALED)


@every_suite
def test_each_suite_opens_what_was_sealed(name):
    assert decrypt(layer(name)) == b'{"id":"1"}'


@pytest.mark.rule("D12")
@every_suite
@given(data=st.data())
def test_a_suite_refuses_other_bytes_in_any_part(name, data):
    sealed = layer(name)
    part = data.draw(st.sampled_from(["iv", "ciphertext", "tag"]))
    whole: bytes = getattr(sealed, part)
    other = data.draw(st.binary(max_size=80) | st.integers(0, len(whole)).map(lambda end: whole[:end]))
    assert (decrypt(replace(sealed, **{part: other})) is None) == (other != whole)


@pytest.mark.rule("D12")
@every_suite
@given(key=st.binary(max_size=100))
def test_a_suite_refuses_another_content_key(name, key):
    sealed = layer(name)
    assert decrypt(replace(sealed, recipients=dict.fromkeys(sealed.recipients, key))) is None


@pytest.mark.rule("D12")
@every_suite
@given(x=COORDINATES, y=COORDINATES)
def test_a_suite_refuses_another_ephemeral_key(name, x, y):
    sealed = layer(name)
    epk = sealed.header["epk"] | {"x": b64(x)} | ({"y": b64(y)} if "y" in sealed.header["epk"] else {})
    assert decrypt(replace(sealed, header={**sealed.header, "epk": epk})) is None


@pytest.mark.rule("D12")
@every_suite
@given(apu=st.binary(max_size=9))
def test_a_suite_refuses_another_apu(name, apu):
    """In authcrypt it names the sender, by which its key was found; in anoncrypt it is part of the key, if any."""
    sealed = layer(name)
    assert (decrypt(replace(sealed, apu=apu)) is None) == (apu != sealed.apu)


@pytest.mark.rule("D12")
@every_suite
@given(apu=st.none() | st.text(max_size=9) | st.integers(-9, 9) | st.lists(st.text(max_size=2), max_size=2))
def test_any_apu_is_read_or_refused(name, apu):
    fields = SEALED[name]
    header = json.loads(unb64(fields["protected"])) | {"apu": apu}
    try:
        envelope = read(orjson.dumps({**fields, "protected": b64(header)}), 1 << 20)
    except EnvelopeError:
        return
    assert decrypt(envelope) is None


@pytest.mark.rule("D8")
@pytest.mark.parametrize("enc", ["A256GCM", "XC20P"])
@pytest.mark.parametrize("curve", CURVES[:2])
async def test_authcrypt_with_another_cipher_is_refused(curve, enc):
    """They do not commit to their key (draft-madden-jose-ecdh-1pu-04 §2.1)."""
    fields = SEALED[f"{curve} authcrypt"]
    header = json.loads(unb64(fields["protected"])) | {"enc": enc}
    with pytest.raises(EnvelopeError, match="expected enc A256CBC-HS512"):
        read(orjson.dumps(fields | {"protected": b64(header)}), 1 << 20)
