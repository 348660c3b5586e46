"""Whatever bytes come: an envelope is opened as it was sealed, or it is refused by the tree of errors."""

import asyncio
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import EnvelopeError, MessageTooLargeError, UnresolvedDidError
from pickup.envelope import OpenedEnvelope
from pickup.envelope.library import DIDCOMM_MESSAGING, LibraryEnvelopes, load_library
from pickup.envelope.reading import MAX_DEPTH, MAX_PROTECTED, V1_CIPHER
from pickup.envelope.v2 import JoseLibrary
from pickup.envelope.v2_cryptography import CryptographyLibrary
from pickup.envelope.v2_didcomm import DidcommLibrary
from pickup.rules.names import verkey
from tests.harness import askar
from tests.harness.people import MemoryResolver, MemorySecrets, Person, b64, jwe, jws, public_half, unb64

LIMIT = 64 * 1024
US, THEM = Person.make("us", "X25519", "P-256"), Person.make("them", "X25519", "P-256")
V1_MESSAGE = orjson.dumps({"@type": "https://didcomm.org/trust_ping/1.0/ping", "@id": "1"})
V2_MESSAGE = {"id": "1", "type": "https://didcomm.org/trust-ping/2.0/ping", "from": THEM.did, "to": [US.did]}
KEYS = [public_half(secret) for secret in US.agreement]
STRANGER = public_half(Person.make("stranger", "X25519").agreement[0])
HIDDEN = jwe(jws(V2_MESSAGE, THEM.authentication[0]), [KEYS[0], STRANGER], THEM.agreement[0])

ENVELOPES = {
    "v1 authcrypt": askar.seal_v1(V1_MESSAGE, [verkey(US.key)], THEM.seed),
    "v1 anoncrypt": askar.seal_v1(V1_MESSAGE, [verkey(THEM.key), verkey(US.key)], None),
    "v2 authcrypt": orjson.dumps(jwe(V2_MESSAGE, KEYS[:1], THEM.agreement[0])),
    "v2 anoncrypt on P-256": orjson.dumps(jwe(V2_MESSAGE, KEYS[1:])),
    "v2 anoncrypt XC20P": orjson.dumps(jwe(V2_MESSAGE, KEYS[:1], enc="XC20P")),
    "v2 signed, authcrypt, anoncrypt": orjson.dumps(jwe(HIDDEN, KEYS[:1])),
}
OURS = [
    LibraryEnvelopes(MemoryResolver([US, THEM]), MemorySecrets([US]), max_bytes=LIMIT, v2=library())
    for library in (DidcommLibrary, JoseLibrary, CryptographyLibrary)
]
REFUSED = (EnvelopeError, UnresolvedDidError)

every_envelope = pytest.mark.parametrize("name", ENVELOPES)
libraries = pytest.mark.parametrize("ours", OURS, ids=["didcomm", "jose", "cryptography"])


def opened(ours: LibraryEnvelopes, data: bytes) -> OpenedEnvelope | None:
    """Return what was opened, None when it was refused as it should be; all else is raised."""
    try:
        return asyncio.run(ours.open(data))
    except REFUSED:
        return None


@every_envelope
@libraries
def test_the_samples_are_whole(name, ours):
    assert (opened(ours, ENVELOPES[name]).sender is None) == ("authcrypt" not in name)


@pytest.mark.rule("D8", "D12")
@every_envelope
@libraries
@given(data=st.data())
def test_a_flipped_bit_never_makes_another_message(name, ours, data):
    envelope = ENVELOPES[name]
    bit = data.draw(st.integers(0, len(envelope) * 8 - 1))
    flipped = bytearray(envelope)
    flipped[bit // 8] ^= 1 << bit % 8
    # Some bits carry nothing: the name of a header that is not protected, the last of a base64 text.
    assert opened(ours, bytes(flipped)) in (None, opened(ours, envelope))


@pytest.mark.rule("D12")
@every_envelope
@libraries
@given(data=st.data())
def test_a_truncated_envelope_is_refused(name, ours, data):
    envelope = ENVELOPES[name]
    assert opened(ours, envelope[: data.draw(st.integers(0, len(envelope) - 1))]) is None


@pytest.mark.rule("D12")
@every_envelope
@libraries
@given(data=st.data())
def test_a_truncated_field_is_refused(name, ours, data):
    fields = json.loads(ENVELOPES[name])
    field = data.draw(st.sampled_from(["protected", "iv", "ciphertext", "tag"]))
    # Four characters are three whole bytes.
    fields[field] = fields[field][: -4 * data.draw(st.integers(1, len(fields[field]) // 4))]
    assert opened(ours, orjson.dumps(fields)) is None


@pytest.mark.rule("D12")
@pytest.mark.parametrize("field", ["protected", "iv", "ciphertext", "tag"])
@every_envelope
@libraries
@pytest.mark.parametrize("value", [None, "", 7, {}, [], "+/", "A A", "A\n", "é"], ids=lambda v: repr(v)[:9])
def test_a_field_that_is_no_base64url_is_refused(name, ours, field, value):
    fields = json.loads(ENVELOPES[name]) | {field: value}
    assert opened(ours, orjson.dumps(fields)) is None
    del fields[field]
    assert opened(ours, orjson.dumps(fields)) is None


@pytest.mark.rule("D12")
@libraries
@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused(ours, data):
    assert opened(ours, data) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "enc": st.sampled_from([V1_CIPHER, "A256CBC-HS512", "XC20P"]) | json_values,
        "alg": st.sampled_from(["Authcrypt", "Anoncrypt", "ECDH-ES+A256KW", "ECDH-1PU+A256KW"]) | json_values,
        "epk": st.just({"kty": "OKP", "crv": "X25519", "x": b64(bytes(32))}) | json_values,
        "skid": st.just(THEM.agreement[0].kid) | json_values,
        "apu": st.just(b64(THEM.agreement[0].kid)) | json_values,
        "apv": json_values,
        "recipients": json_values,
    },
)


@pytest.mark.rule("D12")
@libraries
@given(header=headers | json_values, recipients=json_values, signatures=json_values)
def test_any_json_in_the_shape_of_an_envelope_is_refused(ours, header, recipients, signatures):
    fields: dict[str, Any] = dict.fromkeys(("iv", "ciphertext", "tag", "payload"), "AAAA")
    fields |= {"protected": b64(json.dumps(header)), "recipients": recipients, "signatures": signatures}
    assert opened(ours, json.dumps(fields).encode()) is None


@pytest.mark.rule("D12")
async def test_the_size_is_looked_at_before_anything_else():
    ours = OURS[0]
    envelope = ENVELOPES["v2 authcrypt"]
    for data in (b" " * (LIMIT + 1), envelope + b" " * (LIMIT + 1 - len(envelope))):
        with pytest.raises(MessageTooLargeError, match=str(LIMIT)):
            await ours.open(data)
    assert (await ours.open(envelope + b" " * (LIMIT - len(envelope)))).sender == THEM.did


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"7",
        b'"x"',
        b"[]",
        b"{}",
        b"\xff\xfe{}",
        b'{"protected": "\xff"}',
        b'{"protected": "e30", "ciphertext": "\\ud800"}',
        b"[" * 60_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"protected": "e30", "ciphertext": "AAAA"}',
        orjson.dumps({"protected": b64(b"[]"), "ciphertext": "AAAA"}),
        orjson.dumps({"protected": b64(b"\xff"), "ciphertext": "AAAA"}),
    ],
    ids=lambda data: repr(data)[:30],
)
async def test_what_is_no_envelope_is_refused(data):
    for ours in OURS:
        with pytest.raises(EnvelopeError):
            await ours.open(data)


@pytest.mark.rule("D12")
@pytest.mark.parametrize("name", ["v1 anoncrypt", "v2 anoncrypt XC20P"])
async def test_a_header_that_is_too_long_is_not_read(name):
    fields = json.loads(ENVELOPES[name])
    fields["protected"] = b64(json.loads(unb64(fields["protected"])) | {"x": "x" * MAX_PROTECTED})
    ours = LibraryEnvelopes(
        MemoryResolver([US, THEM]), MemorySecrets([US]), max_bytes=1 << 20, v2=load_library(DIDCOMM_MESSAGING)
    )
    with pytest.raises(EnvelopeError, match="protected header of at most"):
        await ours.open(orjson.dumps(fields))


@pytest.mark.rule("D12")
async def test_json_is_taken_to_its_depth_and_no_deeper():
    for depth, taken in ((MAX_DEPTH, True), (MAX_DEPTH + 1, False)):
        message = json.loads('{"a":' * depth + "1" + "}" * depth)
        result = await asyncio.gather(OURS[0].open(orjson.dumps(jwe(message, KEYS[:1]))), return_exceptions=True)
        assert isinstance(result[0], OpenedEnvelope) is taken, depth
        assert taken or isinstance(result[0], EnvelopeError)
