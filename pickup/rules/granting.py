"""Who is granted mediation, and which keys lead to its mailbox: keylists (RFC 0211) and attached keys (D1, D8, D11)."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from ipaddress import ip_network

from mediator.errors import (
    BadRequestError,
    InvitationRequiredError,
    MediationDeniedError,
    NotEnrolledError,
    QuotaExceededError,
)
from mediator.mailboxes import creating
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create, get_live_mailbox
from mediator.mailboxes.mailbox import Kind, Mailbox, Retention
from pickup.rules.names import canonical
from pickup.rules.records import AccessRule, Connection, MediationRules, NewConnection, Policy, Route, Verdict
from pickup.rules.tables import MediationTransaction

MAX_RULES = 10_000
"""Of both lists together; each instance keeps all of them in memory."""
MAX_NOTE = 200


def parse_name(text: str) -> str:
    """Return a DID or key in its canonical form, or a network; :class:`BadRequestError` when ``text`` is neither."""
    name = canonical(text)
    if name is not None:
        return name
    try:
        return str(ip_network(text, strict=False))
    except ValueError:
        raise BadRequestError("name", "expected a DID, a key (base58 or did:key), an IP address or a network") from None


def is_denied(rules: MediationRules, peer: NewConnection) -> bool:
    """Whether the operator denies a peer, connected or not."""
    return bool(rules.denied) and not rules.denied.isdisjoint((*peer.callers, canonical(peer.their_did)))


def add_access_rule(tx: MediationTransaction, rule: AccessRule) -> None:
    """Put a name on a list, and take it off the other; :class:`QuotaExceededError` when the lists are full."""
    if len(rule.note) > MAX_NOTE or not rule.note.isprintable():
        raise BadRequestError("note", f"expected one line of at most {MAX_NOTE} characters")
    if (there := tx.access_rules.count()) >= MAX_RULES:
        raise QuotaExceededError("names on the allow and deny lists", MAX_RULES, there)
    tx.access_rules.put(rule)


def remove_access_rule(tx: MediationTransaction, name: str, verdict: Verdict) -> None:
    """Take a name off a list; :class:`BadRequestError` when it is not there."""
    if not tx.access_rules.remove(name, verdict):
        raise BadRequestError("name", f"not on the {verdict} list")


ROUTES_AT_ONCE = 1000


def grant(
    tx: MediationTransaction,
    bounds: Bounds,
    random: Callable[[int], bytes],
    rules: MediationRules,
    connection: Connection,
    now: int,
) -> Connection:
    """Grant a connection its mailbox, the same one when it asks again, and return the connection (D1).

    When an operator deleted the mailbox, it gets a new one with the same keylist. Raises :class:`MediationDeniedError`
    by the policy, :class:`NotEnrolledError` when the connection has ended meanwhile.
    """
    # Mailboxes are locked before connections.
    find_mailbox(tx, connection, now)
    current = tx.connections.get(connection.id)
    if current is None:
        raise NotEnrolledError
    if not _is_allowed(rules, current):
        raise denial(rules)
    if find_mailbox(tx, current, now) is not None:
        return current
    request = Create(
        tenant=current.tenant,
        ttl=0,
        desc="DIDComm mediation",
        kind=Kind.MEDIATION,
        retention=Retention.UNTIL_ACK,
    )
    mailbox = creating.create(tx, bounds, random, request, now).mailbox
    granted = replace(current, mailbox_id=mailbox.id, address=mailbox.address, handed=(), handed_in=())
    tx.connections.save(granted)
    offset = 0
    while routes := tx.routes.of(granted, offset, ROUTES_AT_ONCE):
        for route in routes:
            tx.routes.put(replace(route, address=mailbox.address, mailbox_id=mailbox.id))
        offset += len(routes)
    return granted


def denial(rules: MediationRules) -> MediationDeniedError:
    """Return the error for a peer that the policy does not give mediation."""
    return InvitationRequiredError() if rules.policy is Policy.INVITATION else MediationDeniedError()


def _is_allowed(rules: MediationRules, connection: Connection) -> bool:
    if is_denied(rules, connection):
        return False
    match rules.policy:
        case Policy.OPEN:
            return True
        case Policy.INVITATION if connection.invitation is not None:
            return True
        case _:
            return not rules.allowed.isdisjoint((*connection.callers, canonical(connection.their_did)))


def get_mailbox(tx: MediationTransaction, connection: Connection, now: int) -> Mailbox:
    """Return the mailbox of a connection; :class:`NotEnrolledError` when it has none."""
    mailbox = find_mailbox(tx, connection, now)
    if mailbox is None:
        raise NotEnrolledError
    return mailbox


def find_mailbox(tx: MediationTransaction, connection: Connection, now: int) -> Mailbox | None:
    """Return the mailbox of a connection; None without mediation, or when an operator deleted it."""
    if connection.address is None:
        return None
    mailbox = tx.mailboxes.find(connection.tenant, connection.address)
    if mailbox is None or mailbox.id != connection.mailbox_id or not mailbox.is_live(now):
        return None
    return mailbox


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


def update_keylist(
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
    if route is None or route.connection_id != connection.id:
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
    if route is not None and route.connection_id == connection.id:
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
        if around is not None and around.connection_id != connection.id and not _free(tx, rules, around, proven, now):
            return KeylistResult.CLIENT_ERROR
    if route is not None:
        tx.routes.remove(route)
    tx.routes.put(Route(connection.tenant, key, mailbox.address, mailbox.id, connection.id, now, now))
    return KeylistResult.SUCCESS


def _seals(tx: MediationTransaction, rules: MediationRules, connection: Connection, key: str, now: int) -> bool:
    """Whether another connection that is not idle seals with this key or DID (D8)."""
    other = tx.connections.called(connection.tenant, key)
    if other is None or other.id == connection.id:
        return False
    return not rules.idle or other.seen_at + rules.idle > now


def _free(tx: MediationTransaction, rules: MediationRules, route: Route, proven: frozenset[str], now: int) -> bool:
    """Whether a key of another connection is free: proven by the request, or unused for long (D8)."""
    if route.connection_id is None:
        return False
    if route.key in proven:
        return True
    if not rules.idle:
        return False
    holder = tx.connections.get(route.connection_id)
    last = max(route.created_at, route.used_at, 0 if holder is None else holder.seen_at)
    return last + rules.idle <= now


def query_keylist(
    tx: MediationTransaction, connection: Connection, offset: int, limit: int, now: int
) -> tuple[list[Route], int]:
    """Return a page of a keylist, oldest first, and how many keys it has in all; needs mediation."""
    get_mailbox(tx, connection, now)
    return tx.routes.of(connection, offset, limit), tx.routes.count(connection)


def attach_key(
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
    if there is not None and there.connection_id is not None:
        raise BadRequestError("key", "is in the keylist of a connection")
    route = Route(tenant, name, mailbox.address, mailbox.id, None, now, now)
    tx.routes.put(route)
    tx.routes.add_keys(route, inside)
    return route


def detach_key(tx: MediationTransaction, tenant: str, key: str) -> None:
    """Remove the route of an attached key; :class:`BadRequestError` naming ``key`` when it is not attached (D11)."""
    route = tx.routes.find(tenant, _name(key))
    if route is None or route.connection_id is not None:
        raise BadRequestError("key", "is not attached")
    tx.routes.remove(route)


def _name(key: str) -> str:
    name = canonical(key)
    if name is None:
        raise BadRequestError("key", "expected a base58 Ed25519 key or a DID")
    return name
