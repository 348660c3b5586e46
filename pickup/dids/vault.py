"""Encrypts the private keys in the database, with a key that is not in the database."""

import base64
import binascii
import os
from codecs import BOM_UTF8
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mediator.errors import SetupError
from mediator.system.private_files import make_secret

KEY_BYTES = 32
KEY_FILE = "didcomm.key"
_NONCE_BYTES = 12
_FORM = b"\x01"
"""The version byte of sealed secrets, also their associated data."""


class Vault:
    """Seals secrets with AES-256-GCM."""

    def __init__(self, key: bytes) -> None:
        """``key`` is 32 bytes."""
        self._cipher = AESGCM(key)

    @classmethod
    def load(cls, key: bytes | None, data_dir: Path) -> "Vault":
        """Take the key from the configuration, or from ``data_dir/didcomm.key``, which the first start makes.

        Raises :class:`SetupError` when others may read the file, or it holds no valid key.
        """
        return cls(_from_file(data_dir / KEY_FILE) if key is None else key)

    def seal(self, secret: bytes) -> bytes:
        """Encrypt a secret with a random nonce."""
        nonce = os.urandom(_NONCE_BYTES)
        return _FORM + nonce + self._cipher.encrypt(nonce, secret, _FORM)

    def open(self, sealed: bytes) -> bytes:
        """Decrypt a secret; :class:`SetupError` when it was sealed with another key."""
        form, nonce, rest = sealed[:1], sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        try:
            if form == _FORM:
                return self._cipher.decrypt(nonce, rest, _FORM)
        except (InvalidTag, ValueError):
            pass
        raise SetupError(
            "didcomm.key: cannot decrypt the private keys in the database; set the key, or restore the file "
            f"{KEY_FILE}, that was in use when the database was first started"
        )


def _from_file(path: Path) -> bytes:
    try:
        if not path.exists():
            make_secret(path, base64.b64encode(os.urandom(KEY_BYTES)) + b"\n")
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            text = file.read(1024).removeprefix(BOM_UTF8)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror or error}") from error
    if mode & 0o077:
        raise SetupError(f"{path}: expected mode 600, got {mode:o}; others may have read the key")
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise SetupError(f"{path}: expected {KEY_BYTES} bytes in base64")
    return key
