"""What others are shown of a card: a send-only address where the mailbox's own is to stay secret (G4)."""

import re

import orjson

from mediator.mailboxes.address import is_generated

CHOICE = "send_only"
"""The field of a card that says whether its mailbox's own address stays secret."""
_CHOICE = f'"{CHOICE}"'.encode()
_ESCAPED = b"\\u00"


def keeps_secret(card: bytes, address: str) -> bool:
    """Whether others are not to learn the address: as the card says, else if the service generated it (G4)."""
    if _CHOICE in card:
        choice = orjson.loads(card).get(CHOICE)
        if isinstance(choice, bool):
            return choice
    return is_generated(address)


def with_send_only(data: bytes, address: str, send_only: str) -> bytes:
    """Return JSON, a card or a report, with a send-only address in place of a mailbox's own.

    A generated address is replaced wherever it stands, a chosen one, which may be a word, as the ``mailbox`` only. All
    other bytes stay, unless the JSON has escapes in which an address could be written.
    """
    if _ESCAPED in data:
        data = orjson.dumps(orjson.loads(data))
    own, other = address.encode(), send_only.encode()
    if is_generated(address):
        return data.replace(own, other)
    return re.sub(rb'("mailbox"\s*:\s*"(?:[^"]*/)?)' + re.escape(own) + b'"', rb"\g<1>" + other + b'"', data)
