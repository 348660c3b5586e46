"""Mail addresses: what is one, how one is made and shown where it stays secret, and send-only ones (A1, A7, A10)."""

import base64
import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from mediator.errors import BadRequestError
from mediator.mailboxes.mailbox import Mailbox

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


# Send-only addresses: a second address of each mailbox, which takes SEND and nothing else (A10).
#
# One is made of the mailbox's number, hidden, and of a seal over what the mailbox is. So nothing is stored for it, the
# number says where to look, and the seal ends with the mailbox: one that is created again has another.

SEND_ONLY_PREFIX: Final = "send."
_SEAL_BYTES: Final = 17
_NUMBER_BYTES: Final = 8
_LENGTH: Final = (_SEAL_BYTES + _NUMBER_BYTES) * 8 // 5
_REMEMBERED: Final = 10_000
"""Addresses that are made and read at once; a SEND on PostgreSQL needs both, and to compute them takes 10 µs."""
_FORM: Final = re.compile(rf"send\.[0-9a-v]{{{_LENGTH}}}")


def is_send_only(address: str) -> bool:
    """Whether an address has the form of send-only ones, which no mailbox can be created with (A10)."""
    return address.startswith(SEND_ONLY_PREFIX) and _FORM.fullmatch(address) is not None


class SendOnlyAddresses:
    """Makes and reads the send-only addresses of one database, by its key."""

    def __init__(self, key: bytes) -> None:
        """``key`` is 32 random bytes, which nobody else knows."""
        self._key = key
        self.make = lru_cache(_REMEMBERED)(self._make)
        """Takes number, tenant, address and time of creation of a mailbox, and returns its send-only address."""
        self.number = lru_cache(_REMEMBERED)(self._number)
        """Takes a word and returns the number of the mailbox whose send-only address it may be, None if it can be none.

        Only who makes the address of that mailbox and finds it equal knows that it is.
        """

    def _make(self, mailbox_id: int, tenant: str, address: str, created_at: int) -> str:
        sealed = f"{mailbox_id} {created_at} {tenant} {address}".encode()
        seal = hashlib.blake2b(sealed, key=self._key, digest_size=_SEAL_BYTES, person=b"seal").digest()
        hidden = (mailbox_id ^ self._mask(seal)).to_bytes(_NUMBER_BYTES)
        return SEND_ONLY_PREFIX + base64.b32hexencode(seal + hidden).decode("ascii").lower()

    def of(self, mailbox: Mailbox) -> str:
        """Return the send-only address of a mailbox that has an address."""
        return self.make(mailbox.id, mailbox.tenant, mailbox.address, mailbox.created_at)

    def _number(self, address: str) -> int | None:
        if not is_send_only(address):
            return None
        seal, hidden = divmod(int(address[len(SEND_ONLY_PREFIX) :], 32), 1 << 8 * _NUMBER_BYTES)
        mailbox_id = hidden ^ self._mask(seal.to_bytes(_SEAL_BYTES))
        return mailbox_id if mailbox_id < 1 << 63 else None

    def _mask(self, seal: bytes) -> int:
        return int.from_bytes(
            hashlib.blake2b(seal, key=self._key, digest_size=_NUMBER_BYTES, person=b"number").digest()
        )
