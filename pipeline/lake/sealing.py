"""Encrypts payloads and headers in the lake with AES-256-GCM, with keys from a file of the operator.

A sealed value is a random 12-byte nonce followed by the ciphertext with its tag. The message and the column are
authenticated with it, so values cannot be swapped. Keys reach Spark's tasks inside the serialized function only, never
in an option, a plan, a log or a table.
"""

import base64
import binascii
import os
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mediator.errors import DamagedError, SetupError

KEY_BYTES = 32
MAX_KEYS = 1000
_MAX_FILE = 64 * MAX_KEYS
_NONCE_BYTES = 12


@dataclass(frozen=True, slots=True)
class Key:
    """A key, with the id by which rows name it."""

    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """The first 8 hexadecimal digits of its SHA-256."""
        return sha256(self.secret).hexdigest()[:8]


def read_keys(path: Path) -> list[Key]:
    """Read a key file, one base64 key a line; the first seals, all open.

    Raises :class:`SetupError` when the file cannot be read, other users may read it, or a line is not a key.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            text = file.read(_MAX_FILE + 1).removeprefix(BOM_UTF8)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror or error}") from error
    if mode & 0o077:
        raise SetupError(f"{path}: expected mode 600, got {mode:o}; other users may have read the keys")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(text) > _MAX_FILE or not 1 <= len(lines) <= MAX_KEYS:
        raise SetupError(f"{path}: expected 1 to {MAX_KEYS} keys, one a line")
    return [Key(_decoded(line, f"{path}, line {number}")) for number, line in lines]


def _decoded(line: bytes, where: str) -> bytes:
    try:
        secret = base64.b64decode(line, validate=True)
    except binascii.Error:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise SetupError(f"{where}: expected {KEY_BYTES} bytes in base64")
    return secret


class Sealer:
    """Seals with one key. Made in the task that uses it."""

    def __init__(self, key: Key) -> None:
        self._cipher = AESGCM(key.secret)

    def seal(self, data: bytes, column: str, mailbox_no: int, msg_id: int) -> bytes:
        """Return ``data`` sealed as the value of a column of a message."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, _bound(column, mailbox_no, msg_id))


class Opener:
    """Opens values sealed with any of several keys. Made in the task that uses it."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._ciphers: Mapping[str, AESGCM] = {key.id: AESGCM(key.secret) for key in keys}

    def open(self, key_id: str, sealed: bytes, column: str, mailbox_no: int, msg_id: int) -> bytes:
        """Return the plain value.

        Raises :class:`SetupError` when the key is missing, and :class:`DamagedError` when the value was changed.
        """
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise unknown_key(key_id)
        try:
            return cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _bound(column, mailbox_no, msg_id))
        except (InvalidTag, ValueError):
            raise DamagedError(
                f"archive: {column} of message {mailbox_no}.{msg_id} was changed since key {key_id} sealed it"
            ) from None


def unknown_key(key_id: str) -> SetupError:
    """Return the error for a missing key."""
    return SetupError(f"archive: messages are sealed with key {key_id}, which is not in the key file")


def _bound(column: str, mailbox_no: int, msg_id: int) -> bytes:
    return f"{column} {mailbox_no}.{msg_id}".encode()
