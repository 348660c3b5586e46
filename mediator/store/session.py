"""One transaction's connection, what it changed of the mailboxes, and the messages it has yet to insert."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from mediator.mailboxes.claims import Claims
from mediator.mailboxes.events import Event
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Message
from mediator.store import rows
from mediator.store.caches import Counts, MailboxCache, UnflushedPositions
from mediator.store.dialect import Dialect, chunks
from mediator.store.rows import KeptMailbox, Row

T = TypeVar("T")

SHARE_FROM = 4096
"""Bytes from which a payload that one transaction sends to several mailboxes is kept once."""


class Session:
    """What all tables of a transaction share.

    A table that holds something back adds a step to ``before_commit`` or ``on_rollback`` when it first does.
    """

    def __init__(
        self,
        dialect: Dialect,
        mailboxes: MailboxCache,
        positions: UnflushedPositions,
        counts: Counts,
        claims: Claims | None = None,
        *,
        full: bool = False,
    ) -> None:
        """``claims``: None where nothing is handed out. ``full``: the disk has no room for more."""
        self.dialect = dialect
        self.mailboxes = mailboxes
        self.positions = positions
        self.claims = Claims() if claims is None else claims
        self.claims.begin()
        self.full = full
        self.touched: dict[int, KeptMailbox] = {}
        self.removed = False
        """Whether messages were removed."""
        self.unleased: set[int] = set()
        """Groups that are known to have no lease, by number; only this transaction could add any."""
        self.empty_lanes: set[tuple[int, Lane]] = set()
        """Lanes of mailboxes, by number, that are known to hold no message."""
        self.before_commit: list[Callable[[], None]] = []
        self.on_rollback: list[Callable[[], None]] = []
        self.events: list[Event] = []
        self.woken: set[tuple[str, str]] = set()
        self.changed: set[Hashable] = set()
        """What parts keep in memory beyond a transaction, and this one changes."""
        self.due: int | None = None
        self._counts = counts
        self.tables: dict[Callable[[Session], Any], Any] = {}
        """By their classes, those that were used."""
        self._unwritten: list[tuple[KeptMailbox, Message]] = []
        self._unwritten_keys: set[tuple[int, str]] = set()
        self._held: dict[tuple[int, str], tuple[int, int]] = {}

    def table(self, kind: "Callable[[Session], T]") -> T:
        """Return the transaction's table of a class, made when it is first asked for."""
        made = self.tables.get(kind)
        if made is None:
            made = self.tables[kind] = kind(self)
        return made

    def count(self, what: Hashable, count: Callable[[], int]) -> int:
        """Return about how many rows of a kind there are; ``count`` counts them, which happens every few seconds."""
        return self._counts[what].read(count)

    def add_count(self, what: Hashable, by: int) -> None:
        """Note how many rows of a kind this transaction inserts or, below 0, deletes."""
        self._counts[what].add(by)
        self.on_rollback.append(lambda: self._counts[what].add(-by))

    def touch(self, mailbox: Mailbox) -> KeptMailbox:
        """Return the mailbox as this transaction changes it."""
        assert isinstance(mailbox, KeptMailbox)
        self.touched[mailbox.no] = mailbox
        return mailbox

    def write_later(self, mailbox: KeptMailbox, message: Message) -> None:
        """Keep a message for one insert of many."""
        self._unwritten.append((mailbox, message))
        self.empty_lanes.discard((mailbox.no, message.lane))
        if message.key is not None:
            self._unwritten_keys.add((mailbox.no, message.key))

    def unwritten(self, mailbox: Mailbox, key: str) -> bool:
        """Whether a message with the key waits to be inserted."""
        return (mailbox.no, key) in self._unwritten_keys

    def flush(self) -> None:
        """Insert what waits, so that a SELECT sees it."""
        if not self._unwritten:
            return
        waiting, self._unwritten = self._unwritten, []
        self._unwritten_keys.clear()
        bodies = self._share([message.payload for _, message in waiting])
        self.dialect.insert_messages(
            [
                (
                    mailbox.no,
                    message.msg_id,
                    message.lane.value,
                    message.size,
                    message.created_at,
                    *rows.particulars(message),
                    None if id(message.payload) in bodies else message.payload,
                    bodies.get(id(message.payload)),
                    message.volatile,
                )
                for mailbox, message in waiting
            ]
        )

    def _share(self, payloads: Sequence[bytes]) -> dict[int, int]:
        """Keep large payloads that are sent more than once in a body of their own; return its number by identity."""
        uses: dict[int, tuple[bytes, int]] = {}
        for payload in payloads:
            if len(payload) >= SHARE_FROM:
                uses[id(payload)] = (payload, uses.get(id(payload), (payload, 0))[1] + 1)
        return {
            identity: self.one("INSERT INTO body (refs, payload) VALUES (?, ?) RETURNING no", (refs, payload))[0]
            for identity, (payload, refs) in uses.items()
            if refs > 1
        }

    def hold(self, mailbox: Mailbox, recipient: str, messages: int, size: int) -> None:
        """Count for one recipient, written with the rest: a batch brings many messages for the same few."""
        before = self._held.get((mailbox.no, recipient), (0, 0))
        self._held[mailbox.no, recipient] = before[0] + messages, before[1] + size

    def flush_held(self) -> None:
        """Write the counts of recipients; none is kept of who has nothing, or keys of old would pile up."""
        if self._held:
            changed, self._held = self._held, {}
            self.dialect.save_held([(*place, *counts) for place, counts in sorted(changed.items())])

    def write_mailboxes(self) -> None:
        """Write what is still held back of the mailboxes and their messages."""
        self.flush()
        self.flush_held()
        if self.touched:
            self.dialect.save_mailboxes(list(self.touched.values()))

    def finish(self) -> None:
        """Write all that is still held back, right before the commit."""
        self.write_mailboxes()
        for write in self.before_commit:
            write()

    def roll_back(self) -> None:
        """Forget what this transaction left in the caches, since it did not happen."""
        for mailbox in self.touched.values():
            self.mailboxes.forget(mailbox)
        for undo in self.on_rollback:
            undo()
        self.claims.roll_back()

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> Row:
        """Return the only row of a statement that always has one."""
        return self.dialect.execute(sql, parameters)[0]

    def first(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Return the first row of a statement, if it has any."""
        found = self.dialect.execute(sql, parameters)
        return found[0] if found else None


class table(Generic[T]):
    """An attribute of a transaction that is a table, built when it is first used."""

    def __init__(self, kind: Callable[[Session], T]) -> None:
        """``kind`` is the class of the table."""
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        """Remember the name of the attribute, in which the table is kept."""
        self._name = name

    def __get__(self, transaction: Any, owner: type) -> T:
        """Build the table; from then on, Python finds it in the transaction itself."""
        session: Session = transaction.session
        made = session.tables.get(self._kind)
        if made is None:
            made = session.tables[self._kind] = self._kind(session)
        transaction.__dict__[self._name] = made
        return made


class Table:
    """Some rows of the database, over a session; a part's tables derive from it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._dialect = session.dialect
        self._execute = session.dialect.execute

    def _for_each(
        self, sql: str, column: str, values: Sequence[int], before: Sequence[Any] = (), after: Sequence[Any] = ()
    ) -> list[Row]:
        """Run a statement over many values and return all rows; ``{among}`` in it says that a column is one of them.

        ``before`` and ``after`` are the parameters of the places before and behind it.
        """
        found: list[Row] = []
        for chunk in chunks(values):
            among, parameters = self._dialect.any_of(column, chunk)
            found += self._execute(sql.replace("{among}", among), (*before, *parameters, *after))
        return found
