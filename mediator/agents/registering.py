"""REGISTER, UNREGISTER and REPORT: who is in the registry (G1, G2)."""

from dataclasses import replace

from mediator.agents.ports import Tables
from mediator.agents.records import Agent, Liveness, Registration
from mediator.errors import BadRequestError, NoSuchAgentError, QuotaExceededError

MAX_MATCHES = 100
"""Agents of one name are counted no further than this."""
MAX_SHOWN = 200
"""Characters of a name that a refusal repeats."""


def register(tx: Tables, liveness: Liveness, limit: int, new: Registration, now: int) -> tuple[Agent, bool]:
    """Keep a registration, in place of the one its mailbox had, and say whether it had none (G1).

    Either is a sign of life. :class:`QuotaExceededError` when it would be one more than the ``limit`` agents that the
    tenant may have; 0: any number.
    """
    ttl = liveness.default_ttl if new.ttl is None else new.ttl
    former = tx.agents.find(new.tenant, new.address)
    if former is not None:
        return tx.agents.replace(former, new, ttl, now), False
    if limit and (use := tx.agents.count(new.tenant)) >= limit:
        raise QuotaExceededError("agents of the tenant", limit, use)
    return tx.agents.add(new, ttl, now), True


def unregister(tx: Tables, tenant: str, address: str | None, name: str | None, now: int) -> Agent:
    """Forget an agent, and return it as it was, with the revision of its removal; errors are :func:`meant`'s (G2)."""
    agent = meant(tx, tenant, address, name)
    tx.agents.remove(agent.no, now)
    return replace(agent, revision=tx.agents.revision())


def report(tx: Tables, tenant: str, address: str | None, name: str | None, status: bytes, now: int) -> Agent:
    """Keep what an agent says of itself; one that counted as gone is back; errors are :func:`meant`'s (G2)."""
    return tx.agents.seen(meant(tx, tenant, address, name), status, now)


def meant(tx: Tables, tenant: str, address: str | None, name: str | None) -> Agent:
    """Return the agent of a mailbox, or without one the only agent that is called so (G2).

    :class:`NoSuchAgentError`; :class:`BadRequestError` naming ``name`` when several are called so, ``mailbox`` when
    neither was given.
    """
    if address:
        agent = tx.agents.find(tenant, address)
        if agent is None:
            raise NoSuchAgentError(address)
        return agent
    if not name:
        raise BadRequestError("mailbox", "expected the agent's mailbox, or its name")
    matches = tx.agents.named(tenant, name, MAX_MATCHES + 1)
    if not matches:
        raise NoSuchAgentError(name[:MAX_SHOWN])
    if len(matches) > 1:
        count = f"more than {MAX_MATCHES}" if len(matches) > MAX_MATCHES else str(len(matches))
        raise BadRequestError("name", f"{count} agents match; give mailbox")
    return tx.agents.pick(matches)[matches[0]]
