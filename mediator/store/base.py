"""What every store offers to the service: transactions to write in, snapshots to read in, and upkeep."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from mediator.agents import ports as agents
from mediator.mailboxes import ports as mailboxes
from mediator.mediation import ports as mediation
from mediator.runs import ports as runs


class Transaction(mailboxes.Transaction, mediation.Tables, agents.Tables, runs.Tables, Protocol):
    """All contexts of the domain over one database, so that what belongs together is one transaction."""

    def control_key(self, made: bytes) -> bytes:
        """Return the key of control messages that all instances on this database share: ``made``, if none is kept."""


Place = tuple[str, str]
"""Tenant and address of a mailbox."""


@dataclass(frozen=True, slots=True)
class Integrity:
    """What a look at the whole database found."""

    problems: list[str] = field(default_factory=list)
    checked: int = 0
    """How many tables were read through."""
    unchecked: list[str] = field(default_factory=list)
    """The tables for which there was no time."""


class Store(Protocol):
    """One database. Not safe for several threads, but for ``reading`` and ``checkpoint``, which are."""

    quick: bool
    """Whether the database is in this process, so that looking at a row costs less than handing that to a thread."""

    def transaction(self, places: Sequence[Place] = ()) -> AbstractContextManager[Transaction]:
        """Open a transaction; leaving it commits to disk, an exception takes everything back.

        ``places`` are the mailboxes that will be asked for, so that a store can lock them in one go and in order.
        Raises :class:`UnavailableError` when the database cannot be written (A9).
        """

    @property
    def damage(self) -> str | None:
        """What was found damaged within the last minute, None when nothing was."""

    def find_damage(self, seconds: float) -> "Integrity":
        """Read the whole database, as far as that goes in so many seconds, and say what is wrong with it."""

    def reading(self) -> AbstractContextManager[Transaction]:
        """Open a snapshot of what is committed; nothing may be changed in it."""

    def checkpoint(self) -> None:
        """Move what was committed to its final place, beside the one who writes."""

    def upkeep(self, busy: bool) -> None:
        """Do one short step of the housekeeping that needs the writer's place; ``busy``: while others wait for it."""

    def close(self) -> None:
        """Let go of the database."""
