"""A transaction: tables over one session, each built when it is first used."""

from collections.abc import Callable
from typing import TypeVar

from mediator.errors import StorageFullError
from mediator.store.session import Session, table
from mediator.store.tables.groups import Groups, Leases
from mediator.store.tables.mailboxes import Mailboxes
from mediator.store.tables.messages import Messages
from mediator.store.tables.pushed import Pushed
from mediator.store.tables.tail import Tail
from mediator.store.tables.waiting import DedupIds, Delays, Outbox

T = TypeVar("T")


class Transaction:
    """See :class:`mediator.mailboxes.ports.Transaction`.

    A part derives a class that has its own tables too, and gets one over the same transaction by :meth:`table`::

        class NotesTransaction(Transaction):
            notes = table(Notes)

        await broker.write(lambda tx, now: tx.table(NotesTransaction).notes.add("text", now))
    """

    mailboxes = table(Mailboxes)
    messages = table(Messages)
    delays = table(Delays)
    dedup_ids = table(DedupIds)
    groups = table(Groups)
    leases = table(Leases)
    pushed = table(Pushed)
    outbox = table(Outbox)
    tail = table(Tail)

    def __init__(self, session: Session) -> None:
        self.session = session
        self.claims = session.claims
        self.events = session.events
        self.woken = session.woken
        self.changed = session.changed

    def table(self, kind: Callable[[Session], T]) -> T:
        """Return the transaction's table, or tables, of a class; made when they are first asked for."""
        return self.session.table(kind)

    @property
    def due(self) -> int | None:
        """See :class:`mediator.mailboxes.ports.Transaction`."""
        return self.session.due

    @due.setter
    def due(self, due: int | None) -> None:
        self.session.due = due

    def control_key(self, made: bytes) -> bytes:
        """Return the key of control messages that all instances on this database share: ``made``, if none is kept."""
        self.session.dialect.execute("INSERT INTO control_key (no, key) VALUES (1, ?) ON CONFLICT DO NOTHING", (made,))
        return bytes(self.session.one("SELECT key FROM control_key WHERE no = 1")[0])

    def require_room(self) -> None:
        """See :class:`mediator.mailboxes.ports.Transaction`."""
        if self.session.full:
            raise StorageFullError

    def write_heartbeat(self, now: int) -> None:
        """Write the time, or one above the last: where nothing changes SQLite writes nothing, and answers at once."""
        self.session.dialect.execute(
            "INSERT INTO heartbeat (no, at) VALUES (1, ?) ON CONFLICT (no) DO UPDATE"
            " SET at = CASE WHEN excluded.at > heartbeat.at THEN excluded.at ELSE heartbeat.at + 1 END",
            (now,),
        )
