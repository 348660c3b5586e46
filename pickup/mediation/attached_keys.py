"""Keys that an operator attaches to a mailbox, so that NATS clients FETCH what is forwarded to them (D11)."""

from collections.abc import Sequence

from mediator.errors import BadRequestError
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.mailbox import Retention
from pickup.mediation.names import canonical
from pickup.mediation.ports import MediationTransaction
from pickup.mediation.records import Route


def attach(
    tx: MediationTransaction, tenant: str, key: str, address: str, now: int, inside: Sequence[str] = ()
) -> Route:
    """Route a key, in any form, to a mailbox of the tenant; a key that is attached already moves (D11).

    ``inside`` are the canonical keys inside a DID, which lead there too.

    Raises :class:`NoSuchMailboxError`; :class:`BadRequestError` naming ``mail_address`` when its retention is not
    ``until_ack``, or ``key`` when that is no key or in the keylist of a connection.
    """
    name = _name(key)
    mailbox = get_live_mailbox(tx, tenant, address, now)
    if mailbox.retention is not Retention.UNTIL_ACK:
        raise BadRequestError("mail_address", f"expected a mailbox with retention until_ack, got {mailbox.retention}")
    there = tx.routes.find(tenant, name)
    if there is not None and there.connection_no is not None:
        raise BadRequestError("key", "is in the keylist of a connection")
    route = Route(tenant, name, mailbox.address, mailbox.no, None, now, now)
    tx.routes.put(route)
    tx.routes.add_keys(route, inside)
    return route


def detach(tx: MediationTransaction, tenant: str, key: str) -> None:
    """Remove the route of an attached key; :class:`BadRequestError` naming ``key`` when it is not attached (D11)."""
    route = tx.routes.find(tenant, _name(key))
    if route is None or route.connection_no is not None:
        raise BadRequestError("key", "is not attached")
    tx.routes.remove(route)


def _name(key: str) -> str:
    name = canonical(key)
    if name is None:
        raise BadRequestError("key", "expected a base58 Ed25519 key or a DID")
    return name
