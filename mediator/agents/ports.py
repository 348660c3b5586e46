"""What the registry needs kept, in the same transaction as mailboxes; ``mediator.store`` implements it.

Every transaction that changes agents takes the next *revision*, one for all it changes, and what is committed later has
the higher one, also between instances: so whoever has read up to a revision misses nothing behind it. Where several
instances share a database, one that is about to change agents is alone with them from its first look until it commits;
mailboxes are locked before that.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mediator.agents.records import Agent, Change, Embedded, Registration


class ChangePlace(NamedTuple):
    """Where a change stands in the order of all."""

    revision: int
    no: int


class SeenPlace(NamedTuple):
    """Where an agent stands among all by when it was last seen."""

    seen_at: int
    no: int


class Silent(NamedTuple):
    """An agent that was not seen for long."""

    no: int
    tenant: str
    address: str
    ttl: int
    seen_at: int


class Reread(NamedTuple):
    """Terms that were read anew from a card."""

    no: int
    card_revision: int
    terms: bytes


class Unembedded(NamedTuple):
    """An agent whose card has no vectors yet."""

    no: int
    card_revision: int
    card: bytes


class Agents(Protocol):
    """The registered agents."""

    def find(self, tenant: str, address: str) -> Agent | None:
        """Return the agent of a mailbox; ``address`` is one (A1)."""

    def named(self, tenant: str, name: str, limit: int) -> list[int]:
        """Return the numbers of agents called exactly so, in order (G2)."""

    def add(self, new: Registration, ttl: int, now: int) -> Agent:
        """Keep a new agent, alive now, at an address where :meth:`find` found none."""

    def replace(self, agent: Agent, new: Registration, ttl: int, now: int) -> Agent:
        """Keep a registration in place of an agent's former one; a card that differs begins a new edition."""

    def seen(self, agent: Agent, status: bytes, now: int) -> Agent:
        """Keep a report and the moment it came (G2)."""

    def remove(self, no: int, now: int) -> None:
        """Forget an agent with its vectors, if it is there; followers are told until :meth:`forget_removed`."""

    def count(self, tenant: str) -> int:
        """Return how many there are, at once however many these are."""

    def pick(self, numbers: Sequence[int]) -> dict[int, Agent]:
        """Return the agents that are there."""

    def terms(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the terms of the agents that are there."""

    def set_terms(self, terms: Sequence[Reread]) -> None:
        """Keep terms of cards that are still as they were when they were read; no follower needs to know."""

    def revision(self) -> int:
        """Return the last committed revision, or this transaction's own when it has changed agents."""

    def changes(self, after: ChangePlace, space: str, limit: int) -> list[Change]:
        """Return what changed behind a place, each agent once, in order of revision and number.

        From ``ChangePlace(0, 0)`` that is every agent, and the removals that are remembered.
        """

    def unseen(self, since: int, after: SeenPlace, limit: int) -> list[Silent]:
        """Return agents with a ttl that were last seen at ``since`` or before, behind a place, in order of places."""

    def forget_removed(self, before: int, limit: int) -> int:
        """Remember removals before a moment no more; return how many."""


class Vectors(Protocol):
    """The vectors of cards, by space."""

    def put(self, space: str, embedded: Sequence[Embedded]) -> int:
        """Keep vectors for cards that are still as they were; return for how many. Counts as a change of the agents."""

    def read(self, space: str, numbers: Sequence[int]) -> dict[int, Embedded]:
        """Return vectors, those that are there; they may be of a former card."""

    def missing(self, space: str, after: int, limit: int, updated_before: int) -> tuple[list[Unembedded], int | None]:
        """Return agents above a number without vectors of their present card, in order of their numbers.

        Only those last registered before a moment: the others are at work elsewhere. Also returns the number to go on
        after, None when there is no more: so many agents are looked at in one go, whether one of them is found or not.
        """

    def count(self, space: str) -> int:
        """Return how many agents have vectors, some of them maybe of a former card."""

    def spaces(self) -> list[str]:
        """Return the spaces there are vectors in."""

    def drop(self, space: str, limit: int) -> int:
        """Remove vectors of a space that is not used any more; return how many rows went."""


class Tables(Protocol):
    """The part of a transaction that the registry uses."""

    @property
    def agents(self) -> Agents: ...  # noqa: D102
    @property
    def vectors(self) -> Vectors: ...  # noqa: D102
