"""Mailboxes as a batch (``spark.read``) and as a stream (``spark.readStream``): the driver plans, the tasks read.

Tasks read ranges of msg_ids by index. If a batch wants much of the table, they scan ranges of its rows instead.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Self

from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT
from pipeline.source import hide_tracebacks
from pipeline.source.database import (
    MAX_RANGES,
    MailboxDatabase,
    MessageRange,
    RowRange,
    open_database,
    sql_literal,
)
from pipeline.source.options import (
    BATCH,
    EARLIEST,
    LATEST,
    MAILBOX_STREAM,
    Offset,
    ReadOptions,
    StreamOptions,
    max_rows,
    normalize_names,
    parse,
    read_offset,
)
from pipeline.source.schema import check_schema, stored_columns, to_batch

PARTITION_MESSAGES = 100_000
"""Default messages of one task, which holds a snapshot of the database while it reads."""
SCAN_MESSAGES = 5 * PARTITION_MESSAGES
"""The same for a task that scans rows, which is faster."""
COUNTER_LAG = 1000
"""Messages by which a mailbox's counter may lag; it is used as a weight only."""
MAX_SCANNED = 10_000
"""Maximum mailboxes in the plan of each task of a scan."""
SPARSE = 4
"""Scan if at least one row in so many is wanted: an index look-up costs about eight scanned rows."""
MAX_MAILBOXES = 100_000
"""Maximum mailboxes of one stream: each takes 12 bytes of its offsets, and a batch a second to plan with so many."""

_ANY_MSG_ID = (0, 2**63 - 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class MailboxPartition(InputPartition):
    """The messages that one task reads."""

    ranges: tuple[MessageRange, ...]
    rows: RowRange | None = None
    """The rows to scan; None: read by index."""


MsgIds = dict[int, int]
"""The next msg_id to read, by number of the mailbox."""


@dataclass(frozen=True, slots=True)
class BatchOffsets:
    """Where a batch begins and ends, as offsets of a stream; of a mailbox that is not in one, all is read."""

    starting: MsgIds
    ending: MsgIds
    """The first msg_ids that are not read."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        """Read ``startingOffsets`` and ``endingOffsets``; :class:`BadRequestError` names a wrong one."""
        options = normalize_names(given, BATCH)
        both = {}
        for name, word in (("startingOffsets", EARLIEST), ("endingOffsets", LATEST)):
            offset = read_offset(options, name, word, [word])
            both[name] = {} if isinstance(offset, str) else _msg_ids(offset, name)
        starting, ending = both.values()
        for number in starting.keys() & ending.keys():
            if ending[number] < starting[number]:
                least = f"expected {starting[number]}, which is in startingOffsets, or more for mailbox {number}"
                raise BadRequestError("endingOffsets", least)
        return cls(starting, ending)

    def __bool__(self) -> bool:
        return bool(self.starting or self.ending)

    def limit(
        self, database: MailboxDatabase, options: ReadOptions, ranges: Sequence[MessageRange]
    ) -> list[MessageRange]:
        """Limit ranges to the offsets; :class:`BadRequestError` for a number of no mailbox that is read."""
        matches = re.compile(options.pattern or ".*").fullmatch
        mailboxes = database.table(f"SELECT no, address FROM mailbox WHERE {_mailbox_condition(options, wall_clock())}")
        live = {row["no"] for row in mailboxes.to_pylist() if matches(row["address"])}
        for name, ids in (("startingOffsets", self.starting), ("endingOffsets", self.ending)):
            for number in ids.keys() - live:
                raise BadRequestError(name, f"no mailbox that is read has the number {number}")
        limited = [
            replace(
                each,
                first=max(each.first, self.starting.get(each.mailbox_no, 0)),
                last=min(each.last, self.ending.get(each.mailbox_no, each.last + 1) - 1),
            )
            for each in ranges
        ]
        return [each for each in limited if each.first <= each.last]


@hide_tracebacks
class MailboxReader(DataSourceReader):
    """Reads the current contents of mailboxes; no consumer group is affected."""

    def __init__(self, options: ReadOptions, names: Sequence[str], offsets: BatchOffsets | None = None) -> None:
        self._options = options
        self._names = tuple(names)
        self._offsets = offsets
        self._addresses: frozenset[str] | None = None
        """The addresses that filters allow; None: all."""
        self._first, self._last = _ANY_MSG_ID

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
            if self._offsets:
                found = self._offsets.limit(database, self._options, found)
            # Rows of the table are not in the order of msg_ids.
            whole = not self._offsets and (self._first, self._last) == _ANY_MSG_ID
            rows = database.row_range() if whole else None
        ranges = [
            replace(each, first=max(each.first, self._first), last=min(each.last, self._last))
            for each in found
            if self._addresses is None or each.address in self._addresses
        ]
        ranges = [each for each in ranges if each.first <= each.last]
        scans = split_rows(ranges, rows, self._options)
        if scans:
            return [MailboxPartition(tuple(ranges), each) for each in scans]
        return [MailboxPartition(part) for part in split_ranges(ranges, self._options)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the record batches of a partition, in a task."""
        assert isinstance(partition, MailboxPartition)
        return read_ranges(self._options, partition, self._names)

    def _keep(self, addresses: Iterable[Any]) -> None:
        wanted = frozenset(str(address) for address in addresses)
        self._addresses = wanted if self._addresses is None else self._addresses & wanted

    def _narrow(self, name: str, low: Any, high: Any) -> None:
        if name == "msg_id":
            self._first = max(self._first, self._first if low is None else int(low))
            self._last = min(self._last, self._last if high is None else int(high))
        elif name == "created_at":
            if isinstance(low, datetime) and low.tzinfo is not None:
                starting = (low - _EPOCH) // timedelta(milliseconds=1)
                self._options = replace(self._options, starting=max(self._options.starting or 0, starting))
            if isinstance(high, datetime) and high.tzinfo is not None:
                after = (high - _EPOCH) // timedelta(milliseconds=1) + 1
                ending = self._options.ending
                self._options = replace(self._options, ending=after if ending is None else min(ending, after))


@dataclass(frozen=True, slots=True)
class FollowedMailbox:
    """A live mailbox, and its next msg_id."""

    mailbox_no: int
    address: str
    next_id: int


@hide_tracebacks
class MailboxStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams mailboxes by msg_id: each message once, also across restarts of the query (A3, N5).

    Tasks read the messages; the driver only looks up which there are. All msg_ids below a mailbox's next one are
    committed or gone: whoever stores a message holds the mailbox until the commit. What was removed before its batch
    was read is not shown, so a repeated batch may have fewer rows.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = parse(options, MAILBOX_STREAM)
        self._names = check_schema(schema)
        self._stream_options = StreamOptions.of(normalize_names(options, MAILBOX_STREAM), LATEST)
        self._until: MsgIds | None = None
        """Where a run with the trigger ``availableNow`` ends."""
        self._newest: Offset | None = None

    def initialOffset(self) -> Offset:
        """Return where a query without a checkpoint begins; :class:`BadRequestError` names a missing mailbox."""
        options = self._options
        with closing(open_database(options)) as database:
            found = find_mailboxes(database, options)
            live = {each.address for each in found}
            for address in options.addresses:
                if address not in live:
                    raise BadRequestError("subscribe", f'tenant "{options.tenant}" has no mailbox "{address}"')
            if options.starting is not None:
                ranges = (MessageRange(each.mailbox_no, each.address, 0, each.next_id - 1) for each in found)
                return _offset({each.mailbox_no: first_since(database, each, options.starting) for each in ranges})
        earliest = {each.mailbox_no: 0 for each in found}
        match self._stream_options.starting:
            case str(word) if word == LATEST:
                return _offset({each.mailbox_no: each.next_id for each in found})
            case str(word):
                assert word == EARLIEST
                return _offset(earliest)
            case offset:
                ids = _msg_ids(offset)
                for mailbox_no in ids.keys() - earliest.keys():
                    raise BadRequestError("startingOffsets", f"no mailbox that is followed has the number {mailbox_no}")
                return _offset(earliest | ids)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the maximum number of messages of one batch."""
        return self._stream_options.limit

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return where the next batch ends; :class:`LostDataError` if a followed mailbox is gone."""
        begins = _msg_ids(start)
        with closing(open_database(self._options)) as database:
            found = find_mailboxes(database, self._options)
            self._newest = _offset({each.mailbox_no: each.next_id for each in found})
            self._report_missing(begins, found)
            if self._until is not None:
                # Mailboxes that were created since are left to the next run.
                until = begins | self._until
                found = [replace(each, next_id=until[each.mailbox_no]) for each in found if each.mailbox_no in until]
            ends = {each.mailbox_no: max(each.next_id, begins.get(each.mailbox_no, 0)) for each in found}
            max_messages = max_rows(limit)
            if max_messages is not None:
                ends = limit_ends(database, begins, ends, max_messages)
        return _offset(ends)

    def reportLatestOffset(self) -> Offset | None:
        """Return the newest offset at the last look-up."""
        return self._newest

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the current ends."""
        with closing(open_database(self._options)) as database:
            self._until = {each.mailbox_no: each.next_id for each in find_mailboxes(database, self._options)}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Split a batch among tasks; :class:`LostDataError` if a mailbox is gone."""
        begins = _msg_ids(start)
        new = {number: (begins.get(number, 0), after) for number, after in _msg_ids(end).items()}
        new = {number: (first, after) for number, (first, after) in new.items() if first < after}
        if not new:
            return []
        with closing(open_database(self._options)) as database:
            addresses = {each.mailbox_no: each.address for each in find_mailboxes(database, self._options)}
        ranges = []
        for number, (first, after) in sorted(new.items()):
            if number in addresses:
                ranges.append(MessageRange(number, addresses[number], first, after - 1, after - first))
            else:
                self._stream_options.report_lost(
                    f"mailbox {number} was deleted or expired before its msg_ids {first} to {after - 1} were read"
                )
        return [MailboxPartition(part) for part in split_ranges(ranges, self._options)] if ranges else []

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the record batches of a partition, in a task."""
        assert isinstance(partition, MailboxPartition)
        return read_ranges(self._options, partition, self._names)

    def _report_missing(self, begins: MsgIds, found: Sequence[FollowedMailbox]) -> None:
        live = {each.mailbox_no: each for each in found}
        for number, next_id in begins.items():
            if number not in live:
                self._stream_options.report_lost(
                    f"mailbox {number} was deleted or expired, what it had from msg_id {next_id} on was not read"
                )
            elif live[number].next_id < next_id:
                self._stream_options.report_lost(
                    f'mailbox {number}, "{live[number].address}", will give msg_id {live[number].next_id} again, and'
                    f" was read up to {next_id}: its database is an older one"
                )


def wall_clock() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def read_ranges(options: ReadOptions, partition: MailboxPartition, names: Sequence[str]) -> Iterator[Any]:
    """Yield record batches of the columns ``names`` of a partition's unexpired messages, from one snapshot.

    Raises :class:`UnavailableError` when the database goes away.
    """
    if not partition.ranges:
        return
    addresses = {each.mailbox_no: each.address for each in partition.ranges}
    with closing(open_database(options)) as database:
        condition = _message_condition(database, options, wall_clock())
        for rows in database.messages(stored_columns(names), partition.ranges, partition.rows, condition):
            if rows.num_rows:
                yield to_batch(rows, names, options.tenant, addresses)


def _message_condition(database: MailboxDatabase, options: ReadOptions, now: int) -> str:
    """Return the condition on a message: unexpired, of the time and with the tags of the options."""
    wanted = [f"(expire_at IS NULL OR expire_at > {now})"]
    if options.starting is not None:
        wanted.append(f"created_at >= {options.starting}")
    if options.ending is not None:
        wanted.append(f"created_at < {options.ending}")
    wanted += [f"{database.position}(',' || tags || ',', {sql_literal(f',{tag},')}) > 0" for tag in options.tags]
    return " AND ".join(wanted)


def _mailbox_condition(options: ReadOptions, now: int) -> str:
    """Return the condition on a live mailbox of the tenant that the options name, except for a pattern."""
    wanted = [f"tenant = {sql_literal(options.tenant)}", "address IS NOT NULL"]
    if options.addresses:
        wanted.append(f"address IN ({', '.join(map(sql_literal, options.addresses))})")
    if options.prefix:
        # No character of an address (A1) comes after it, so what begins with the prefix is one range of the index.
        wanted.append(f"address >= {sql_literal(options.prefix)} AND address < {sql_literal(options.prefix + '~')}")
    wanted.append(f"(expire_at IS NULL OR expire_at > {now})")
    return " AND ".join(wanted)


def find_ranges(database: MailboxDatabase, options: ReadOptions, now: int) -> list[MessageRange]:
    """Return what is in the mailboxes that the options name, in the order of their numbers; empty ones are left out.

    Raises :class:`BadRequestError` for a mailbox of ``subscribe`` or a tenant that does not exist.
    """
    found = database.table(
        "SELECT mailbox.no, address, messages,"
        " (SELECT MIN(msg_id) FROM message WHERE mailbox_no = mailbox.no) AS first,"
        " (SELECT MAX(msg_id) FROM message WHERE mailbox_no = mailbox.no) AS last"
        f" FROM mailbox WHERE {_mailbox_condition(options, now)} ORDER BY mailbox.no"
    ).to_pylist()
    if options.tenant != DEFAULT_TENANT and not found:
        mailboxes = f"SELECT no FROM mailbox WHERE tenant = {sql_literal(options.tenant)} LIMIT 1"
        if not database.table(mailboxes).num_rows:
            raise BadRequestError("tenant", f'"{options.tenant}" has no mailboxes')
    live = {row["address"] for row in found}
    for address in options.addresses:
        if address not in live:
            raise BadRequestError("subscribe", f'tenant "{options.tenant}" has no mailbox "{address}"')
    matches = re.compile(options.pattern or ".*").fullmatch
    ranges = [
        MessageRange(row["no"], row["address"], row["first"], row["last"], row["messages"] + COUNTER_LAG)
        for row in found
        if row["first"] is not None and matches(row["address"])
    ]
    timed = [_limit_to_times(database, options, each) for each in ranges]
    return [each for each in timed if each.first <= each.last]


def _limit_to_times(database: MailboxDatabase, options: ReadOptions, whole: MessageRange) -> MessageRange:
    """Cut a large mailbox at the times of the options; small ones are read and their rows compared."""
    if whole.last - whole.first < COUNTER_LAG:
        return whole
    first, last = whole.first, whole.last
    if options.starting is not None:
        first = first_since(database, whole, options.starting)
    if options.ending is not None:
        last = first_since(database, whole, options.ending) - 1
    return replace(whole, first=first, last=last)


def first_since(database: MailboxDatabase, whole: MessageRange, at: int) -> int:
    """Return the first msg_id of a range that became visible at ``at`` or later, else the one after the range.

    A binary search: ``created_at`` never decreases while msg_ids grow (N5).
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


def find_mailboxes(database: MailboxDatabase, options: ReadOptions) -> list[FollowedMailbox]:
    """Return the live mailboxes that the options name, by number."""
    # The store updates a mailbox's counter only now and then; the highest stored msg_id may be newer.
    rows = database.table(
        "SELECT no, address, next_id, (SELECT MAX(msg_id) FROM message WHERE mailbox_no = mailbox.no) AS last"
        f" FROM mailbox WHERE {_mailbox_condition(options, wall_clock())} ORDER BY no"
    ).to_pylist()
    matches = re.compile(options.pattern or ".*").fullmatch
    found = [
        FollowedMailbox(row["no"], row["address"], max(row["next_id"], -1 if row["last"] is None else row["last"] + 1))
        for row in rows
        if matches(row["address"])
    ]
    if len(found) > MAX_MAILBOXES:
        raise BadRequestError("subscribe", f"expected at most {MAX_MAILBOXES} mailboxes in one stream")
    return found


def find_addresses(database: MailboxDatabase, numbers: Sequence[int]) -> dict[int, str]:
    """Return the addresses of mailboxes by number; deleted ones have none."""
    found: dict[int, str] = {}
    for first in range(0, len(numbers), MAX_RANGES):
        wanted = ", ".join(str(number) for number in numbers[first : first + MAX_RANGES])
        rows = database.table(f"SELECT no, address FROM mailbox WHERE no IN ({wanted}) AND address IS NOT NULL")
        found |= {row["no"]: row["address"] for row in rows.to_pylist()}
    return found


def split_ranges(ranges: Sequence[MessageRange], options: ReadOptions) -> list[tuple[MessageRange, ...]]:
    """Split ranges among tasks, in order and evenly; a large mailbox goes to several."""
    weighed = [replace(each, weight=_weight(each)) for each in ranges]
    total = sum(each.weight for each in weighed)
    count = _count_tasks(total, PARTITION_MESSAGES, options)
    shares: list[list[MessageRange]] = [[] for _ in range(count)]
    before = 0
    for each in weighed:
        span = each.last - each.first + 1
        for number in range(before * count // total, (before + each.weight - 1) * count // total + 1):
            begin = max(0, -(-number * total // count) - before)
            end = min(each.weight, -(-(number + 1) * total // count) - before)
            # Cut by weight, as if messages were evenly distributed.
            first, after = (each.first + span * weight // each.weight for weight in (begin, end))
            shares[number].append(replace(each, first=first, last=after - 1, weight=end - begin))
        before += each.weight
    return [tuple(part) for part in shares]


def split_rows(ranges: Sequence[MessageRange], rows: RowRange | None, options: ReadOptions) -> list[RowRange]:
    """Return the rows of each task if a scan of the table is cheaper, otherwise an empty list."""
    total = sum(map(_weight, ranges))
    if rows is None or len(ranges) > MAX_SCANNED or total * SPARSE < rows.last - rows.first + 1:
        return []
    count = _count_tasks(total, SCAN_MESSAGES, options)
    ends = [rows.first + (rows.last - rows.first + 1) * number // count for number in range(count + 1)]
    return [RowRange(first, after - 1) for first, after in pairwise(ends)]


def _weight(messages: MessageRange) -> int:
    return min(messages.weight, messages.last - messages.first + 1)


def _count_tasks(messages: int, of_one_task: int, options: ReadOptions) -> int:
    wanted = options.partitions or max(options.min_partitions, -(-messages // of_one_task))
    return max(1, min(wanted, messages))


def limit_ends(database: MailboxDatabase, begins: MsgIds, ends: MsgIds, max_messages: int) -> MsgIds:
    """Limit the ends to about ``max_messages`` in total, shared fairly among the mailboxes."""
    limited = {}
    lags = sorted((end - begins.get(number, 0), number) for number, end in ends.items())
    for index, (lag, number) in enumerate(lags):
        share = -(-max_messages // (len(lags) - index))
        limited[number] = ends[number]
        if lag > share:
            limited[number] = _msg_id_after(database, number, begins.get(number, 0), ends[number], share)
        max_messages -= min(lag, share)
    return dict(sorted(limited.items()))


def _msg_id_after(database: MailboxDatabase, mailbox_no: int, first: int, end: int, count: int) -> int:
    """Return the msg_id after ``count`` messages, since msg_ids may be missing."""
    if not count:
        return first
    last = database.table(
        f"SELECT msg_id FROM message WHERE mailbox_no = {mailbox_no} AND msg_id >= {first} AND msg_id < {end}"
        f" ORDER BY msg_id LIMIT 1 OFFSET {count - 1}"
    ).to_pylist()
    return int(last[0]["msg_id"]) + 1 if last else end


def _offset(ids: MsgIds) -> Offset:
    return {str(number): next_id for number, next_id in ids.items()}


def _msg_ids(offset: Offset, option: str = "startingOffsets") -> MsgIds:
    for number, next_id in offset.items():
        if not (number.isascii() and number.isdigit() and type(next_id) is int and next_id >= 0):
            raise BadRequestError(option, f'expected {{"MAILBOX_NO": MSG_ID}}, got {offset!r:.200}')
    return {int(number): next_id for number, next_id in offset.items()}
