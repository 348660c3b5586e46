"""Queries over connections, for operators, the relay to endpoints, and push notifications."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from mediator.errors import NoSuchConnectionError, NotEnrolledError
from mediator.mailboxes.address import finds_address
from mediator.mailboxes.mailbox import Mailbox
from pickup.rules import granting, message_queue
from pickup.rules.names import canonical
from pickup.rules.records import Connection, ConnectionUse, PushDevice, Route
from pickup.rules.tables import ConnectionRow, MediationTransaction


class ConnectionView(NamedTuple):
    """What an operator sees of a connection."""

    connection: Connection
    mailbox: Mailbox | None
    keys: int
    """How many keys its keylist has."""
    use: ConnectionUse
    """What was counted of it."""
    routes: Sequence[Route] = ()
    """The first of them, when requested."""

    @property
    def seen_at(self) -> int:
        """When it was last in use."""
        return max(self.connection.created_at, self.connection.seen_at, self.use.seen_at)


class ConnectionPage(NamedTuple):
    """Connections of a tenant."""

    views: list[ConnectionView]
    more: bool
    total: int


class DeviceQueue(NamedTuple):
    """A phone that may be asleep, and how many messages wait for it."""

    mailbox_id: int
    connection_id: int
    device: PushDevice
    messages: int


def get_connection(tx: MediationTransaction, tenant: str, connection_id: int) -> Connection:
    """Return a connection; :class:`NoSuchConnectionError` when the tenant has none of this number."""
    connection = tx.connections.get(connection_id)
    if connection is None or connection.tenant != tenant:
        raise NoSuchConnectionError(connection_id)
    return connection


def connections(tx: MediationTransaction, tenant: str, after: int, limit: int, now: int) -> ConnectionPage:
    """Return connections of a tenant behind a number, in order."""
    found = tx.connections.list(tenant, after, limit + 1)
    uses = tx.uses.of([one.id for one in found[:limit]])
    views = [_view(tx, one, uses, now) for one in found[:limit]]
    return ConnectionPage(views, len(found) > limit, tx.connections.count(tenant))


def find_rows(
    tx: MediationTransaction, tenant: str, text: str, limit: int, *, whole_addresses: bool
) -> list[ConnectionRow]:
    """Return connections of a tenant in falling order of their numbers, those that a text finds; "" finds all.

    It finds keys, DIDs and callers that begin so among all connections, and labels, addresses of mailboxes and numbers
    among the newest ``limit``. ``whole_addresses``: whoever asks sees addresses as a whole (A7).
    """
    newest = tx.connections.newest(tenant, limit)
    if not text:
        return sorted(tx.connections.rows(newest), reverse=True)
    # Keys are stored as did:key, whatever form a person copies.
    prefix = canonical(text) or (f"did:key:{text}" if text.startswith("z6Mk") else text)
    named = set(tx.connections.named(tenant, prefix, limit))
    rows = tx.connections.rows(list(named.union(newest)))
    lower = text.lower()
    found = [
        row
        for row in rows
        if row.id in named
        or finds_address(text, row.address, whole=whole_addresses)
        or lower in row.label.lower()
        or str(row.id) == text
    ]
    return sorted(found, reverse=True)


def views(tx: MediationTransaction, tenant: str, numbers: Sequence[int], now: int) -> list[ConnectionView]:
    """Return these connections of a tenant, in the same order, those that are there."""
    found = [
        one
        for connection_id in numbers
        if (one := tx.connections.get(connection_id)) is not None and one.tenant == tenant
    ]
    uses = tx.uses.of([one.id for one in found])
    return [_view(tx, one, uses, now) for one in found]


def connection(tx: MediationTransaction, tenant: str, connection_id: int, max_routes: int, now: int) -> ConnectionView:
    """Return one connection with its first keys; :class:`NoSuchConnectionError` when there is none."""
    found = get_connection(tx, tenant, connection_id)
    return _view(tx, found, tx.uses.of([connection_id]), now)._replace(routes=tx.routes.of(found, 0, max_routes))


def _view(
    tx: MediationTransaction, connection: Connection, uses: Mapping[int, ConnectionUse], now: int
) -> ConnectionView:
    mailbox, use = granting.find_mailbox(tx, connection, now), uses.get(connection.id) or ConnectionUse(connection.id)
    return ConnectionView(connection, mailbox, tx.routes.count(connection), use)


def waiting(
    tx: MediationTransaction, tenant: str, after: int, limit: int, now: int
) -> tuple[list[Connection], int | None]:
    """Return those of the next ``limit`` connections that have an endpoint and mail, and where the next page begins."""
    page = tx.connections.list(tenant, after, limit)
    found = [one for one in page if one.endpoint is not None and _has_mail(tx, one, now)]
    return found, page[-1].id if len(page) == limit else None


def _has_mail(tx: MediationTransaction, connection: Connection, now: int) -> bool:
    mailbox = granting.find_mailbox(tx, connection, now)
    return mailbox is not None and mailbox.messages > 0


def devices(tx: MediationTransaction, mailbox_ids: Sequence[int], now: int) -> list[DeviceQueue]:
    """Return the phones registered for these mailboxes, and how many messages wait for each."""
    found = []
    for mailbox_id in mailbox_ids:
        holder = tx.connections.of_mailbox(mailbox_id)
        if holder is None or holder.device is None:
            continue
        # The mailbox may have been deleted by an operator.
        with suppress(NotEnrolledError):
            count = message_queue.status(tx, holder, None, now).count
            found.append(DeviceQueue(mailbox_id, holder.id, holder.device, count))
    return found
