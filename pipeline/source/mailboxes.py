"""Chooses the mailboxes to read and splits their messages evenly among tasks.

Ranges of msg_ids are read by index; if much of the table is wanted, ranges of rows are scanned instead.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT
from pipeline.source.options import ReadOptions

PARTITION_MESSAGES = 100_000
"""Default messages of one task, which holds a snapshot of the database while it reads."""
STRETCH_MESSAGES = 5 * PARTITION_MESSAGES
"""The same for a task that scans rows, which is faster."""
UNCOUNTED = 1000
"""Messages by which a mailbox's counter may lag; it is used as a weight only."""
SLICES = 500
"""Mailboxes in one SELECT."""
SCANNED = 10_000
"""Mailboxes in the plan of each task of a scan, at most."""
SPARSE = 4
"""Scan if at least one row in so many is wanted: an index look-up costs about eight scanned rows."""


@dataclass(frozen=True, slots=True)
class MessageRange:
    """The messages of a mailbox from one msg_id to another, both included."""

    mailbox_no: int
    address: str
    first: int
    last: int
    weight: int = 1
    """About how many messages are in it."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """A range of rows of the table of messages, of all mailboxes; both ends included."""

    first: int
    last: int


class MailboxDatabase(Protocol):
    """A snapshot of a mediator's database, read only."""

    find: str
    """The SQL function for the position of a substring."""

    def table(self, sql: str) -> Any:
        """Return the rows of a query, which must be few, as an Arrow table."""

    def stretch(self) -> RowRange | None:
        """Return all of the table; None where it cannot be read by stretches, or is empty."""

    def messages(
        self, columns: Sequence[str], slices: Sequence[MessageRange], stretch: RowRange | None, where: str
    ) -> Any:
        """Yield Arrow batches of columns of the table of messages: the slices, or all that a stretch has of them."""

    def close(self) -> None:
        """Close the database."""


def sql_literal(text: str) -> str:
    """Write a text into SQL; drivers stream only statements without parameters. Texts with a zero never get here."""
    return "'" + text.replace("'", "''") + "'"


def find_ranges(database: MailboxDatabase, options: ReadOptions, now: int) -> list[MessageRange]:
    """Return what is in the mailboxes that the options name, in the order of their numbers; empty ones are left out.

    Raises :class:`BadRequestError` for a mailbox of ``subscribe`` or a tenant that is not there.
    """
    found = database.table(
        "SELECT mailbox.no, address, messages,"
        " (SELECT MIN(msg_id) FROM message WHERE mailbox_no = mailbox.no) AS first,"
        " (SELECT MAX(msg_id) FROM message WHERE mailbox_no = mailbox.no) AS last"
        f" FROM mailbox WHERE {mailbox_condition(options)}"
        f" AND (expire_at IS NULL OR expire_at > {now}) ORDER BY mailbox.no"
    ).to_pylist()
    if options.tenant != DEFAULT_TENANT and not found and not _has_mailboxes(database, options.tenant):
        raise BadRequestError("tenant", f'"{options.tenant}" has no mailboxes')
    there = {row["address"] for row in found}
    for address in options.addresses:
        if address not in there:
            raise BadRequestError("subscribe", f'tenant "{options.tenant}" has no mailbox "{address}"')
    if options.pattern is not None:
        fits = re.compile(options.pattern).fullmatch
        found = [row for row in found if fits(row["address"])]
    whole = [
        MessageRange(row["no"], row["address"], row["first"], row["last"], row["messages"] + UNCOUNTED)
        for row in found
        if row["first"] is not None
    ]
    timed = [_timed(database, options, each) for each in whole]
    return [each for each in timed if each.first <= each.last]


def find_addresses(database: MailboxDatabase, numbers: Sequence[int]) -> dict[int, str]:
    """Return the addresses of mailboxes by number; those that are gone have none."""
    found: dict[int, str] = {}
    for first in range(0, len(numbers), SLICES):
        wanted = ", ".join(str(number) for number in numbers[first : first + SLICES])
        rows = database.table(f"SELECT no, address FROM mailbox WHERE no IN ({wanted}) AND address IS NOT NULL")
        found |= {row["no"]: row["address"] for row in rows.to_pylist()}
    return found


def mailbox_condition(options: ReadOptions) -> str:
    """Return the condition on a mailbox that is of the tenant and named by the options, but for a pattern."""
    named = [f"tenant = {sql_literal(options.tenant)}", "address IS NOT NULL"]
    if options.addresses:
        named.append(f"address IN ({', '.join(map(sql_literal, options.addresses))})")
    if options.prefix:
        # No character of an address (A1) comes after it, so what begins with the prefix is one range of the index.
        named.append(f"address >= {sql_literal(options.prefix)} AND address < {sql_literal(options.prefix + '~')}")
    return " AND ".join(named)


def _has_mailboxes(database: MailboxDatabase, tenant: str) -> bool:
    return bool(database.table(f"SELECT no FROM mailbox WHERE tenant = {sql_literal(tenant)} LIMIT 1").num_rows)


def _timed(database: MailboxDatabase, options: ReadOptions, whole: MessageRange) -> MessageRange:
    """Cut a large mailbox at the times of the options; small ones are read and their rows compared."""
    if whole.last - whole.first < UNCOUNTED:
        return whole
    first, last = whole.first, whole.last
    if options.starting is not None:
        first = first_since(database, whole, options.starting)
    if options.ending is not None:
        last = first_since(database, whole, options.ending) - 1
    return replace(whole, first=first, last=last)


def first_since(database: MailboxDatabase, whole: MessageRange, at: int) -> int:
    """Return the first msg_id that became visible at ``at`` or later, else the one behind the slice.

    Searches by halves: ``created_at`` never goes back while msg_ids grow (N5).
    """
    low, high = whole.first, whole.last + 1
    while low < high:
        middle = (low + high) // 2
        row = database.table(
            f"SELECT msg_id, created_at FROM message WHERE mailbox_no = {whole.mailbox_no}"
            f" AND msg_id BETWEEN {middle} AND {high - 1} ORDER BY msg_id LIMIT 1"
        ).to_pylist()
        if not row or row[0]["created_at"] >= at:
            high = middle
        else:
            low = row[0]["msg_id"] + 1
    return low


def split_ranges(slices: Sequence[MessageRange], options: ReadOptions) -> list[tuple[MessageRange, ...]]:
    """Split ranges among tasks, in order and evenly; a large mailbox goes to several."""
    weighed = [replace(each, weight=_weight(each)) for each in slices]
    total = sum(each.weight for each in weighed)
    count = _tasks(total, PARTITION_MESSAGES, options)
    shares: list[list[MessageRange]] = [[] for _ in range(count)]
    before = 0
    for each in weighed:
        for number in range(before * count // total, (before + each.weight - 1) * count // total + 1):
            begin = max(0, -(-number * total // count) - before)
            end = min(each.weight, -(-(number + 1) * total // count) - before)
            shares[number].append(_part(each, begin, end))
        before += each.weight
    return [tuple(part) for part in shares]


def split_rows(slices: Sequence[MessageRange], whole: RowRange | None, options: ReadOptions) -> list[RowRange]:
    """Return the rows of each task if a scan of the table is cheaper, otherwise an empty list."""
    total = sum(map(_weight, slices))
    if whole is None or len(slices) > SCANNED or total * SPARSE < whole.last - whole.first + 1:
        return []
    count = _tasks(total, STRETCH_MESSAGES, options)
    ends = [whole.first + (whole.last - whole.first + 1) * number // count for number in range(count + 1)]
    return [RowRange(first, after - 1) for first, after in pairwise(ends)]


def _weight(each: MessageRange) -> int:
    return min(each.weight, each.last - each.first + 1)


def _tasks(total: int, each: int, options: ReadOptions) -> int:
    wanted = options.partitions or max(options.min_partitions, -(-total // each))
    return max(1, min(wanted, total))


def _part(whole: MessageRange, begin: int, end: int) -> MessageRange:
    """Cut a range by weight, assuming evenly distributed messages."""
    span = whole.last - whole.first + 1
    first, after = (whole.first + span * at // whole.weight for at in (begin, end))
    return replace(whole, first=first, last=after - 1, weight=end - begin)


def message_condition(database: MailboxDatabase, options: ReadOptions, now: int) -> str:
    """Return the condition on a message: alive, of the time and with the tags of the options."""
    wanted = [f"(expire_at IS NULL OR expire_at > {now})"]
    if options.starting is not None:
        wanted.append(f"created_at >= {options.starting}")
    if options.ending is not None:
        wanted.append(f"created_at < {options.ending}")
    wanted += [f"{database.find}(',' || tags || ',', {sql_literal(f',{tag},')}) > 0" for tag in options.tags]
    return " AND ".join(wanted)


def select_ranges(columns: str, slices: Sequence[MessageRange], where: str, message: str = "message") -> str:
    """Return the SELECT of these slices, in their order."""
    values = ", ".join(f"({each.mailbox_no}, {each.first}, {each.last})" for each in slices)
    return (
        f"WITH slice (no, first_id, last_id) AS (VALUES {values}) SELECT {columns} FROM slice CROSS JOIN {message}"
        f" WHERE mailbox_no = slice.no AND msg_id BETWEEN first_id AND last_id AND {where}"
    )
