"""Envelopes by Askar, the Rust library below ACA-Py and Credo: what ours are held against.

v1 is put together from its primitives as RFC 0019 says; of v2 one recipient on any curve.
"""

import json
from collections.abc import Sequence
from typing import Any

from aries_askar import Key, KeyAlg, crypto_box
from aries_askar.ecdh import Ecdh1PU, EcdhEs

from pickup.rules.names import base58, unbase58
from tests.harness.people import apv_of, b64, unb64


def seal_v1(
    message: bytes, to: Sequence[bytes], seed: bytes | None, *, padded: bool = True, after_sender: str = ""
) -> bytes:
    """Seal for raw Ed25519 keys, from the key of a seed, or anonymously; ``after_sender`` follows the sender's name."""
    cek = Key.generate(KeyAlg.C20P)
    encode = _padded if padded else b64
    recipients = []
    for verkey in to:
        target = Key.from_public_bytes(KeyAlg.ED25519, verkey).convert_key(KeyAlg.X25519)
        if seed is None:
            encrypted, header = crypto_box.crypto_box_seal(target, cek.get_secret_bytes()), {"kid": base58(verkey)}
        else:
            own = Key.from_secret_bytes(KeyAlg.ED25519, seed)
            nonce = crypto_box.random_nonce()
            encrypted = crypto_box.crypto_box(target, own.convert_key(KeyAlg.X25519), cek.get_secret_bytes(), nonce)
            sender = crypto_box.crypto_box_seal(target, base58(own.get_public_bytes()) + after_sender)
            header = {"kid": base58(verkey), "sender": encode(sender), "iv": encode(nonce)}
        recipients.append({"encrypted_key": encode(encrypted), "header": header})
    alg = "Anoncrypt" if seed is None else "Authcrypt"
    outer = {"enc": "xchacha20poly1305_ietf", "typ": "JWM/1.0", "alg": alg, "recipients": recipients}
    protected = encode(json.dumps(outer).encode())
    sealed = cek.aead_encrypt(message, aad=protected.encode())
    ciphertext, tag, nonce = sealed.parts
    fields = {
        "protected": protected,
        "iv": encode(nonce),
        "ciphertext": encode(ciphertext),
        "tag": encode(tag),
    }
    return json.dumps(fields).encode()


def open_v1(envelope: bytes, seed: bytes) -> tuple[bytes, bytes | None]:
    """Return the plaintext, and the sender's raw key when there is one."""
    fields = json.loads(envelope)
    outer = json.loads(unb64(fields["protected"]))
    own = Key.from_secret_bytes(KeyAlg.ED25519, seed)
    mine = next(item for item in outer["recipients"] if item["header"]["kid"] == base58(own.get_public_bytes()))
    exchange = own.convert_key(KeyAlg.X25519)
    encrypted, sender = unb64(mine["encrypted_key"]), None
    if outer["alg"] == "Anoncrypt":
        secret = crypto_box.crypto_box_seal_open(exchange, encrypted)
    else:
        sender = unbase58(crypto_box.crypto_box_seal_open(exchange, unb64(mine["header"]["sender"])).decode())
        theirs = Key.from_public_bytes(KeyAlg.ED25519, sender).convert_key(KeyAlg.X25519)
        secret = crypto_box.crypto_box_open(exchange, theirs, encrypted, unb64(mine["header"]["iv"]))
    plaintext = Key.from_secret_bytes(KeyAlg.C20P, secret).aead_decrypt(
        unb64(fields["ciphertext"]),
        nonce=unb64(fields["iv"]),
        tag=unb64(fields["tag"]),
        aad=fields["protected"].encode(),
    )
    return plaintext, sender


_CIPHERS = {"A256CBC-HS512": KeyAlg.A256CBC_HS512, "A256GCM": KeyAlg.A256GCM, "XC20P": KeyAlg.XC20P}


def seal_v2(
    message: bytes,
    kid: str,
    to: dict[str, str],
    sender_kid: str | None = None,
    sender: dict[str, str] | None = None,
    enc: str = "A256CBC-HS512",
) -> bytes:
    """Seal for one public JWK, from a private one, or anonymously."""
    receiver = Key.from_jwk(to)
    ephemeral = Key.generate(receiver.algorithm)
    epk = json.loads(ephemeral.get_jwk_public())
    apu, apv = (sender_kid or "").encode(), unb64(apv_of([kid]))
    protected: dict[str, Any] = {"enc": enc, "apv": b64(apv), "epk": epk}
    cek = Key.generate(_CIPHERS[enc])
    if sender_kid is None:
        protected["alg"] = "ECDH-ES+A256KW"
    else:
        protected |= {"alg": "ECDH-1PU+A256KW", "apu": b64(apu), "skid": sender_kid}
    aad = b64(protected)
    ciphertext, tag, nonce = cek.aead_encrypt(message, aad=aad.encode()).parts
    if sender is None:
        wrapped = EcdhEs("ECDH-ES+A256KW", apu, apv).sender_wrap_key(KeyAlg.A256KW, ephemeral, receiver, cek)
    else:
        wrapped = Ecdh1PU("ECDH-1PU+A256KW", apu, apv).sender_wrap_key(
            KeyAlg.A256KW, ephemeral, sender, receiver, cek, cc_tag=tag
        )
    fields = {
        "protected": aad,
        "recipients": [{"header": {"kid": kid}, "encrypted_key": b64(wrapped.ciphertext)}],
        "iv": b64(nonce),
        "ciphertext": b64(ciphertext),
        "tag": b64(tag),
    }
    return json.dumps(fields).encode()


def open_v2(envelope: bytes, kid: str, own: dict[str, str], sender: dict[str, str] | None = None) -> bytes:
    """Open by a private JWK, with the public one of the sender unless it is anonymous."""
    fields = json.loads(envelope)
    protected = json.loads(unb64(fields["protected"]))
    wrapped = next(unb64(item["encrypted_key"]) for item in fields["recipients"] if item["header"]["kid"] == kid)
    ephemeral, receiver, tag = Key.from_jwk(protected["epk"]), Key.from_jwk(own), unb64(fields["tag"])
    apu, apv = unb64(protected.get("apu", "")), unb64(protected["apv"])
    if sender is None:
        cek = EcdhEs(protected["alg"], apu, apv).receiver_unwrap_key(
            KeyAlg.A256KW, KeyAlg.A256CBC_HS512, ephemeral, receiver, wrapped
        )
    else:
        cek = Ecdh1PU(protected["alg"], apu, apv).receiver_unwrap_key(
            KeyAlg.A256KW, KeyAlg.A256CBC_HS512, ephemeral, sender, receiver, wrapped, cc_tag=tag
        )
    return cek.aead_decrypt(
        unb64(fields["ciphertext"]), nonce=unb64(fields["iv"]), tag=tag, aad=fields["protected"].encode()
    )


def _padded(raw: bytes) -> str:
    text = b64(raw)
    return text + "=" * (-len(text) % 4)
