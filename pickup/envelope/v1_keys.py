"""The v1 library, which remembers what it derives from keys; the only module that imports it.

By itself it converts the same public keys and agrees on the same secrets again for each message, which takes more
than half of its time. :data:`crypto` sees PyNaCl through a namespace in which these are cached.
"""

from functools import lru_cache
from types import SimpleNamespace

import nacl.bindings
import nacl.exceptions
import nacl.utils
from didcomm_messaging.legacy import crypto

__all__ = ["crypto"]

MAX_KEYS = 16_384
"""Public keys whose forms are remembered."""
MAX_PEERS = 4096
"""Pairs of a public key and one of ours whose secret is remembered; our own keys are in memory too."""

_agree = lru_cache(MAX_PEERS)(nacl.bindings.crypto_box_beforenm)


def _box(message: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
    return nacl.bindings.crypto_box_afternm(message, nonce, _agree(public, secret))


def _box_open(sealed: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
    return nacl.bindings.crypto_box_open_afternm(sealed, nonce, _agree(public, secret))


_cached = {
    "crypto_sign_ed25519_pk_to_curve25519": lru_cache(MAX_KEYS)(nacl.bindings.crypto_sign_ed25519_pk_to_curve25519),
    "crypto_box": _box,
    "crypto_box_open": _box_open,
}
crypto.nacl = SimpleNamespace(
    bindings=SimpleNamespace(**{**vars(nacl.bindings), **_cached}), exceptions=nacl.exceptions, utils=nacl.utils
)
crypto.bytes_to_b58 = lru_cache(MAX_KEYS)(crypto.bytes_to_b58)
crypto.b58_to_bytes = lru_cache(MAX_KEYS)(crypto.b58_to_bytes)
