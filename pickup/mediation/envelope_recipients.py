"""Reads the recipients of a DIDComm envelope without decrypting it (D11)."""

import base64
import json
from collections.abc import Mapping
from typing import Any

MAX_RECIPIENTS = 50
_MARKS = (b",", b"{", b"[")
_MAX_MARKS = 1000
"""Commas and brackets in an envelope. Base64 has none, so 50 recipients need a third of it.

Beyond it nothing is parsed: megabytes of brackets would block the event loop.
"""
_FIELDS = ("protected", "iv", "ciphertext", "tag")


def recipients(payload: bytes) -> list[str] | None:
    """Return the recipients of an encrypted DIDComm message as written; None for any other payload.

    v1 (RFC 0019) lists base58 keys inside ``protected``, v2 key ids (DID URLs) beside it.
    """
    envelope = _object(payload)
    return None if envelope is None else recipients_in(envelope)


def recipients_in(envelope: Mapping[str, Any]) -> list[str] | None:
    """Do as :func:`recipients` for a parsed envelope."""
    if not all(isinstance(envelope.get(field), str) for field in _FIELDS):
        return None
    listed = envelope.get("recipients")
    if listed is None:
        text = envelope["protected"]
        try:
            protected = _object(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        except ValueError:
            return None
        listed = None if protected is None else protected.get("recipients")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_RECIPIENTS:
        return None
    kids = [_kid(recipient) for recipient in listed]
    named = [kid for kid in kids if kid is not None]
    return named if len(named) == len(kids) else None


def _kid(recipient: object) -> str | None:
    header = recipient.get("header") if isinstance(recipient, dict) else None
    kid = header.get("kid") if isinstance(header, dict) else None
    return kid if isinstance(kid, str) else None


def _object(data: bytes) -> dict[str, Any] | None:
    if sum(map(data.count, _MARKS)) > _MAX_MARKS:
        return None
    try:
        parsed = json.loads(data.decode())
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
