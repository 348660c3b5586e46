"""Agents that have been gone for long, and how they are collected (G3)."""

from mediator.agents.ports import SeenPlace, Silent, Tables
from mediator.agents.records import Liveness
from mediator.mailboxes.address import redact
from mediator.mailboxes.bounds import DAY
from mediator.mailboxes.collecting import Collected
from mediator.mailboxes.planning import Example, Finding

FIRST = SeenPlace(-1, 0)
REMEMBERED = DAY
"""Milliseconds for which those who follow the registry are told that an agent was removed."""
MAX_PLANNED = 2_000
"""Agents that a dry run looks at."""
SILENT = "gave no sign of life for long"


def collect(
    tx: Tables, liveness: Liveness, after: SeenPlace, now: int, limit: int
) -> tuple[Collected, SeenPlace | None]:
    """Remove agents that have been gone for ``liveness.keep`` milliseconds; 0: none.

    Returns where the next slice goes on, None when all that were silent for so long were looked at.
    """
    silent = _silent(tx, liveness, after, now, limit)
    over = [one for one in silent if _over_at(liveness, one) <= now]
    for one in over:
        tx.agents.remove(one.no, now)
    last = SeenPlace(silent[-1].seen_at, silent[-1].no) if len(silent) == limit else None
    return Collected(agents=len(over)), last


def forget(tx: Tables, now: int, limit: int) -> int:
    """Tell followers no more of what was removed long ago, and return of how many."""
    return tx.agents.forget_removed(now - REMEMBERED, limit)


def plan(tx: Tables, liveness: Liveness, now: int, examples: int) -> list[Finding]:
    """Say which agents :func:`collect` would remove, with so many examples; nothing when there are none."""
    silent = _silent(tx, liveness, FIRST, now, MAX_PLANNED)
    over = [one for one in silent if _over_at(liveness, one) <= now]
    if not over:
        return []
    shown = tuple(Example(one.tenant, redact(one.address), one.no, _over_at(liveness, one)) for one in over[:examples])
    return [Finding("agents", SILENT, len(over), shown, len(silent) >= MAX_PLANNED)]


def _silent(tx: Tables, liveness: Liveness, after: SeenPlace, now: int, limit: int) -> list[Silent]:
    """Return agents that may have been gone for long; those whose signs of life come seldom may have not."""
    return tx.agents.unseen(now - liveness.grace - liveness.keep, after, limit) if liveness.keep else []


def _over_at(liveness: Liveness, silent: Silent) -> int:
    return silent.seen_at + liveness.span(silent.ttl) + liveness.keep
