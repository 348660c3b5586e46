"""The usual suites of DIDComm v2, composed on ``cryptography`` and libsodium: JWE in half of the JOSE library's time.

RFC 7516 with ``ECDH-ES+A256KW`` (RFC 7518 §4.6) and ``ECDH-1PU+A256KW`` (draft-madden-jose-ecdh-1pu-04) on X25519 and
P-256, content encrypted by ``A256CBC-HS512``, ``A256GCM`` (RFC 7518 §5) or ``XC20P`` (draft-amringer-jose-chacha-02).
No primitive is written here. Headers were checked before, by :mod:`pickup.envelope.reading`: that ``enc`` is one for
``alg``, that ``apv`` and ``apu`` name recipients and sender, and that ``epk`` is a public key.
"""

import hmac
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import nacl.bindings
import nacl.exceptions
import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from cryptography.hazmat.primitives.kdf.concatkdf import ConcatKDFHash
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap
from cryptography.hazmat.primitives.padding import PKCS7

from mediator.errors import EnvelopeError
from pickup import base64url
from pickup.dids.document import PublicKey, Secret
from pickup.dids.material import P256, X25519
from pickup.envelope.reading import Jwe
from pickup.envelope.v2 import JoseLibrary, protected_header
from pickup.message import encode

CBC_HMAC, GCM, XCHACHA = "A256CBC-HS512", "A256GCM", "XC20P"
SIZES = {CBC_HMAC: (64, 16, 32), GCM: (32, 12, 16), XCHACHA: (32, 24, 16)}
"""Bytes of the content key, the initialization vector and the tag."""
MAX_KEYS = 4096
"""Keys of others, ready to be used, that are remembered, and secrets that a key of theirs shares with one of ours."""
_KEY_BITS = (256).to_bytes(4)
_COORDINATE = 32
"""Bytes of a coordinate on P-256."""
_P256 = ec.SECP256R1()


class CryptographyLibrary(JoseLibrary):
    """Does the usual suites itself, and leaves everything else to the JOSE library."""

    async def decrypt(self, jwe: Jwe, recipient: Secret, sender: PublicKey | None) -> bytes:
        """Open a layer; :class:`EnvelopeError` when it was damaged, or not sealed for this key by this sender."""
        if jwe.curve not in (X25519, P256) or jwe.epks:
            return await super().decrypt(jwe, recipient, sender)
        try:
            enc = jwe.header["enc"]
            key_size, iv_size, tag_size = SIZES[enc]
            if len(jwe.iv) != iv_size or len(jwe.tag) != tag_size:
                raise ValueError(f"expected {iv_size} bytes in iv and {tag_size} in tag")
            private = _private(recipient.curve, recipient.jwk["d"])
            epk = jwe.header["epk"]
            secret = _agree(jwe.curve, private, _read_public(jwe.curve, epk["x"], epk.get("y")))
            if sender is not None:
                secret += _agree_for_long(jwe.curve, recipient.jwk["d"], sender.jwk["x"], sender.jwk.get("y"))
            wrapping = _wrapping_key(jwe.header["alg"], jwe.apu, jwe.apv, secret, b"" if sender is None else jwe.tag)
            content_key = aes_key_unwrap(wrapping, jwe.recipients[recipient.kid])
            if len(content_key) != key_size:
                raise ValueError(f"expected a content key of {key_size} bytes")
            aad = jwe.fields["protected"]
            if "aad" in jwe.fields:
                aad = f"{aad}.{jwe.fields['aad']}"
            return _open(enc, content_key, jwe, aad.encode())
        except (ValueError, InvalidTag, InvalidUnwrap, nacl.exceptions.CryptoError) as error:
            raise EnvelopeError("damaged, or sealed for another key") from error

    async def encrypt(self, message: Mapping[str, Any], to: Sequence[PublicKey], sender: Secret | None) -> bytes:
        """Seal for keys of one curve."""
        curve = to[0].curve
        if curve not in (X25519, P256):
            return await super().encrypt(message, to, sender)
        ephemeral: Any = X25519PrivateKey.generate() if curve == X25519 else ec.generate_private_key(_P256)
        header = {**protected_header(to, sender), "epk": _jwk_of(curve, ephemeral.public_key())}
        protected = base64url.encode(orjson.dumps(header))
        content_key, iv = os.urandom(64), os.urandom(16)
        padder = PKCS7(128).padder()
        encryptor = Cipher(AES(content_key[32:]), CBC(iv)).encryptor()
        ciphertext = encryptor.update(padder.update(encode(message)) + padder.finalize()) + encryptor.finalize()
        tag = _mac(content_key, protected.encode(), iv, ciphertext)
        apu, apv = b"" if sender is None else sender.kid.encode(), base64url.decode(header["apv"])
        recipients = []
        for key in to:
            theirs = key.jwk["x"], key.jwk.get("y")
            secret = _agree(curve, ephemeral, _public(curve, *theirs))
            if sender is not None:
                secret += _agree_for_long(curve, sender.jwk["d"], *theirs)
            wrapping = _wrapping_key(header["alg"], apu, apv, secret, b"" if sender is None else tag)
            wrapped = base64url.encode(aes_key_wrap(wrapping, content_key))
            recipients.append({"header": {"kid": key.kid}, "encrypted_key": wrapped})
        sealed = {"iv": iv, "ciphertext": ciphertext, "tag": tag}
        fields = {name: base64url.encode(value) for name, value in sealed.items()}
        return orjson.dumps({"protected": protected, "recipients": recipients, **fields})


def _open(enc: str, key: bytes, jwe: Jwe, aad: bytes) -> bytes:
    """Check and decrypt the content."""
    if enc == CBC_HMAC:
        if not hmac.compare_digest(_mac(key, aad, jwe.iv, jwe.ciphertext), jwe.tag):
            raise InvalidTag
        decryptor, unpadder = Cipher(AES(key[32:]), CBC(jwe.iv)).decryptor(), PKCS7(128).unpadder()
        return unpadder.update(decryptor.update(jwe.ciphertext) + decryptor.finalize()) + unpadder.finalize()
    if enc == GCM:
        return AESGCM(key).decrypt(jwe.iv, jwe.ciphertext + jwe.tag, aad)
    return nacl.bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(jwe.ciphertext + jwe.tag, aad, jwe.iv, key)


def _mac(key: bytes, aad: bytes, iv: bytes, ciphertext: bytes) -> bytes:
    """Return the tag of AES_256_CBC_HMAC_SHA_512 (RFC 7518 §5.2.5)."""
    return hmac.digest(key[:32], aad + iv + ciphertext + (len(aad) * 8).to_bytes(8), "sha512")[:32]


def _wrapping_key(alg: str, apu: bytes, apv: bytes, secret: bytes, tag: bytes) -> bytes:
    """Derive the key that wraps the content key (RFC 7518 §4.6.2); ``tag`` is that of authcrypt (draft §2.3)."""
    parts = b"".join(len(part).to_bytes(4) + part for part in (alg.encode(), apu, apv))
    tagged = len(tag).to_bytes(4) + tag if tag else b""
    return ConcatKDFHash(hashes.SHA256(), 32, parts + _KEY_BITS + tagged).derive(secret)


def _agree(curve: str, private: Any, public: Any) -> bytes:
    """Return the secret that two keys of a curve share; ValueError for a key that makes any secret the same."""
    secret: bytes = private.exchange(public) if curve == X25519 else private.exchange(ec.ECDH(), public)
    return secret


@lru_cache(MAX_KEYS)
def _agree_for_long(curve: str, d: str, x: str, y: str | None) -> bytes:
    """Return the secret that a key of ours shares with one in a document, which is the same for all messages."""
    return _agree(curve, _private(curve, d), _public(curve, x, y))


@lru_cache(MAX_KEYS)
def _private(curve: str, d: str) -> Any:
    if curve == X25519:
        return X25519PrivateKey.from_private_bytes(base64url.decode(d))
    return ec.derive_private_key(int.from_bytes(base64url.decode(d)), _P256)


def _read_public(curve: str, x: str, y: str | None) -> Any:
    """Read a public key; ValueError for one that is not on its curve."""
    if curve == X25519:
        return X25519PublicKey.from_public_bytes(base64url.decode(x))
    # As numbers, since some write coordinates without their leading zeros, or with one more.
    across, up = (int.from_bytes(base64url.decode(part)) for part in (x, y or ""))
    return ec.EllipticCurvePublicNumbers(across, up, _P256).public_key()


_public = lru_cache(MAX_KEYS)(_read_public)


def _jwk_of(curve: str, public: Any) -> dict[str, str]:
    """Write a public key, coordinates in the length of their curve (RFC 7518 §6.2.1.2)."""
    if curve == X25519:
        return {"kty": "OKP", "crv": X25519, "x": base64url.encode(public.public_bytes_raw())}
    numbers = public.public_numbers()
    x, y = (base64url.encode(number.to_bytes(_COORDINATE)) for number in (numbers.x, numbers.y))
    return {"kty": "EC", "crv": P256, "x": x, "y": y}
