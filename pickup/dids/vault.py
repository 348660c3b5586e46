"""The vault: encrypts the private keys that the store keeps, with a key that the store does not have."""

from pathlib import Path

KEY_BYTES = 32


class Vault:
    """Seals secrets with AES-GCM."""

    def __init__(self, key: bytes) -> None:
        """``key`` is 32 bytes."""
        raise NotImplementedError

    @classmethod
    def load(cls, key: bytes | None, data_dir: Path) -> "Vault":
        """Take the key from the configuration, or from ``data_dir/didcomm.key``, which is made at the first start.

        Raises :class:`SetupError` when the file is readable for others, or not such a key.
        """
        raise NotImplementedError

    def seal(self, secret: bytes) -> bytes:
        """Encrypt a secret."""
        raise NotImplementedError

    def open(self, sealed: bytes) -> bytes:
        """Decrypt; :class:`SetupError` when this is not the key it was sealed with."""
        raise NotImplementedError
