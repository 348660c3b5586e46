"""v2 envelopes by each library: held against Askar on every curve, and all that must agree does (didcomm.org)."""

import json
import sys
from dataclasses import replace
from itertools import permutations
from typing import Any

import aries_askar
import orjson
import pytest
from didcomm_messaging.crypto.backend.askar import AskarCryptoService, AskarKey

from mediator.errors import EnvelopeError, SetupError, UnresolvedDidError
from pickup.dids.document import PublicKey
from pickup.dids.material import multibase, peer_2_fragments
from pickup.envelope.library import LibraryEnvelopes, load_library
from pickup.envelope.reading import MAX_V2_RECIPIENTS
from pickup.envelope.v2 import JoseLibrary
from pickup.envelope.v2_cryptography import CryptographyLibrary
from pickup.envelope.v2_didcomm import DidcommLibrary
from pickup.rules.records import Generation
from pickup.settings import DidcommSettings
from tests.harness import askar
from tests.harness.didcomm_messaging import DidcommMessaging
from tests.harness.people import (
    CURVES,
    MemoryResolver,
    MemorySecrets,
    Person,
    apv_of,
    b64,
    jwe,
    jws,
    make_secret,
    public_half,
    unb64,
)

US, THEM, EVE = (Person.make(name, *CURVES) for name in ("us", "them", "eve"))
PING = {"id": "1", "type": "https://didcomm.org/trust-ping/2.0/ping", "body": {"comment": "Grüße, 漢字 und 🎈"}}
FROM_THEM = PING | {"from": THEM.did, "to": [US.did]}


LIBRARIES = {
    "didcomm": DidcommLibrary(),
    "jose": JoseLibrary(),
    "cryptography": CryptographyLibrary(),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> JoseLibrary:
    return LIBRARIES[request.param]


@pytest.fixture
def envelopes(library: JoseLibrary) -> LibraryEnvelopes:
    return LibraryEnvelopes(MemoryResolver([US, THEM, EVE]), MemorySecrets([US]), max_bytes=1 << 20, v2=library)


def to_us(number: int = 0) -> list[PublicKey]:
    return [public_half(US.agreement[number])]


def header_of(envelope: dict[str, Any]) -> dict[str, Any]:
    """Return the protected header."""
    header: dict[str, Any] = json.loads(unb64(envelope["protected"]))
    return header


def changed(envelope: dict[str, Any], **protected: Any) -> dict[str, Any]:
    """The envelope with other fields in its protected header."""
    return envelope | {"protected": b64(header_of(envelope) | protected)}


async def refused(envelopes: LibraryEnvelopes, envelope: dict[str, Any], match: str | None = None) -> EnvelopeError:
    with pytest.raises(EnvelopeError, match=match) as caught:
        await envelopes.open(orjson.dumps(envelope))
    return caught.value


async def refused_unopened(envelopes: LibraryEnvelopes, envelope: dict[str, Any]) -> None:
    """A header that was changed after sealing would be refused in any case; here it never gets so far."""
    error = await refused(envelopes, envelope)
    assert error.__cause__ is None, "the library was asked to open it"


def root(error: BaseException) -> BaseException:
    """What the library came to a stop at."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def test_the_setting_alone_chooses_the_v2_library():
    assert isinstance(load_library(DidcommSettings().envelope_library), CryptographyLibrary)
    assert isinstance(load_library("didcomm"), DidcommLibrary)


def test_a_v2_library_that_is_not_installed_is_a_setup_error(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "didcomm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "pickup.envelope.v2_didcomm")
    monkeypatch.setitem(sys.modules, "didcomm", None)
    with pytest.raises(SetupError, match="pip install --no-deps didcomm"):
        load_library("didcomm")


@pytest.mark.parametrize("number", range(len(CURVES)), ids=CURVES)
async def test_askar_and_we_open_each_other_on_every_curve(envelopes, number):
    own, their = US.agreement[number], THEM.agreement[number]
    for sender in (their, None):
        text = orjson.dumps(FROM_THEM)
        sealed = askar.seal_v2(
            text, own.kid, dict(public_half(own).jwk), sender and sender.kid, sender and dict(sender.jwk)
        )
        opened = await envelopes.open(sealed)
        assert (opened.generation, opened.plaintext, opened.recipient) == (Generation.V2, FROM_THEM, own.kid)
        assert opened.sender == (THEM.did if sender else None)
        answer = PING | {"from": US.did}
        sealed = await envelopes.seal_v2(answer, their.kid, US.did if sender else None)
        plaintext = askar.open_v2(sealed, their.kid, dict(their.jwk), dict(public_half(own).jwk) if sender else None)
        assert json.loads(plaintext) == answer


@pytest.mark.parametrize(("first", "second"), list(permutations([*LIBRARIES.values(), DidcommMessaging()], 2)))
async def test_the_libraries_open_each_other(first, second):
    resolver = MemoryResolver([US, THEM])
    theirs = LibraryEnvelopes(resolver, MemorySecrets([THEM]), max_bytes=1 << 20, v2=first)
    ours = LibraryEnvelopes(resolver, MemorySecrets([US]), max_bytes=1 << 20, v2=second)
    for to in (US.did, *(secret.kid for secret in US.agreement)):
        for sender in (THEM.did, None):
            opened = await ours.open(await theirs.seal_v2(FROM_THEM, to, sender))
            assert (opened.plaintext, opened.sender) == (FROM_THEM, sender)


@pytest.mark.parametrize("form", range(3), ids=["multibase", "without z", "eight characters"])
async def test_a_peer_may_name_its_keys_as_older_readers_did(library, form):
    peer = Person.make("did:peer:2.Ez6LS", "X25519", signs=["Ed25519"])
    envelopes = LibraryEnvelopes(MemoryResolver([US, peer]), MemorySecrets([US]), max_bytes=1 << 20, v2=library)
    (its,), (signing,) = peer.agreement, peer.authentication
    numbered = its.kid
    renamed = replace(its, kid=f"{peer.did}#{peer_2_fragments(multibase(public_half(its).jwk))[form]}")
    signing = replace(signing, kid=f"{peer.did}#{peer_2_fragments(multibase(public_half(signing).jwk))[form]}")
    mail = PING | {"from": peer.did}
    # What was not opened names nobody's keys.
    forged = changed(jwe(mail, to_us(), its), skid=renamed.kid, apu=b64(renamed.kid))
    await refused(envelopes, forged)
    assert kids_of(await envelopes.seal_v2(PING | {"from": US.did}, peer.did, US.did)) == [numbered]
    for plaintext in (mail, jws(mail, signing)):
        opened = await envelopes.open(orjson.dumps(jwe(plaintext, to_us(), renamed)))
        assert (opened.plaintext, opened.sender) == (mail, peer.did)
    # It finds its secret by that name only.
    sealed = await envelopes.seal_v2(PING | {"from": US.did}, peer.did, US.did)
    assert kids_of(sealed) == [renamed.kid]
    askar.open_v2(sealed, renamed.kid, dict(its.jwk), dict(public_half(US.agreement[0]).jwk))
    await envelopes.open(orjson.dumps(jwe(mail, to_us(), its)))
    assert kids_of(await envelopes.seal_v2(PING | {"from": US.did}, peer.did, US.did)) == [numbered]


async def test_the_keys_of_other_methods_have_one_name_only(envelopes):
    renamed = replace(THEM.agreement[0], kid=f"{THEM.did}#{multibase(public_half(THEM.agreement[0]).jwk)}")
    with pytest.raises(UnresolvedDidError):
        await envelopes.open(orjson.dumps(jwe(FROM_THEM, to_us(), renamed)))


def kids_of(sealed: bytes) -> list[str]:
    return [recipient["header"]["kid"] for recipient in json.loads(sealed)["recipients"]]


async def test_what_is_within_our_bounds_is_opened_however_large(envelopes):
    letter = FROM_THEM | {"body": {"comment": "x" * 500_000}}
    for whole in (letter, jws(letter, THEM.authentication[0])):
        opened = await envelopes.open(orjson.dumps(jwe(whole, to_us(), THEM.agreement[0])))
        assert (opened.plaintext, opened.sender) == (letter, THEM.did)
    sealed = await envelopes.seal_v2(letter | {"from": US.did}, US.did, US.did)
    assert (await envelopes.open(sealed)).plaintext == letter | {"from": US.did, "to": [US.did]}


@pytest.mark.parametrize("curve", ["P-256", "P-384"])
async def test_ephemeral_keys_are_written_in_full_length(library, curve):
    """Dropped zeros make an envelope that stricter peers refuse; half a percent of all coordinates begin with one."""
    us, them = Person.make("us", curve), Person.make("them", curve)
    envelopes = LibraryEnvelopes(MemoryResolver([us, them]), MemorySecrets([us]), max_bytes=1 << 20, v2=library)
    size, zeros = int(curve[2:]) // 8, 0
    for _ in range(4000):
        fields = json.loads(await envelopes.seal_v2(PING, them.did, None))
        epk = json.loads(unb64(fields["protected"]))["epk"]
        x, y = unb64(epk["x"]), unb64(epk["y"])
        assert len(x) == len(y) == size
        if x[0] == 0 or y[0] == 0:
            zeros += 1
            break
    assert zeros, "no coordinate began with zeros, so nothing was tested"


async def with_epk_in_recipients() -> dict[str, Any]:
    """An anonymous message as didcomm-messaging writes it with its default backend."""
    key = to_us()[0]
    to = AskarKey(aries_askar.Key.from_jwk(dict(key.jwk)), key.kid)
    envelope: dict[str, Any] = orjson.loads(await AskarCryptoService().ecdh_es_encrypt([to], orjson.dumps(PING)))
    assert "epk" not in header_of(envelope)
    return envelope


async def test_an_epk_in_the_recipients_is_read(envelopes):
    opened = await envelopes.open(orjson.dumps(await with_epk_in_recipients()))
    assert (opened.plaintext, opened.sender) == (PING, None)


@pytest.mark.parametrize("epk", [None, 7, {}, {"kty": "OKP", "crv": "X25519", "x": b64(b"1" * 32)}])
async def test_another_epk_in_the_recipients_is_refused(envelopes, epk):
    envelope = await with_epk_in_recipients()
    envelope["recipients"][0]["header"]["epk"] = epk
    await refused(envelopes, envelope)


@pytest.mark.rule("D8")
async def test_a_sender_needs_an_epk_that_is_protected(envelopes):
    envelope = jwe(FROM_THEM, to_us(), THEM.agreement[0])
    header = header_of(envelope)
    envelope["recipients"][0]["header"]["epk"] = header.pop("epk")
    await refused(envelopes, envelope | {"protected": b64(header)}, "expected epk in the protected header")


@pytest.mark.parametrize("enc", ["A256CBC-HS512", "A256GCM", "XC20P"])
async def test_every_cipher_for_anonymous_messages_is_opened(envelopes, enc):
    own = US.agreement[0]
    by_askar = askar.seal_v2(orjson.dumps(PING), own.kid, dict(public_half(own).jwk), enc=enc)
    for sealed in (orjson.dumps(jwe(PING, to_us(), enc=enc)), by_askar):
        opened = await envelopes.open(sealed)
        assert (opened.plaintext, opened.sender) == (PING, None)


@pytest.mark.parametrize("enc", ["A256GCM", "XC20P", "A128CBC-HS256", "none", None, 7, ["A256GCM"]])
async def test_a_sealed_sender_takes_the_one_cipher_that_binds_it(envelopes, enc):
    await refused(envelopes, changed(jwe(FROM_THEM, to_us(), THEM.agreement[0]), enc=enc), "enc")


@pytest.mark.parametrize(
    "alg",
    ["ECDH-ES", "ECDH-1PU", "ECDH-ES+A128KW", "PBES2-HS512+A256KW", "dir", "RSA-OAEP", "none", None, {"a": 1}],
    ids=str,
)
async def test_other_algorithms_are_refused(envelopes, alg):
    await refused(envelopes, changed(jwe(PING, to_us()), alg=alg), "alg")


async def test_an_anonymous_message_takes_no_other_cipher(envelopes):
    await refused(envelopes, changed(jwe(PING, to_us()), enc="A128CBC-HS256"), "enc")


# Who the sender is


@pytest.mark.rule("D8")
async def test_the_caller_is_the_did_whose_key_sealed(envelopes):
    opened = await envelopes.open(orjson.dumps(jwe(FROM_THEM, to_us(), THEM.agreement[0])))
    assert opened.sender == THEM.did


@pytest.mark.rule("D8")
async def test_a_from_other_than_the_sealing_did_is_refused(envelopes):
    await refused(envelopes, jwe(FROM_THEM | {"from": EVE.did}, to_us(), THEM.agreement[0]), "from")


@pytest.mark.rule("D8")
@pytest.mark.parametrize("claimed", [None, "", 7, [THEM.did], "x"])
async def test_a_sealed_message_without_a_from_is_refused(envelopes, claimed):
    await refused(envelopes, jwe(PING | {"from": claimed}, to_us(), THEM.agreement[0]), "from")
    await refused(envelopes, jwe(PING, to_us(), THEM.agreement[0]), "from")


@pytest.mark.rule("D8")
async def test_an_anonymous_message_naming_a_sender_has_none(envelopes):
    opened = await envelopes.open(orjson.dumps(jwe(FROM_THEM, to_us())))
    assert opened.sender is None


@pytest.mark.rule("D8")
async def test_skid_and_apu_must_name_the_same_key(envelopes):
    sender = THEM.agreement[0]
    await refused(envelopes, jwe(FROM_THEM, to_us(), sender, protected={"skid": EVE.agreement[0].kid}), "skid and apu")
    await refused(envelopes, jwe(FROM_THEM, to_us(), sender, protected={"apu": b64(EVE.agreement[0].kid)}), "skid")


@pytest.mark.rule("D8")
async def test_without_skid_apu_says_who_sealed(envelopes):
    envelope = jwe(FROM_THEM, to_us(), THEM.agreement[0], protected={"skid": None})
    assert (await envelopes.open(orjson.dumps(envelope))).sender == THEM.did


@pytest.mark.parametrize("apu", [None, "", "!", b64(b"\xff\xff"), b64("them"), b64(THEM.did), b64("did:x:y#" * 2000)])
async def test_an_apu_that_names_no_key_is_refused(envelopes, apu):
    envelope = jwe(FROM_THEM, to_us(), THEM.agreement[0])
    header = {name: value for name, value in header_of(envelope).items() if name != "skid"}
    await refused_unopened(envelopes, envelope | {"protected": b64(header | {"apu": apu})})


@pytest.mark.rule("D8")
async def test_a_key_that_is_not_the_senders_does_not_seal_for_it(envelopes):
    """Eve seals with her key and names theirs."""
    forged = make_secret(THEM.agreement[0].kid, "X25519")
    await refused(envelopes, jwe(FROM_THEM, to_us(), forged))


@pytest.mark.rule("D8")
async def test_a_sender_key_not_for_agreement_is_refused(envelopes):
    unlisted = make_secret(f"{THEM.did}#other", "X25519")
    with pytest.raises(UnresolvedDidError):
        await envelopes.open(orjson.dumps(jwe(FROM_THEM, to_us(), unlisted)))


@pytest.mark.rule("D8")
async def test_a_document_cannot_use_the_key_of_another_did(library):
    """A document that lists someone else's key by its own id speaks for that key's holder no more than before."""
    eve = Person(EVE.did, [make_secret(f"{THEM.did}#key", "X25519")], [])
    envelopes = LibraryEnvelopes(MemoryResolver([US, THEM, eve]), MemorySecrets([US]), max_bytes=1 << 20, v2=library)
    with pytest.raises(UnresolvedDidError):
        await envelopes.open(orjson.dumps(jwe(FROM_THEM, to_us(), eve.agreement[0])))
    named = make_secret(f"{EVE.did}#key", "X25519")
    with pytest.raises(UnresolvedDidError):
        await envelopes.open(orjson.dumps(jwe(FROM_THEM | {"from": EVE.did}, to_us(), named)))


async def test_a_sender_nobody_can_find_is_told_so(envelopes):
    stranger = Person.make("stranger", "X25519")
    with pytest.raises(UnresolvedDidError):
        await envelopes.open(orjson.dumps(jwe(PING | {"from": stranger.did}, to_us(), stranger.agreement[0])))


@pytest.mark.rule("D8")
async def test_long_and_short_form_of_a_did_are_one_sender(library):
    long = "did:peer:4zQmd8CpeFPci817KDsbSAKWcXAE2mjvCQSasRewvbSF54Bd:z2M1k7h4psgp4CmJcnQn2Ljp7Pz7ktsd7oBhMU3dWY5s"
    short = long.rpartition(":")[0]
    them = Person.make(long, "X25519")
    resolver = MemoryResolver([US, them])
    resolver.documents[short] = them.document
    envelopes = LibraryEnvelopes(resolver, MemorySecrets([US]), max_bytes=1 << 20, v2=library)
    for claimed in (long, short):
        opened = await envelopes.open(orjson.dumps(jwe(PING | {"from": claimed}, to_us(), them.agreement[0])))
        assert opened.sender == long
    by_short = make_secret("x", "X25519")
    by_short = type(by_short)(them.agreement[0].kid.replace(long, short), "X25519", them.agreement[0].jwk)
    opened = await envelopes.open(orjson.dumps(jwe(PING | {"from": long}, to_us(), by_short)))
    assert opened.sender == short


# For whom it is


@pytest.mark.rule("D12")
async def test_unknown_key_and_broken_envelope_get_one_error(envelopes):
    not_ours = jwe(PING, [public_half(EVE.agreement[0])])
    broken = jwe(PING, to_us()) | {"tag": b64(bytes(32))}
    texts = set()
    for envelope in (not_ours, broken):
        with pytest.raises(EnvelopeError) as caught:
            await envelopes.open(orjson.dumps(envelope))
        texts.add(str(caught.value))
    assert len(texts) == 1


async def test_an_envelope_for_several_is_opened_by_whichever_is_ours(envelopes):
    others = [public_half(make_secret(f"did:example:{number}#1", "X25519")) for number in range(MAX_V2_RECIPIENTS - 1)]
    for sender in (THEM.agreement[0], None):
        opened = await envelopes.open(orjson.dumps(jwe(FROM_THEM, [*others, *to_us()], sender)))
        assert opened.recipient == US.agreement[0].kid


@pytest.mark.parametrize("count", [MAX_V2_RECIPIENTS + 1, 1000])
async def test_more_recipients_than_one_did_has_keys_are_refused(envelopes, count):
    kids = [f"did:example:{n}#1" for n in range(count)]
    recipients = [{"header": {"kid": kid}, "encrypted_key": "AAAA"} for kid in kids]
    await refused(envelopes, changed(jwe(PING, to_us()) | {"recipients": recipients}, apv=apv_of(kids)), "recipients")


async def test_apv_must_be_that_of_the_recipients(envelopes):
    await refused(envelopes, jwe(PING, to_us(), protected={"apv": apv_of(["did:example:us#other"])}), "apv")
    envelope = jwe(PING, to_us())
    envelope["recipients"].append({"header": {"kid": "did:example:added#1"}, "encrypted_key": "AAAA"})
    await refused(envelopes, envelope, "apv")
    await refused(envelopes, jwe(PING, to_us(), protected={"apv": None}), "apv is missing")


async def test_the_same_recipient_twice_is_refused(envelopes):
    await refused(envelopes, jwe(PING, [*to_us(), *to_us()]), "once")


@pytest.mark.parametrize("to", [[EVE.did], [], ["x"], US.did, [7], {"a": 1}])
async def test_a_to_that_does_not_name_us_is_refused(envelopes, to):
    await refused(envelopes, jwe(PING | {"to": to}, to_us()), "to")


async def test_a_to_that_names_others_besides_us_is_fine(envelopes):
    message = PING | {"to": [EVE.did, US.did]}
    assert (await envelopes.open(orjson.dumps(jwe(message, to_us())))).plaintext == message


@pytest.mark.parametrize(
    "recipients",
    [
        None,
        [],
        {},
        ["x"],
        [{}],
        [{"header": {}}],
        [{"header": {"kid": 1}, "encrypted_key": "AAAA"}],
        [{"header": {"kid": "us"}, "encrypted_key": "AAAA"}],
        [{"header": {"kid": US.did}, "encrypted_key": "AAAA"}],
        [{"header": {"kid": US.agreement[0].kid}}],
        [{"header": {"kid": US.agreement[0].kid}, "encrypted_key": "=AAA"}],
        [{"header": {"kid": US.agreement[0].kid}, "encrypted_key": "AAAA"}],
    ],
    ids=str,
)
async def test_recipients_that_are_none_are_refused(envelopes, recipients):
    await refused(envelopes, jwe(PING, to_us()) | {"recipients": recipients})


# The ephemeral key


async def test_an_epk_on_another_curve_than_the_key_is_refused(envelopes):
    for number, other in ((0, 1), (1, 2), (2, 0)):
        await refused_unopened(
            envelopes, changed(jwe(PING, to_us(number)), epk=dict(public_half(EVE.agreement[other]).jwk))
        )


async def test_a_sender_key_on_another_curve_than_epk_is_refused(envelopes):
    kid = THEM.agreement[1].kid
    envelope = changed(jwe(FROM_THEM, to_us(), THEM.agreement[0]), skid=kid, apu=b64(kid))
    await refused(envelopes, envelope, "different curves")


@pytest.mark.parametrize("number", [1, 2], ids=CURVES[1:])
async def test_a_point_that_is_not_on_its_curve_is_refused(envelopes, number):
    """The other way round it would tell our key piece by piece."""
    envelope = jwe(PING, to_us(number))
    epk = header_of(envelope)["epk"]
    off = bytearray(unb64(epk["y"]))
    off[-1] ^= 1
    for y in (b64(bytes(off)), b64(bytes(len(off)))):
        error = await refused(envelopes, changed(envelope, epk=epk | {"y": y}))
        assert isinstance(root(error), ValueError)
        assert "curve" in str(root(error))


async def test_a_point_of_small_order_is_refused(envelopes):
    for x in (bytes(32), b"\1" + bytes(31), bytes.fromhex("ec" + "ff" * 30 + "7f")):
        envelope = jwe(PING, to_us())
        error = await refused(envelopes, changed(envelope, epk=header_of(envelope)["epk"] | {"x": b64(x)}))
        assert isinstance(root(error), ValueError)
        assert "shared key" in str(root(error))


@pytest.mark.parametrize("number", range(len(CURVES)), ids=CURVES)
async def test_a_coordinate_of_another_length_is_refused(envelopes, number):
    envelope = jwe(PING, to_us(number))
    epk = header_of(envelope)["epk"]
    x = unb64(epk["x"])
    for other in (x[:-1], x + b"\0"):
        await refused(envelopes, changed(envelope, epk=epk | {"x": b64(other)}))


@pytest.mark.parametrize(
    "epk",
    [
        None,
        "x",
        {},
        {"kty": "OKP", "crv": "X448", "x": "AAAA"},
        {"kty": "EC", "crv": "P-521", "x": "AAAA", "y": "AAAA"},
        {"kty": "EC", "crv": "P-256", "x": "AAAA"},
        {"kty": "EC", "crv": "X25519", "x": "AAAA", "y": "AAAA"},
        {"kty": "OKP", "crv": "X25519", "x": 7},
        {"kty": "OKP", "crv": "X25519", "x": "A" * 10_000},
        {"kty": "RSA", "n": "A" * 10_000, "e": "AQAB"},
        {"kty": ["OKP"], "crv": {"X25519": 1}},
        dict(EVE.agreement[0].jwk),
    ],
    ids=lambda epk: str(epk)[:30],
)
async def test_an_epk_that_is_no_public_key_is_refused(envelopes, epk):
    await refused_unopened(envelopes, changed(jwe(PING, to_us()), epk=epk))


async def test_an_epk_in_the_shared_header_is_refused(envelopes):
    envelope = jwe(PING, to_us())
    header = header_of(envelope)
    epk = header.pop("epk")
    await refused(envelopes, envelope | {"protected": b64(header), "unprotected": {"epk": epk}}, "expected epk")


async def test_headers_that_are_not_protected_change_nothing(envelopes):
    envelope = jwe(FROM_THEM, to_us(), THEM.agreement[0])
    envelope["unprotected"] = {"zip": "DEF", "skid": EVE.agreement[0].kid, "x": 1}
    envelope["recipients"][0]["header"] |= {"apu": "AAAA", "epk": {}, "alg": "none", "more": 1}
    opened = await envelopes.open(orjson.dumps(envelope | {"more": [1]}))
    assert (opened.plaintext, opened.sender) == (FROM_THEM, THEM.did)


async def test_unknown_protected_headers_change_nothing(envelopes):
    envelope = jwe(PING, to_us(), protected={"x-new": {"a": [1]}, "cty": "x", "typ": "JWM/2.0"})
    assert (await envelopes.open(orjson.dumps(envelope))).plaintext == PING


@pytest.mark.rule("D12")
@pytest.mark.parametrize("protected", [{"zip": "DEF"}, {"zip": None}, {"crit": ["exp"]}])
async def test_compression_and_criticality_are_refused(envelopes, protected):
    await refused(envelopes, changed(jwe(PING, to_us()), **protected), "zip")


@pytest.mark.rule("D12")
async def test_a_zip_bomb_in_an_inner_layer_is_refused(envelopes):
    inner = jwe(b"{" + b" " * 100_000 + b"}", to_us(), THEM.agreement[0], protected={"zip": "DEF"})
    await refused(envelopes, jwe(inner, to_us()), "zip")


@pytest.mark.parametrize("padded", [True, False])
async def test_base64url_is_taken_padded_and_unpadded(envelopes, padded):
    envelope = jwe(FROM_THEM, to_us(), THEM.agreement[0])
    if padded:
        # What the header says in itself is padded before it is sealed; the rest can be after.
        sender = THEM.agreement[0]
        headers = {"apu": _padded(b64(sender.kid)), "apv": _padded(apv_of([to_us()[0].kid]))}
        envelope = jwe(FROM_THEM, to_us(), sender, protected=headers)
        for name in ("iv", "ciphertext", "tag"):
            envelope[name] = _padded(envelope[name])
        envelope["recipients"][0]["encrypted_key"] = _padded(envelope["recipients"][0]["encrypted_key"])
    assert (await envelopes.open(orjson.dumps(envelope))).sender == THEM.did


def _padded(text: str) -> str:
    return text + "=" * (-len(text) % 4)


# Layers


@pytest.mark.rule("D8")
async def test_authcrypt_inside_anoncrypt_is_from_the_inner_sender(envelopes):
    inner = jwe(FROM_THEM, to_us(1), THEM.agreement[1])
    opened = await envelopes.open(orjson.dumps(jwe(inner, to_us(0))))
    assert (opened.sender, opened.recipient) == (THEM.did, US.agreement[1].kid)


@pytest.mark.rule("D8")
async def test_a_hidden_sender_is_held_to_its_from_too(envelopes):
    inner = jwe(FROM_THEM | {"from": EVE.did}, to_us(), THEM.agreement[0])
    await refused(envelopes, jwe(inner, to_us()), "from")


@pytest.mark.rule("D8")
async def test_one_senders_envelope_inside_anothers_is_refused(envelopes):
    inner = jwe(FROM_THEM, to_us(), THEM.agreement[0])
    await refused(envelopes, jwe(inner, to_us(), EVE.agreement[0]), "layer")


async def test_layers_without_end_are_refused(envelopes):
    anonymous = jwe(jwe(PING, to_us()), to_us())
    await refused(envelopes, anonymous, "layer")
    thrice = jwe(jwe(jwe(FROM_THEM, to_us(), THEM.agreement[0]), to_us(), THEM.agreement[0]), to_us())
    await refused(envelopes, thrice, "layers")
    twice_signed = jwe(jws(jws(FROM_THEM, THEM.authentication[0]), THEM.authentication[0]), to_us())
    await refused(envelopes, twice_signed, "layers")


@pytest.mark.rule("D8")
@pytest.mark.parametrize("number", [0, 1], ids=["Ed25519", "P-256"])
async def test_a_signed_message_sealed_by_its_signer_is_opened(envelopes, number):
    signed = jws(FROM_THEM, THEM.authentication[number])
    opened = await envelopes.open(orjson.dumps(jwe(signed, to_us(), THEM.agreement[0])))
    assert (opened.plaintext, opened.sender) == (FROM_THEM, THEM.did)


@pytest.mark.rule("D8")
async def test_signer_and_sealer_must_be_the_same(envelopes):
    """Eve got it signed for herself, and sends it on in her own name or in theirs."""
    signed = jws(FROM_THEM, THEM.authentication[0])
    await refused(envelopes, jwe(signed, to_us(), EVE.agreement[0]), "from")
    signed = jws(FROM_THEM | {"from": EVE.did}, THEM.authentication[0])
    await refused(envelopes, jwe(signed, to_us(), EVE.agreement[0]), "signed")


@pytest.mark.rule("D8")
async def test_a_signature_by_another_key_is_refused(envelopes):
    signed = jws(FROM_THEM, EVE.authentication[0], kid=THEM.authentication[0].kid)
    await refused(envelopes, jwe(signed, to_us(), THEM.agreement[0]), "signature")
    signed = jws(FROM_THEM, EVE.authentication[1], kid=THEM.authentication[0].kid)
    await refused(envelopes, jwe(signed, to_us(), THEM.agreement[0]), "alg")


@pytest.mark.rule("D8")
async def test_a_signature_over_something_else_is_refused(envelopes):
    signed = jws(FROM_THEM, THEM.authentication[0])
    signed["payload"] = b64(FROM_THEM | {"id": "2"})
    await refused(envelopes, jwe(signed, to_us(), THEM.agreement[0]), "signature")


@pytest.mark.rule("D8")
async def test_only_keys_of_authentication_sign(envelopes):
    unlisted = make_secret(f"{THEM.did}#other", "Ed25519")
    with pytest.raises(UnresolvedDidError):
        await envelopes.open(orjson.dumps(jwe(jws(FROM_THEM, unlisted), to_us())))


@pytest.mark.rule("D8")
async def test_a_signed_message_sealed_by_nobody_is_from_nobody(envelopes):
    """Whoever it was signed for could send it on."""
    opened = await envelopes.open(orjson.dumps(jwe(jws(FROM_THEM, THEM.authentication[0]), to_us())))
    assert (opened.plaintext, opened.sender) == (FROM_THEM, None)
    signed = jws(FROM_THEM | {"from": EVE.did}, THEM.authentication[0])
    await refused(envelopes, jwe(signed, to_us()), "signed")


@pytest.mark.parametrize(
    "signatures",
    [None, [], {}, ["x"], [{}], [{"protected": "e30", "signature": "AAAA"}]],
    ids=str,
)
async def test_signatures_that_are_none_are_refused(envelopes, signatures):
    signed = jws(FROM_THEM, THEM.authentication[0]) | {"signatures": signatures}
    await refused(envelopes, jwe(signed, to_us()))


async def test_more_than_one_signature_is_refused(envelopes):
    signed = jws(FROM_THEM, THEM.authentication[0])
    await refused(envelopes, jwe(signed | {"signatures": signed["signatures"] * 2}, to_us()), "one signature")


@pytest.mark.rule("D8", "D12")
async def test_what_is_not_encrypted_is_refused(envelopes):
    for message in (FROM_THEM, jws(FROM_THEM, THEM.authentication[0])):
        await refused(envelopes, message, "encrypted")


@pytest.mark.rule("D12")
@pytest.mark.parametrize("plaintext", [b"", b"x", b"[]", b"null", b'{"a": "\xff"}', b"[" * 5000, b'{"a":' * 900])
async def test_a_plaintext_that_is_no_object_is_refused(envelopes, plaintext):
    await refused(envelopes, jwe(plaintext, to_us()))


# Sealing


async def test_it_is_sealed_for_all_keys_of_the_first_curve_both_have(library):
    us = Person.make("us", "P-384", "P-256")
    them = Person.make("them", "X25519", "P-256", "P-384", "P-256")
    envelopes = LibraryEnvelopes(MemoryResolver([us, them]), MemorySecrets([us]), max_bytes=1 << 20, v2=library)
    fields = json.loads(await envelopes.seal_v2(PING, them.did, us.did))
    assert [item["header"]["kid"] for item in fields["recipients"]] == [them.agreement[n].kid for n in (1, 3)]
    assert json.loads(unb64(fields["protected"]))["skid"] == us.agreement[1].kid
    fields = json.loads(await envelopes.seal_v2(PING, them.did, None))
    assert [item["header"]["kid"] for item in fields["recipients"]] == [them.agreement[0].kid]


async def test_where_no_key_fits_it_is_said_whose_fault_it_is(library):
    us, them, nobody = Person.make("us", "P-384"), Person.make("them", "X25519"), Person.make("nobody")
    envelopes = LibraryEnvelopes(MemoryResolver([us, them, nobody]), MemorySecrets([us]), max_bytes=1 << 20, v2=library)
    with pytest.raises(EnvelopeError):
        await envelopes.seal_v2(PING, them.did, us.did)
    with pytest.raises(EnvelopeError):
        await envelopes.seal_v2(PING, us.did, them.did)
    for to in (nobody.did, "did:example:unknown", f"{them.did}#unknown"):
        with pytest.raises(UnresolvedDidError):
            await envelopes.seal_v2(PING, to, None)


async def test_a_document_with_a_key_off_its_curve_is_not_sealed_for(library):
    them = Person.make("them", "P-256")
    them.agreement[0].jwk["y"] = b64(bytes(32))
    envelopes = LibraryEnvelopes(MemoryResolver([them]), MemorySecrets(), max_bytes=1 << 20, v2=library)
    with pytest.raises(EnvelopeError):
        await envelopes.seal_v2(PING, them.did, None)
