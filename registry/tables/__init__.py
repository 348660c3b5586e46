"""The tables of the registry in SQL: agents with their cards, and the vectors of these."""

from mediator.store.session import table
from mediator.store.transaction import Transaction
from registry.tables.agents import Agents
from registry.tables.memory import Memory
from registry.tables.vectors import Vectors


class RegistryTables(Transaction):
    """A transaction with the tables of the registry; see :class:`registry.agents.ports.RegistryTables`."""

    agents = table(Agents)
    vectors = table(Vectors)
    memory = table(Memory)
