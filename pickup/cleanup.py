"""The clean-up steps of DIDComm: unused connections, and stored envelopes that are too old (D8, D13)."""

from dataclasses import asdict

from mediator.cleanup.collector import CleanupStep, SliceResult
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.planning import PlannedRemoval
from mediator.store.base import Transaction
from pickup.rules import connecting, replays
from pickup.tables import MediationTables


class UnusedConnections(CleanupStep):
    """Forgets connections that were not used for ``span`` milliseconds and for which no mail waits; 0: none."""

    name = "connections"
    retires_mailboxes = True

    def __init__(self, span: int) -> None:
        self._span = span

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Look at connections in the order in which they were last seen."""
        removed, after = connecting.forget_unused(
            tx.table(MediationTables), self._span, self.cursor or connecting.FIRST, now, limit
        )
        return SliceResult(removed.total, after is not None, asdict(removed), after)

    def plan(self, tx: Transaction, now: int, examples: int) -> list[PlannedRemoval]:
        """Say which connections would be forgotten."""
        return connecting.plan_unused(tx.table(MediationTables), self._span, now, examples)

    def forget_mailbox(self, tx: Transaction, mailbox: Mailbox) -> None:
        """Forget the keys that were attached to the mailbox (D11)."""
        tx.table(MediationTables).routes.remove_attached(mailbox.no)


class OldReplays(CleanupStep):
    """Forgets envelopes that are too old to be accepted again; they are not counted, since nobody misses them."""

    name = "replays"

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Forget at most ``limit`` envelopes."""
        forgotten = replays.forget(tx.table(MediationTables), now, limit)
        return SliceResult(forgotten, forgotten >= limit)
