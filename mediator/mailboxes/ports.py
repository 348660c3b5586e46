"""The tables that the rules need, declared as small interfaces; ``mediator.store`` implements them.

A verb runs inside one :class:`Transaction`. Verbs check first and change afterwards: one that raises
has changed nothing, so a store may commit many verbs together. All reads see the transaction's own writes. Times are
milliseconds since the epoch. Errors of tables are faults of the store, never of the caller.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from mediator.mailboxes.claims import Claims
from mediator.mailboxes.events import Event
from mediator.mailboxes.group import Group, Lease
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Kind, Mailbox, NewMailbox, Retention
from mediator.mailboxes.message import Delayed, Handle, Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Filter:
    """Which messages QUERY wants; all that is given must hold (Q1)."""

    key: str | None = None
    tags: tuple[str, ...] = ()
    since: int | None = None
    """Inclusive, compares ``created_at``."""
    before_id: int | None = None
    recipient: str | None = None
    """Only what was forwarded to this canonical key (D3)."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How much something holds."""

    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Expired:
    """A message whose time is over, and the mailbox it is in."""

    mailbox_no: int
    handle: Handle


MAX_EXPIRED = 10_000
"""Expired messages of all mailboxes that are searched for those of one; the clean-up is seldom further behind."""


class LeaseCount(NamedTuple):
    """How many leases a group has (F6)."""

    running: int
    """Those that workers hold now, of messages that are gone included."""
    due: bool
    """Whether any message that is not dead may be given again."""


NO_LEASES = LeaseCount(0, due=False)


class LiveLeaseCount(NamedTuple):
    """A group's leases of one kind whose messages exist."""

    number: int
    first_expiry: int | None
    """When the first of the messages expires; None: none does."""


class LeasePlace(NamedTuple):
    """The position of a lease in the order in which all leases end."""

    until: int
    group_no: int
    msg_id: int


class MailboxRow(NamedTuple):
    """A mailbox as lists of many show it."""

    no: int
    tenant: str
    address: str
    kind: Kind
    retention: Retention
    messages: int
    bytes: int
    next_id: int
    expire_at: int | None
    last_at: int
    oldest_at: int | None
    """When its oldest message came, expired or not."""


class DelayedRow(NamedTuple):
    """A delayed message as lists show it."""

    due_at: int
    lane: Lane
    size: int
    sent_at: int


class Mailboxes(Protocol):
    """The mailboxes themselves."""

    def find(self, tenant: str, address: str) -> Mailbox | None:
        """Return the mailbox that holds the address, expired or not, locked until the transaction ends."""

    def find_to_send(self, tenant: str, address: str) -> Mailbox | None:
        """Do as :meth:`find`; the address may be a mailbox's send-only address too (A10)."""

    def send_only(self, mailbox: Mailbox) -> str:
        """Return the send-only address of a mailbox that is not retired (A10)."""

    def send_only_of(self, tenant: str, addresses: Sequence[str], now: int) -> dict[str, str]:
        """Return by their addresses the send-only addresses of those of these mailboxes that live, locking none."""

    def by_no(self, numbers: Iterable[int]) -> dict[int, Mailbox]:
        """Return the mailboxes that are there, retired ones too, locked in order of their numbers."""

    def add(self, new: NewMailbox) -> Mailbox | None:
        """Store a new mailbox; None when its address was taken in the meantime."""

    def describe(self, mailbox: Mailbox, desc: str, tags: tuple[str, ...], ack_wait: int | None) -> None:
        """Change what describes a mailbox."""

    def retire(self, mailbox: Mailbox) -> None:
        """Free the address at once; what is inside is collected later (M1, M4)."""

    def expired(self, now: int, limit: int) -> list[Mailbox]:
        """Return mailboxes whose TTL is over and whose address is not yet freed, oldest expiry first."""

    def retired(self, limit: int) -> list[Mailbox]:
        """Return mailboxes that wait to be collected."""

    def drop(self, mailbox: Mailbox) -> None:
        """Remove a retired mailbox, whose messages are gone already."""

    def public(self, tenant: str, after: str, tags: Sequence[str], skip: int, limit: int, now: int) -> list[Mailbox]:
        """Do as :meth:`list` for public ones that have all of ``tags``, and leave the first ``skip`` out (E10)."""

    def list(self, tenant: str, after: str, limit: int, now: int) -> list[Mailbox]:
        """Return living mailboxes of a tenant in order of address, those behind ``after``; not that of broadcasts."""

    def survey(self, tenant: str, prefix: str, limit: int, now: int) -> Sequence[MailboxRow]:
        """Return the first living mailboxes of a tenant whose addresses begin so, in order, each with few look-ups."""

    def tenants(self) -> Sequence[str]:
        """Return the tenants that have a mailbox, living or expired, in order."""

    def count(self, tenant: str, now: int) -> int:
        """Return how many living mailboxes a tenant's clients have; about, if that was counted seconds ago."""

    def held(self, tenant: str, limit: int) -> Sequence[Mailbox]:
        """Return mailboxes of a tenant, of any kind and expired ones too, whose address is not yet freed."""

    def usage(self, tenant: str, now: int = 0) -> Usage:
        """Return what all mailboxes of a tenant hold, delayed messages too; may read every one of them.

        What has expired by ``now`` is left out, as far as it is among the first :data:`MAX_EXPIRED` messages that did.
        """


class Messages(Protocol):
    """Visible messages. Expired ones count as gone wherever ``now`` is given."""

    def append(self, mailbox: Mailbox, message: Message) -> None:
        """Keep a message and count it; ``message.msg_id`` is ``mailbox.next_id``, which moves up by one."""

    def handles(self, mailbox: Mailbox, ids: Sequence[int], now: int) -> dict[int, Handle]:
        """Return the handles of these messages, those that are there."""

    def keyed(self, mailbox: Mailbox, key: str) -> Handle | None:
        """Return the message that has the key, expired or not (S2)."""

    def lane(
        self,
        mailbox: Mailbox,
        lane: Lane,
        after: int,
        limit: int,
        budget: int,
        now: int,
        without: Collection[int] = (),
    ) -> list[Message]:
        """Return messages of a lane behind msg_id ``after``, in order; stops behind ``budget`` bytes of size.

        Those whose msg_id is in ``without`` are passed over unread.
        """

    def pick(self, mailbox: Mailbox, ids: Sequence[int], budget: int, now: int) -> list[Message]:
        """Return these messages in order of msg_id, those that are there; stops behind ``budget`` bytes of size."""

    def newest(self, mailbox: Mailbox, wanted: Filter, limit: int, budget: int, now: int) -> list[Message]:
        """Return the newest messages that fit the filter, in ascending msg_id (Q1)."""

    def heads(self, mailbox: Mailbox, wanted: Filter, limit: int, now: int) -> list[Message]:
        """Do as :meth:`newest` and leave the payloads unread: each is empty."""

    def between(self, mailbox: Mailbox, lane: Lane, after: int, last: int, now: int) -> list[Handle]:
        """Return a lane's living messages behind ``after`` up to and with ``last``."""

    def first(self, mailbox: Mailbox, limit: int) -> list[Handle]:
        """Return the oldest messages of a mailbox, expired or not."""

    def first_since(self, mailbox: Mailbox, at: int) -> int:
        """Return the lowest msg_id whose ``created_at`` is ``at`` or later, else ``mailbox.next_id`` (F1, N5)."""

    def remove(self, mailbox: Mailbox, handles: Sequence[Handle]) -> None:
        """Remove messages and take them from the counters."""

    def expired(self, now: int, limit: int) -> list[Expired]:
        """Return messages whose TTL is over, oldest expiry first."""

    def expired_in(self, mailbox: Mailbox, now: int, limit: int) -> list[Handle]:
        """Return messages of one mailbox whose TTL is over, of the first :data:`MAX_EXPIRED` messages that expired."""

    def volatile(self, instance: str, limit: int) -> list[Expired]:
        """Return messages that the next start of a service removes (E5)."""

    def addressed(
        self,
        mailbox: Mailbox,
        recipient: str,
        after: int,
        limit: int,
        budget: int,
        now: int,
        without: Collection[int] = (),
    ) -> list[Message]:
        """Return messages for one recipient key behind msg_id ``after``, as :meth:`lane` does (D3)."""

    def held_for(self, mailbox: Mailbox, recipient: str) -> Usage:
        """Return what is kept for one recipient key, without a scan (D1)."""


class Delays(Protocol):
    """Messages that are not yet visible (S4)."""

    def add(self, delayed: Delayed) -> None:
        """Keep a delayed message; the store gives it its ``seq``."""

    def due(self, now: int, limit: int, budget: int) -> list[Delayed]:
        """Return what is due, by time and then in order of arrival; stops behind ``budget`` bytes of size."""

    def of(self, mailbox: Mailbox, limit: int) -> list[Delayed]:
        """Return what waits for one mailbox."""

    def soonest(self, mailbox: Mailbox, among: int, limit: int) -> Sequence[DelayedRow]:
        """Return what of it falls due first, of so many messages in no order, without payloads."""

    def usage(self, mailbox: Mailbox, now: int = 0) -> Usage:
        """Return how much waits for one mailbox and has not expired by ``now``."""

    def remove(self, delayed: Sequence[Delayed]) -> None:
        """Forget delayed messages that were released."""

    def drop_volatile(self, instance: str, limit: int) -> list[Expired]:
        """Remove, unread, what the next start of a service removes, and return what it was (E5)."""

    def next_due(self) -> int | None:
        """Return when the next message falls due."""

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        """Remove what waits for a retired mailbox, unread; return how many."""


class DedupIds(Protocol):
    """Which dedup ids a mailbox has seen (S3)."""

    def find(self, mailbox: Mailbox, dedup_id: str, now: int) -> int | None:
        """Return the msg_id that was answered for it, None when it is new or its time is over."""

    def add(self, mailbox: Mailbox, dedup_id: str, msg_id: int, expire_at: int) -> None:
        """Keep an id; beyond the bound of a mailbox the oldest are forgotten."""

    def settle(self, mailbox: Mailbox, dedup_id: str, msg_id: int) -> None:
        """Set the msg_id of a delayed message that became visible."""

    def forget(self, mailbox: Mailbox, dedup_id: str) -> None:
        """End an id with its message."""

    def collect(self, now: int, limit: int) -> int:
        """Remove ids whose time is over; return how many."""

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        """Remove ids of a retired mailbox; return how many."""


class Groups(Protocol):
    """Consumer groups (A4)."""

    def find(self, mailbox: Mailbox, name: str, *, push: bool = False) -> Group | None:
        """Return a copy of the group; groups that messages are pushed to have names of their own."""

    def of(self, mailbox: Mailbox, limit: int) -> list[Group]:
        """Return the groups of a mailbox in order of their names."""

    def by_no(self, numbers: Iterable[int]) -> dict[int, Group]:
        """Return copies of the groups that are there."""

    def count(self, mailbox: Mailbox) -> int:
        """Return how many groups the mailbox has."""

    def add(self, mailbox: Mailbox, name: str, *, push: bool = False) -> Group:
        """Keep a new group that stands before the first message."""

    def save(self, group: Group) -> None:
        """Store the group as it is now."""

    def remember(self, group: Group) -> None:
        """Store the group as it is now in memory only; a restart may lose that."""

    def see(self, group: Group, now: int) -> None:
        """Note that a group that messages are pushed to has members (E7)."""

    def unseen(self, before: int, limit: int) -> list[Group]:
        """Return groups that messages are pushed to and that had no members since ``before``, oldest first (E7)."""

    def drop(self, group: Group) -> None:
        """Forget a group with its leases."""

    def clear(self, mailbox: Mailbox, limit: int) -> int:
        """Remove groups of a retired mailbox with their leases; return how many rows went."""


class Leases(Protocol):
    """Messages handed to one worker of a group each (F6, F7)."""

    def get(self, group: Group, ids: Sequence[int]) -> list[Lease]:
        """Return the leases of these messages, dead ones too."""

    def put(self, group: Group, leases: Sequence[Lease]) -> None:
        """Keep leases, new or changed."""

    def remove(self, group: Group, ids: Sequence[int]) -> None:
        """End leases."""

    def due(self, group: Group, now: int, limit: int, lanes: Sequence[Lane] = LANES) -> list[Lease]:
        """Return leases that ended and are not dead, by lane and msg_id.

        Where more than ``limit`` of a lane are due, those come first whose time was over first.
        """

    def without_lease(self, group: Group, lane: Lane, last: int) -> list[int]:
        """Return ids up to ``last`` whose last delivery was without a lease."""

    def dead(self, group: Group, after: int, limit: int) -> list[Lease]:
        """Return dead messages behind msg_id ``after``."""

    def count(self, group: Group, now: int) -> LeaseCount:
        """Count the group's leases."""

    def count_delayed(self, mailbox: Mailbox, group: Group, exact_above: int, now: int) -> int:
        """Return about how many messages wait that the group gave back with a delay; above a number it is exact."""

    def living(self, mailbox: Mailbox, group: Group, now: int, *, delayed: bool = False) -> LiveLeaseCount:
        """Look at the message of each lease that runs, or waits for its delay, and return how many are there."""

    def end_gone(self, mailbox: Mailbox, group: Group, now: int, *, delayed: bool = False) -> None:
        """End the leases of messages that :meth:`living` did not find."""

    def ended(self, after: LeasePlace, now: int, limit: int) -> list[LeasePlace]:
        """Return where leases of all groups, dead ones too, ended behind ``after`` and up to ``now``, in that order."""

    def next_end(self, group: Group, now: int, *, delayed: Sequence[bool] = (False, True)) -> int | None:
        """Return when the next lease or delay ends; ``delayed`` chooses one of them."""

    def clear(self, group: Group) -> None:
        """End all leases of a group (F4)."""


class Copy(NamedTuple):
    """What tells a copy in the outbox from all others, also from those of another store or of an older backup."""

    seq: int
    mailbox_no: int
    msg_id: int
    created_at: int
    """Milliseconds since the epoch."""


class Pushed(Protocol):
    """How far the mail of each mailbox was pushed, and confirmed by whom it was pushed to (E4)."""

    def raise_to(self, mailbox: Mailbox, marks: Sequence[int]) -> None:
        """Note the highest confirmed msg_id of each lane, -1 for none; a mark never goes back."""

    def marks(self, mailbox: Mailbox) -> list[int]:
        """Return the marks, by lane."""

    def unread(self, mailbox: Mailbox, now: int) -> int:
        """Return how many live messages stand behind the marks."""


class Outbox(Protocol):
    """Copies that wait for the archive (S6), each under a number above those of all that came before."""

    def backlog(self) -> int:
        """Return how many copies wait, delayed messages that will need one included."""

    def add(self, mailbox: Mailbox, message: Message) -> None:
        """Copy a message."""

    def remove(self, copies: Sequence[Copy]) -> int:
        """Take out copies that the archive has, and return how many of them were there."""

    def forget(self, tenant: str, address: str, after: int, limit: int) -> tuple[int, int | None]:
        """Take out the copies of an address among the next ``limit`` behind a number.

        Returns how many there were, and the number to go on behind; None at the end.
        """


class TailRow(NamedTuple):
    """Lines of the journal that may not be in its files yet."""

    no: int
    instance: str
    """Which service wrote it."""
    written_at: int
    lines: bytes


class Tail(Protocol):
    """Lines of the journal that are committed with a transaction until they are in its files."""

    ordered: bool
    """Whether ``mark`` and ``behind`` work: a message is kept behind all that are there."""

    @property
    def removed(self) -> bool:
        """Whether this transaction removed messages; places behind the last mark may be taken anew then."""

    def add(self, instance: str, lines: bytes, now: int) -> None:
        """Keep lines with this transaction, in a row behind all others of the instance."""

    def numbers(self, instance: str) -> list[int]:
        """Return which rows the instance has."""

    def read(self, after: int, limit: int) -> list[TailRow]:
        """Return rows of all instances behind a number, in order of their numbers."""

    def remove(self, numbers: Sequence[int]) -> None:
        """Forget rows whose lines are in files."""

    def mark(self) -> int:
        """Return the place of the last message, 0 when there is none."""

    def behind(self, mark: int, limit: int) -> list[tuple[int, Event]]:
        """Return what the messages behind a place tell of their storing, each with its own place, in order."""


class Transaction(Protocol):
    """All that one verb may read and change, and what others learn of it after the commit."""

    def table(self, kind: Callable[[Any], T]) -> T:
        """Return the tables of a part, over the same transaction."""

    @property
    def mailboxes(self) -> Mailboxes: ...  # noqa: D102
    @property
    def messages(self) -> Messages: ...  # noqa: D102
    @property
    def delays(self) -> Delays: ...  # noqa: D102
    @property
    def dedup_ids(self) -> DedupIds: ...  # noqa: D102
    @property
    def groups(self) -> Groups: ...  # noqa: D102
    @property
    def leases(self) -> Leases: ...  # noqa: D102
    @property
    def pushed(self) -> Pushed: ...  # noqa: D102
    @property
    def outbox(self) -> Outbox: ...  # noqa: D102
    @property
    def tail(self) -> Tail: ...  # noqa: D102

    claims: Claims
    """What connections were handed without a lease, in this process's memory (F9)."""
    events: list[Event]
    """What happened, for observers."""
    woken: set[tuple[str, str]]
    """Tenant and address of the mailboxes whose waiting FETCHes must read again."""
    due: int | None
    """The earliest time at which a message that was delayed here falls due."""

    def require_room(self) -> None:
        """Raise :class:`StorageFullError` while the disk has no more space than is reserved for ACK and DELETE."""

    def write_heartbeat(self, now: int) -> None:
        """Write the time, so that a database that cannot be written is noticed."""
