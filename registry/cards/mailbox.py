"""What identifies an agent: its mailbox, a bare address or one at the end of an ``mq9://`` URL, or its name (G1)."""

import re
from collections.abc import Mapping
from typing import Any

from mediator.errors import BadRequestError
from mediator.fields import has_controls
from mediator.mailboxes.address import MAX_ADDRESS, bare_address, writable_address

NAMED = "name:"
"""What the id of an agent without a mailbox begins with; its name follows. No address does."""
MAX_NAME = 256
"""Characters of an agent's name."""
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


def agent_id(value: Any) -> str:
    """Return the address of a mailbox, or the id of an agent without one; raises as :func:`mailbox_address` does."""
    if isinstance(value, str) and value.startswith(NAMED):
        return _named(value.removeprefix(NAMED), "mailbox")
    return mailbox_address(value)


def card_id(card: Mapping[str, Any]) -> str:
    """Return what identifies the agent of a card: the address of its mailbox, or its name (G1).

    Raises :class:`BadRequestError` naming ``mailbox`` for an invalid one or where both are missing, ``name`` for a name
    that cannot identify an agent.
    """
    address = find_mailbox(card)
    if address is not None:
        return address
    name = card.get("name")
    if name is None or name == "":
        raise BadRequestError("mailbox", f"expected {_EXPECTED}, or a name")
    return _named(name, "name")


def _named(name: Any, field: str) -> str:
    # Two names that were cut or cleaned to the same one would be two agents in one place.
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME or has_controls(name):
        expected = f"a name of 1 to {MAX_NAME} characters, none of them control characters"
        raise BadRequestError(field, f"expected {expected}, where there is no mailbox")
    return NAMED + name


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
