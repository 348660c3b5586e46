"""DID documents of every age are read into one form; what cannot be used is left out, and nothing breaks the reader."""

from contextlib import suppress
from typing import Any

import did_peer_4
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import UnresolvedDidError
from pickup import base64url
from pickup.dids import material
from pickup.dids.document import MAX_KEYS, MAX_SERVICES, DidDocument, parse
from pickup.dids.resolver import MAX_LONG_FORM, read
from pickup.rules.names import base58, from_verkey

DID = "did:web:example.com"
VERKEY = bytes(range(32))
KEY = from_verkey(VERKEY)
X = bytes(range(32, 64))
ED_JWK = {"kty": "OKP", "crv": "Ed25519", "x": base64url.encode(VERKEY)}
X_JWK = {"kty": "OKP", "crv": "X25519", "x": base64url.encode(X)}
P256 = ec.derive_private_key(7, ec.SECP256R1()).public_key().public_numbers()
P256_JWK = {
    "kty": "EC",
    "crv": "P-256",
    "x": base64url.encode(P256.x.to_bytes(32, "big")),
    "y": base64url.encode(P256.y.to_bytes(32, "big")),
}
ED_MULTIBASE = KEY.removeprefix("did:key:")
X_MULTIBASE = material.multibase(X_JWK)

json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=15,
)
names = st.sampled_from(
    ["id", "type", "uri", "priority", "publicKeyMultibase", "publicKeyBase58", "publicKeyJwk", "publicKey"]
) | st.sampled_from(["serviceEndpoint", "recipientKeys", "routingKeys", "accept", "crv", "kty", "x", "y"])
values = st.sampled_from(
    "Multikey JsonWebKey2020 Ed25519VerificationKey2018 did-communication DIDCommMessaging EC OKP P-256 z u zz #a "
    f"{DID} {DID}#a {ED_MULTIBASE} {X_MULTIBASE} https://example.com".split()
)
part = st.recursive(
    values | json, lambda inner: st.dictionaries(names, inner, max_size=6) | st.lists(inner, max_size=3)
)
document = st.dictionaries(
    st.sampled_from(["id", "verificationMethod", "publicKey", "authentication", "keyAgreement", "service"]),
    part | st.lists(part, max_size=4),
)


def one(method: dict[str, Any], use: str = "keyAgreement") -> DidDocument:
    return parse({"verificationMethod": [{"id": "#k", **method}], use: ["#k"]}, DID)


@pytest.mark.parametrize(
    ("method", "jwk"),
    [
        ({"type": "X25519KeyAgreementKey2019", "publicKeyBase58": base58(X)}, X_JWK),
        ({"type": "X25519KeyAgreementKey2020", "publicKeyMultibase": X_MULTIBASE}, X_JWK),
        ({"type": "X25519KeyAgreementKey2019", "publicKeyMultibase": "z" + base58(X)}, X_JWK),
        ({"type": "Multikey", "publicKeyMultibase": X_MULTIBASE}, X_JWK),
        ({"type": "Multikey", "publicKeyMultibase": "u" + base64url.encode(b"\xec\x01" + X)}, X_JWK),
        ({"type": "JsonWebKey2020", "publicKeyJwk": {**X_JWK, "kid": "k", "use": "enc"}}, X_JWK),
        ({"type": "JsonWebKey2020", "publicKeyJwk": {**X_JWK, "x": X_JWK["x"] + "="}}, X_JWK),
        ({"type": "Multikey", "publicKeyMultibase": material.multibase(P256_JWK)}, P256_JWK),
        ({"type": "JsonWebKey2020", "publicKeyJwk": P256_JWK}, P256_JWK),
    ],
)
def test_a_key_is_read_however_it_is_written(method, jwk) -> None:
    (key,) = one(method).key_agreement
    assert (key.kid, key.curve, key.jwk) == (f"{DID}#k", jwk["crv"], jwk)


@pytest.mark.parametrize("form", ["Ed25519VerificationKey2018", "Ed25519VerificationKey2020", "Multikey"])
def test_a_signing_key_is_no_key_to_seal_for(form: str) -> None:
    method = {"type": form, "publicKeyMultibase": ED_MULTIBASE}
    assert one(method).key_agreement == ()
    assert [key.jwk for key in one(method, "authentication").authentication] == [ED_JWK]


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "method",
    [
        {"type": "EcdsaSecp256k1VerificationKey2019", "publicKeyBase58": base58(X)},
        {"type": "Multikey", "publicKeyBase58": base58(X)},
        {"type": "Multikey", "publicKeyMultibase": "z" + base58(b"\xe7\x01" + X)},
        {"type": "Multikey", "publicKeyMultibase": "z0OIl"},
        {"type": "Multikey", "publicKeyMultibase": "z" + "1" * 10_000},
        {"type": "X25519KeyAgreementKey2020", "publicKeyMultibase": ED_MULTIBASE},
        {"type": "X25519KeyAgreementKey2019", "publicKeyBase58": base58(X[:31])},
        {"type": "X25519KeyAgreementKey2019", "publicKeyBase58": base58(X + b"\0")},
        {"type": "JsonWebKey2020", "publicKeyJwk": {**P256_JWK, "y": P256_JWK["x"]}},
        {"type": "JsonWebKey2020", "publicKeyJwk": {**P256_JWK, "crv": "P-384"}},
        {"type": "JsonWebKey2020", "publicKeyJwk": {**P256_JWK, "kty": "OKP"}},
        {"type": "JsonWebKey2020", "publicKeyJwk": {**P256_JWK, "crv": "P-521"}},
        {"type": "JsonWebKey2020", "publicKeyJwk": {"kty": "OKP", "crv": "X25519", "x": "é"}},
        {"type": "JsonWebKey2020", "publicKeyJwk": "k"},
        {"type": ["Multikey"], "publicKeyMultibase": X_MULTIBASE},
        {"publicKeyMultibase": X_MULTIBASE},
        {"type": "Multikey", "publicKeyMultibase": 7},
        {"type": "Multikey", "publicKeyMultibase": X_MULTIBASE, "id": 7},
        {"type": "Multikey", "publicKeyMultibase": X_MULTIBASE, "id": "did:web:somebody.else#k"},
    ],
)
def test_an_unusable_key_is_skipped_and_the_others_stay(method) -> None:
    good = {"id": "#good", "type": "Multikey", "publicKeyMultibase": X_MULTIBASE}
    document = parse(
        {"verificationMethod": [{"id": "#k", **method}, good], "keyAgreement": ["#k", method.get("id"), "#good"]}, DID
    )
    assert [key.kid for key in document.key_agreement] == [f"{DID}#good"]


@pytest.mark.parametrize("id", ["#k", "k", f"{DID}#k"])
@pytest.mark.parametrize("reference", ["#k", f"{DID}#k"])
def test_ids_become_absolute(id: str, reference: str) -> None:
    method = {"id": id, "type": "Multikey", "publicKeyMultibase": X_MULTIBASE}
    read = parse({"verificationMethod": [method], "keyAgreement": [reference]}, DID)
    assert [key.kid for key in read.key_agreement] == [f"{DID}#k"]
    assert read.raw["keyAgreement"] == [f"{DID}#k"]
    assert read.raw["verificationMethod"] == [
        {"id": f"{DID}#k", "type": "JsonWebKey2020", "controller": DID, "publicKeyJwk": X_JWK}
    ]


def test_a_key_may_be_embedded_where_it_is_used() -> None:
    method = {"id": "#k", "type": "Multikey", "publicKeyMultibase": X_MULTIBASE}
    read = parse({"keyAgreement": [method, "#k"]}, DID)
    assert [key.kid for key in read.key_agreement] == [f"{DID}#k"]


ACCEPT = ["didcomm/v2"]


@pytest.mark.parametrize(
    "service",
    [
        {"serviceEndpoint": "https://example.com", "routingKeys": ["did:a:b#c"], "accept": ACCEPT},
        {"serviceEndpoint": {"uri": "https://example.com", "routingKeys": ["did:a:b#c"], "accept": ACCEPT}},
        {"serviceEndpoint": [{"uri": "https://example.com", "routingKeys": ["did:a:b#c"], "accept": ACCEPT}]},
        {"serviceEndpoint": ["https://example.com"], "routingKeys": ["did:a:b#c"], "accept": ACCEPT},
    ],
)
def test_services_are_flattened(service) -> None:
    read = parse({"service": [{"id": "#s", "type": "DIDCommMessaging", **service}]}, DID)
    (found,) = read.services
    assert (found.id, found.endpoint, found.routing_keys, found.accept) == (
        f"{DID}#s",
        "https://example.com",
        ("did:a:b#c",),
        ("didcomm/v2",),
    )
    assert read.raw["service"] == [
        {
            "id": f"{DID}#s",
            "type": "DIDCommMessaging",
            "serviceEndpoint": "https://example.com",
            "routingKeys": ["did:a:b#c"],
            "accept": ACCEPT,
        }
    ]


def test_services_come_in_the_order_of_their_priority() -> None:
    def service(endpoint: str, **more: Any) -> dict[str, Any]:
        return {"id": "#s", "type": "did-communication", "serviceEndpoint": endpoint, **more}

    services = [
        service("https://third.example", priority=2),
        service("https://first.example"),
        service("wss://second.example", priority=1),
        service("ftp://never.example"),
        {**service("https://linked.example"), "type": "LinkedDomains"},
        service("didcomm:transport/queue"),
    ]
    found = [one.endpoint for one in parse({"service": services}, DID).services]
    assert found == ["https://first.example", "wss://second.example", "https://third.example"]


@pytest.mark.rule("D3")
@pytest.mark.parametrize("written", ["#ed", f"{DID}#ed", base58(VERKEY), KEY, f"{KEY}#{ED_MULTIBASE}"])
def test_recipient_keys_become_canonical(written: str) -> None:
    method = {"id": "#ed", "type": "Ed25519VerificationKey2018", "publicKeyBase58": base58(VERKEY)}
    service = {
        "id": "#s",
        "type": "did-communication",
        "serviceEndpoint": "https://example.com",
        "recipientKeys": ["#missing", "junk", 7, written],
    }
    (found,) = parse({"verificationMethod": [method], "service": [service]}, DID).services
    assert found.recipient_keys == (KEY,)


@pytest.mark.parametrize("prefix", ["", "did:sov:"])
def test_a_document_of_connections_1_0_is_read(prefix: str) -> None:
    nym, verkey = "WgWxqztrNooG92RXvxSTWv", base58(VERKEY)
    raw = {
        "@context": "https://w3id.org/did/v1",
        "id": prefix + nym,
        "publicKey": [
            {
                "id": f"{prefix}{nym}#1",
                "type": "Ed25519VerificationKey2018",
                "controller": prefix + nym,
                "publicKeyBase58": verkey,
            }
        ],
        "authentication": [{"type": "Ed25519SignatureAuthentication2018", "publicKey": f"{prefix}{nym}#1"}],
        "service": [
            {
                "id": f"{prefix}{nym};indy",
                "type": "IndyAgent",
                "priority": 0,
                "recipientKeys": [verkey],
                "routingKeys": [base58(X)],
                "serviceEndpoint": "http://alice.example:8000",
            }
        ],
    }
    read = parse(raw, nym)
    assert [key.jwk for key in read.authentication] == [ED_JWK]
    (service,) = read.services
    assert (service.endpoint, service.recipient_keys, service.routing_keys) == (
        "http://alice.example:8000",
        (KEY,),
        (base58(X),),
    )


@pytest.mark.rule("D12")
def test_a_document_with_thousands_of_parts_is_cut() -> None:
    methods = [{"id": f"#{n}", "type": "Multikey", "publicKeyMultibase": X_MULTIBASE} for n in range(5000)]
    service = {"type": "DIDCommMessaging", "serviceEndpoint": [{"uri": "https://example.com"}] * 5000}
    read = parse(
        {
            "verificationMethod": methods,
            "publicKey": methods,
            "keyAgreement": methods,
            "authentication": [f"#{n}" for n in range(5000)],
            "service": [service] * 5000,
        },
        DID,
    )
    assert len(read.raw["verificationMethod"]) <= MAX_KEYS
    assert len(read.key_agreement) <= MAX_KEYS
    assert len(read.authentication) <= MAX_KEYS
    assert len(read.services) <= MAX_SERVICES


@pytest.mark.rule("D12")
@given(json | document)
def test_whatever_a_document_is_there_is_one_error_at_most(raw: object) -> None:
    try:
        read = parse(raw, DID)
    except UnresolvedDidError:
        assert not isinstance(raw, dict)
    else:
        assert all(key.kid.startswith(f"{DID}#") for key in (*read.key_agreement, *read.authentication))
        assert all(isinstance(service.endpoint, str) for service in read.services)


@pytest.mark.rule("D12")
@given(
    st.sampled_from(
        ["did:key:z", "did:peer:0z", "did:peer:2", "did:peer:2.V", "did:peer:2.S", "did:peer:4zQm", "did:"]
    ),
    st.text("6MkLSEzVS.:123456789ABCabcxyz_-%#?\n\0é", max_size=120),
)
def test_whatever_a_did_is_there_is_one_error_at_most(head: str, tail: str) -> None:
    with suppress(UnresolvedDidError):
        assert read(head + tail).did == head + tail


@pytest.mark.rule("D12")
@given(document)
def test_any_did_peer_4_parses_or_raises_one_error(raw: dict[str, Any]) -> None:
    did = did_peer_4.encode(raw, validate=False)
    try:
        assert read(did).did == did
    except UnresolvedDidError:
        assert len(did) > MAX_LONG_FORM or len(did) < 70


@pytest.mark.rule("D12")
def test_deep_nesting_inside_a_did_is_not_well_formed() -> None:
    encoded = "z" + base58(b"\x80\x04" + b"[" * 2500)
    digest = did_peer_4._hash_encoded_doc(encoded)
    with pytest.raises(UnresolvedDidError):
        read(f"did:peer:4{digest}:{encoded}")
