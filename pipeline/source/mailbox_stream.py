"""Streams mailboxes by msg_id: each message once, also across restarts of the query (A3, N5)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError
from pipeline.source.mailbox_batch import MailboxPartition, open_database, read_ranges, wall_clock
from pipeline.source.mailboxes import MailboxDatabase, MessageRange, first_since, mailbox_condition, split_ranges
from pipeline.source.options import MAILBOX_STREAM, ReadOptions, normalize_names, parse
from pipeline.source.schema import check_schema
from pipeline.source.stream_options import EARLIEST, LATEST, Offset, StreamOptions, max_rows
from pipeline.source.tracebacks import hide_tracebacks

MAX_MAILBOXES = 1000
"""Mailboxes of one stream; each is in its offsets."""

Ids = dict[int, int]
"""The next msg_id to read, by number of the mailbox."""


@dataclass(frozen=True, slots=True)
class FollowedMailbox:
    """A live mailbox, and its next msg_id."""

    no: int
    address: str
    next_id: int


@hide_tracebacks
class MailboxStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Mailboxes, as Spark asks for them; tasks read the messages, the driver only looks which there are.

    All msg_ids below a mailbox's next one are committed or gone: whoever stores a message holds the mailbox until the
    commit. What was removed before its batch was read is not shown, so a batch that is run again may have fewer rows.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = parse(options, MAILBOX_STREAM)
        self._names = check_schema(schema)
        self._following = StreamOptions.of(normalize_names(options, MAILBOX_STREAM), LATEST)
        self._until: Ids | None = None
        self._newest: Offset | None = None

    def initialOffset(self) -> Offset:
        """Return where a query without a checkpoint begins; :class:`BadRequestError` names a mailbox that lacks."""
        with closing(open_database(self._options)) as database:
            found = find_mailboxes(database, self._options)
            there = {each.address for each in found}
            for address in self._options.addresses:
                if address not in there:
                    raise BadRequestError("subscribe", f'tenant "{self._options.tenant}" has no mailbox "{address}"')
            if self._options.starting is not None:
                return _offset({each.no: _first_since(database, each, self._options.starting) for each in found})
        match self._following.starting:
            case str(word) if word == LATEST:
                return _offset({each.no: each.next_id for each in found})
            case str(word):
                assert word == EARLIEST
                return _offset({each.no: 0 for each in found})
            case given:
                ids = _ids(given)
                for no in ids.keys() - {each.no for each in found}:
                    raise BadRequestError("startingOffsets", f"no mailbox that is followed has the number {no}")
                return _offset({each.no: 0 for each in found} | ids)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the messages of one batch."""
        return self._following.limit

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return where the next batch ends; :class:`LostDataError` when a mailbox went that was followed."""
        before = _ids(start)
        with closing(open_database(self._options)) as database:
            found = find_mailboxes(database, self._options)
            self._newest = _offset({each.no: each.next_id for each in found})
            self._check_all_there(before, found)
            if self._until is not None:
                # A mailbox that came later is of the next run.
                until = before | self._until
                found = [FollowedMailbox(each.no, each.address, until[each.no]) for each in found if each.no in until]
            ends = {each.no: max(each.next_id, before.get(each.no, 0)) for each in found}
            most = max_rows(limit)
            if most is not None:
                ends = limit_ends(database, before, ends, most)
        return _offset(ends)

    def reportLatestOffset(self) -> Offset | None:
        """Return the newest offset at the last look."""
        return self._newest

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the current ends."""
        with closing(open_database(self._options)) as database:
            self._until = {each.no: each.next_id for each in find_mailboxes(database, self._options)}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Split a batch among tasks; :class:`LostDataError` if a mailbox is gone."""
        before, behind = _ids(start), _ids(end)
        new = {no: (before.get(no, 0), last) for no, last in behind.items() if before.get(no, 0) < last}
        if not new:
            return []
        with closing(open_database(self._options)) as database:
            found = {each.no: each.address for each in find_mailboxes(database, self._options)}
        slices = []
        for no, (first, after) in sorted(new.items()):
            if no in found:
                slices.append(MessageRange(no, found[no], first, after - 1, after - first))
            else:
                self._following.report_lost(
                    f"mailbox {no} was deleted or expired before its msg_ids {first} to {after - 1} were read"
                )
        return [MailboxPartition(part) for part in split_ranges(slices, self._options)] if slices else []

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read one share, in a task."""
        assert isinstance(partition, MailboxPartition)
        return read_ranges(self._options, partition.slices, self._names)

    def _check_all_there(self, before: Ids, found: Sequence[FollowedMailbox]) -> None:
        there = {each.no: each for each in found}
        for no, next_id in before.items():
            if no not in there:
                self._following.report_lost(
                    f"mailbox {no} was deleted or expired, what it had from msg_id {next_id} on was not read"
                )
            elif there[no].next_id < next_id:
                self._following.report_lost(
                    f'mailbox {no}, "{there[no].address}", will give msg_id {there[no].next_id} again, and was read up'
                    f" to {next_id}: its database is an older one"
                )


def _first_since(database: MailboxDatabase, mailbox: FollowedMailbox, at: int) -> int:
    return first_since(database, MessageRange(mailbox.no, mailbox.address, 0, mailbox.next_id - 1), at)


def find_mailboxes(database: MailboxDatabase, options: ReadOptions) -> list[FollowedMailbox]:
    """Return the live mailboxes that the options name, by number."""
    # The store updates a mailbox's counter only now and then; the highest stored msg_id may be newer.
    rows = database.table(
        "SELECT no, address, next_id, (SELECT MAX(msg_id) FROM message WHERE mailbox_no = mailbox.no) AS last"
        f" FROM mailbox WHERE {mailbox_condition(options)}"
        f" AND (expire_at IS NULL OR expire_at > {wall_clock()}) ORDER BY no"
    ).to_pylist()
    fits = re.compile(options.pattern or ".*").fullmatch
    found = [
        FollowedMailbox(row["no"], row["address"], max(row["next_id"], -1 if row["last"] is None else row["last"] + 1))
        for row in rows
        if fits(row["address"])
    ]
    if len(found) > MAX_MAILBOXES:
        raise BadRequestError("subscribe", f"expected at most {MAX_MAILBOXES} mailboxes in one stream")
    return found


def limit_ends(database: MailboxDatabase, before: Ids, ends: Ids, most: int) -> Ids:
    """Limit the ends to about ``most`` messages in total, shared fairly among the mailboxes."""
    bounded = {}
    lags = sorted((end - before.get(no, 0), no) for no, end in ends.items())
    for place, (lag, no) in enumerate(lags):
        fair = -(-most // (len(lags) - place))
        bounded[no] = ends[no] if lag <= fair else _behind(database, no, before.get(no, 0), ends[no], fair)
        most -= min(lag, fair)
    return dict(sorted(bounded.items()))


def _behind(database: MailboxDatabase, no: int, first: int, end: int, count: int) -> int:
    """Return the msg_id after so many messages, since msg_ids may be missing."""
    if not count:
        return first
    last = database.table(
        f"SELECT msg_id FROM message WHERE mailbox_no = {no} AND msg_id >= {first} AND msg_id < {end}"
        f" ORDER BY msg_id LIMIT 1 OFFSET {count - 1}"
    ).to_pylist()
    return int(last[0]["msg_id"]) + 1 if last else end


def _offset(ids: Ids) -> Offset:
    return {str(no): next_id for no, next_id in ids.items()}


def _ids(offset: Offset) -> Ids:
    for no, next_id in offset.items():
        if not (no.isascii() and no.isdigit() and type(next_id) is int and next_id >= 0):
            raise BadRequestError("startingOffsets", f'expected {{"MAILBOX_NO": MSG_ID}}, got {offset!r:.200}')
    return {int(no): next_id for no, next_id in offset.items()}
