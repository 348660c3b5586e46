"""Consumer groups and their leases in SQL."""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from mediator.mailboxes import rows
from mediator.mailboxes.group import NO_LEASE, NO_LEASES, Group, Lease, LeaseCount, LeaseCursor, LiveLeaseCount
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.rows import Row
from mediator.mailboxes.session import EMPTY_LANES, Session, Table

DELAYED = "delayed leases"
"""Under which the messages that a group gave back with a delay are counted, with its number."""


class Groups(Table):
    """Consumer groups (A4)."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._positions = session.positions
        self._before: dict[int, bytes | None] = {}
        """The positions that this transaction changed, as they were before."""

    def find(self, mailbox: Mailbox, name: str, *, push: bool = False) -> Group | None:
        """Return a copy of the group; groups that messages are pushed to have names of their own."""
        if self._dialect.absences:
            self._session.flush()
        row = self._dialect.first(
            f"SELECT {rows.GROUP}{self._dialect.absences} FROM consumer WHERE mailbox_no = ? AND name = ? AND push = ?",
            (mailbox.id, name, int(push)),
        )
        if row is None:
            return None
        group = self._read(row[:_COLUMNS])
        if self._dialect.absences:
            unleased, *empty = row[_COLUMNS:]
            if unleased:
                self._session.unleased.add(group.id)
            lanes = zip(EMPTY_LANES, empty, strict=True)
            self._session.empty_lanes.update((mailbox.id, lane) for lane, is_empty in lanes if is_empty)
        return group

    def of(self, mailbox: Mailbox, limit: int) -> list[Group]:
        """Return the groups of a mailbox in order of their names."""
        sql = f"{_GROUP} WHERE mailbox_no = ? ORDER BY name, push LIMIT ?"
        return [self._read(row) for row in self._execute(sql, (mailbox.id, limit))]

    def by_id(self, numbers: Iterable[int]) -> dict[int, Group]:
        """Return copies of the groups that are there."""
        found = self._for_each(_GROUP + " WHERE {among}", "no", sorted(numbers))
        return {row[0]: self._read(row) for row in found}

    def count(self, mailbox: Mailbox) -> int:
        """Return how many groups the mailbox has."""
        return int(self._session.one("SELECT count(*) FROM consumer WHERE mailbox_no = ?", (mailbox.id,))[0])

    def count_leases(self, mailbox: Mailbox) -> int:
        """Return how many leases all groups of the mailbox have, dead ones too."""
        sql = "SELECT count(*) FROM lease JOIN consumer ON group_no = no WHERE mailbox_no = ?"
        return int(self._session.one(sql, (mailbox.id,))[0])

    def add(self, mailbox: Mailbox, name: str, *, push: bool = False) -> Group:
        """Keep a new group that stands before the first message."""
        start = [-1] * len(LANES)
        group = Group(0, mailbox.id, name, start, list(start), push=push)
        group.id = self._session.one(
            "INSERT INTO consumer (mailbox_no, name, state, push) VALUES (?, ?, ?, ?) RETURNING no",
            (mailbox.id, name, rows.group_state(group), int(push)),
        )[0]
        return group

    def save(self, group: Group) -> None:
        """Store the group as it is now."""
        if group.id in self._positions:
            self._change(group.id, None)
        self._execute("UPDATE consumer SET state = ? WHERE no = ?", (rows.group_state(group), group.id))

    def remember(self, group: Group) -> None:
        """Store the group as it is now in memory only; a restart may lose that."""
        self._change(group.id, rows.group_state(group))
        self._write_rows(self._positions.surplus())

    def _read(self, row: Row) -> Group:
        return rows.group(row, self._positions.get(row[0]) or row[3])

    def _write_rows(self, positions: Sequence[tuple[int, bytes]]) -> None:
        for group_id, state in positions:
            self._change(group_id, None)
            self._execute("UPDATE consumer SET state = ? WHERE no = ?", (state, group_id))

    def _change(self, group_id: int, state: bytes | None) -> None:
        if not self._before:
            self._session.on_rollback.append(self._restore)
        self._before.setdefault(group_id, self._positions.get(group_id))
        self._positions.put(group_id, state)

    def _restore(self) -> None:
        for group_id, state in self._before.items():
            self._positions.put(group_id, state)

    def write_positions(self) -> None:
        """Write every position that is newer than its row."""
        self._write_rows(list(self._positions.items()))

    def see(self, group: Group, now: int) -> None:
        """Note that a group that messages are pushed to has members (E7)."""
        group.seen_at = now
        self._execute("UPDATE consumer SET seen_at = ? WHERE no = ?", (now, group.id))

    def unseen(self, before: int, limit: int) -> list[Group]:
        """Return groups that messages are pushed to and that had no members since ``before``, oldest first (E7)."""
        sql = f"{_GROUP} WHERE push = 1 AND seen_at < ? ORDER BY seen_at LIMIT ?"
        return [self._read(row) for row in self._execute(sql, (before, limit))]

    def drop(self, group: Group) -> None:
        """Forget a group with its leases."""
        if group.id in self._positions:
            self._change(group.id, None)
        self._execute("DELETE FROM lease WHERE group_no = ?", (group.id,))
        self._execute("DELETE FROM consumer WHERE no = ?", (group.id,))

    def drop_leases(self, group_id: int, limit: int) -> int:
        """Remove so many leases of the group of this number at most, dead ones too; return how many went."""
        sql = (
            "DELETE FROM lease WHERE group_no = ? AND msg_id IN"
            " (SELECT msg_id FROM lease WHERE group_no = ? LIMIT ?) RETURNING msg_id"
        )
        return len(self._execute(sql, (group_id, group_id, limit)))

    def clear(self, mailbox: Mailbox, limit: int) -> tuple[int, int]:
        """Remove groups of a retired mailbox with their leases; return how many groups and how many leases went."""
        groups = leases = 0
        for (group_id,) in self._execute("SELECT no FROM consumer WHERE mailbox_no = ? LIMIT ?", (mailbox.id, limit)):
            leases += self.drop_leases(group_id, limit - groups - leases)
            if groups + leases >= limit:
                break
            self._execute("DELETE FROM consumer WHERE no = ?", (group_id,))
            groups += 1
        return groups, leases


class Leases(Table):
    """Messages handed to one worker of a group each (F6, F7)."""

    def get(self, group: Group, ids: Sequence[int]) -> list[Lease]:
        """Return the leases of these messages, dead ones too."""
        if group.id in self._session.unleased:
            return []
        found = self._for_each(_LEASE + " WHERE group_no = ? AND {among}", "msg_id", ids, (group.id,))
        return [_lease(row) for row in found]

    def put(self, group: Group, leases: Sequence[Lease]) -> None:
        """Keep leases, new or changed."""
        if not leases:
            return
        self._session.unleased.discard(group.id)
        if delayed := sum([lease.delayed for lease in leases]):
            self._session.add_count((DELAYED, group.id), delayed)
        self._dialect.many(
            "INSERT INTO lease (group_no, msg_id, lane, until, deliveries, dead, delayed) VALUES (?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (group_no, msg_id) DO UPDATE SET until = excluded.until,"
            " deliveries = excluded.deliveries, dead = excluded.dead, delayed = excluded.delayed",
            [(group.id, x.msg_id, x.lane.value, x.until, x.deliveries, int(x.dead), int(x.delayed)) for x in leases],
        )

    def remove(self, group: Group, ids: Sequence[int]) -> None:
        """End leases."""
        self._for_each("DELETE FROM lease WHERE group_no = ? AND {among}", "msg_id", ids, (group.id,))

    def due(self, group: Group, now: int, limit: int, lanes: Sequence[Lane] = LANES) -> list[Lease]:
        """Return leases that ended and are not dead, by lane and msg_id.

        Where more than ``limit`` of a lane are due, those come first whose time was over first.
        """
        # Each part is the beginning of a range of the index, or a FETCH would sort all that is due.
        sql = " UNION ALL ".join(
            f"SELECT * FROM ({_LEASE} WHERE {place} AND until <= ? ORDER BY until, msg_id LIMIT ?) AS part"
            for place in _ranges(lanes)
        )
        found = self._execute(sql, (group.id, now, limit) * (2 * len(lanes)))
        return [_lease(row) for row in sorted(found, key=_by_lane_and_id)[:limit]]

    def without_lease(self, group: Group, lane: Lane, last: int) -> list[int]:
        """Return ids up to ``last`` whose last delivery was without a lease."""
        if group.id in self._session.unleased:
            return []
        sql = (
            "SELECT msg_id FROM lease WHERE group_no = ? AND dead = 0 AND delayed = 0 AND lane = ? AND until = ?"
            " AND msg_id <= ? ORDER BY msg_id"
        )
        return [row[0] for row in self._execute(sql, (group.id, lane.value, NO_LEASE, last))]

    def dead(self, group: Group, after: int, limit: int) -> list[Lease]:
        """Return dead messages behind msg_id ``after``."""
        sql = f"{_LEASE} WHERE group_no = ? AND dead = 1 AND msg_id > ? ORDER BY msg_id LIMIT ?"
        return [_lease(row) for row in self._execute(sql, (group.id, after, limit))]

    def count(self, group: Group, now: int) -> LeaseCount:
        """Count the group's leases."""
        if group.id in self._session.unleased:
            return NO_LEASES
        row = self._dialect.first(_COUNT, (group.id, now, group.id, now, group.id))
        if row is None:
            self._session.unleased.add(group.id)
            return NO_LEASES
        return LeaseCount(row[0], bool(row[1]))

    def count_delayed(self, mailbox: Mailbox, group: Group, exact_above: int, now: int) -> int:
        """Return about how many messages wait that the group gave back with a delay; above a number it is exact."""

        def count_exactly() -> int:
            sql = "SELECT count(*) FROM lease WHERE group_no = ? AND dead = 0 AND delayed = 1"
            return int(self._session.one(sql, (group.id,))[0])

        def count_living() -> int:
            if (there := count_exactly()) <= exact_above:
                return there
            # At most every few seconds: it looks for the message of each.
            self.end_gone(mailbox, group, now, delayed=True)
            return count_exactly()

        about = self._session.count((DELAYED, group.id), count_living)
        return about if about <= exact_above else count_exactly()

    def living(self, mailbox: Mailbox, group: Group, now: int, *, delayed: bool = False) -> LiveLeaseCount:
        """Look at the message of each lease that runs, or waits for its delay, and return how many are there."""
        self._session.flush()
        # In this order of tables: SQLite would not know that the mailbox may hold far more than the group has leased.
        sql = (
            "SELECT count(*), min(expire_at) FROM lease CROSS JOIN message WHERE group_no = ? AND dead = 0"
            " AND delayed = ? AND until > ?"
            " AND mailbox_no = ? AND message.msg_id = lease.msg_id AND (expire_at IS NULL OR expire_at > ?)"
        )
        return LiveLeaseCount(*self._session.one(sql, (group.id, int(delayed), now, mailbox.id, now)))

    def running(self, mailbox: Mailbox, group: Group, limit: int, now: int) -> list[Lease]:
        """Return leases that run, or wait for their delay, of messages that are there, in order of msg_id."""
        self._session.flush()
        sql = (
            f"{_LEASE} WHERE group_no = ? AND dead = 0 AND until > ? AND EXISTS (SELECT 1 FROM message WHERE"
            " mailbox_no = ? AND message.msg_id = lease.msg_id AND (expire_at IS NULL OR expire_at > ?))"
            " ORDER BY msg_id LIMIT ?"
        )
        return [_lease(row) for row in self._execute(sql, (group.id, now, mailbox.id, now, limit))]

    def end_gone(self, mailbox: Mailbox, group: Group, now: int, *, delayed: bool = False) -> None:
        """End the leases of messages that :meth:`living` did not find."""
        self._session.flush()
        self._execute(
            "DELETE FROM lease WHERE group_no = ? AND dead = 0 AND delayed = ? AND NOT EXISTS (SELECT 1 FROM message"
            " WHERE mailbox_no = ? AND message.msg_id = lease.msg_id AND (expire_at IS NULL OR expire_at > ?))",
            (group.id, int(delayed), mailbox.id, now),
        )

    def ended(self, after: LeaseCursor, now: int, limit: int) -> list[LeaseCursor]:
        """Return where leases of all groups, dead ones too, ended behind ``after`` and up to ``now``, in that order."""
        sql = (
            "SELECT until, group_no, msg_id FROM lease WHERE (until, group_no, msg_id) > (?, ?, ?)"
            " AND until <= ? ORDER BY until, group_no, msg_id LIMIT ?"
        )
        return [LeaseCursor(*row) for row in self._execute(sql, (*after, now, limit))]

    def next_end(self, group: Group, now: int, *, delayed: Sequence[bool] = (False, True)) -> int | None:
        """Return when the next lease or delay ends; ``delayed`` chooses one of them."""
        ranges = list(_ranges(LANES, delayed))
        ends = " UNION ALL ".join(f"SELECT min(until) AS until FROM lease WHERE {x} AND until > ?" for x in ranges)
        row = self._session.one(f"SELECT min(until) FROM ({ends}) AS ends", (group.id, now) * len(ranges))
        return None if row[0] is None else int(row[0])

    def clear(self, group: Group) -> None:
        """End all leases of a group (F4)."""
        self._execute("DELETE FROM lease WHERE group_no = ?", (group.id,))


_COLUMNS = rows.GROUP.count(",") + 1
_GROUP = f"SELECT {rows.GROUP} FROM consumer"
_LEASE = "SELECT msg_id, lane, until, deliveries, dead, delayed FROM lease"
_ALL_LANES = ", ".join(str(lane.value) for lane in LANES)
# The last condition comes first: most groups have no lease.
_COUNT = (
    "SELECT (SELECT count(*) FROM lease WHERE group_no = ? AND dead = 0 AND delayed = 0"
    f" AND lane IN ({_ALL_LANES}) AND until > ?), EXISTS (SELECT 1 FROM lease WHERE group_no = ? AND dead = 0"
    f" AND delayed IN (0, 1) AND lane IN ({_ALL_LANES}) AND until <= ?)"
    " WHERE EXISTS (SELECT 1 FROM lease WHERE group_no = ?)"
)
_by_lane_and_id = itemgetter(1, 0)


def _ranges(lanes: Iterable[Lane], delayed: Sequence[bool] = (False, True)) -> Iterator[str]:
    """Yield the conditions of the ranges in which the index ``lease_state`` is in order of ``until``."""
    for lane in lanes:
        for each in delayed:
            yield f"group_no = ? AND dead = 0 AND delayed = {int(each)} AND lane = {lane.value}"


def _lease(row: Row) -> Lease:
    return Lease(row[0], LANES[row[1]], row[2], row[3], bool(row[4]), bool(row[5]))
