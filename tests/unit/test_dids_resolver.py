"""The resolver: every method it knows, our own first, short forms of what was met, and one error for all others."""

import json
from itertools import count
from typing import Any

import did_peer_2
import did_peer_4
import pytest
from nacl.signing import SigningKey

from mediator.errors import UnresolvedDidError
from mediator.http.guard import Guard
from pickup import base64url
from pickup.dids import material, own_dids
from pickup.dids.document import DidDocument, parse
from pickup.dids.material import IdentityKeys
from pickup.dids.resolver import MAX_KEPT, MAX_LONG_FORM, CachingResolver, DidWebResolver, read
from pickup.rules.names import from_verkey
from tests.harness.old_identity import OLD_SECRET

URL = "https://mediator.example.com/didcomm"


class Known:
    """Who has been met before; counts the questions."""

    def __init__(self, own: DidDocument | None = None, met: dict[str, str] | None = None) -> None:
        self.own = own
        self.met = met or {}
        self.asked: list[str] = []

    def document(self, did: str) -> DidDocument | None:
        return self.own if self.own is not None and self.own.did == did else None

    async def long_form(self, short: str) -> str | None:
        self.asked.append(short)
        return self.met.get(short)


def resolver(known: Known | None = None) -> CachingResolver:
    return CachingResolver(known or Known(), DidWebResolver(Guard()))


@pytest.fixture(scope="module")
def someone() -> IdentityKeys:
    return material.read(OLD_SECRET)


def short_form(did: str) -> str:
    return did.rpartition(":")[0]


async def test_a_did_key_has_the_key_and_what_is_derived_of_it(someone: IdentityKeys) -> None:
    did = from_verkey(someone.verkey)
    document = await resolver().resolve(did)
    derived = bytes(SigningKey(someone.seed).verify_key.to_curve25519_public_key())
    assert [key.jwk for key in document.authentication] == [someone.signing.public]
    (agreement,) = document.key_agreement
    assert agreement.jwk == material.from_raw("X25519", derived)
    assert agreement.kid == f"{did}#{material.multibase(agreement.jwk)}"


@pytest.mark.parametrize("at", range(3))
async def test_a_did_key_of_each_curve_can_be_sealed_for(someone: IdentityKeys, at: int) -> None:
    pair = someone.agreement[at]
    did = f"did:key:{pair.multibase}"
    (key,) = (await resolver().resolve(did)).key_agreement
    assert (key.kid, key.jwk) == (f"{did}#{pair.multibase}", pair.public)


def test_known_did_keys() -> None:
    # From the test vectors of the method.
    ed = read("did:key:z6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp")
    assert ed.key_agreement[0].kid.endswith("#z6LShs9GGnqk85isEBzzshkuVWrVKsRp24GnDuHk8QWkARMW")
    p256 = read("did:key:zDnaerx9CtbPJ1q36T5Ln5wYt3MQYeGRG5ehnPAmxcf5mDZpv")
    assert p256.key_agreement[0].jwk == {
        "kty": "EC",
        "crv": "P-256",
        "x": "igrFmi0whuihKnj9R3Om1SoMph72wUGeFaBbzG2vzns",
        "y": "efsX5b10x8yjyrj4ny3pGfLcY7Xby1KzgqOdqnsrJIM",
    }
    p384 = read("did:key:z82Lm1MpAkeJcix9K8TMiLd5NMAhnwkjjCBeWHXyu3U4oT2MVJJKXkcVBgjGhnLBn2Kaau9")
    assert p384.key_agreement[0].jwk == {
        "kty": "EC",
        "crv": "P-384",
        "x": "lInTxl8fjLKp_UCrxI0WDklahi-7-_6JbtiHjiRvMvhedhKVdHBfi2HCY8t_QJyc",
        "y": "y6N1IC-2mXxHreETBW7K3mBcw0qGr3CWHCs-yl09yCQRLcyfGv7XhqAngHOu51Zv",
    }


async def test_did_peer_0(someone: IdentityKeys) -> None:
    document = await resolver().resolve(f"did:peer:0{someone.signing.multibase}")
    assert [key.jwk for key in document.authentication] == [someone.signing.public]
    assert [key.jwk for key in document.key_agreement] == [someone.derived.public]


async def test_did_peer_2_of_any_form_of_service(someone: IdentityKeys) -> None:
    forms: list[dict[str, Any]] = [
        {"t": "dm", "s": {"uri": "https://a.example", "r": ["did:a:b#c"], "a": ["didcomm/v2"]}},
        {"t": "dm", "s": "https://a.example", "r": ["did:a:b#c"], "a": ["didcomm/v2"]},
        {"type": "DIDCommMessaging", "serviceEndpoint": "https://a.example", "routingKeys": ["did:a:b#c"], "a": []},
    ]
    for form in forms:
        specs = [did_peer_2.KeySpec.key_agreement(pair.multibase) for pair in someone.agreement]
        document = await resolver().resolve(did_peer_2.generate(specs, [form]))
        assert [key.jwk for key in document.key_agreement] == [pair.public for pair in someone.agreement]
        assert [key.kid.partition("#")[2] for key in document.key_agreement] == ["key-1", "key-2", "key-3"]
        (service,) = document.services
        assert (service.endpoint, service.routing_keys) == ("https://a.example", ("did:a:b#c",))


def peer_2(someone: IdentityKeys, *services: Any) -> str:
    parts = [f".E{someone.agreement[0].multibase}", f".V{someone.signing.multibase}"]
    return "did:peer:2" + "".join(parts + [f".S{base64url.encode(json.dumps(one).encode())}" for one in services])


@pytest.mark.parametrize(
    ("services", "endpoints"),
    [
        ([], []),
        ([[]], []),
        (
            [[{"t": "dm", "s": {"uri": "https://a.example"}}, {"t": "dm", "s": {"uri": "wss://a.example"}}]],
            ["https", "wss"],
        ),
        (
            [{"t": "dm", "s": [{"uri": "https://a.example", "a": ["didcomm/v2"]}, {"uri": "wss://a.example"}]}],
            ["https", "wss"],
        ),
        (
            [{"type": "dm", "serviceEndpoint": "https://a.example"}, [{"t": "dm", "s": "wss://a.example"}]],
            ["https", "wss"],
        ),
        ([{"type": "DIDCommMessaging", "s": {"uri": "https://a.example", "routingKeys": []}}], ["https"]),
        ([[{"t": "other", "s": 1}, {}, {"t": "dm"}]], []),
    ],
)
async def test_did_peer_2_with_lists_of_services(
    someone: IdentityKeys, services: list[Any], endpoints: list[str]
) -> None:
    document = await resolver().resolve(peer_2(someone, *services))
    assert [service.endpoint.partition(":")[0] for service in document.services] == endpoints
    assert [key.jwk for key in document.key_agreement] == [someone.agreement[0].public]
    assert document.key_agreement[0].kid.endswith("#key-1")
    assert document.authentication[0].kid.endswith("#key-2")


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (".Sxyz", "part 3: expected services as JSON"),
        (".S" + base64url.encode(b'"text"'), "part 3: expected a service"),
        (".S" + base64url.encode(b"[1]"), "part 3: expected a service"),
        (".S" + base64url.encode(b"[" * 1100 + b"]" * 1100), "part 3: expected services as JSON"),
        (".S" + base64url.encode(b'{"t":"dm","s":' + b'{"s":' * 900 + b"1" + b"}" * 901), ""),
        (".Xz6LSabc", "part 3: expected A, D, E, I or V"),
        (".Eu6LSabc", "part 3: expected A, D, E, I or V"),
        (".Ez0OIl", "part 3: expected A, D, E, I or V"),
        ("..Vz6Mk", "part 3: expected A, D, E, I or V"),
    ],
)
async def test_the_malformed_part_of_a_did_peer_2_is_named(someone: IdentityKeys, part: str, problem: str) -> None:
    if not problem:
        assert (await resolver().resolve(peer_2(someone) + part)).services == ()
        return
    with pytest.raises(UnresolvedDidError, match=problem):
        await resolver().resolve(peer_2(someone) + part)


async def test_a_short_did_peer_4_resolves_after_its_long_form(someone: IdentityKeys) -> None:
    long = own_dids.v1_did(someone, URL)
    known, short = Known(), short_form(long)
    one = resolver(known)
    with pytest.raises(UnresolvedDidError, match="long form is unknown"):
        await one.resolve(short)
    document = await one.resolve(long)
    assert document.did == long
    again = await one.resolve(short)
    assert again.did == short
    assert again.key_agreement[0].kid == f"{short}#key-2"
    assert again.key_agreement[0].jwk == document.key_agreement[0].jwk
    assert known.asked == [short]


async def test_a_short_did_peer_4_resolves_after_a_restart(someone: IdentityKeys) -> None:
    long = own_dids.v1_did(someone, URL)
    short = short_form(long)
    document = await resolver(Known(met={short: long})).resolve(short)
    assert [service.recipient_keys for service in document.services] == [(from_verkey(someone.verkey),)] * 2


async def test_a_long_form_of_another_short_form_is_refused(someone: IdentityKeys) -> None:
    long, other = own_dids.v1_did(someone, URL), own_dids.v1_did(someone, "https://other.example.com")
    with pytest.raises(UnresolvedDidError):
        await resolver(Known(met={short_form(long): other})).resolve(short_form(long))


@pytest.mark.rule("D12")
async def test_a_did_peer_4_whose_hash_is_another_is_refused(someone: IdentityKeys) -> None:
    long, other = own_dids.v1_did(someone, URL), own_dids.v1_did(someone, "https://other.example.com")
    forged = f"{short_form(long)}:{other.rpartition(':')[2]}"
    with pytest.raises(UnresolvedDidError):
        await resolver().resolve(forged)


@pytest.mark.rule("D12")
async def test_a_did_peer_4_has_a_longest_length() -> None:
    def long(size: int) -> str:
        return str(did_peer_4.encode({"alsoKnownAs": ["x" * size]}))

    size = max(size for size in range(2800, 3000) if len(long(size)) <= MAX_LONG_FORM)
    assert (await resolver().resolve(long(size))).key_agreement == ()
    with pytest.raises(UnresolvedDidError, match="at most"):
        await resolver().resolve(long(size + 1))


async def test_our_own_comes_first_and_is_not_copied(someone: IdentityKeys) -> None:
    own = parse({}, own_dids.v2_did(someone, URL))
    assert await resolver(Known(own=own)).resolve(own.did) is own


async def test_a_document_is_read_once(someone: IdentityKeys) -> None:
    did, one = own_dids.v2_did(someone, URL), resolver()
    assert await one.resolve(did) is await one.resolve(did)


async def test_what_is_kept_is_bounded_and_the_longest_unused_goes(someone: IdentityKeys) -> None:
    one, did = resolver(), own_dids.v2_did(someone, URL)
    first = await one.resolve(did)
    numbers = count(1)

    async def more(times: int) -> None:
        for _ in range(times):
            await one.resolve("did:key:" + material.multibase(material.from_raw("X25519", next(numbers).to_bytes(32))))

    await more(MAX_KEPT - 1)
    assert await one.resolve(did) is first
    await more(MAX_KEPT)
    assert await one.resolve(did) is not first


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "did",
    [
        "",
        "did",
        "did:key:",
        "did:key:z",
        "did:key:z6Mk",
        "did:key:zQ3shokFTS3brHcDQrn82RUDfCZESWL1ZdCEJwekUDPQiYBme",
        "did:key:z6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp#z6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp",
        "did:peer:1zQmZMygzYqNwU6Uhmewx5Xepf2VLp5S4HLSwwgf2aiKZuwa",
        "did:peer:2",
        "did:peer:2.SeyJ0",
        "did:peer:2.S" + "W1" * 100,
        "did:peer:2.Vz6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp\n",
        "did:peer:3zQmS19jtYDvGtKVrJhQnRFpBQAx3pJ9omx2HpNrcXFuRCz9",
        "did:peer:4",
        "did:peer:4zQm:z",
        "did:example:123",
        "did:sov:WgWxqztrNooG92RXvxSTWv",
        "did:peer:4zQm" + "1" * 9000,
        "did:peer:2.Ez" + "1" * 9000,
    ],
)
async def test_what_leads_nowhere_is_one_error(did: str) -> None:
    with pytest.raises(UnresolvedDidError) as raised:
        await resolver().resolve(did)
    assert len(str(raised.value)) < 200


def test_our_dids_are_read_by_the_libraries_of_others_as_by_us(someone: IdentityKeys) -> None:
    endpoints = [{"uri": url, "accept": ["didcomm/v2"]} for url in (URL, "wss://mediator.example.com/didcomm")]
    for did, expected in (
        (own_dids.v2_did(someone, URL), endpoints[:1]),
        (own_dids.socket_did(someone, URL), endpoints),
    ):
        v2 = did_peer_2.resolve(did)
        assert [service["serviceEndpoint"] for service in v2["service"]] == expected
        assert {service["type"] for service in v2["service"]} == {"DIDCommMessaging"}
    v1 = did_peer_4.resolve(own_dids.v1_did(someone, URL))
    assert v1["@context"][0] == "https://www.w3.org/ns/did/v1"
    assert [service["priority"] for service in v1["service"]] == [0, 1]
    assert [service["serviceEndpoint"].partition(":")[0] for service in v1["service"]] == ["https", "wss"]
    assert {service["accept"][1] for service in v1["service"]} == {"didcomm/aip2;env=rfc19"}
    assert all(service["recipientKeys"] == [v1["authentication"][0]] for service in v1["service"])
