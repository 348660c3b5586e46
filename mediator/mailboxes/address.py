"""Mail addresses: what is one, how a new one is made, and how one is shown where it must stay secret (A1, A7)."""

import base64
import hashlib
import re
from collections.abc import Callable

from mediator.errors import BadRequestError

MAX_ADDRESS = 128
DEFAULT_TENANT = "default"
"""Whose callers are that nobody has named, while there is no other tenant (A6)."""
PUBLIC = "public"
"""The board of each tenant's public mailboxes: clients read it, the service alone writes it (E10)."""
RESERVED = frozenset({PUBLIC})

SHOWN = 4
"""Characters of an address that everybody sees who sees that it is there (A7)."""
NUMBERED = "id:"
"""Before the number of a mailbox, where that stands in place of its address; no address has a colon."""

_ADDRESS = re.compile(r"[a-z0-9]+(?:\.[a-z0-9]+)*")
_URL = re.compile(r"mq9://.*/", re.IGNORECASE)
_GENERATED = re.compile(r"[a-z2-7]{26}")


def bare_address(text: str) -> str:
    """Return what follows ``mq9://…/``, the form in which cards name a mailbox; any other text as it is (N11)."""
    url = _URL.match(text)
    return text if url is None else text[url.end() :]


def parse_address(text: str, field: str = "mail_address") -> str:
    """Return the address in ``text`` (A1, N11), else raise :class:`BadRequestError` naming ``field``."""
    if ":" in text:
        text = bare_address(text)
    if not 1 <= len(text) <= MAX_ADDRESS:
        raise BadRequestError(field, f"expected 1 to {MAX_ADDRESS} characters, got {len(text)}")
    if not _ADDRESS.fullmatch(text):
        raise BadRequestError(field, "expected lowercase letters and digits, in parts joined by single dots")
    return text


def writable_address(text: str, field: str = "mail_address") -> str:
    """Return the address in ``text`` if clients may create it and write to it: one that is not reserved (A1)."""
    address = parse_address(text, field)
    if address in RESERVED:
        raise BadRequestError(field, f"{address} is reserved")
    return address


def new_address(random: Callable[[int], bytes]) -> str:
    """Make an address that cannot be guessed: 130 random bits as 26 letters and digits (A1, A7)."""
    return base64.b32encode(random(17)).decode("ascii").lower()[:26]


def is_generated(address: str) -> bool:
    """Whether an address has the form of those that :func:`new_address` makes."""
    return _GENERATED.fullmatch(address) is not None


def redact(address: str) -> str:
    """Show an address where the reader may not learn it: at most half of it, four characters, and a hash (A7)."""
    if address in RESERVED:
        return address
    shown = address[: min(SHOWN, len(address) // 2)]
    return f"{shown}…{hashlib.sha256(address.encode()).hexdigest()[:8]}"


def finds_address(text: str, address: str, *, whole: bool) -> bool:
    """Whether a search for ``text`` finds an address: by its beginning, or as a whole where that is not shown (A7).

    ``whole``: whoever searches sees whole addresses. A longer beginning would let others guess letter after letter.
    """
    return text == address or ((whole or len(text) <= SHOWN) and address.startswith(text))
