"""Ed25519 signatures inside v1 messages: signed attachments (RFC 0017) and signed fields (RFC 0234)."""

import base64
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from mediator.errors import BadRequestError
from pickup import base64url
from pickup.message import Json, encode, unbase64
from pickup.rules import names

MAX_SIGNATURES = 8
"""Signatures one attachment may have."""
MAX_SIGNED = 64 * 1024
"""Bytes of a signed attachment."""
SIGNED_FIELD = "signature/1.0/ed25519Sha512_single"


@dataclass(frozen=True, slots=True)
class Signed:
    """A payload, and the canonical keys whose valid signatures it has."""

    payload: bytes
    keys: tuple[str, ...]


def sign_attachment(payload: bytes, mime_type: str, id: str, seed: bytes) -> Json:
    """Write an attachment with a detached JWS (RFC 0017) by an Ed25519 seed."""
    private = Ed25519PrivateKey.from_private_bytes(seed)
    raw = private.public_key().public_bytes_raw()
    kid = names.from_verkey(raw)
    jwk = {"kty": "OKP", "crv": "Ed25519", "x": base64url.encode(raw), "kid": kid}
    # The key is named once: Credo 0.5 refuses a header with more than one of jwk, kid and x5c. ACA-Py reads jwk.kid.
    protected = base64url.encode(orjson.dumps({"alg": "EdDSA", "jwk": jwk}))
    signature = private.sign(f"{protected}.{base64url.encode(payload)}".encode())
    jws = {"header": {"kid": kid}, "protected": protected, "signature": base64url.encode(signature)}
    # Deployed agents expect the standard alphabet with padding here.
    return {
        "@id": id,
        "mime-type": mime_type,
        "data": {"base64": base64.b64encode(payload).decode(), "jws": jws},
    }


def verify_attachment(attachment: object, where: str) -> Signed:
    """Verify all signatures of an attachment; :class:`BadRequestError` names ``where``."""
    data = attachment.get("data") if isinstance(attachment, dict) else None
    text = data.get("base64") if isinstance(data, dict) else None
    jws = data.get("jws") if isinstance(data, dict) else None
    if not isinstance(text, str) or len(text) > MAX_SIGNED * 4 // 3 + 4:
        raise BadRequestError(where, f"expected at most {MAX_SIGNED} bytes in base64")
    if not isinstance(jws, dict):
        raise BadRequestError(where, "expected a signature")
    payload = unbase64(text, where)
    signatures = jws.get("signatures", [jws])
    if not isinstance(signatures, list) or not 0 < len(signatures) <= MAX_SIGNATURES:
        raise BadRequestError(where, f"expected 1 to {MAX_SIGNATURES} signatures")
    return Signed(payload, tuple(_signer(signature, payload, where) for signature in signatures))


def _signer(jws: object, payload: bytes, where: str) -> str:
    """Verify one signature and return its canonical key."""
    protected = jws.get("protected") if isinstance(jws, dict) else None
    signature = jws.get("signature") if isinstance(jws, dict) else None
    if not isinstance(jws, dict) or not isinstance(protected, str) or not isinstance(signature, str):
        raise BadRequestError(where, "expected a signature with its protected header")
    key = _key_of(_header(protected, where), jws.get("header"), where)
    try:
        public = Ed25519PublicKey.from_public_bytes(names.verkey(key))
        public.verify(unbase64(signature, where), f"{protected}.{base64url.encode(payload)}".encode())
    except (InvalidSignature, ValueError):
        raise BadRequestError(where, "the signature is wrong") from None
    return key


def _header(protected: str, where: str) -> Mapping[str, Any]:
    try:
        header = orjson.loads(unbase64(protected, where))
    except orjson.JSONDecodeError:
        header = None
    if not isinstance(header, dict) or header.get("alg") != "EdDSA":
        raise BadRequestError(where, "expected a protected header with alg EdDSA")
    return header


def _key_of(header: Mapping[str, Any], unprotected: object, where: str) -> str:
    """Return the one key that all parts of a signature name."""
    jwk = header.get("jwk")
    kids = [header.get("kid"), unprotected.get("kid") if isinstance(unprotected, dict) else None]
    found = set()
    if isinstance(jwk, dict):
        kids.append(jwk.get("kid"))
        x = jwk.get("x")
        if jwk.get("kty") != "OKP" or jwk.get("crv") != "Ed25519" or not isinstance(x, str):
            raise BadRequestError(where, "expected an Ed25519 key")
        raw = unbase64(x, where)
        if len(raw) != 32:
            raise BadRequestError(where, "expected an Ed25519 key")
        found.add(names.from_verkey(raw))
    for kid in kids:
        # Key ids that are not keys, such as a fragment of the signed document, cannot be checked here.
        if isinstance(kid, str) and (name := names.canonical(kid)) is not None and names.is_ed25519(name):
            found.add(name)
    if len(found) != 1:
        raise BadRequestError(where, "expected a signature that names one Ed25519 key")
    return found.pop()


def sign_field(value: Json, prefix: str, seconds: int, seed: bytes) -> Json:
    """Write a signed field (RFC 0234); ``seconds`` is the time of signing, ``prefix`` that of the message type."""
    private = Ed25519PrivateKey.from_private_bytes(seed)
    data = struct.pack(">Q", seconds) + encode(value)
    return {
        "@type": f"{prefix}{SIGNED_FIELD}",
        "signature": base64.urlsafe_b64encode(private.sign(data)).decode(),
        "sig_data": base64.urlsafe_b64encode(data).decode(),
        "signer": names.base58(private.public_key().public_bytes_raw()),
    }
