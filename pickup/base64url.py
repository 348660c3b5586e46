"""Base64 as DIDComm writes it: for URLs and without padding; peers write the standard alphabet and padding too."""

import base64


def encode(raw: bytes) -> str:
    """Write without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode(text: str) -> bytes:
    """Read either alphabet, padded or not; :class:`ValueError` for anything else."""
    bare = text.rstrip("=")
    return base64.b64decode(bare + "=" * (-len(bare) % 4), altchars=b"-_", validate=True)
