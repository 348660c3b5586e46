"""The tables that the rules of the registry need, in the same transaction as those of mailboxes.

Every transaction that changes agents takes the next *revision*, the same for all its changes. A later commit has a
higher revision, also across instances, so a reader that has read up to a revision has missed nothing before it. To
ensure this on a shared database, a transaction that is going to change agents locks them from its first look until its
commit; it locks mailboxes before that.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mediator.mailboxes.ports import Mailboxes
from registry.agents.records import Agent, AgentChange, CardVectors, Registration


class ChangeCursor(NamedTuple):
    """Position of a change in the order of all changes."""

    revision: int
    no: int


class LastSeenCursor(NamedTuple):
    """Position of an agent in the order of when they were last seen."""

    seen_at: int
    no: int


class SilentAgent(NamedTuple):
    """An agent that was not seen for a long time."""

    no: int
    tenant: str
    address: str
    ttl: int
    seen_at: int


class UpdatedTerms(NamedTuple):
    """New terms of an unchanged card."""

    no: int
    card_revision: int
    terms: bytes


class UnembeddedCard(NamedTuple):
    """A card that has no vectors yet."""

    no: int
    card_revision: int
    card: bytes


class Agents(Protocol):
    """The registered agents."""

    def find(self, tenant: str, address: str) -> Agent | None:
        """Return the agent of a mailbox; ``address`` is one (A1)."""

    def named(self, tenant: str, name: str, limit: int) -> list[int]:
        """Return the numbers of agents with exactly this name, in order (G2)."""

    def add(self, new: Registration, ttl: int, now: int) -> Agent:
        """Add an agent, alive now, at an address where :meth:`find` found none."""

    def replace(self, agent: Agent, new: Registration, ttl: int, now: int) -> Agent:
        """Replace the registration of an agent; another card begins a new edition."""

    def seen(self, agent: Agent, status: bytes, now: int) -> Agent:
        """Store a report and when it came (G2)."""

    def remove(self, no: int, now: int) -> None:
        """Delete an agent and its vectors, if it exists; :meth:`changes` shows it until :meth:`forget_removed`."""

    def count(self, tenant: str) -> int:
        """Return how many agents a tenant has, in constant time."""

    def pick(self, numbers: Sequence[int]) -> dict[int, Agent]:
        """Return the agents with these numbers that exist."""

    def terms(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the terms of the agents with these numbers that exist."""

    def set_terms(self, terms: Sequence[UpdatedTerms]) -> None:
        """Store terms of cards that have not changed since; this is no change of the agents."""

    def revision(self) -> int:
        """Return the last committed revision, or that of this transaction if it has changed agents."""

    def changes(self, after: ChangeCursor, space: str, limit: int) -> list[AgentChange]:
        """Return the changes after a cursor, each agent once, in order of revision and number.

        After ``ChangeCursor(0, 0)`` these are all agents, and the removals that are remembered.
        """

    def last_sign(self) -> int:
        """Return when any agent with a ttl was last seen, 0 if there is none."""

    def unseen(self, since: int, after: LastSeenCursor, limit: int) -> list[SilentAgent]:
        """Return agents with a ttl that were last seen at ``since`` or before, after a cursor and in its order."""

    def forget_removed(self, before: int, limit: int) -> int:
        """Delete the records of removals before a time in milliseconds; return how many."""


class Vectors(Protocol):
    """The vectors of cards, by space."""

    def put(self, space: str, embedded: Sequence[CardVectors]) -> int:
        """Store vectors of cards that have not changed since; return of how many. It is a change of these agents."""

    def read(self, space: str, numbers: Sequence[int]) -> dict[int, CardVectors]:
        """Return the vectors that exist; they may be of a former card."""

    def missing(
        self, space: str, after: int, limit: int, updated_before: int
    ) -> tuple[list[UnembeddedCard], int | None]:
        """Return the agents after a number whose current card has no vectors, in order of their numbers.

        Agents registered at or after ``updated_before`` are left to the instance that registered them. One call looks
        at ``limit`` agents, whether they have vectors or not, and also returns the number to continue after, None at
        the end.
        """

    def count(self, space: str) -> int:
        """Return how many agents have vectors, maybe of a former card."""

    def spaces(self) -> list[str]:
        """Return all spaces that have vectors."""

    def drop(self, space: str, limit: int) -> int:
        """Delete at most ``limit`` rows of an unused space; return how many were deleted."""


class RegistryTables(Protocol):
    """The tables of the registry in one transaction, and those of the mailboxes."""

    @property
    def mailboxes(self) -> Mailboxes: ...  # noqa: D102
    @property
    def agents(self) -> Agents: ...  # noqa: D102
    @property
    def vectors(self) -> Vectors: ...  # noqa: D102
