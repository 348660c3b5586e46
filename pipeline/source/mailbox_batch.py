"""The batch reader of ``spark.read.format("mq9")``: plans on the driver, reads on the executors."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from pipeline.source.mailboxes import (
    MailboxDatabase,
    MessageRange,
    RowRange,
    find_ranges,
    message_condition,
    split_ranges,
    split_rows,
)
from pipeline.source.options import ReadOptions
from pipeline.source.schema import stored_columns, to_batch
from pipeline.source.tracebacks import hide_tracebacks

_ANY = (0, 2**63 - 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def wall_clock() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def open_database(options: ReadOptions) -> MailboxDatabase:
    """Open a snapshot of where the mail is; :class:`BadRequestError` names the option if that cannot be."""
    if options.database_url is None:
        from pipeline.source.sqlite import SqliteDatabase

        return SqliteDatabase(options)
    from pipeline.source.postgres import PostgresDatabase

    return PostgresDatabase(options)


def read_ranges(
    options: ReadOptions, slices: Sequence[MessageRange], names: Sequence[str], stretch: RowRange | None = None
) -> Iterator[Any]:
    """Yield record batches of the columns ``names`` of what is in ``slices`` and not expired now: one snapshot.

    With a ``stretch`` it is what that has of their mailboxes. Raises :class:`UnavailableError` when the database goes
    away.
    """
    addresses = {each.mailbox_no: each.address for each in slices}
    if not slices:
        return
    with closing(open_database(options)) as database:
        for rows in database.messages(
            stored_columns(names), slices, stretch, message_condition(database, options, wall_clock())
        ):
            if rows.num_rows:
                yield to_batch(rows, names, options.tenant, addresses)


@dataclass(frozen=True)
class MailboxPartition(InputPartition):
    """The messages that one task reads."""

    slices: tuple[MessageRange, ...]
    stretch: RowRange | None = None
    """The rows to scan; None: read by index."""


@hide_tracebacks
class MailboxReader(DataSourceReader):
    """Reads the current contents of mailboxes; no consumer group is affected."""

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)
        self._only: frozenset[str] | None = None
        self._first, self._last = _ANY

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Use the filters to skip mailboxes, msg_ids and times; Spark still applies them to each row."""
        for each in filters:
            match each:
                case EqualTo(("mailbox",), value):
                    self._keep([value])
                case In(("mailbox",), value):
                    self._keep(value)
                case (
                    EqualTo((name,), value)
                    | GreaterThan((name,), value)
                    | GreaterThanOrEqual((name,), value)
                    | LessThan((name,), value)
                    | LessThanOrEqual((name,), value)
                ):
                    at_least = not isinstance(each, LessThan | LessThanOrEqual)
                    at_most = not isinstance(each, GreaterThan | GreaterThanOrEqual)
                    self._narrow(name, value if at_least else None, value if at_most else None)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Find the mailboxes and split them among tasks; messages sent later are not read."""
        with closing(open_database(self._options)) as database:
            found = find_ranges(database, self._options, wall_clock())
            # A stretch of the table knows nothing of msg_ids.
            whole = database.stretch() if (self._first, self._last) == _ANY else None
        kept = [
            replace(each, first=max(each.first, self._first), last=min(each.last, self._last))
            for each in found
            if self._only is None or each.address in self._only
        ]
        wanted = [each for each in kept if each.first <= each.last]
        stretches = split_rows(wanted, whole, self._options)
        if stretches:
            return [MailboxPartition(tuple(wanted), each) for each in stretches]
        return [MailboxPartition(part) for part in split_ranges(wanted, self._options)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the record batches of a partition."""
        assert isinstance(partition, MailboxPartition)
        return read_ranges(self._options, partition.slices, self._names, partition.stretch)

    def _keep(self, addresses: Iterable[Any]) -> None:
        wanted = frozenset(str(address) for address in addresses)
        self._only = wanted if self._only is None else self._only & wanted

    def _narrow(self, name: str, low: Any, high: Any) -> None:
        if name == "msg_id":
            self._first = max(self._first, self._first if low is None else int(low))
            self._last = min(self._last, self._last if high is None else int(high))
        elif name == "created_at":
            if isinstance(low, datetime) and low.tzinfo is not None:
                self._options = replace(self._options, starting=max(self._options.starting or 0, _milliseconds(low)))
            if isinstance(high, datetime) and high.tzinfo is not None:
                after = _milliseconds(high) + 1
                ending = self._options.ending
                self._options = replace(self._options, ending=after if ending is None else min(ending, after))


def _milliseconds(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(milliseconds=1)
