"""The rules of what others learn of an agent whose mailbox keeps its own address secret (G4)."""

from collections.abc import Sequence
from dataclasses import replace

from mediator.mailboxes.send_only import is_send_only
from registry.agents.ports import RegistryTables
from registry.agents.records import Agent
from registry.cards.publishing import keeps_secret, with_send_only


def shown_to_others(tx: RegistryTables, tenant: str, agents: Sequence[Agent], now: int) -> list[Agent]:
    """Return agents of a tenant as others may see them: with a send-only address in place of a secret one."""
    secret = [agent.address for agent in agents if keeps_secret(agent.card, agent.address)]
    send_only = tx.mailboxes.send_only_of(tenant, secret, now)
    return [_shown(agent, send_only.get(agent.address)) for agent in agents]


def _shown(agent: Agent, send_only: str | None) -> Agent:
    if send_only is None:
        return agent
    status = None if agent.status is None else with_send_only(agent.status, agent.address, send_only)
    card = with_send_only(agent.card, agent.address, send_only)
    return replace(agent, address=send_only, card=card, status=status)


def find_own(tx: RegistryTables, tenant: str, address: str, now: int) -> Agent | None:
    """Return the agent of a mailbox as it was registered, by its own address or the one that others know it by."""
    shown = behind(tx, tenant, address, now)
    if shown is None:
        return tx.agents.find(tenant, address)
    return tx.agents.pick([shown.no]).get(shown.no)


def behind(tx: RegistryTables, tenant: str, address: str, now: int) -> Agent | None:
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
