"""Parses envelopes before any cryptography: bounds, generation, and headers that must agree (D8, D12).

Everything here works on untrusted bytes. The result is bounded in size, depth and recipients, each field has its type
and alphabet, and all headers name the same sender. Anything else is an :class:`EnvelopeError`.
"""

import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from mediator.errors import EnvelopeError, MessageTooLargeError
from pickup import base64url
from pickup.rules.names import MAX_NAME

MAX_DEPTH = 64
"""Levels of nesting in any JSON: the libraries parse by recursion."""
MAX_VALUES = 20_000
"""Commas and brackets in any JSON, one for each value: megabytes of them would block the event loop."""
MAX_V1_RECIPIENTS = 50
MAX_V2_RECIPIENTS = 16
"""The keys of one DID; also the limit of the JOSE library."""
MAX_PROTECTED = 64 * 1024
"""Characters of the protected header, which holds all of a v1 envelope's recipients, or two v2 key ids."""
MAX_KID = MAX_NAME + 256
_MAX_CACHED = 1024
"""Characters of the key ids of an envelope whose apv is cached: longer ones would fill the memory."""

V1_CIPHER = "xchacha20poly1305_ietf"
ANONCRYPT = "ECDH-ES+A256KW"
AUTHCRYPT = "ECDH-1PU+A256KW"
CIPHERS = {AUTHCRYPT: frozenset({"A256CBC-HS512"}), ANONCRYPT: frozenset({"A256CBC-HS512", "A256GCM", "XC20P"})}
SIGNERS = {"Ed25519": "EdDSA", "P-256": "ES256", "P-384": "ES384"}
"""The one algorithm that each curve signs with."""

_BASE64 = re.compile(r"[A-Za-z0-9_-]+={0,2}")
_STANDARD = bytes.maketrans(b"-_+/=", b"+/!!!")
"""Translates base64url to the standard alphabet, and what only that has to ``!``, which strict decoding refuses."""
_NOT_ENCRYPTED = "expected an encrypted message"


@dataclass(slots=True)
class V1Envelope:
    """A v1 envelope (RFC 0019), not opened yet."""

    fields: Mapping[str, Any]
    """As they came; ``protected`` is base64url."""
    authenticated: bool
    recipients: Sequence[Mapping[str, Any]]
    """Each has ``encrypted_key``, and a ``header`` with its ``kid`` in base58."""
    iv: bytes
    ciphertext: bytes
    tag: bytes


@dataclass(slots=True)
class Jwe:
    """One encrypted layer of v2, not opened yet."""

    fields: Mapping[str, Any]
    """As they came; ``protected`` and ``aad`` are base64url."""
    header: Mapping[str, Any]
    """What ``protected`` holds."""
    recipients: Mapping[str, bytes]
    """Key ids, each with its encrypted content key."""
    apu: bytes
    """The sender's key id as claimed; of an anonymous layer usually empty."""
    apv: bytes
    """Identifies the recipients."""
    iv: bytes
    ciphertext: bytes
    tag: bytes
    curve: str
    """The curve of the ephemeral key, and so of all keys involved."""
    sender_kid: str | None
    """The sender's key id as claimed; None: anonymous."""
    epks: Mapping[str, Any] = field(default_factory=dict)
    """For each key id its ephemeral key, where the protected header has none (RFC 7518 §4.6.1.1)."""

    def only_for(self, kid: str) -> dict[str, Any]:
        """Return the layer as JSON for one of its recipients, without unprotected headers."""
        header = {"kid": kid, "epk": self.epks[kid]} if self.epks else {"kid": kid}
        names = ("protected", "iv", "ciphertext", "tag", *(("aad",) if "aad" in self.fields else ()))
        recipient = {"header": header, "encrypted_key": base64url.encode(self.recipients[kid])}
        return {**{name: self.fields[name] for name in names}, "recipients": [recipient]}


@dataclass(frozen=True, slots=True)
class Jws:
    """A signed layer of v2, not verified yet."""

    payload: str
    protected: str
    signature: str
    alg: str
    kid: str


def read(data: bytes, max_bytes: int) -> V1Envelope | Jwe:
    """Read an envelope; :class:`MessageTooLargeError` above ``max_bytes``, else :class:`EnvelopeError`."""
    if len(data) > max_bytes:
        raise MessageTooLargeError(len(data), max_bytes)
    fields = read_object(data)
    if "ciphertext" not in fields:
        raise EnvelopeError(_NOT_ENCRYPTED)
    header = _protected(fields)
    return _read_v1(fields, header) if header.get("enc") == V1_CIPHER else _read_jwe(fields, header)


def envelope_digest(envelope: V1Envelope | Jwe) -> bytes:
    """Identify an envelope by its protected header, which is authenticated and holds a new key each time."""
    return hashlib.blake2b(envelope.fields["protected"].encode(), digest_size=16).digest()


def read_layer(payload: bytes) -> Jwe | Jws | dict[str, Any]:
    """Read the content of a v2 layer: another layer, or the plaintext."""
    fields = read_object(payload)
    if "ciphertext" in fields:
        return _read_jwe(fields, _protected(fields))
    if "signatures" in fields:
        return _read_jws(fields)
    return fields


def read_jwt(text: str) -> tuple[Jws, dict[str, Any]]:
    """Read a JWT (RFC 7519) in its compact form, not verified yet, and its claims."""
    parts = dict(zip(("protected", "payload", "signature"), text.split(".", 2), strict=False))
    _texts(parts, "protected", "payload", "signature")
    header = _protected(parts)
    if "b64" in header or header.get("alg") not in SIGNERS.values():
        raise EnvelopeError(f"expected alg {' or '.join(sorted(SIGNERS.values()))}")
    return Jws(**parts, alg=header["alg"], kid=_kid(header.get("kid"))), read_object(decode(parts, "payload"))


def read_object(data: bytes) -> dict[str, Any]:
    """Read a JSON object of bounded depth and number of values."""
    if len(data) > MAX_VALUES and sum(map(data.count, (b"{", b"[", b","))) > MAX_VALUES:
        raise EnvelopeError(f"expected JSON of at most {MAX_VALUES} values")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise EnvelopeError("expected JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise EnvelopeError("expected a JSON object")
    # Counting is much faster than walking, and few objects have so many brackets. Few brackets are counted fastest by
    # what is left without them: `count` compares each byte, `replace` skips to the next one.
    brackets = 2 * len(data) - len(data.replace(b"{", b"")) - len(data.replace(b"[", b""))
    if brackets > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise EnvelopeError(f"expected JSON of at most {MAX_DEPTH} levels")
    return value


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = [item for item in below if isinstance(item, dict | list)]
    return depth


def _texts(fields: Mapping[str, Any], *names: str) -> dict[str, str]:
    """Return fields that must be there, and be base64url."""
    texts: dict[str, str] = {}
    for name in names:
        value = fields.get(name)
        if value is None:
            raise EnvelopeError(f"{name} is missing")
        if not isinstance(value, str) or _BASE64.fullmatch(value) is None:
            raise EnvelopeError(f"expected base64url in {name}")
        texts[name] = value
    return texts


def decode(fields: Mapping[str, Any], name: str) -> bytes:
    """Return what a field has in base64url, padded or not; :class:`EnvelopeError` names one that has not."""
    text = fields.get(name)
    if text is None:
        raise EnvelopeError(f"{name} is missing")
    bare = text.rstrip("=") if isinstance(text, str) else ""
    if not bare or len(text) > len(bare) + 2:
        raise EnvelopeError(f"expected base64url in {name}")
    if len(text) > MAX_PROTECTED and name == "protected":
        raise EnvelopeError(f"expected a protected header of at most {MAX_PROTECTED} characters")
    try:
        standard = bare.encode("ascii").translate(_STANDARD) + b"=" * (-len(bare) % 4)
        return binascii.a2b_base64(standard, strict_mode=True)
    except ValueError:
        raise EnvelopeError(f"expected base64url in {name}") from None


def _protected(fields: Mapping[str, Any]) -> dict[str, Any]:
    header = read_object(decode(fields, "protected"))
    # Decompression makes much out of little; nothing of DIDComm uses either of the two.
    if "zip" in header or "crit" in header:
        raise EnvelopeError("zip and crit are not accepted")
    return header


def _list_of_objects(value: object, max_items: int) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or len(value) > max_items:
        raise EnvelopeError(f"expected 1 to {max_items} recipients")
    for item in value:
        if not isinstance(item, dict) or not isinstance(item.get("header"), dict):
            raise EnvelopeError("expected recipients with a header")
    return value


def _read_v1(fields: Mapping[str, Any], header: Mapping[str, Any]) -> V1Envelope:
    if header.get("alg") not in ("Authcrypt", "Anoncrypt"):
        raise EnvelopeError("expected Authcrypt or Anoncrypt")
    authenticated = header["alg"] == "Authcrypt"
    recipients = _list_of_objects(header.get("recipients"), MAX_V1_RECIPIENTS)
    for recipient in recipients:
        own = recipient["header"]
        _texts(recipient, "encrypted_key")
        if not isinstance(own.get("kid"), str):
            raise EnvelopeError("expected a kid for each recipient")
        # The library decides by these two fields alone, so they must agree with alg.
        for name in ("sender", "iv"):
            if authenticated:
                _texts(own, name)
            elif own.get(name) is not None:
                raise EnvelopeError(f"expected no {name} in an Anoncrypt envelope")
    iv, ciphertext, tag = decode(fields, "iv"), decode(fields, "ciphertext"), decode(fields, "tag")
    return V1Envelope(fields, authenticated, recipients, iv, ciphertext, tag)


def _read_jwe(fields: Mapping[str, Any], header: Mapping[str, Any]) -> Jwe:
    alg = header.get("alg")
    if not isinstance(alg, str) or alg not in CIPHERS:
        raise EnvelopeError(f"expected alg {ANONCRYPT} or {AUTHCRYPT}")
    if not isinstance(header.get("enc"), str) or header["enc"] not in CIPHERS[alg]:
        raise EnvelopeError(f"expected enc {' or '.join(sorted(CIPHERS[alg]))}")
    recipients: dict[str, bytes] = {}
    for recipient in _list_of_objects(fields.get("recipients"), MAX_V2_RECIPIENTS):
        recipients[_kid(recipient["header"].get("kid"))] = decode(recipient, "encrypted_key")
    if len(recipients) != len(fields["recipients"]):
        raise EnvelopeError("expected each recipient once")
    kids = tuple(sorted(recipients))
    expected = apv_of if sum(map(len, kids)) <= _MAX_CACHED else apv_of.__wrapped__
    apv = decode(header, "apv")
    if apv != expected(kids):
        raise EnvelopeError("apv is not that of the recipients")
    apu = decode(header, "apu") if alg == AUTHCRYPT or header.get("apu") else b""
    if "aad" in fields:
        _texts(fields, "aad")
    iv, ciphertext, tag = decode(fields, "iv"), decode(fields, "ciphertext"), decode(fields, "tag")
    epks: dict[str, Any] = {}
    if alg == ANONCRYPT and "epk" not in header:
        # didcomm-messaging writes it there on Askar. One that was changed opens nothing, as a changed content key does.
        epks = {recipient["header"]["kid"]: recipient["header"].get("epk") for recipient in fields["recipients"]}
    curves = {_curve(epk) for epk in epks.values()} or {_curve(header.get("epk"))}
    if len(curves) != 1:
        raise EnvelopeError("expected an epk on one curve for all recipients")
    sender_kid = _sender(header, apu) if alg == AUTHCRYPT else None
    return Jwe(fields, header, recipients, apu, apv, iv, ciphertext, tag, curves.pop(), sender_kid, epks)


@lru_cache(maxsize=1024)
def apv_of(kids: tuple[str, ...]) -> bytes:
    """Return the ``apv`` of sorted key ids (DIDComm v2 §ecdh-1pu-key-wrapping-and-common-protected-headers)."""
    return hashlib.sha256(".".join(kids).encode()).digest()


def _curve(epk: object) -> str:
    """Return the curve of the ephemeral key. The library checks that the point is on it."""
    if not isinstance(epk, dict):
        raise EnvelopeError("expected epk in the protected header")
    match epk.get("kty"), epk.get("crv"):
        case "OKP", "X25519":
            coordinates = ["x"]
        case "EC", "P-256" | "P-384":
            coordinates = ["x", "y"]
        case _:
            raise EnvelopeError("expected an epk on X25519, P-256 or P-384")
    if "d" in epk:
        raise EnvelopeError("expected a public epk")
    if max(map(len, _texts(epk, *coordinates).values())) > 128:
        raise EnvelopeError("expected an epk of the size of its curve")
    return str(epk["crv"])


def _sender(header: Mapping[str, Any], apu: bytes) -> str:
    try:
        by_apu = apu.decode()
    except UnicodeDecodeError:
        raise EnvelopeError("expected a key id in apu") from None
    if "skid" in header and header["skid"] != by_apu:
        raise EnvelopeError("skid and apu differ")
    return _kid(by_apu)


def _kid(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_KID:
        raise EnvelopeError("expected a key id")
    did, _, fragment = value.partition("#")
    if not did.startswith("did:") or not fragment:
        raise EnvelopeError("expected a DID URL as key id")
    return value


def _read_jws(fields: Mapping[str, Any]) -> Jws:
    signatures = fields["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1 or not isinstance(signatures[0], dict):
        raise EnvelopeError("expected one signature")
    header = _protected(signatures[0])
    own = signatures[0].get("header")
    # didcomm.org puts kid beside the protected header; a protected one takes precedence.
    kid = header["kid"] if "kid" in header else own.get("kid") if isinstance(own, dict) else None
    if "b64" in header or header.get("alg") not in SIGNERS.values():
        raise EnvelopeError(f"expected alg {' or '.join(sorted(SIGNERS.values()))}")
    texts = _texts(fields, "payload") | _texts(signatures[0], "protected", "signature")
    return Jws(**texts, alg=header["alg"], kid=_kid(kid))
