"""A transaction: tables over one session, each built when it is first used.

A verb runs inside one :class:`Transaction`. Verbs check first and change afterwards: one that raises has changed
nothing, so many verbs may be committed together. All reads see the transaction's own writes. Times are milliseconds
since the epoch. Errors of tables are faults of the store, never of the caller.
"""

from collections.abc import Callable
from typing import TypeVar

from mediator.errors import StorageFullError
from mediator.mailboxes.session import Session, table
from mediator.mailboxes.tables.copy_rules import CopyRules
from mediator.mailboxes.tables.groups import Groups, Leases
from mediator.mailboxes.tables.mailboxes import Mailboxes
from mediator.mailboxes.tables.messages import Messages, Pushed
from mediator.mailboxes.tables.waiting import DedupIds, Delays, Outbox, Tail

T = TypeVar("T")


class Transaction:
    """All that one verb may read and change, and what others learn of it after the commit.

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
    copy_rules = table(CopyRules)

    def __init__(self, session: Session) -> None:
        self.session = session
        self.claims = session.claims
        """What connections were handed without a lease, in this process's memory (F9)."""
        self.events = session.events
        """What happened, for observers."""
        self.woken = session.woken
        """Tenant and address of the mailboxes whose waiting FETCHes must read again."""
        self.changed = session.changed
        """What parts keep in memory beyond a transaction, and this one changes."""

    def table(self, kind: Callable[[Session], T]) -> T:
        """Return the transaction's table, or tables, of a class; made when they are first asked for."""
        return self.session.table(kind)

    def control_key(self, made: bytes) -> bytes:
        """Return the key of control messages that all instances on this database share: ``made``, if none is kept."""
        self.session.dialect.execute("INSERT INTO control_key (no, key) VALUES (1, ?) ON CONFLICT DO NOTHING", (made,))
        return bytes(self.session.one("SELECT key FROM control_key WHERE no = 1")[0])

    def require_room(self) -> None:
        """Raise :class:`StorageFullError` while the disk has no more space than is reserved for ACK and DELETE."""
        if self.session.full:
            raise StorageFullError

    def write_heartbeat(self, now: int) -> None:
        """Write the time, or one above the last: where nothing changes SQLite writes nothing, and answers at once."""
        self.session.dialect.execute(
            "INSERT INTO heartbeat (no, at) VALUES (1, ?) ON CONFLICT (no) DO UPDATE"
            " SET at = CASE WHEN excluded.at > heartbeat.at THEN excluded.at ELSE heartbeat.at + 1 END",
            (now,),
        )
