"""Mailboxes as agents name them in their cards: a bare address, or one at the end of an ``mq9://`` URL (G1)."""

from typing import Any


def mailbox_address(value: Any) -> str:
    """Return the address that ``mq9://…/{addr}`` or a bare address names; the mailbox need not exist (G1).

    :class:`mediator.errors.BadRequestError` naming ``mailbox`` for anything else, and for a reserved address.
    """
    raise NotImplementedError
