"""The rules of the memory of use: who may vote, what is kept of it, and when it is forgotten (G5–G7)."""

from mediator.errors import BadRequestError, NoSuchAgentError
from mediator.mailboxes.bounds import DAY
from registry.agents.records import Agent
from registry.agents.showing import behind
from registry.memory.ports import MemoryTables
from registry.memory.records import SIGN, AskedQuery, Vote

MAX_VOTES = 64
"""Votes on one request; more of them take the place of the oldest, of the voters with the most."""
MAX_FORGOTTEN = 20
"""Requests that one vote takes the place of."""
REMEMBERED = DAY
"""Milliseconds for which a forgotten request stays among the changes that indexes read."""


def vote(
    tx: MemoryTables, query: AskedQuery, address: str, value: int, voter: int, owner: int | None, over: int, now: int
) -> int | None:
    """Keep a vote on how the agent of an address served a request; return its revision, None if it does not count.

    That of who registered the card does not (G6): ``owner`` is the caller's number where a tenant has several parties,
    else None. ``over`` is how many requests the tenant then has too many: as many that were not used for longest are
    forgotten. A weak sign takes no stronger vote's place.

    Raises :class:`NoSuchAgentError`, and :class:`BadRequestError` for an agent that the search did not find.
    """
    agent = found_as(tx, query.tenant, address, now)
    if agent is None:
        raise NoSuchAgentError(address)
    if not query.found(agent.no):
        raise BadRequestError("mailbox", "expected an agent that this search found among its first")
    if owner is not None and agent.owner == owner:
        return None
    if value == SIGN and tx.memory.find_vote(query, agent.no, voter) is not None:
        return None
    if over > 0:
        # Not all of many at once, where the bound was lowered: the next votes forget the others.
        tx.memory.forget(tx.memory.oldest(query.tenant, min(over, MAX_FORGOTTEN)), now)
    tx.memory.vote(Vote(tx.memory.keep(query, now), agent.no, voter, value, now), MAX_VOTES)
    return tx.agents.revision()


def found_as(tx: MemoryTables, tenant: str, address: str, now: int) -> Agent | None:
    """Return the agent that others find under an address (G4)."""
    shown = behind(tx, tenant, address, now)
    return tx.agents.find(tenant, address) if shown is None else tx.agents.pick([shown.no])[shown.no]


def collect(tx: MemoryTables, keep: int, now: int, limit: int) -> tuple[int, bool]:
    """Forget requests unused for ``keep`` milliseconds, and votes on removed agents; return how many, and if more."""
    old = tx.memory.unused(now - keep, limit)
    tx.memory.forget(old, now)
    removed = len(old)
    for agent_no in tx.memory.orphaned(limit):
        if removed >= limit:
            break
        removed += tx.memory.forget_agent(agent_no, now, limit - removed)
    gone = tx.memory.forget_removed(now - REMEMBERED, limit)
    return removed + gone, removed >= limit or gone >= limit


def forget_all(tx: MemoryTables, tenant: str, limit: int, now: int) -> int:
    """Forget requests of a tenant, at most ``limit``; return how many."""
    numbers = tx.memory.oldest(tenant, limit)
    tx.memory.forget(numbers, now)
    return len(numbers)


def forget_agent(tx: MemoryTables, agent_no: int, now: int) -> int:
    """Forget all votes on an agent, and the requests that nobody else served; return how many votes."""
    votes = 0
    while some := tx.memory.forget_agent(agent_no, now, 500):
        votes += some
    return votes
