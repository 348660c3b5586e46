"""Keys that an operator attaches to a mailbox, so that a NATS group FETCHes what is forwarded to them (D11)."""

from mediator.mediation.ports import Transaction
from mediator.mediation.records import Route


def attach(tx: Transaction, tenant: str, key: str, address: str, now: int) -> Route:
    """Let a key, in any form, lead to a mailbox of the tenant; a key attached before moves (D11).

    :class:`NoSuchMailboxError`, or :class:`BadRequestError` naming ``mail_address`` when its retention is not
    ``until_ack``, naming ``key`` when that is none or a connection holds it.
    """
    raise NotImplementedError


def detach(tx: Transaction, tenant: str, key: str, now: int) -> None:
    """Let an attached key lead nowhere; :class:`BadRequestError` naming ``key`` when it is not attached (D11)."""
    raise NotImplementedError
