"""Handshakes read what strangers write: whatever it is, it is refused in our own words or taken, and nothing else."""

import base64
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import MediatorError
from pickup.invitations import id_inside
from pickup.protocols.handshakes import read_attached
from pickup.protocols.signatures import verify_attachment
from pickup.rules.names import is_ed25519
from tests.harness.handshaking import Peer, unpadded

PEER = Peer()
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=12)
WORDS = st.sampled_from(
    [PEER.key, PEER.verkey, PEER.nym, "#1", "z6Mk", "did:key:z6Mk", "EdDSA", "Ed25519", "IndyAgent"]
)
JSON = st.recursive(
    SCALARS | WORDS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["id", "type", "kid", "jwk", "x", "crv", "kty", "alg"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def mutated(whole: Any) -> st.SearchStrategy[Any]:
    """Return the value with one part of it, anywhere, replaced by something else."""

    def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(place for name, item in inner for place in places(item, (*path, name)))]

    def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
        if not path:
            return new
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[path[0]] = replaced(value[path[0]], path[1:], new)
        return copy

    return st.builds(lambda path, new: replaced(whole, path, new), st.sampled_from(places(whole)), JSON)


@pytest.mark.rule("D12")
@given(JSON | mutated(PEER.old_document("https://peer.example")) | mutated(PEER.genesis_document()))
def test_any_document_is_read_or_refused(document: Any) -> None:
    did = document.get("id") if isinstance(document, dict) else None
    with suppress(MediatorError):
        peer = read_attached(document, did if isinstance(did, str) else PEER.nym, "document")
        assert peer.signing
        assert all(map(is_ed25519, (*peer.signing, *peer.keys, *peer.routing_keys)))
        assert peer.endpoint is None or peer.endpoint.startswith(("http://", "https://", "ws://", "wss://"))


@pytest.mark.rule("D12")
@given(JSON | mutated(PEER.attach(PEER.old_document())))
def test_any_attachment_is_verified_or_refused(attachment: Any) -> None:
    with suppress(MediatorError):
        signed = verify_attachment(attachment, "attachment")
        # Only what was not touched, or not part of what is signed, still carries this signature.
        assert signed.keys == (PEER.key,)
        assert signed.payload == orjson.dumps(PEER.old_document())


@pytest.mark.rule("D12")
@given(mutated({"alg": "EdDSA", "jwk": {"kty": "OKP", "crv": "Ed25519", "x": unpadded(PEER.raw), "kid": PEER.key}}))
def test_any_protected_header_is_read_or_refused(header: Any) -> None:
    protected, payload = unpadded(orjson.dumps(header)), b"payload"
    signature = unpadded(PEER.signer.sign(f"{protected}.{unpadded(payload)}".encode()).signature)
    jws = {"protected": protected, "signature": signature}
    with suppress(MediatorError):
        data = {"base64": base64.b64encode(payload).decode(), "jws": jws}
        assert verify_attachment({"data": data}, "attachment").keys == (PEER.key,)


@pytest.mark.rule("D12")
@given(st.text(max_size=60) | JSON.map(lambda value: unpadded(orjson.dumps(value))))
def test_any_text_in_a_link_has_an_id_or_is_refused(text: str) -> None:
    with suppress(MediatorError):
        assert isinstance(id_inside(text), str)
