"""What the clean-up does for the registry: agents that are gone for long (G3)."""

from dataclasses import asdict

from mediator.cleanup.collector import CleanupStep, SliceResult
from mediator.mailboxes.planning import PlannedRemoval
from mediator.store.base import Transaction
from registry import rules
from registry.records import Liveness
from registry.tables import RegistryTables


class SilentAgents(CleanupStep):
    """Removes agents that have given no sign of life for long."""

    name = "agents"

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Look at agents in the order in which they were last seen."""
        removed, after = rules.collect_agents(
            tx.table(RegistryTables), self._liveness, self.cursor or rules.FIRST_SEEN, now, limit
        )
        return SliceResult(removed.total, after is not None, asdict(removed), after)

    def plan(self, tx: Transaction, now: int, examples: int) -> list[PlannedRemoval]:
        """Say which agents would be removed."""
        return rules.plan_collecting(tx.table(RegistryTables), self._liveness, now, examples)


class UnusedRequests(CleanupStep):
    """Forgets requests that were not asked for long, and what was remembered of agents that are removed."""

    name = "remembered_requests"

    def __init__(self, keep: int) -> None:
        """``keep``: milliseconds."""
        self._keep = keep

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Forget at most ``limit`` requests, and votes on as many agents."""
        removed, more = rules.collect_requests(tx.table(RegistryTables), self._keep, now, limit)
        return SliceResult(removed, more)


class RemovedAgents(CleanupStep):
    """Forgets which agents were removed long ago; they are not counted, since every index has heard of it."""

    name = "removed_agents"

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Forget at most ``limit`` removals."""
        forgotten = rules.forget_removed_agents(tx.table(RegistryTables), now, limit)
        return SliceResult(forgotten, forgotten >= limit)
