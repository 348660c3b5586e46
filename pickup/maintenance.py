"""The clean-up steps of DIDComm (D8, D13), and what ``mediator verify`` checks of it."""

from dataclasses import asdict
from typing import Any

import orjson

from mediator.cleanup.collector import CleanupStep, SliceResult
from mediator.mailboxes.collecting import PlannedRemoval
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.rows import Row
from mediator.store.base import Transaction
from mediator.verify.checks import DamageKind, RowCheck, VerifyCheck, orphans
from pickup.rules import connecting, replays
from pickup.rules.tables import MediationTransaction


class UnusedConnections(CleanupStep):
    """Forgets connections that were not used for ``span`` milliseconds and for which no mail waits; 0: none."""

    name = "connections"
    retires_mailboxes = True

    def __init__(self, span: int) -> None:
        self._span = span

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Look at connections in the order in which they were last seen."""
        removed, after = connecting.forget_unused(
            tx.table(MediationTransaction), self._span, self.cursor or connecting.FIRST, now, limit
        )
        return SliceResult(removed.total, after is not None, asdict(removed), after)

    def plan(self, tx: Transaction, now: int, examples: int) -> list[PlannedRemoval]:
        """Say which connections would be forgotten."""
        return connecting.plan_unused(tx.table(MediationTransaction), self._span, now, examples)

    def forget_mailbox(self, tx: Transaction, mailbox: Mailbox) -> None:
        """Forget the keys that were attached to the mailbox (D11)."""
        tx.table(MediationTransaction).routes.remove_attached(mailbox.id)


class OldReplays(CleanupStep):
    """Forgets envelopes that are too old to be accepted again; they are not counted, since nobody misses them."""

    name = "replays"

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Forget at most ``limit`` envelopes."""
        forgotten = replays.forget(tx.table(MediationTransaction), now, limit)
        return SliceResult(forgotten, forgotten >= limit)


_RECONNECT = "Remove the connection (`mediator connections remove NUMBER`), so that the wallet connects again."
STATE = DamageKind("connection_state", "Connections cannot be read: their wallets get no mail.", _RECONNECT)
MAILBOX = DamageKind(
    "connection_mailbox", "Connections name a mailbox that is not theirs, or that another one has.", _RECONNECT
)
KEYLIST = DamageKind(
    "keylist", "Keys lead to a connection that does not exist, or to another mailbox than the connection's.", _RECONNECT
)
ROUTES = DamageKind("key_count", "Connections count other keys than their keylist has.", _RECONNECT)
CALLERS = DamageKind("callers", "The keys by which a connection is recognised are not those that it has.", _RECONNECT)
IDENTITIES = DamageKind("identities", "The mediator's own identities or invitations cannot be read.")


def mediation_checks() -> list[VerifyCheck]:
    """Return the checks."""
    return [
        RowCheck(
            STATE,
            "connection.no",
            "SELECT no, state FROM connection WHERE {no}",
            "connection {0}",
            judge=lambda row: _read(row[1]) is None,
            slice_rows=2000,
        ),
        RowCheck(
            MAILBOX,
            "connection.no",
            "SELECT connection.no, mailbox_no FROM connection JOIN mailbox ON mailbox.no = mailbox_no"
            " WHERE {connection.no} AND (kind <> 'mediation' OR mailbox.tenant <> connection.tenant OR EXISTS"
            " (SELECT 1 FROM connection AS other WHERE other.mailbox_no = mailbox.no AND other.no <> connection.no))",
            "connection {0} and mailbox {1}",
        ),
        orphans(KEYLIST, "route", "connection_no", "connection", where=" AND connection_no > 0"),
        RowCheck(
            KEYLIST,
            "route.connection_no",
            "SELECT connection_no, count(*) FROM route JOIN connection ON connection.no = connection_no"
            " WHERE {connection_no} AND (connection.mailbox_no IS NULL OR route.mailbox_no <> connection.mailbox_no"
            " OR route.tenant <> connection.tenant) GROUP BY connection_no",
            "{1} of connection {0}",
        ),
        RowCheck(
            ROUTES,
            "connection.no route.connection_no",
            "SELECT no, routes, there FROM (SELECT connection.no, routes, count(route.key) AS there FROM connection"
            " LEFT JOIN route ON connection_no = connection.no WHERE {connection.no}"
            " GROUP BY connection.no, routes) AS counted WHERE routes <> there",
            "connection {0} counts {1}, and has {2}",
        ),
        RowCheck(
            KEYLIST,
            "route_key.created_at",
            # No index begins with a number: the table is read in one piece.
            "SELECT tenant, count(*) FROM route_key WHERE {created_at} AND NOT EXISTS (SELECT 1 FROM route"
            " WHERE route.tenant = route_key.tenant AND route.key = route_key.route) GROUP BY tenant",
            "route_key: {1} of tenant {0} lead to no key",
            slice_rows=10_000_000,
        ),
        orphans(CALLERS, "caller", "connection_no", "connection"),
        RowCheck(
            CALLERS,
            "connection.no caller.connection_no",
            "SELECT no, state, (SELECT count(*) FROM caller WHERE connection_no = no"
            " AND caller.tenant = connection.tenant) FROM connection WHERE {no}",
            "connection {0} has {2} of them",
            judge=_has_other_callers,
            slice_rows=2000,
        ),
        RowCheck(
            IDENTITIES,
            "identity.no",
            "SELECT no, dids FROM identity WHERE {no}",
            "identity {0}",
            judge=lambda row: not isinstance(_json(row[1]), list),
        ),
    ]


def _read(state: bytes) -> dict[str, Any] | None:
    value = _json(state)
    return value if isinstance(value, dict) and isinstance(value.get("callers"), list) else None


def _has_other_callers(row: Row) -> bool:
    state = _read(row[1])
    return state is not None and len(set(state["callers"])) != row[2]


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        return None
