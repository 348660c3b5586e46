"""The rules of the registry: who registers and reports, what others see, votes, and what is removed (G1-G8)."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from mediator.errors import BadRequestError, NoSuchAgentError, QuotaExceededError, SendOnlyError
from mediator.mailboxes.address import is_send_only, redact
from mediator.mailboxes.bounds import DAY
from mediator.mailboxes.collecting import Collected, Example, PlannedRemoval
from registry.cards.card import NAMED, agent_address, keeps_secret, with_send_only
from registry.records import (
    SIGN,
    Agent,
    CardVectors,
    LastSeenCursor,
    Liveness,
    RecentSearch,
    Registration,
    SilentAgent,
    Vote,
)
from registry.tables import RegistryTables

MAX_MATCHES = 100
"""Agents of one name are counted up to this."""
MAX_SHOWN = 200
"""Characters of a name that an error repeats."""


class EmbeddedRegistration(NamedTuple):
    """A registration with vectors that a model made elsewhere."""

    new: Registration
    vectors: bytes
    """In the form of :attr:`CardVectors.vectors`."""


class BulkOutcome(NamedTuple):
    """The result of many registrations."""

    added: int
    replaced: int
    embedded: int
    """Agents that were registered with this card, and got the vectors they lacked."""
    unchanged: int
    revision: int
    """Of the transaction, or the last one if nothing changed."""


def register(tx: RegistryTables, liveness: Liveness, limit: int, new: Registration, now: int) -> tuple[Agent, bool]:
    """Store a registration, in place of its mailbox's former one, and return whether the agent is new (G1).

    It is a sign of life. Raises :class:`QuotaExceededError` when the tenant would have more than ``limit`` agents; 0 is
    no limit. Raises :class:`SendOnlyError` for the send-only address of an agent that is registered (G4).
    """
    if find_by_send_only(tx, new.tenant, new.address, now) is not None:
        raise SendOnlyError(new.address)
    former = tx.agents.find(new.tenant, new.address)
    if former is None:
        _check_limit(tx, limit, new.tenant, 1)
    return _store(tx, liveness, former, new, now), former is None


def register_many(
    tx: RegistryTables,
    liveness: Liveness,
    limit: int,
    tenant: str,
    space: str,
    read: Sequence[EmbeddedRegistration],
    now: int,
) -> BulkOutcome:
    """Store registrations of one tenant with their vectors, all or none; ``limit`` and errors as in :func:`register`.

    Of several for one mailbox the last counts. An agent that is registered with this card stays as it is: repeating a
    bulk registration changes nothing, and is no sign of life since somebody else makes it. For the same reason an agent
    that gets another card stays that of who registered it before (G6).
    """
    latest = {each.new.address: each for each in read}
    former = {address: tx.agents.find(tenant, address) for address in latest}
    added = sum(agent is None for agent in former.values())
    _check_limit(tx, limit, tenant, added)
    same = {agent.id for address, agent in former.items() if agent and agent.card == latest[address].new.card}
    stored = tx.vectors.read(space, list(same))
    made, unchanged = [], 0
    for address, (new, vectors) in latest.items():
        agent = former[address]
        if agent is None or agent.id not in same:
            owner = new.owner if agent is None else agent.owner
            agent = _store(tx, liveness, agent, replace(new, owner=owner), now)
        elif agent.id in stored and stored[agent.id].card_revision == agent.card_revision:
            unchanged += 1
            continue
        made.append(CardVectors(agent.id, agent.card_revision, vectors))
    tx.vectors.save(space, made)
    replaced = len(latest) - added - len(same)
    return BulkOutcome(added, replaced, len(same) - unchanged, unchanged, tx.agents.revision())


def _check_limit(tx: RegistryTables, limit: int, tenant: str, added: int) -> None:
    if limit and added and (use := tx.agents.count(tenant)) + added > limit:
        raise QuotaExceededError("agents of the tenant", limit, use)


def _store(tx: RegistryTables, liveness: Liveness, former: Agent | None, new: Registration, now: int) -> Agent:
    ttl = liveness.default_ttl if new.ttl is None else new.ttl
    return tx.agents.add(new, ttl, now) if former is None else tx.agents.replace(former, new, ttl, now)


def unregister(tx: RegistryTables, tenant: str, address: str | None, name: str | None, now: int) -> Agent:
    """Remove an agent, and return it as it was, with the revision of its removal (G2).

    Raises as :func:`resolve_agent` does.
    """
    agent = resolve_agent(tx, tenant, address, name, now)
    tx.agents.remove(agent.id, now)
    return replace(agent, revision=tx.agents.revision())


def report(tx: RegistryTables, tenant: str, address: str | None, name: str | None, status: bytes, now: int) -> Agent:
    """Store a status report, which is a sign of life (G2); raises as :func:`resolve_agent` does."""
    return tx.agents.seen(resolve_agent(tx, tenant, address, name, now), status, now)


def resolve_agent(tx: RegistryTables, tenant: str, address: str | None, name: str | None, now: int) -> Agent:
    """Return the agent of a mailbox or, without one, that which its name identifies, or the only one of it (G2).

    Raises :class:`NoSuchAgentError`; :class:`SendOnlyError` for an agent that others know by this send-only address
    (G4); :class:`BadRequestError` naming ``name`` when several agents have this name,
    ``mailbox`` when neither was given.
    """
    if address:
        if find_by_send_only(tx, tenant, address, now) is not None:
            raise SendOnlyError(address)
        agent = tx.agents.find(tenant, address)
        if agent is None:
            raise NoSuchAgentError(address)
        return agent
    if not name:
        raise BadRequestError("mailbox", "expected the agent's mailbox, or its name")
    with suppress(BadRequestError):
        # Not every name can identify an agent, and a database may take such a name in no text.
        if (agent := tx.agents.find(tenant, agent_address(NAMED + name))) is not None:
            return agent
    matches = tx.agents.named(tenant, name, MAX_MATCHES + 1)
    if not matches:
        raise NoSuchAgentError(name[:MAX_SHOWN])
    if len(matches) > 1:
        count = f"more than {MAX_MATCHES}" if len(matches) > MAX_MATCHES else str(len(matches))
        raise BadRequestError("name", f"{count} agents match; give mailbox")
    return tx.agents.pick(matches)[matches[0]]


def shown_to_others(tx: RegistryTables, tenant: str, agents: Sequence[Agent], now: int) -> list[Agent]:
    """Return agents of a tenant as others may see them: with a send-only address in place of a secret one."""
    secret = [agent.address for agent in agents if keeps_secret(agent.card, agent.address)]
    if not secret:
        return list(agents)
    send_only = tx.mailboxes.send_only_of(tenant, secret, now)
    return [
        _with_send_only(agent, send_only[agent.address]) if agent.address in send_only else agent for agent in agents
    ]


def _with_send_only(agent: Agent, send_only: str) -> Agent:
    status = None if agent.status is None else with_send_only(agent.status, agent.address, send_only)
    card = with_send_only(agent.card, agent.address, send_only)
    return replace(agent, address=send_only, card=card, status=status)


def find_own(tx: RegistryTables, tenant: str, address: str, now: int) -> Agent | None:
    """Return the agent of a mailbox as it was registered, by its own address or the one that others know it by."""
    shown = find_by_send_only(tx, tenant, address, now)
    if shown is None:
        return tx.agents.find(tenant, address)
    return tx.agents.pick([shown.id]).get(shown.id)


def find_by_send_only(tx: RegistryTables, tenant: str, address: str, now: int) -> Agent | None:
    """Return the agent that others know by this send-only address, as they see it; None if there is none."""
    if not is_send_only(address):
        return None
    # The mailbox first: agents are locked after mailboxes.
    mailbox = tx.mailboxes.find_to_send(tenant, address)
    agent = None if mailbox is None else tx.agents.find(tenant, mailbox.address)
    if agent is None:
        return None
    [shown] = shown_to_others(tx, tenant, [agent], now)
    return shown if shown.address == address else None


MAX_VOTES = 64
"""Votes on one request; more of them take the place of the oldest, of the voters with the most."""
MAX_FORGOTTEN = 20
"""Requests that one vote takes the place of."""


def vote(
    tx: RegistryTables,
    query: RecentSearch,
    address: str,
    value: int,
    voter: int,
    owner: int | None,
    over: int,
    now: int,
) -> int | None:
    """Keep a vote on how the agent of an address served a request; return its revision, None if it does not count.

    That of who registered the card does not (G6): ``owner`` is the caller's number where a tenant has several parties,
    else None. ``over`` is how many requests the tenant then has too many: as many that were not used for longest are
    forgotten. A weak sign takes no stronger vote's place.

    Raises :class:`NoSuchAgentError`, and :class:`BadRequestError` for an agent that the search did not find.
    """
    agent = find_own(tx, query.tenant, address, now)
    if agent is None:
        raise NoSuchAgentError(address)
    if not query.has_agent(agent.id):
        raise BadRequestError("mailbox", "expected an agent that this search found among its first")
    if owner is not None and agent.owner == owner:
        return None
    if value == SIGN and tx.memory.find_vote(query, agent.id, voter) is not None:
        return None
    if over > 0:
        # Not all of many at once, where the bound was lowered: the next votes forget the others.
        tx.memory.forget(tx.memory.oldest(query.tenant, min(over, MAX_FORGOTTEN)), now)
    tx.memory.vote(Vote(tx.memory.save_request(query, now), agent.id, voter, value, now), MAX_VOTES)
    return tx.agents.revision()


def collect_requests(tx: RegistryTables, keep: int, now: int, limit: int) -> tuple[int, bool]:
    """Forget requests unused for ``keep`` milliseconds, and votes on removed agents; return how many, and if more."""
    old = tx.memory.unused(now - keep, limit)
    tx.memory.forget(old, now)
    removed = len(old)
    for agent_id in tx.memory.orphaned(limit):
        if removed >= limit:
            break
        removed += tx.memory.forget_agent(agent_id, now, limit - removed)
    gone = tx.memory.forget_removed(now - REMEMBERED, limit)
    return removed + gone, removed >= limit or gone >= limit


def forget_all(tx: RegistryTables, tenant: str, limit: int, now: int) -> int:
    """Forget requests of a tenant, at most ``limit``; return how many."""
    numbers = tx.memory.oldest(tenant, limit)
    tx.memory.forget(numbers, now)
    return len(numbers)


def forget_agent(tx: RegistryTables, agent_id: int, now: int) -> int:
    """Forget all votes on an agent, and the requests that nobody else served; return how many votes."""
    votes = 0
    while some := tx.memory.forget_agent(agent_id, now, 500):
        votes += some
    return votes


FIRST_SEEN = LastSeenCursor(-1, 0)
REMEMBERED = DAY
"""Milliseconds for which a removal, of an agent or a request, stays among the changes that indexes read."""
MAX_PLANNED = 2_000
"""Agents that a dry run looks at."""
SILENT = "gave no sign of life for long"


def collect_agents(
    tx: RegistryTables, liveness: Liveness, after: LastSeenCursor, now: int, limit: int
) -> tuple[Collected, LastSeenCursor | None]:
    """Remove agents that have been gone for ``liveness.keep`` milliseconds; 0 removes none.

    Also returns the cursor for the next slice, None at the end.
    """
    silent = _silent(tx, liveness, after, now, limit)
    expired = [one for one in silent if _expires_at(liveness, one) <= now]
    for one in expired:
        tx.agents.remove(one.agent_id, now)
    last = LastSeenCursor(silent[-1].seen_at, silent[-1].agent_id) if len(silent) == limit else None
    return Collected(agents=len(expired)), last


def forget_removed_agents(tx: RegistryTables, now: int, limit: int) -> int:
    """Delete the records of removals that all indexes have read by now; return how many."""
    return tx.agents.forget_removed(now - REMEMBERED, limit)


def plan_collecting(tx: RegistryTables, liveness: Liveness, now: int, examples: int) -> list[PlannedRemoval]:
    """Return which agents :func:`collect_agents` would remove, with at most ``examples`` of them; nothing if none."""
    silent = _silent(tx, liveness, FIRST_SEEN, now, MAX_PLANNED)
    expired = [one for one in silent if _expires_at(liveness, one) <= now]
    if not expired:
        return []
    shown = tuple(
        Example(one.tenant, redact(one.address), one.agent_id, _expires_at(liveness, one)) for one in expired[:examples]
    )
    return [PlannedRemoval("agents", SILENT, len(expired), shown, len(silent) >= MAX_PLANNED)]


def _silent(tx: RegistryTables, liveness: Liveness, after: LastSeenCursor, now: int, limit: int) -> list[SilentAgent]:
    """Return agents that may have been gone for long; those with a long ttl may still be stale."""
    return tx.agents.unseen(now - liveness.grace - liveness.keep, after, limit) if liveness.keep else []


def _expires_at(liveness: Liveness, silent: SilentAgent) -> int:
    return silent.seen_at + liveness.span(silent.ttl) + liveness.keep
