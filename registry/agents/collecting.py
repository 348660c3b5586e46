"""The rules by which the clean-up removes agents that have been gone for long (G3)."""

from mediator.mailboxes.address import redact
from mediator.mailboxes.bounds import DAY
from mediator.mailboxes.collecting import Collected
from mediator.mailboxes.planning import Example, PlannedRemoval
from registry.agents.ports import LastSeenCursor, RegistryTables, SilentAgent
from registry.agents.records import Liveness

FIRST = LastSeenCursor(-1, 0)
REMEMBERED = DAY
"""Milliseconds for which the removal of an agent stays among the changes that indexes read."""
MAX_PLANNED = 2_000
"""Agents that a dry run looks at."""
SILENT = "gave no sign of life for long"


def collect(
    tx: RegistryTables, liveness: Liveness, after: LastSeenCursor, now: int, limit: int
) -> tuple[Collected, LastSeenCursor | None]:
    """Remove agents that have been gone for ``liveness.keep`` milliseconds; 0 removes none.

    Also returns the cursor for the next slice, None at the end.
    """
    silent = _silent(tx, liveness, after, now, limit)
    expired = [one for one in silent if _expires_at(liveness, one) <= now]
    for one in expired:
        tx.agents.remove(one.no, now)
    last = LastSeenCursor(silent[-1].seen_at, silent[-1].no) if len(silent) == limit else None
    return Collected(agents=len(expired)), last


def forget(tx: RegistryTables, now: int, limit: int) -> int:
    """Delete the records of removals that all indexes have read by now; return how many."""
    return tx.agents.forget_removed(now - REMEMBERED, limit)


def plan(tx: RegistryTables, liveness: Liveness, now: int, examples: int) -> list[PlannedRemoval]:
    """Return which agents :func:`collect` would remove, with at most ``examples`` of them; nothing if none."""
    silent = _silent(tx, liveness, FIRST, now, MAX_PLANNED)
    expired = [one for one in silent if _expires_at(liveness, one) <= now]
    if not expired:
        return []
    shown = tuple(
        Example(one.tenant, redact(one.address), one.no, _expires_at(liveness, one)) for one in expired[:examples]
    )
    return [PlannedRemoval("agents", SILENT, len(expired), shown, len(silent) >= MAX_PLANNED)]


def _silent(tx: RegistryTables, liveness: Liveness, after: LastSeenCursor, now: int, limit: int) -> list[SilentAgent]:
    """Return agents that may have been gone for long; those with a long ttl may still be stale."""
    return tx.agents.unseen(now - liveness.grace - liveness.keep, after, limit) if liveness.keep else []


def _expires_at(liveness: Liveness, silent: SilentAgent) -> int:
    return silent.seen_at + liveness.span(silent.ttl) + liveness.keep
