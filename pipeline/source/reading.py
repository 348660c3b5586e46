"""The reader behind ``spark.read.format("mq9")``: plans in the driver, reads in the executors."""

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

from pipeline.source.failing import reason_first
from pipeline.source.mailboxes import Database, Slice, Stretch, choose, scanned, share, where
from pipeline.source.options import Options
from pipeline.source.schema import shape, stored

_ANY = (0, 2**63 - 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def wall_clock() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def open_database(options: Options) -> Database:
    """Open a snapshot of where the mail is; :class:`BadRequestError` names the option if that cannot be."""
    if options.database_url is None:
        from pipeline.source.sqlite import SqliteMail

        return SqliteMail(options)
    from pipeline.source.postgres import PostgresMail

    return PostgresMail(options)


def read_slices(
    options: Options, slices: Sequence[Slice], names: Sequence[str], stretch: Stretch | None = None
) -> Iterator[Any]:
    """Yield record batches of the columns ``names`` of what is in ``slices`` and not expired now: one snapshot.

    With a ``stretch`` it is what that has of their mailboxes. Raises :class:`UnavailableError` when the database goes
    away.
    """
    addresses = {each.mailbox_no: each.address for each in slices}
    if not slices:
        return
    with closing(open_database(options)) as database:
        for rows in database.messages(stored(names), slices, stretch, where(database, options, wall_clock())):
            if rows.num_rows:
                yield shape(rows, names, options.tenant, addresses)


@dataclass(frozen=True)
class Share(InputPartition):
    """What one task reads."""

    slices: tuple[Slice, ...]
    stretch: Stretch | None = None
    """Where in the table it reads; None: wherever the index says."""


@reason_first
class MailReader(DataSourceReader):
    """Reads what mailboxes hold now, and moves no group."""

    def __init__(self, options: Options, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)
        self._only: frozenset[str] | None = None
        self._first, self._last = _ANY

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Leave out mailboxes, msg_ids and times that no row of the answer has; Spark still compares each row."""
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
        """Look for the mailboxes and deal them out; what is sent from now on is not read."""
        with closing(open_database(self._options)) as database:
            found = choose(database, self._options, wall_clock())
            # A stretch of the table knows nothing of msg_ids.
            whole = database.stretch() if (self._first, self._last) == _ANY else None
        kept = [
            replace(each, first=max(each.first, self._first), last=min(each.last, self._last))
            for each in found
            if self._only is None or each.address in self._only
        ]
        wanted = [each for each in kept if each.first <= each.last]
        stretches = scanned(wanted, whole, self._options)
        if stretches:
            return [Share(tuple(wanted), each) for each in stretches]
        return [Share(part) for part in share(wanted, self._options)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the record batches of a share."""
        assert isinstance(partition, Share)
        return read_slices(self._options, partition.slices, self._names, partition.stretch)

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
