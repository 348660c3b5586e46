"""Which mailboxes are read, and which part of them by whom: slices of msg_ids, about as many messages to each task."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT
from pipeline.source.options import Options

PARTITION_MESSAGES = 100_000
"""Messages of one task unless an option says otherwise: a snapshot of the database is held no longer than they take."""
UNCOUNTED = 1000
"""Messages by which a mailbox's counter may lag behind: it weighs, and decides nothing."""
SLICES = 500
"""Mailboxes in one SELECT."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The messages of a mailbox from one msg_id to another, both included."""

    mailbox_no: int
    address: str
    first: int
    last: int
    weight: int = 1
    """About how many messages are in it."""


class Database(Protocol):
    """A snapshot of a mediator's database, read only."""

    find: str
    """The function that says where a text begins in another one."""

    def table(self, sql: str) -> Any:
        """Return the few rows of a question as an Arrow table."""

    def messages(self, columns: Sequence[str], slices: Sequence[Slice], where: str) -> Any:
        """Yield Arrow batches of columns of the table of messages."""

    def close(self) -> None:
        """Let go of the database."""


def literal(text: str) -> str:
    """Write a text into SQL; drivers stream only statements without parameters. Texts with a zero never get here."""
    return "'" + text.replace("'", "''") + "'"


def choose(database: Database, options: Options, now: int) -> list[Slice]:
    """Return what is in the mailboxes that the options name, in the order of their numbers; empty ones are left out.

    Raises :class:`BadRequestError` for a mailbox of ``subscribe`` or a tenant that is not there.
    """
    found = database.table(
        "SELECT mailbox.no, address, messages,"
        " (SELECT MIN(msg_id) FROM message WHERE mailbox_no = mailbox.no) AS first,"
        " (SELECT MAX(msg_id) FROM message WHERE mailbox_no = mailbox.no) AS last"
        f" FROM mailbox WHERE {named(options)} AND (expire_at IS NULL OR expire_at > {now}) ORDER BY mailbox.no"
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
        Slice(row["no"], row["address"], row["first"], row["last"], row["messages"] + UNCOUNTED)
        for row in found
        if row["first"] is not None
    ]
    timed = [_timed(database, options, each) for each in whole]
    return [each for each in timed if each.first <= each.last]


def named(options: Options) -> str:
    """Return the condition on a mailbox that is of the tenant and named by the options, but for a pattern."""
    named = [f"tenant = {literal(options.tenant)}", "address IS NOT NULL"]
    if options.addresses:
        named.append(f"address IN ({', '.join(map(literal, options.addresses))})")
    if options.prefix:
        # No character of an address (A1) comes after it, so what begins with the prefix is one range of the index.
        named.append(f"address >= {literal(options.prefix)} AND address < {literal(options.prefix + '~')}")
    return " AND ".join(named)


def _has_mailboxes(database: Database, tenant: str) -> bool:
    return bool(database.table(f"SELECT no FROM mailbox WHERE tenant = {literal(tenant)} LIMIT 1").num_rows)


def _timed(database: Database, options: Options, whole: Slice) -> Slice:
    """Cut a large mailbox at the times of the options; small ones are read and their rows compared."""
    if whole.last - whole.first < UNCOUNTED:
        return whole
    first, last = whole.first, whole.last
    if options.starting is not None:
        first = _first_since(database, whole, options.starting)
    if options.ending is not None:
        last = _first_since(database, whole, options.ending) - 1
    return replace(whole, first=first, last=last)


def _first_since(database: Database, whole: Slice, at: int) -> int:
    """Search by halves: ``created_at`` never goes back while msg_ids grow (N5)."""
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


def share(slices: Sequence[Slice], options: Options) -> list[tuple[Slice, ...]]:
    """Deal the slices out to tasks, in their order, each about as many messages; a large mailbox goes to several."""
    weighed = [replace(each, weight=min(each.weight, each.last - each.first + 1)) for each in slices]
    total = sum(each.weight for each in weighed)
    wanted = options.partitions or max(options.min_partitions, -(-total // PARTITION_MESSAGES))
    count = max(1, min(wanted, total))
    shares: list[list[Slice]] = [[] for _ in range(count)]
    before = 0
    for each in weighed:
        for number in range(before * count // total, (before + each.weight - 1) * count // total + 1):
            begin = max(0, -(-number * total // count) - before)
            end = min(each.weight, -(-(number + 1) * total // count) - before)
            shares[number].append(_part(each, begin, end))
        before += each.weight
    return [tuple(part) for part in shares]


def _part(whole: Slice, begin: int, end: int) -> Slice:
    """Cut a slice by its weight, as if its messages stood evenly in it."""
    span = whole.last - whole.first + 1
    first, after = (whole.first + span * at // whole.weight for at in (begin, end))
    return replace(whole, first=first, last=after - 1, weight=end - begin)


def where(database: Database, options: Options, now: int) -> str:
    """Return the condition on a message: alive, of the time and with the tags of the options."""
    wanted = [f"(expire_at IS NULL OR expire_at > {now})"]
    if options.starting is not None:
        wanted.append(f"created_at >= {options.starting}")
    if options.ending is not None:
        wanted.append(f"created_at < {options.ending}")
    wanted += [f"{database.find}(',' || tags || ',', {literal(f',{tag},')}) > 0" for tag in options.tags]
    return " AND ".join(wanted)


def select(columns: str, slices: Sequence[Slice], where: str, message: str = "message") -> str:
    """Return the SELECT of these slices, in their order."""
    values = ", ".join(f"({each.mailbox_no}, {each.first}, {each.last})" for each in slices)
    return (
        f"WITH slice (no, first_id, last_id) AS (VALUES {values}) SELECT {columns} FROM slice CROSS JOIN {message}"
        f" WHERE mailbox_no = slice.no AND msg_id BETWEEN first_id AND last_id AND {where}"
    )
