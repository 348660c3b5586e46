"""One transaction's connection, what it changed of the mailboxes, and the messages it has yet to insert.

A *dialect* is a connection to the database, which the store brings: nothing here knows a database library.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from mediator.mailboxes import rows
from mediator.mailboxes.address import SendOnlyAddresses
from mediator.mailboxes.claims import Claims
from mediator.mailboxes.copy_rule import CopyRuleCache
from mediator.mailboxes.events import Event
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Mailbox, MailboxKey
from mediator.mailboxes.message import Message
from mediator.mailboxes.rows import KeptMailbox, Row

T = TypeVar("T")
Keys: TypeAlias = Sequence[int | str]
"""What rows are looked up by."""

SHARE_FROM = 4096
"""Bytes from which a payload that one transaction sends to several mailboxes is kept once."""
COUNT_SECONDS = 5.0
"""How long a count is believed; what is added here is counted meanwhile."""
MAX_COUNTS = 10_000

MESSAGE_COLUMNS = (
    "mailbox_no, msg_id, lane, size, created_at, expire_at, key, tags, recipient, extra, payload, body_no, volatile"
)

EMPTY_LANES = (Lane.CRITICAL, Lane.URGENT, Lane.LOW)
"""The lanes with an index of their own."""


class Dialect(Protocol):
    """One connection, and what its database does in its own way."""

    ordered: bool
    """Whether a message's ``id`` is above those of all messages that are there when it is kept."""
    absences: str
    """Columns behind those of a group, empty where asking again costs nothing: whether it has no lease, and for each of
    the lanes of ``EMPTY_LANES`` whether its mailbox has no message there."""
    lane_sources: tuple[str, ...]
    """The message table as each lane is read from it, by the right index."""
    send_only: SendOnlyAddresses | None
    """See :func:`send_only_addresses`."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a statement with ``?`` places and return its rows."""

    def first(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Run a statement and return its first row, if it has any."""

    def many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each row of parameters."""

    def insert_messages(self, values: Sequence[Row]) -> None:
        """Insert rows of the message table, in the order of :data:`MESSAGE_COLUMNS`."""

    def budgeted(self, source: str, parameters: Sequence[Any], order: str, limit: int, budget: int) -> Iterator[Row]:
        """Read MESSAGE columns from ``source``, a table with its WHERE; no payloads much beyond the byte budget."""

    def any_of(self, column: str, values: Keys) -> tuple[str, Sequence[Any]]:
        """Return a condition that holds when the column is one of the values, at least one, and its parameters."""

    def has_tag(self) -> str:
        """Return a condition with one place that holds when the column ``tags`` has the tag."""

    def lock(self) -> str:
        """Return what a SELECT of mailboxes ends with to lock them."""

    def settle_counters(self, mailbox: KeptMailbox) -> None:
        """Bring counters that were read from a row up to what the messages are now."""

    def save_recipient_counts(self, changed: Sequence[Row]) -> None:
        """Add to the counts of recipients; rows of mailbox_no, recipient, messages, bytes. What comes to 0 goes."""

    def save_mailboxes(self, mailboxes: Sequence[KeptMailbox]) -> None:
        """Write counters of changed mailboxes, those that must be written."""

    def overwrite_removed(self, on: bool) -> None:
        """Overwrite rows that this connection removes with zeros from now on, where the database is in this process."""

    def usage(self, tenant: str, now: int) -> Row:
        """Return how many messages and bytes all mailboxes of a tenant hold that have not expired by ``now``."""

    def clock(self) -> int | None:
        """Return the database server's time in milliseconds since the epoch, None if it has no clock of its own."""

    def size(self) -> int:
        """Return the bytes of the database."""

    def uncounted(self, mailboxes: str, parameters: Sequence[Any]) -> list[Row]:
        """Return what came after counters were last written: mailbox_no, count, bytes, next_id and the last time.

        ``mailboxes`` is the condition of those that are asked for, with its parameters.
        """


def send_only_addresses(dialect: Dialect) -> SendOnlyAddresses:
    """Return the send-only addresses of the database; a connection reads their key once (A10)."""
    if dialect.send_only is None:
        [(key,)] = dialect.execute("SELECT key FROM send_only_key WHERE no = 1")
        dialect.send_only = SendOnlyAddresses(bytes(key))
    return dialect.send_only


def chunks(values: Sequence[T], size: int = 500) -> list[Sequence[T]]:
    """Split parameters so that no statement has too many."""
    return [values[start : start + size] for start in range(0, len(values), size)]


# What a store remembers between transactions.


class MailboxCache:
    """Mailboxes that were read, by key and by number; the least recently used are dropped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_key: OrderedDict[MailboxKey, KeptMailbox] = OrderedDict()
        self._by_id: dict[int, KeptMailbox] = {}
        self._by_send_only: dict[MailboxKey, KeptMailbox] = {}

    def at(self, tenant: str, address: str) -> KeptMailbox | None:
        """Return the mailbox that has the address."""
        mailbox = self._by_key.get((tenant, address))
        if mailbox is not None:
            self._by_key.move_to_end((tenant, address))
        return mailbox

    def at_send_only(self, tenant: str, address: str) -> KeptMailbox | None:
        """Return the mailbox that was found by a send-only address before (A10)."""
        mailbox = self._by_send_only.get((tenant, address))
        return mailbox if mailbox is not None and self.at(*mailbox.key) is mailbox else None

    def found_by_send_only(self, mailbox: KeptMailbox) -> None:
        """Remember a mailbox that is here by its send-only address, too."""
        self._by_send_only[mailbox.tenant, mailbox.send_only] = mailbox

    def by_id(self, mailbox_id: int) -> KeptMailbox | None:
        """Return the mailbox with a number."""
        return self._by_id.get(mailbox_id)

    def add(self, mailbox: KeptMailbox) -> None:
        """Remember a mailbox that has an address."""
        self._by_key[mailbox.tenant, mailbox.address] = mailbox
        self._by_id[mailbox.id] = mailbox

    def forget(self, mailbox: Mailbox) -> None:
        """Forget a mailbox, under whatever key it was known."""
        known = self._by_id.pop(mailbox.id, None)
        if known is not None and self._by_key.get((known.tenant, known.address)) is known:
            del self._by_key[known.tenant, known.address]
        if known is not None:
            self._by_send_only.pop((known.tenant, known.send_only), None)

    def trim(self) -> None:
        """Forget the least recently used above the capacity; only between transactions."""
        while len(self._by_key) > self._capacity:
            _, mailbox = self._by_key.popitem(last=False)
            self._by_id.pop(mailbox.id, None)
            self._by_send_only.pop((mailbox.tenant, mailbox.send_only), None)


class UnflushedPositions(OrderedDict[int, bytes]):
    """Positions of groups that are newer than their rows, by number; a crash loses them, which costs duplicates (K2).

    Where several instances share a database, each must see them at once: there ``capacity`` is 0, and rows are written.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def put(self, group_id: int, state: bytes | None) -> None:
        """Remember a position; None: the row is right again."""
        if state is None:
            self.pop(group_id, None)
        else:
            self[group_id] = state
            self.move_to_end(group_id)

    def surplus(self) -> list[tuple[int, bytes]]:
        """Return the positions that are more than may be remembered, least recently used first."""
        return list(islice(self.items(), max(0, len(self) - self._capacity)))


class Counted:
    """How many rows there are of one kind: counted now and then, and added to in between."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._counted_at = 0.0

    def read(self, count: Callable[[], int]) -> int:
        """Return the number, counting anew when the last count is old."""
        now = self._clock()
        if not self._counted_at or now - self._counted_at > COUNT_SECONDS:
            self._count = count()
            self._counted_at = now
        return self._count

    def add(self, by: int) -> None:
        """Note how many rows were inserted or, below 0, deleted."""
        self._count += by


class Counts(defaultdict[Hashable, Counted]):
    """Numbers of rows that are needed so often that counting them each time would hold up others, by what is counted.

    Of more than are kept, those go first that came first: they are counted anew.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` returns seconds; it never goes back."""
        super().__init__(lambda: Counted(clock))

    def __missing__(self, what: Hashable) -> Counted:
        """Begin to count, and forget the oldest where there are too many."""
        # Readers look here too: a copy does not change meanwhile.
        for oldest in list(self)[: max(0, len(self) - MAX_COUNTS + 1)]:
            self.pop(oldest, None)
        return super().__missing__(what)


# A transaction.


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
        unleased: set[int] | None = None,
        copy_rules: CopyRuleCache | None = None,
        copy_revision: int | None = None,
        full: bool = False,
    ) -> None:
        """``claims``: None where nothing is handed out. ``full``: the disk has no room for more.

        ``unleased``: what former transactions found, where no other process could have changed it. ``copy_rules``: the
        rules by which mail is copied, as of their last reading; ``copy_revision``: the revision that holds now, None
        where that is not known.
        """
        self.dialect = dialect
        self.mailboxes = mailboxes
        self.positions = positions
        self.claims = Claims() if claims is None else claims
        self.copy_rules = CopyRuleCache() if copy_rules is None else copy_rules
        self.copy_revision = copy_revision
        self.claims.undo.clear()
        self.full = full
        self.changed_mailboxes: dict[int, KeptMailbox] = {}
        self.removed = False
        """Whether messages were removed."""
        self.unleased: set[int] = set() if unleased is None else unleased
        """Groups that are known to have no lease, by number; only a transaction of this process could add any."""
        self.empty_lanes: set[tuple[int, Lane]] = set()
        """Lanes of mailboxes, by number, that are known to hold no message."""
        self.before_commit: list[Callable[[], None]] = []
        self.on_rollback: list[Callable[[], None]] = []
        self.events: list[Event] = []
        self.woken: set[MailboxKey] = set()
        self.changed: set[Hashable] = set()
        """What parts keep in memory beyond a transaction, and this one changes."""
        self.due: int | None = None
        """The earliest time at which a message that was delayed here falls due."""
        self._counts = counts
        self.tables: dict[Callable[[Session], Any], Any] = {}
        """By their classes, those that were used."""
        self.unwritten: list[tuple[KeptMailbox, Message]] = []
        """Messages that wait for one insert of many: whoever reads messages flushes first where any wait."""
        self._unwritten_keys: set[tuple[int, str]] = set()
        self._recipient_counts: dict[tuple[int, str], tuple[int, int]] = {}

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

    def mark_changed(self, mailbox: Mailbox) -> KeptMailbox:
        """Have the mailbox written before the commit; return it as this transaction changes it."""
        assert isinstance(mailbox, KeptMailbox)
        self.changed_mailboxes[mailbox.id] = mailbox
        return mailbox

    def write_later(self, mailbox: KeptMailbox, message: Message) -> None:
        """Keep a message for one insert of many."""
        self.unwritten.append((mailbox, message))
        self.empty_lanes.discard((mailbox.id, message.lane))
        if message.key is not None:
            self._unwritten_keys.add((mailbox.id, message.key))

    def is_unwritten(self, mailbox: Mailbox, key: str) -> bool:
        """Whether a message with the key waits to be inserted."""
        return (mailbox.id, key) in self._unwritten_keys

    def flush(self) -> None:
        """Insert what waits, so that a SELECT sees it."""
        if not self.unwritten:
            return
        waiting, self.unwritten = self.unwritten, []
        self._unwritten_keys.clear()
        bodies = self._share([message.payload for _, message in waiting]) if len(waiting) > 1 else {}
        self.dialect.insert_messages(
            [
                (
                    mailbox.id,
                    message.msg_id,
                    message.lane.value,
                    message.size,
                    message.created_at,
                    *rows.detail_columns(message),
                    None if id(message.payload) in bodies else message.payload,
                    bodies.get(id(message.payload)),
                    message.kept_until_start_of,
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

    def add_recipient_count(self, mailbox: Mailbox, recipient: str, messages: int, size: int) -> None:
        """Count for one recipient. Written before the commit: a batch brings many messages for the same few keys."""
        before = self._recipient_counts.get((mailbox.id, recipient), (0, 0))
        self._recipient_counts[mailbox.id, recipient] = before[0] + messages, before[1] + size

    def flush_recipient_counts(self) -> None:
        """Write the counts of recipients; rows that fall to 0 are deleted, or rows of unused keys would pile up."""
        changed, self._recipient_counts = self._recipient_counts, {}
        if changed:
            self.dialect.save_recipient_counts([(*key, *counts) for key, counts in sorted(changed.items())])

    def finish(self) -> None:
        """Write all that is still held back, right before the commit."""
        if self.unwritten:
            self.flush()
        if self._recipient_counts:
            self.flush_recipient_counts()
        if self.changed_mailboxes:
            self.dialect.save_mailboxes(list(self.changed_mailboxes.values()))
        for write in self.before_commit:
            write()

    def roll_back(self) -> None:
        """Forget what this transaction left in the caches, since it did not happen."""
        for mailbox in self.changed_mailboxes.values():
            self.mailboxes.forget(mailbox)
        for undo in self.on_rollback:
            undo()
        self.claims.roll_back()
        # The leases that this transaction ended are there again.
        self.unleased.clear()

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> Row:
        """Return the only row of a statement that always has one."""
        return self.dialect.execute(sql, parameters)[0]


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
        self, sql: str, column: str, values: Keys, before: Sequence[Any] = (), after: Sequence[Any] = ()
    ) -> list[Row]:
        """Run a statement over many values and return all rows; ``{among}`` in it says that a column is one of them.

        ``before`` and ``after`` are the parameters of the places before and behind it.
        """
        found: list[Row] = []
        for chunk in chunks(values):
            among, parameters = self._dialect.any_of(column, chunk)
            found += self._execute(sql.replace("{among}", among), (*before, *parameters, *after))
        return found
