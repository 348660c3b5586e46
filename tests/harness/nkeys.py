"""Keys and tokens of NATS's own kind, made for tests: nkeys, and the JWTs of operators, accounts and users."""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from nacl.signing import SigningKey

PREFIXES = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
SEED = 18 << 3


def _crc(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc


def _unpadded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass
class Key:
    """A key pair of an operator, an account or a user."""

    kind: str
    key: SigningKey = field(default_factory=SigningKey.generate)

    @property
    def public(self) -> str:
        raw = bytes([PREFIXES[self.kind]]) + bytes(self.key.verify_key)
        return base64.b32encode(raw + _crc(raw).to_bytes(2, "little")).rstrip(b"=").decode()

    @property
    def seed(self) -> str:
        """The private key as files of nkeys hold it."""
        prefix = PREFIXES[self.kind]
        raw = bytes([SEED | prefix >> 5, (prefix & 31) << 3]) + bytes(self.key)
        return base64.b32encode(raw + _crc(raw).to_bytes(2, "little")).rstrip(b"=").decode()

    def sign(self, nonce: str) -> str:
        return _unpadded(self.key.sign(nonce.encode()).signature)

    def vouch(self, other: "Key", name: str, **claims: Any) -> str:
        """Make a JWT about a key."""
        body = {
            "iat": 1_700_000_000,
            "iss": self.public,
            "name": name,
            "sub": other.public,
            "nats": {"type": other.kind, "version": 2, **claims},
        }
        body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
        head = _unpadded(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
        signed = f"{head}.{_unpadded(json.dumps(body).encode())}"
        return f"{signed}.{_unpadded(self.key.sign(signed.encode()).signature)}"


def credentials(token: str, user: Key) -> str:
    """Return the text of a credentials file for a user and its JWT."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
