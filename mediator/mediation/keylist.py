"""Keylists: which keys and DIDs lead to whose mailbox, changed and shown by their holder (D8)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mediator.mailboxes.mailbox import Mailbox
from mediator.mediation.granting import mailbox_of
from mediator.mediation.names import canonical
from mediator.mediation.ports import Transaction
from mediator.mediation.records import Connection, Route, Rules


class Result(StrEnum):
    """What became of one change."""

    SUCCESS = "success"
    NO_CHANGE = "no_change"
    CLIENT_ERROR = "client_error"
    SERVER_ERROR = "server_error"


@dataclass(frozen=True, slots=True)
class Change:
    """One wish, as the peer wrote it: ``add`` or ``remove`` a key or DID in any form."""

    key: str
    action: str


def update(
    tx: Transaction,
    rules: Rules,
    connection: Connection,
    changes: Sequence[Change],
    proven: frozenset[str],
    now: int,
    own: Collection[str] = (),
) -> list[Result]:
    """Change a keylist, each wish on its own and in order; return what became of each (D8).

    ``proven`` are the canonical keys and DIDs that sealed the envelope this came in: they are taken over from whoever
    has them. Any other key that somebody else holds or seals with, or an operator attached, is ``client_error``, until
    its holder has been idle; so is a key of the mediator, of whichever tenant: one of an invitation, or of ``own``.
    :class:`NotEnrolledError` without mediation.
    """
    mailbox = mailbox_of(tx, connection, now)
    held = tx.routes.count(connection)
    results: list[Result] = []
    for change in changes:
        key = canonical(change.key)
        if key is None or change.action not in ("add", "remove"):
            results.append(Result.CLIENT_ERROR)
        elif change.action == "remove":
            removed = _remove(tx, connection, key)
            held -= removed
            results.append(Result.SUCCESS if removed else Result.NO_CHANGE)
        elif key in own:
            results.append(Result.CLIENT_ERROR)
        else:
            results.append(_add(tx, rules, connection, mailbox, key, held, proven, now))
            held += results[-1] is Result.SUCCESS
    return results


def _remove(tx: Transaction, connection: Connection, key: str) -> bool:
    route = tx.routes.find(connection.tenant, key)
    if route is None or route.connection_no != connection.no:
        return False
    tx.routes.remove(route)
    return True


def _add(
    tx: Transaction,
    rules: Rules,
    connection: Connection,
    mailbox: Mailbox,
    key: str,
    held: int,
    proven: frozenset[str],
    now: int,
) -> Result:
    route = tx.routes.find(connection.tenant, key)
    if route is not None and route.connection_no == connection.no:
        return Result.NO_CHANGE
    if rules.max_keys and held >= rules.max_keys:
        return Result.CLIENT_ERROR
    if tx.invitations.keyed(key) is not None or (key not in proven and _seals(tx, rules, connection, key, now)):
        return Result.CLIENT_ERROR
    if route is not None and not _free(tx, rules, route, proven, now):
        return Result.CLIENT_ERROR
    if route is not None:
        tx.routes.remove(route)
    tx.routes.put(Route(connection.tenant, key, mailbox.address, mailbox.no, connection.no, now, now))
    return Result.SUCCESS


def _seals(tx: Transaction, rules: Rules, connection: Connection, key: str, now: int) -> bool:
    """Whether a key or DID is the one that another connection seals with, which is not idle (D8)."""
    other = tx.connections.called(connection.tenant, key)
    if other is None or other.no == connection.no:
        return False
    return not rules.idle or other.seen_at + rules.idle > now


def _free(tx: Transaction, rules: Rules, route: Route, proven: frozenset[str], now: int) -> bool:
    """Whether a key that somebody else holds may be had: proven, or not used for long (D8)."""
    if route.connection_no is None:
        return False
    if route.key in proven:
        return True
    if not rules.idle:
        return False
    holder = tx.connections.get(route.connection_no)
    last = max(route.created_at, route.used_at, 0 if holder is None else holder.seen_at)
    return last + rules.idle <= now


def query(tx: Transaction, connection: Connection, offset: int, limit: int) -> tuple[list[Route], int]:
    """Return a page of a keylist, oldest first, and how many keys it has in all."""
    return tx.routes.of(connection, offset, limit), tx.routes.count(connection)
