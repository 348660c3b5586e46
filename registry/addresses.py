"""Mailboxes as agents name them in their cards: a bare address, or one at the end of an ``mq9://`` URL (G1)."""

import re
from collections.abc import Mapping
from typing import Any

from mediator.errors import BadRequestError
from mediator.mailboxes.address import MAX_ADDRESS, writable_address

SCHEME = "mq9://"
_EXPECTED = "an address, bare or as mq9://broker/address"
_HYPHENATED = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")


def mailbox_address(value: Any) -> str:
    """Return the address that ``mq9://…/{addr}`` or a bare address names; the mailbox need not exist (G1).

    Single hyphens may stand inside of it, which no mailbox here has (A1).
    :class:`mediator.errors.BadRequestError` naming ``mailbox`` for anything else, and for a reserved address.
    """
    if not isinstance(value, str):
        raise BadRequestError("mailbox", f"expected {_EXPECTED}")
    if "/" not in value:
        return _address(value)
    _, slash, address = value[len(SCHEME) :].rpartition("/")
    if value[: len(SCHEME)].lower() != SCHEME or not slash:
        raise BadRequestError("mailbox", f"expected {_EXPECTED}")
    return _address(address)


def _address(text: str) -> str:
    # The mailbox may be another service's, and the names of many catalogs have hyphens; ours cannot be created so.
    if "-" in text and len(text) <= MAX_ADDRESS and _HYPHENATED.fullmatch(text):
        return text
    return writable_address(text, "mailbox")


def find_mailbox(card: Mapping[str, Any]) -> str | None:
    """Return the address of the mailbox that a card names, None when it names none.

    It stands at the top level, or in the parameters of an A2A extension. Errors as those of :func:`mailbox_address`.
    """
    value = card.get("mailbox")
    if value is None or value == "":
        value = _extension_mailbox(card)
    return None if value is None else mailbox_address(value)


def card_mailbox(card: Mapping[str, Any]) -> str:
    """Return the address of the mailbox that a card must name (G1); errors as those of :func:`mailbox_address`."""
    address = find_mailbox(card)
    if address is None:
        beside = "; a name alone is not enough" if card.get("name") else ""
        raise BadRequestError("mailbox", f"expected {_EXPECTED}{beside}")
    return address


def _extension_mailbox(card: Mapping[str, Any]) -> str | None:
    capabilities = card.get("capabilities")
    extensions = capabilities.get("extensions") if isinstance(capabilities, dict) else None
    if not isinstance(extensions, list):
        return None
    for extension in extensions:
        params = extension.get("params") if isinstance(extension, dict) else None
        mailbox = params.get("mailbox") if isinstance(params, dict) else None
        # Other extensions may have a field of this name that is something else.
        if isinstance(mailbox, str) and mailbox:
            return mailbox
    return None
