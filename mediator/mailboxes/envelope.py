"""DIDComm envelopes as far as a mailbox looks into them: is it one, and for whom (D11). Nothing is decrypted here."""

import base64
import json
from collections.abc import Mapping
from typing import Any

MAX_RECIPIENTS = 50
_MARKS = (b",", b"{", b"[")
_MAX_MARKS = 1000
"""Commas and brackets in an envelope: base64 has none, so 50 recipients need a third of it.

Above it no JSON is parsed, which for megabytes of brackets would keep everybody waiting.
"""
_FIELDS = ("protected", "iv", "ciphertext", "tag")


def is_envelope(payload: bytes) -> bool:
    """Whether this has the shape of an encrypted DIDComm message, v1 or v2."""
    return recipients(payload) is not None


def recipients(payload: bytes) -> list[str] | None:
    """Return for whom an encrypted DIDComm message is, in its own words; None when it is none.

    v1 (RFC 0019) names base58 keys inside ``protected``, v2 names key ids (DID URLs) beside it.
    """
    envelope = _object(payload)
    return None if envelope is None else recipients_in(envelope)


def recipients_in(envelope: Mapping[str, Any]) -> list[str] | None:
    """Do as :func:`recipients` for what was parsed already."""
    if not all(isinstance(envelope.get(field), str) for field in _FIELDS):
        return None
    listed = envelope.get("recipients")
    if listed is None:
        protected = _object(_unbase64(envelope["protected"]))
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


def _unbase64(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return b""
