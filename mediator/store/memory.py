"""The in-memory twin: the same promises without a disk, for tests and for learning the rules."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mediator.mailboxes.events import Event
from mediator.mailboxes.message import Message
from mediator.store.base import Integrity, Place, Transaction
from mediator.store.memory_agents import Agents, Vectors
from mediator.store.memory_data import Data
from mediator.store.memory_groups import Groups, Leases, Pushed
from mediator.store.memory_mediation import Connections, Identities, Invitations, Replays, Routes
from mediator.store.memory_messages import Mailboxes, Messages
from mediator.store.memory_runs import Runs
from mediator.store.memory_table import Undo
from mediator.store.memory_waiting import DedupIds, Delays, Outbox, Tail


class MemoryStore:
    """A store that forgets when the process ends."""

    quick = True

    def __init__(self) -> None:
        self._data = Data()
        self._lock = threading.RLock()

    @contextmanager
    def transaction(self, places: Sequence[Place] = ()) -> Iterator[Transaction]:
        """Open a transaction; see :class:`mediator.store.base.Store`."""
        del places
        undo: Undo = []
        with self._lock:
            try:
                yield MemoryTransaction(self._data, undo)
            except BaseException:
                for step in reversed(undo):
                    step()
                raise

    damage = None

    def find_damage(self, seconds: float) -> Integrity:
        """Memory is never damaged."""
        del seconds
        return Integrity()

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """Open a snapshot; see :class:`mediator.store.base.Store`."""
        with self._lock:
            yield MemoryTransaction(self._data, [])

    def checkpoint(self) -> None:
        """Memory has one place only."""

    def upkeep(self, busy: bool) -> None:
        """Memory needs none."""

    def close(self) -> None:
        """Nothing to let go of."""

    def archived(self) -> list[Message]:
        """Return what the outbox holds, for tests."""
        with self._lock:
            return [message for _, message in self._data.outbox.values()]


class MemoryTransaction:
    """All tables over one set of dictionaries."""

    def __init__(self, data: Data, undo: Undo) -> None:
        self._data = data
        self.connections = Connections(data.mediation, undo)
        self.routes = Routes(data.mediation, undo)
        self.invitations = Invitations(data.mediation, undo)
        self.identities = Identities(data.mediation, undo)
        self.replays = Replays(data.mediation, undo)
        self.agents = Agents(data.registry, undo)
        self.vectors = Vectors(data.registry, undo, self.agents)
        self.runs = Runs(data.history, undo)
        self.mailboxes = Mailboxes(data, undo, self.routes)
        self.messages = Messages(data, undo)
        self.delays = Delays(data, undo)
        self.dedup_ids = DedupIds(data, undo)
        self.groups = Groups(data, undo)
        self.leases = Leases(data, undo)
        self.pushed = Pushed(data, undo)
        self.outbox = Outbox(data, undo)
        self.tail = Tail(data, undo)
        self.events: list[Event] = []
        self.woken: set[tuple[str, str]] = set()
        self.due: int | None = None

    def control_key(self, made: bytes) -> bytes:
        """See :class:`mediator.store.base.Transaction`."""
        self._data.control_key = self._data.control_key or made
        return self._data.control_key

    def require_room(self) -> None:
        """Memory has no disk."""

    def beat(self, now: int) -> None:
        """Memory always takes what is written."""
