"""Canonical names: the one form in which keys and DIDs are compared (D3).

Peers write the same key as raw base58 or as a ``did:key`` with or without fragment, and the same ``did:peer:4`` in its
long or its short form.
"""

import re
from functools import lru_cache

MAX_NAME = 8192
"""Characters of the longest name that is read."""
MAX_CANONICAL = 2048
"""Characters of the longest canonical name: names are indexed, and PostgreSQL's indexes end at 2700 bytes."""
KEY_BYTES = 32

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {character: digit for digit, character in enumerate(_ALPHABET)}
_DID = re.compile(r"(did:[a-z0-9]+:[A-Za-z0-9._:%-]+)(?:[#?/;].*)?", re.DOTALL)
_ED25519 = "did:key:z6Mk"
_KEY_PREFIX = "did:key:z"
_CODE = b"\xed\x01"
"""The multicodec of an Ed25519 public key."""
_BASE58_KEY = range(32, 45)
"""Lengths that 32 bytes may have in base58."""
_CODED_LENGTH = 47
"""Characters of base58 for the code and 32 bytes."""
_MAX_CACHED = 512
"""Longer names are not cached: they are rare, and many would fill the memory. A did:peer:2 has some 300 characters."""


def canonical(text: str) -> str | None:
    """Return the form in which a key or DID is compared, None when ``text`` is neither (D3).

    A base58 Ed25519 key and its ``did:key`` become ``did:key:z6Mk…``, a ``did:peer:4`` its short form; other DID
    URLs lose fragment, query, path and parameters.
    """
    if len(text) <= _MAX_CACHED:
        return _cached(text)
    return _canonical(text) if len(text) <= MAX_NAME else None


@lru_cache(maxsize=8192)
def _cached(text: str) -> str | None:
    return _canonical(text)


def _canonical(text: str) -> str | None:
    if not text.startswith("did:"):
        raw = _key(text)
        return None if raw is None else from_verkey(raw)
    match = _DID.fullmatch(text)
    if match is None:
        return None
    did = match[1]
    if did.startswith(_ED25519):
        return did if _coded(did) is not None else None
    if did.startswith("did:peer:4"):
        did = ":".join(did.split(":", 3)[:3])
    return did if len(did) <= MAX_CANONICAL else None


def _key(text: str) -> bytes | None:
    if len(text) not in _BASE58_KEY:
        return None
    try:
        raw = unbase58(text)
    except ValueError:
        return None
    return raw if len(raw) == KEY_BYTES else None


def _coded(did: str) -> bytes | None:
    """Return the key inside an Ed25519 did:key."""
    encoded = did[len(_KEY_PREFIX) :]
    if len(encoded) != _CODED_LENGTH:
        return None
    try:
        raw = unbase58(encoded)
    except ValueError:
        return None
    return raw[2:] if len(raw) == KEY_BYTES + 2 and raw.startswith(_CODE) else None


def is_ed25519(key: str) -> bool:
    """Whether a canonical name is an Ed25519 key, which v1 writes in base58."""
    return key.startswith(_ED25519)


@lru_cache(maxsize=4096)
def verkey(key: str) -> bytes:
    """Return the 32 bytes of a canonical Ed25519 key; :class:`ValueError` for any other name."""
    raw = _coded(key) if is_ed25519(key) else None
    if raw is None:
        raise ValueError("expected an Ed25519 did:key")
    return raw


def from_verkey(raw: bytes) -> str:
    """Return the canonical name of an Ed25519 public key; :class:`ValueError` unless it has 32 bytes."""
    if len(raw) != KEY_BYTES:
        raise ValueError(f"expected {KEY_BYTES} bytes, got {len(raw)}")
    return _KEY_PREFIX + base58(_CODE + raw)


def base58(raw: bytes) -> str:
    """Write bytes in base58 with Bitcoin's alphabet."""
    number = int.from_bytes(raw, "big")
    characters = []
    while number:
        number, digit = divmod(number, 58)
        characters.append(_ALPHABET[digit])
    zeros = len(raw) - len(raw.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(characters))


def unbase58(text: str) -> bytes:
    """Read base58; :class:`ValueError` when it is none, or longer than a name may be."""
    if len(text) > MAX_NAME:
        raise ValueError(f"expected at most {MAX_NAME} characters, got {len(text)}")
    number = 0
    try:
        for character in text:
            number = number * 58 + _DIGITS[character]
    except KeyError:
        raise ValueError("expected base58") from None
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
