"""Base64url without padding, as DIDComm writes it; peers also write the standard alphabet and padding."""

import base64


def encode(raw: bytes) -> str:
    """Write without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode(text: str) -> bytes:
    """Read either alphabet, padded or not; :class:`ValueError` for anything else."""
    bare = text.rstrip("=")
    return base64.b64decode(bare + "=" * (-len(bare) % 4), altchars=b"-_", validate=True)
