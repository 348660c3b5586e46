"""What the registry brings to the service: its settings, commands, clean-up, and its doors over NATS and HTTP."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from mediator.parts import Part

if TYPE_CHECKING:
    import typer

    from mediator.cleanup.collector import CleanupStep
    from mediator.host import Host
    from mediator.settings.settings import Settings
    from mediator.settings.types import PartSettings
    from mediator.store.base import Transaction
    from mediator.verify.checks import VerifyCheck


class RegistryPart(Part):
    """Agents publish AgentCards, others find them."""

    name = "registry"

    def settings(self) -> "type[PartSettings]":
        """Return the options of the registry."""
        from registry.settings import RegistrySettings

        return RegistrySettings

    def add_commands(self, app: "typer.Typer") -> None:
        """Add the group ``agent``."""
        from registry.cli.agents import app as agent

        app.add_typer(agent, name="agent")

    def cleanup_steps(self, settings: "Settings") -> "Sequence[CleanupStep]":
        """Remove agents that are gone for long, and what is remembered too long."""
        from registry.maintenance import RemovedAgents, SilentAgents, UnusedRequests
        from registry.settings import RegistrySettings

        chosen = settings.section(RegistrySettings)
        # Removed agents last: what is remembered of them is found by these records.
        return SilentAgents(chosen.liveness), UnusedRequests(chosen.memory_policy().keep), RemovedAgents()

    def forget_address(self, tx: "Transaction", tenant: str, address: str, now: int) -> Mapping[str, int]:
        """Remove the agent of the mailbox, with its card and vectors, and what is remembered of it."""
        from registry.rules import forget_agent
        from registry.tables import RegistryTables

        tables = tx.table(RegistryTables)
        agent = tables.agents.find(tenant, address)
        if agent is None:
            return {}
        votes = forget_agent(tables, agent.id, now)
        tables.agents.remove(agent.id, now)
        return {"agents": 1, "agent_votes": votes}

    def verify_checks(self, settings: "Settings") -> "Sequence[VerifyCheck]":
        """Check agents, counts and vectors."""
        from registry.maintenance import registry_checks

        return registry_checks()

    @asynccontextmanager
    async def open(self, host: "Host") -> AsyncIterator[None]:
        """Run the registry and open its doors: the verbs ``AGENT.*`` and REST."""
        from registry.settings import RegistrySettings

        if not host.settings.section(RegistrySettings).enabled:
            yield
            return
        from registry.service import open_registry

        async with open_registry(host):
            yield


part = RegistryPart()
