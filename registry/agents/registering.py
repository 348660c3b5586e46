"""The rules of REGISTER, UNREGISTER and REPORT (G1, G2)."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from mediator.errors import BadRequestError, NoSuchAgentError, QuotaExceededError, SendOnlyError
from registry.agents.ports import RegistryTables
from registry.agents.records import Agent, CardVectors, Liveness, Registration
from registry.agents.showing import behind
from registry.cards.mailbox import NAMED, agent_id

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
    _check_own(tx, new.tenant, new.address, now)
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
    same = {agent.no for address, agent in former.items() if agent and agent.card == latest[address].new.card}
    stored = tx.vectors.read(space, list(same))
    made, unchanged = [], 0
    for address, (new, vectors) in latest.items():
        agent = former[address]
        if agent is None or agent.no not in same:
            owner = new.owner if agent is None else agent.owner
            agent = _store(tx, liveness, agent, replace(new, owner=owner), now)
        elif agent.no in stored and stored[agent.no].card_revision == agent.card_revision:
            unchanged += 1
            continue
        made.append(CardVectors(agent.no, agent.card_revision, vectors))
    tx.vectors.put(space, made)
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
    tx.agents.remove(agent.no, now)
    return replace(agent, revision=tx.agents.revision())


def report(tx: RegistryTables, tenant: str, address: str | None, name: str | None, status: bytes, now: int) -> Agent:
    """Store a status report, which is a sign of life (G2); raises as :func:`resolve_agent` does."""
    return tx.agents.seen(resolve_agent(tx, tenant, address, name, now), status, now)


def _check_own(tx: RegistryTables, tenant: str, address: str, now: int) -> None:
    if behind(tx, tenant, address, now) is not None:
        raise SendOnlyError(address)


def resolve_agent(tx: RegistryTables, tenant: str, address: str | None, name: str | None, now: int) -> Agent:
    """Return the agent of a mailbox or, without one, that which its name identifies, or the only one of it (G2).

    Raises :class:`NoSuchAgentError`; :class:`SendOnlyError` for an agent that others know by this send-only address
    (G4); :class:`BadRequestError` naming ``name`` when several agents have this name,
    ``mailbox`` when neither was given.
    """
    if address:
        _check_own(tx, tenant, address, now)
        agent = tx.agents.find(tenant, address)
        if agent is None:
            raise NoSuchAgentError(address)
        return agent
    if not name:
        raise BadRequestError("mailbox", "expected the agent's mailbox, or its name")
    with suppress(BadRequestError):
        # Not every name can identify an agent, and a database may take such a name in no text.
        if (agent := tx.agents.find(tenant, agent_id(NAMED + name))) is not None:
            return agent
    matches = tx.agents.named(tenant, name, MAX_MATCHES + 1)
    if not matches:
        raise NoSuchAgentError(name[:MAX_SHOWN])
    if len(matches) > 1:
        count = f"more than {MAX_MATCHES}" if len(matches) > MAX_MATCHES else str(len(matches))
        raise BadRequestError("name", f"{count} agents match; give mailbox")
    return tx.agents.pick(matches)[matches[0]]
