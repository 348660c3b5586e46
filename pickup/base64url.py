"""Base64url without padding, as DIDComm writes it; peers also write the standard alphabet and padding."""

import base64
import binascii

_STANDARD = bytes.maketrans(b"-_", b"+/")


def encode(raw: bytes) -> str:
    """Write without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode(text: str) -> bytes:
    """Read either alphabet, padded or not; :class:`ValueError` for anything else."""
    bare = text.rstrip("=").encode("ascii")
    return binascii.a2b_base64(bare.translate(_STANDARD) + b"=" * (-len(bare) % 4), strict_mode=True)
