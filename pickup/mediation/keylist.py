"""Keylists (RFC 0211): the keys and DIDs that lead to a holder's mailbox, updated and queried by it (D8)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mediator.mailboxes.mailbox import Mailbox
from pickup.mediation.granting import get_mailbox
from pickup.mediation.names import canonical
from pickup.mediation.ports import MediationTransaction
from pickup.mediation.records import Connection, MediationRules, Route


class KeylistResult(StrEnum):
    """The result of one update (RFC 0211)."""

    SUCCESS = "success"
    NO_CHANGE = "no_change"
    CLIENT_ERROR = "client_error"


@dataclass(frozen=True, slots=True)
class KeylistUpdate:
    """One update as the peer wrote it: ``add`` or ``remove`` a key or DID in any form."""

    key: str
    action: str
    inside: tuple[str, ...] = ()
    """The canonical keys inside a DID that is added."""


def update(
    tx: MediationTransaction,
    rules: MediationRules,
    connection: Connection,
    changes: Sequence[KeylistUpdate],
    proven: frozenset[str],
    now: int,
    own: Collection[str] = (),
) -> list[KeylistResult]:
    """Update a keylist, each update on its own and in order; return their results (D8).

    ``proven`` are the canonical keys and DIDs that sealed the request: they are taken over from any other connection.
    Any other key that another connection holds, inside a DID too, or seals with is a ``client_error`` until that
    connection is idle; so is a key that an operator attached, and a key of the mediator: of an invitation, or one in
    ``own``. Raises :class:`NotEnrolledError` without mediation.
    """
    mailbox = get_mailbox(tx, connection, now)
    held = tx.routes.count(connection)
    results: list[KeylistResult] = []
    for change in changes:
        key = canonical(change.key)
        if key is None or change.action not in ("add", "remove"):
            results.append(KeylistResult.CLIENT_ERROR)
        elif change.action == "remove":
            removed = _remove(tx, connection, key)
            held -= removed
            results.append(KeylistResult.SUCCESS if removed else KeylistResult.NO_CHANGE)
        elif key in own:
            results.append(KeylistResult.CLIENT_ERROR)
        else:
            results.append(_add(tx, rules, connection, mailbox, key, held, proven, now))
            if results[-1] is not KeylistResult.CLIENT_ERROR and (route := tx.routes.find(connection.tenant, key)):
                free = [one for one in change.inside if one in proven or not _seals(tx, rules, connection, one, now)]
                tx.routes.add_keys(route, [one for one in free if one not in own])
            held += results[-1] is KeylistResult.SUCCESS
    return results


def _remove(tx: MediationTransaction, connection: Connection, key: str) -> bool:
    route = tx.routes.find(connection.tenant, key)
    if route is None or route.connection_no != connection.no:
        return False
    tx.routes.remove(route)
    return True


def _add(
    tx: MediationTransaction,
    rules: MediationRules,
    connection: Connection,
    mailbox: Mailbox,
    key: str,
    held: int,
    proven: frozenset[str],
    now: int,
) -> KeylistResult:
    route = tx.routes.find(connection.tenant, key)
    if route is not None and route.connection_no == connection.no:
        return KeylistResult.NO_CHANGE
    if key in rules.denied or (rules.max_keys and held >= rules.max_keys):
        return KeylistResult.CLIENT_ERROR
    if tx.invitations.keyed(key) is not None or (key not in proven and _seals(tx, rules, connection, key, now)):
        return KeylistResult.CLIENT_ERROR
    if route is not None and not _free(tx, rules, route, proven, now):
        return KeylistResult.CLIENT_ERROR
    if route is None and key not in proven:
        # The key may be inside a DID of another connection, to which its mail goes.
        around = tx.routes.resolve(connection.tenant, key)
        if around is not None and around.connection_no != connection.no and not _free(tx, rules, around, proven, now):
            return KeylistResult.CLIENT_ERROR
    if route is not None:
        tx.routes.remove(route)
    tx.routes.put(Route(connection.tenant, key, mailbox.address, mailbox.no, connection.no, now, now))
    return KeylistResult.SUCCESS


def _seals(tx: MediationTransaction, rules: MediationRules, connection: Connection, key: str, now: int) -> bool:
    """Whether another connection that is not idle seals with this key or DID (D8)."""
    other = tx.connections.called(connection.tenant, key)
    if other is None or other.no == connection.no:
        return False
    return not rules.idle or other.seen_at + rules.idle > now


def _free(tx: MediationTransaction, rules: MediationRules, route: Route, proven: frozenset[str], now: int) -> bool:
    """Whether a key of another connection is free: proven by the request, or unused for long (D8)."""
    if route.connection_no is None:
        return False
    if route.key in proven:
        return True
    if not rules.idle:
        return False
    holder = tx.connections.get(route.connection_no)
    last = max(route.created_at, route.used_at, 0 if holder is None else holder.seen_at)
    return last + rules.idle <= now


def query(
    tx: MediationTransaction, connection: Connection, offset: int, limit: int, now: int
) -> tuple[list[Route], int]:
    """Return a page of a keylist, oldest first, and how many keys it has in all; needs mediation."""
    get_mailbox(tx, connection, now)
    return tx.routes.of(connection, offset, limit), tx.routes.count(connection)
