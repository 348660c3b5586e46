"""Keys that an operator attaches to a mailbox, so that a NATS group FETCHes what is forwarded to them (D11)."""

from mediator.errors import BadRequestError
from mediator.mailboxes.creating import living
from mediator.mailboxes.mailbox import Retention
from mediator.mediation.names import canonical
from mediator.mediation.ports import Transaction
from mediator.mediation.records import Route


def attach(tx: Transaction, tenant: str, key: str, address: str, now: int) -> Route:
    """Let a key, in any form, lead to a mailbox of the tenant; a key attached before moves (D11).

    :class:`NoSuchMailboxError`, or :class:`BadRequestError` naming ``mail_address`` when its retention is not
    ``until_ack``, naming ``key`` when that is none or a connection holds it.
    """
    name = _name(key)
    mailbox = living(tx, tenant, address, now)
    if mailbox.retention is not Retention.UNTIL_ACK:
        raise BadRequestError("mail_address", f"expected a mailbox with retention until_ack, got {mailbox.retention}")
    there = tx.routes.find(tenant, name)
    if there is not None and there.connection_no is not None:
        raise BadRequestError("key", "is in the keylist of a connection")
    route = Route(tenant, name, mailbox.address, mailbox.no, None, now, now)
    tx.routes.put(route)
    return route


def detach(tx: Transaction, tenant: str, key: str) -> None:
    """Let an attached key lead nowhere; :class:`BadRequestError` naming ``key`` when it is not attached (D11)."""
    route = tx.routes.find(tenant, _name(key))
    if route is None or route.connection_no is not None:
        raise BadRequestError("key", "is not attached")
    tx.routes.remove(route)


def _name(key: str) -> str:
    name = canonical(key)
    if name is None:
        raise BadRequestError("key", "expected a base58 Ed25519 key or a DID")
    return name
