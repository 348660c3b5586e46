"""The mailbox of a card: a bare address, or one at the end of an ``mq9://`` URL (G1)."""

import re
from collections.abc import Mapping
from typing import Any

from mediator.errors import BadRequestError
from mediator.mailboxes.address import MAX_ADDRESS, bare_address, writable_address

_EXPECTED = "an address, bare or as mq9://broker/address"
_HYPHENATED = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")


def mailbox_address(value: Any) -> str:
    """Return the address in ``mq9://…/{addr}`` or a bare address; the mailbox need not exist (G1).

    It may contain single hyphens, unlike mailboxes here (A1). Raises :class:`mediator.errors.BadRequestError` naming
    ``mailbox`` for anything else, and for a reserved address.
    """
    if not isinstance(value, str):
        raise BadRequestError("mailbox", f"expected {_EXPECTED}")
    address = bare_address(value)
    if "/" in address:
        raise BadRequestError("mailbox", f"expected {_EXPECTED}")
    return _address(address)


def _address(text: str) -> str:
    # The mailbox may belong to another service, and names in many catalogs have hyphens.
    if "-" in text and len(text) <= MAX_ADDRESS and _HYPHENATED.fullmatch(text):
        return text
    return writable_address(text, "mailbox")


def find_mailbox(card: Mapping[str, Any]) -> str | None:
    """Return the mailbox of a card, from the top level or the parameters of an A2A extension; None without one.

    Raises as :func:`mailbox_address` does.
    """
    value = card.get("mailbox")
    if value is None or value == "":
        value = _extension_mailbox(card)
    return None if value is None else mailbox_address(value)


def card_mailbox(card: Mapping[str, Any]) -> str:
    """Return the mailbox of a card, which must have one (G1); raises as :func:`mailbox_address` does."""
    address = find_mailbox(card)
    if address is None:
        hint = "; a name alone is not enough" if card.get("name") else ""
        raise BadRequestError("mailbox", f"expected {_EXPECTED}{hint}")
    return address


def _extension_mailbox(card: Mapping[str, Any]) -> str | None:
    capabilities = card.get("capabilities")
    extensions = capabilities.get("extensions") if isinstance(capabilities, dict) else None
    if not isinstance(extensions, list):
        return None
    for extension in extensions:
        params = extension.get("params") if isinstance(extension, dict) else None
        mailbox = params.get("mailbox") if isinstance(params, dict) else None
        # Other extensions may use this name for something else.
        if isinstance(mailbox, str) and mailbox:
            return mailbox
    return None
