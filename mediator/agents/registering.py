"""REGISTER, UNREGISTER and REPORT: who is in the registry (G1, G2)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mediator.agents.ports import Tables
from mediator.agents.records import Agent, Embedded, Liveness, Registration
from mediator.errors import BadRequestError, NoSuchAgentError, QuotaExceededError

MAX_MATCHES = 100
"""Agents of one name are counted no further than this."""
MAX_SHOWN = 200
"""Characters of a name that a refusal repeats."""


class Read(NamedTuple):
    """A registration whose card was read by a model elsewhere."""

    new: Registration
    vectors: bytes
    """As of :class:`Embedded`."""


class Taken(NamedTuple):
    """What became of many registrations."""

    added: int
    replaced: int
    embedded: int
    """Agents whose card was there already and got the vectors it lacked."""
    unchanged: int
    revision: int
    """Of the transaction, or the last one where nothing changed."""


def register(tx: Tables, liveness: Liveness, limit: int, new: Registration, now: int) -> tuple[Agent, bool]:
    """Keep a registration, in place of the one its mailbox had, and say whether it had none (G1).

    Either is a sign of life. :class:`QuotaExceededError` when it would be one more than the ``limit`` agents that the
    tenant may have; 0: any number.
    """
    former = tx.agents.find(new.tenant, new.address)
    if former is None:
        _make_room(tx, limit, new.tenant, 1)
    return _keep(tx, liveness, former, new, now), former is None


def take(tx: Tables, liveness: Liveness, limit: int, tenant: str, space: str, read: Sequence[Read], now: int) -> Taken:
    """Keep registrations of one tenant with their vectors, all or none: ``limit`` and errors as of :func:`register`.

    Of several for one mailbox the last counts. An agent that is there with this card stays as it is, so that the same
    once more changes nothing: somebody else hands it in, and that is no sign of life.
    """
    wanted = {each.new.address: each for each in read}
    former = {address: tx.agents.find(tenant, address) for address in wanted}
    added = sum(agent is None for agent in former.values())
    _make_room(tx, limit, tenant, added)
    same = {agent.no for address, agent in former.items() if agent and agent.card == wanted[address].new.card}
    there = tx.vectors.read(space, list(same))
    made, unchanged = [], 0
    for address, (new, vectors) in wanted.items():
        agent = former[address]
        if agent is None or agent.no not in same:
            agent = _keep(tx, liveness, agent, new, now)
        elif agent.no in there and there[agent.no].card_revision == agent.card_revision:
            unchanged += 1
            continue
        made.append(Embedded(agent.no, agent.card_revision, vectors))
    tx.vectors.put(space, made)
    replaced = len(wanted) - added - len(same)
    return Taken(added, replaced, len(same) - unchanged, unchanged, tx.agents.revision())


def _make_room(tx: Tables, limit: int, tenant: str, added: int) -> None:
    if limit and added and (use := tx.agents.count(tenant)) + added > limit:
        raise QuotaExceededError("agents of the tenant", limit, use)


def _keep(tx: Tables, liveness: Liveness, former: Agent | None, new: Registration, now: int) -> Agent:
    ttl = liveness.default_ttl if new.ttl is None else new.ttl
    return tx.agents.add(new, ttl, now) if former is None else tx.agents.replace(former, new, ttl, now)


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
