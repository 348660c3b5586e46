"""v2 envelopes between us and didcomm-rust, both ways, by each of our libraries."""

from typing import Any

import pytest

from pickup.envelope.library import LibraryEnvelopes
from pickup.envelope.v2 import JoseLibrary
from pickup.envelope.v2_cryptography import CryptographyLibrary
from pickup.envelope.v2_didcomm import DidcommLibrary
from pickup.rules.records import Generation
from tests.harness.node import Rust
from tests.harness.people import MemoryResolver, MemorySecrets, Person

# didcomm-rust has no P-384; tests/unit/test_envelope_v2.py holds that against Askar.
CURVES = ("X25519", "P-256")
BODY = {"text": "Grüße, 漢字 und 🎈"}


@pytest.fixture(params=[DidcommLibrary, JoseLibrary, CryptographyLibrary])
def library(request: pytest.FixtureRequest) -> JoseLibrary:
    return request.param()


@pytest.fixture(params=CURVES)
def people(request: pytest.FixtureRequest) -> tuple[Person, Person]:
    return Person.make("us", request.param), Person.make("them", request.param)


def ours(library: JoseLibrary, us: Person, *others: Person) -> LibraryEnvelopes:
    return LibraryEnvelopes(MemoryResolver([us, *others]), MemorySecrets([us]), max_bytes=1 << 20, v2=library)


def message(**headers: Any) -> dict[str, Any]:
    return {"id": "1", "type": "https://didcomm.org/basicmessage/2.0/message", "body": BODY, **headers}


@pytest.mark.rule("D8")
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
async def test_what_rust_seals_from_its_did_is_opened_as_from_it(rust: Rust, library, people, signed, hidden):
    us, them = people
    sent = message(**{"from": them.did, "to": [us.did]})
    envelope = rust.pack(sent, us.did, them, [us], sign=signed, protect_sender=hidden)
    opened = await ours(library, us, them).open(envelope)
    assert (opened.generation, opened.sender, opened.recipient) == (Generation.V2, them.did, us.agreement[0].kid)
    assert {name: opened.plaintext[name] for name in sent} == sent


@pytest.mark.rule("D8")
@pytest.mark.parametrize("cipher", ["A256cbcHs512EcdhEsA256kw", "Xc20pEcdhEsA256kw", "A256gcmEcdhEsA256kw"])
async def test_what_rust_seals_anonymously_is_opened_as_from_nobody(rust: Rust, library, people, cipher):
    us, _ = people
    opened = await ours(library, us).open(rust.pack(message(to=[us.did]), us.did, None, [us], enc_alg_anon=cipher))
    assert (opened.sender, opened.plaintext["body"]) == (None, BODY)


@pytest.mark.rule("D8")
async def test_a_signature_alone_does_not_say_who_sealed(rust: Rust, library, people):
    us, them = people
    sent = message(**{"from": them.did, "to": [us.did]})
    opened = await ours(library, us, them).open(rust.pack(sent, us.did, None, [us], signer=them))
    assert (opened.sender, opened.plaintext["body"]) == (None, BODY)


async def test_rust_seals_for_all_keys_of_a_curve_and_either_opens(rust: Rust, library):
    us, them = Person.make("us", "X25519", "X25519", "P-256"), Person.make("them", "X25519")
    envelope = rust.pack(message(**{"from": them.did}), us.did, them, [us])
    last = Person(us.did, us.agreement[1:], us.authentication)
    opened = await ours(library, last, them).open(envelope)
    assert opened.recipient == us.agreement[1].kid


async def test_rust_opens_what_we_seal_from_our_did(rust: Rust, library, people):
    us, them = people
    sent = message(**{"from": us.did, "to": [them.did]})
    answer = rust.unpack(await ours(library, us, them).seal_v2(sent, them.did, us.did), them, [us])
    assert answer["metadata"]["authenticated"]
    assert answer["metadata"]["encrypted_from_kid"] == us.agreement[0].kid
    assert answer["message"]["body"] == BODY


async def test_rust_opens_what_we_seal_anonymously(rust: Rust, library, people):
    us, them = people
    answer = rust.unpack(await ours(library, us, them).seal_v2(message(to=[them.did]), them.did, None), them)
    assert answer["metadata"]["anonymous_sender"]
    assert not answer["metadata"]["authenticated"]
    assert answer["message"]["body"] == BODY


async def test_rust_opens_ours_for_one_key_id_and_for_several(rust: Rust, library):
    us, them = Person.make("us", "P-256", "X25519"), Person.make("them", "X25519", "P-256", "X25519")
    sent = message(**{"from": us.did, "to": [them.did]})
    envelopes = ours(library, us, them)
    for to, kids in ((them.did, [0, 2]), (them.agreement[1].kid, [1])):
        answer = rust.unpack(await envelopes.seal_v2(sent, to, us.did), them, [us])
        assert answer["metadata"]["encrypted_to_kids"] == [them.agreement[number].kid for number in kids]
