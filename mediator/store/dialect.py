"""What SQLite and PostgreSQL do each in its own way."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.send_only import SendOnlyAddresses
from mediator.store.rows import KeptMailbox, Row

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
    send_only: SendOnlyAddresses | None
    """See :func:`send_only_addresses`."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a statement with ``?`` places and return its rows."""

    def many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each row of parameters."""

    def insert_messages(self, values: Sequence[Row]) -> None:
        """Insert rows of the message table, in the order of :data:`MESSAGE_COLUMNS`."""

    def lane_source(self, lane: Lane) -> str:
        """Return the message table as a lane is read from it, by the right index."""

    def budgeted(self, source: str, parameters: Sequence[Any], order: str, limit: int, budget: int) -> Iterator[Row]:
        """Read MESSAGE columns from ``source``, a table with its WHERE; no payloads much beyond the byte budget."""

    def any_of(self, column: str, values: Sequence[int]) -> tuple[str, Sequence[Any]]:
        """Return a condition that holds when the column is one of the values, and its parameters."""

    def has_tag(self) -> str:
        """Return a condition with one place that holds when the column ``tags`` has the tag."""

    def lock(self) -> str:
        """Return what a SELECT of mailboxes ends with to lock them."""

    def settle_counters(self, mailbox: KeptMailbox) -> None:
        """Bring counters that were read from a row up to what the messages are now."""

    def save_held(self, changed: Sequence[Row]) -> None:
        """Add to the counts of recipients; rows of mailbox_no, recipient, messages, bytes. What comes to 0 goes."""

    def save_mailboxes(self, mailboxes: Sequence[KeptMailbox]) -> None:
        """Write counters of changed mailboxes, those that must be written."""

    def overwrite_removed(self, on: bool) -> None:
        """Overwrite rows that this connection removes with zeros from now on, where the database is in this process."""

    def usage(self, tenant: str, now: int) -> Row:
        """Return how many messages and bytes all mailboxes of a tenant hold that have not expired by ``now``."""

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


def chunks(values: Sequence[int], size: int = 500) -> Iterator[Sequence[int]]:
    """Split parameters so that no statement has too many."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
