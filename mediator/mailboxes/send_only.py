"""Send-only addresses: a second address of each mailbox, which takes SEND and nothing else (A10).

One is made of the mailbox's number, hidden, and of a seal over what the mailbox is. So nothing is stored for it, the
number says where to look, and the seal ends with the mailbox: one that is created again has another.
"""

import re
from base64 import b32hexencode
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from mediator.mailboxes.mailbox import Mailbox

PREFIX: Final = "send."
_SEAL_BYTES: Final = 17
_NUMBER_BYTES: Final = 8
_LENGTH: Final = (_SEAL_BYTES + _NUMBER_BYTES) * 8 // 5
_REMEMBERED: Final = 10_000
"""Addresses that are made and read at once; a SEND on PostgreSQL needs both, and to compute them takes 10 µs."""
_FORM: Final = re.compile(rf"send\.[0-9a-v]{{{_LENGTH}}}")


def is_send_only(address: str) -> bool:
    """Whether an address has the form of send-only ones, which no mailbox can be created with (A10)."""
    return address.startswith(PREFIX) and _FORM.fullmatch(address) is not None


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

    def _make(self, no: int, tenant: str, address: str, created_at: int) -> str:
        sealed = f"{no} {created_at} {tenant} {address}".encode()
        seal = blake2b(sealed, key=self._key, digest_size=_SEAL_BYTES, person=b"seal").digest()
        hidden = (no ^ self._mask(seal)).to_bytes(_NUMBER_BYTES)
        return PREFIX + b32hexencode(seal + hidden).decode("ascii").lower()

    def of(self, mailbox: Mailbox) -> str:
        """Return the send-only address of a mailbox that has an address."""
        return self.make(mailbox.no, mailbox.tenant, mailbox.address, mailbox.created_at)

    def _number(self, address: str) -> int | None:
        if not is_send_only(address):
            return None
        seal, hidden = divmod(int(address[len(PREFIX) :], 32), 1 << 8 * _NUMBER_BYTES)
        no = hidden ^ self._mask(seal.to_bytes(_SEAL_BYTES))
        return no if no < 1 << 63 else None

    def _mask(self, seal: bytes) -> int:
        return int.from_bytes(blake2b(seal, key=self._key, digest_size=_NUMBER_BYTES, person=b"number").digest())
