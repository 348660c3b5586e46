"""A transaction of a SQL store: all tables over one session."""

from mediator.errors import StorageFullError
from mediator.mailboxes.events import Event
from mediator.store.sql.agents import Agents, Clock
from mediator.store.sql.dialect import Dialect
from mediator.store.sql.groups import Groups, Leases
from mediator.store.sql.identities import Identities, Invitations
from mediator.store.sql.known import Counts, Known, Remembered
from mediator.store.sql.mailboxes import Mailboxes
from mediator.store.sql.mediation import Connections, Routes
from mediator.store.sql.messages import Messages
from mediator.store.sql.pushed import Pushed
from mediator.store.sql.replays import Replays
from mediator.store.sql.runs import Runs
from mediator.store.sql.session import Session
from mediator.store.sql.tail import Tail
from mediator.store.sql.vectors import Vectors
from mediator.store.sql.waiting import DedupIds, Delays, Outbox


class SqlTransaction:
    """See :class:`mediator.store.base.Transaction`."""

    def __init__(
        self, dialect: Dialect, known: Known, remembered: Remembered, counts: Counts, *, full: bool = False
    ) -> None:
        """``full``: the disk has no room for more."""
        self._full = full
        self.session = session = Session(dialect, known)
        self.mailboxes = Mailboxes(session)
        self.messages = Messages(session)
        self.delays = Delays(session, counts.outbox)
        self.dedup_ids = DedupIds(session, self.mailboxes)
        self.groups = Groups(session, remembered)
        self.leases = Leases(session)
        self.pushed = Pushed(session)
        self.outbox = Outbox(session, counts.outbox)
        self.tail = Tail(session)
        self.connections = Connections(session, counts)
        self.routes = Routes(session)
        self.invitations = Invitations(session)
        self.identities = Identities(session)
        self.replays = Replays(session)
        clock = Clock(session)
        self.agents = Agents(session, clock)
        self.vectors = Vectors(session, clock)
        self.runs = Runs(session)
        self.events: list[Event] = []
        self.woken: set[tuple[str, str]] = set()
        self.due: int | None = None

    def control_key(self, made: bytes) -> bytes:
        """See :class:`mediator.store.base.Transaction`."""
        self.session.dialect.execute("INSERT INTO control_key (no, key) VALUES (1, ?) ON CONFLICT DO NOTHING", (made,))
        return bytes(self.session.one("SELECT key FROM control_key WHERE no = 1")[0])

    def require_room(self) -> None:
        """See :class:`mediator.mailboxes.ports.Transaction`."""
        if self._full:
            raise StorageFullError

    def beat(self, now: int) -> None:
        """Write the time, or one above the last: where nothing changes SQLite writes nothing, and answers at once."""
        self.session.dialect.execute(
            "INSERT INTO heartbeat (no, at) VALUES (1, ?) ON CONFLICT (no) DO UPDATE"
            " SET at = CASE WHEN excluded.at > heartbeat.at THEN excluded.at ELSE heartbeat.at + 1 END",
            (now,),
        )

    def finish(self) -> None:
        """Write what is still held back, right before the commit."""
        self.session.finish()
        self.agents.finish()
        self.tail.finish()
