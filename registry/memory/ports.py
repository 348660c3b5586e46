"""The table that the rules of the memory of use need, beside those of the agents; revisions are the agents' own."""

from collections.abc import Sequence
from typing import Protocol

from registry.agents.ports import ChangeCursor, RegistryTables
from registry.memory.records import AskedQuery, RequestChange, Vote


class Memory(Protocol):
    """Remembered requests, and the votes on who served them."""

    def keep(self, query: AskedQuery, now: int) -> int:
        """Remember a request, or that it was asked again; return its number."""

    def vote(self, vote: Vote, limit: int) -> None:
        """Keep a vote in place of the voter's former one on this agent.

        Beyond ``limit`` votes the oldest go, of the voters with the most.
        """

    def find_vote(self, query: AskedQuery, agent_no: int, voter: int) -> int | None:
        """Return the value of a voter's vote on an agent for this request, None without one."""

    def changes(self, after: ChangeCursor, space: str, limit: int) -> list[RequestChange]:
        """Return the changes after a cursor, in order of revision and number, with the vectors of a space."""

    def votes(self, numbers: Sequence[int]) -> list[Vote]:
        """Return all votes on these requests."""

    def oldest(self, tenant: str, limit: int) -> list[int]:
        """Return the requests of a tenant that were not used for longest."""

    def unused(self, before: int, limit: int) -> list[int]:
        """Return requests of all tenants that were last used before a time."""

    def forget(self, numbers: Sequence[int], now: int) -> None:
        """Delete requests with all votes; :meth:`changes` shows them until :meth:`forget_removed`."""

    def forget_agent(self, agent_no: int, now: int, limit: int) -> int:
        """Delete at most ``limit`` votes on an agent, and requests that are left without; return how many votes."""

    def orphaned(self, limit: int) -> list[int]:
        """Return removed agents that there are still votes on."""

    def forget_removed(self, before: int, limit: int) -> int:
        """Delete the records of forgotten requests before a time; return how many."""


class MemoryTables(RegistryTables, Protocol):
    """The tables of the registry with its memory."""

    @property
    def memory(self) -> Memory: ...  # noqa: D102
