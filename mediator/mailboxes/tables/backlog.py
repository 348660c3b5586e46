"""What waits in all mailboxes, slice by slice, so that no question reads more than some thousand rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mediator.mailboxes import group, rows
from mediator.mailboxes.address import PUBLIC
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.mailboxes.rows import Row
from mediator.mailboxes.session import Table

MAX_GROUPS: Final = 5_000
"""Groups of a slice, unless it is one mailbox."""
_AT_ONCE: Final = 100
_NORMAL_WINDOW: Final = 1_000
"""Messages among which the next one of the lane normal is searched, which has no index of its own."""


@dataclass(slots=True)
class GroupBacklog:
    """What waits for one group. Times are milliseconds since the epoch."""

    name: str
    dead: int = 0
    waiting_since: int | None = None
    """Since when a message waits for the group: when the oldest came that it was not given yet, or when a lease ended
    without an ACK. None: no message waits."""

    def wait(self, since: int) -> None:
        """Note a message that waits."""
        self.waiting_since = since if self.waiting_since is None else min(since, self.waiting_since)


@dataclass(slots=True)
class MailboxBacklog:
    """What one mailbox holds."""

    id: int
    tenant: str
    address: str
    kind: Kind
    messages: int
    bytes: int
    waiting_since: int | None = None
    """Since when a message waits for any reader."""
    delayed: int = 0
    """Messages that were sent with a delay and are not due yet."""
    delayed_bytes: int = 0
    given_back: int = 0
    """Messages that groups gave back with a delay, counted for each group."""
    leased: int = 0
    groups: list[GroupBacklog] = field(default_factory=list)

    @property
    def dead(self) -> int:
        """How many messages are dead, counted for each group."""
        return sum(group.dead for group in self.groups)

    @property
    def is_counted(self) -> bool:
        """Whether the quota of mailboxes counts it (M1)."""
        return self.kind is Kind.STANDARD and self.address != PUBLIC


class Backlogs(Table):
    """The mailboxes in order of their numbers, each with all that waits in it."""

    def read_slice(self, after: int, limit: int, now: int) -> list[MailboxBacklog]:
        """Return at most ``limit`` living mailboxes with numbers above ``after``; none: there are no more."""
        found = self._execute(
            "SELECT no, tenant, address, kind, messages, bytes,"
            # Without a group, a message waits until it is acknowledged.
            " CASE WHEN retention = ? AND NOT EXISTS (SELECT 1 FROM consumer WHERE mailbox_no = mailbox.no) THEN"
            " (SELECT created_at FROM message WHERE mailbox_no = mailbox.no ORDER BY msg_id LIMIT 1) END"
            " FROM mailbox WHERE no > ? AND address IS NOT NULL AND (expire_at IS NULL OR expire_at > ?)"
            " ORDER BY no LIMIT ?",
            (Retention.UNTIL_ACK.value, after, now, limit),
        )
        if not found:
            return []
        alone = len(found) == 1
        # Those between them are gone, and may have groups all the same.
        span = found[0][0] - 1 if alone else after, found[-1][0]
        groups = self._execute(
            "SELECT no, mailbox_no, name, state FROM consumer WHERE mailbox_no > ? AND mailbox_no <= ? LIMIT ?",
            (*span, group.MAX_GROUPS if alone else MAX_GROUPS + 1),
        )
        if len(groups) > MAX_GROUPS and not alone:
            return self.read_slice(after, len(found) // 2, now)
        mailboxes = {
            mailbox_id: MailboxBacklog(mailbox_id, tenant, address, Kind(kind), messages, size, since)
            for mailbox_id, tenant, address, kind, messages, size, since in found
        }
        for mailbox_id, count, size, *_ in self._dialect.uncounted("no > ? AND no <= ? AND address IS NOT NULL", span):
            if mailbox_id in mailboxes:
                mailboxes[mailbox_id].messages += count
                mailboxes[mailbox_id].bytes += size
        delayed = self._execute(
            "SELECT mailbox_no, count(*), sum(size) FROM delayed WHERE mailbox_no > ? AND mailbox_no <= ?"
            " GROUP BY mailbox_no",
            span,
        )
        for mailbox_id, count, size in delayed:
            if mailbox_id in mailboxes:
                mailboxes[mailbox_id].delayed, mailboxes[mailbox_id].delayed_bytes = count, int(size)
        self._add_groups(mailboxes, [row for row in groups if row[1] in mailboxes], span, now)
        return list(mailboxes.values())

    def _add_groups(
        self, mailboxes: Mapping[int, MailboxBacklog], groups: Sequence[Row], span: tuple[int, int], now: int
    ) -> None:
        if not groups:
            return
        made = {group_id: GroupBacklog(name) for group_id, _, name, _ in groups}
        for group_id, mailbox_id, *_ in groups:
            mailboxes[mailbox_id].groups.append(made[group_id])
        leases = self._execute(
            "SELECT group_no, mailbox_no, sum(CASE WHEN dead = 0 AND until > ? THEN delayed ELSE 0 END),"
            " sum(CASE WHEN dead = 0 AND until > ? THEN 1 - delayed ELSE 0 END),"
            f" sum(CASE WHEN {_ENDED} THEN 1 ELSE 0 END)"
            " FROM consumer JOIN lease ON group_no = consumer.no WHERE mailbox_no > ? AND mailbox_no <= ?"
            " GROUP BY group_no, mailbox_no",
            (now, now, now, *span),
        )
        with_ended = []
        for group_id, mailbox_id, given_back, leased, ended in leases:
            if group_id in made:
                mailboxes[mailbox_id].given_back += int(given_back)
                mailboxes[mailbox_id].leased += int(leased)
                if ended:
                    with_ended.append(group_id)
        states = {group_id: self._session.positions.get(group_id) or state for group_id, _, _, state in groups}
        self._add_ended(made, with_ended, states, now)
        for group_id, since in self._next_messages([row for row in groups if mailboxes[row[1]].messages], states):
            made[group_id].wait(since)
        for mailbox in mailboxes.values():
            if mailbox.groups:
                waiting = [group.waiting_since for group in mailbox.groups if group.waiting_since is not None]
                mailbox.waiting_since = min(waiting, default=None)

    def _add_ended(
        self, groups: Mapping[int, GroupBacklog], numbers: Sequence[int], states: Mapping[int, bytes], now: int
    ) -> None:
        """Count messages whose lease ended without an ACK: they are dead, or wait to be given again (F6, F7)."""
        # The clean-up looks at the leases of a message that is gone an hour later.
        counted = self._for_each(
            "SELECT group_no, dead, deliveries, count(*), min(until) FROM consumer"
            f" JOIN lease ON group_no = consumer.no AND ({_ENDED})"
            " JOIN message ON message.mailbox_no = consumer.mailbox_no AND message.msg_id = lease.msg_id"
            " WHERE {among} AND (message.expire_at IS NULL OR message.expire_at > ?)"
            " GROUP BY group_no, dead, deliveries",
            "group_no",
            numbers,
            (now,),
            (now,),
        )
        for group_id, dead, deliveries, count, since in counted:
            max_deliver = rows.position(states[group_id])[1]
            # A message is dead from the end of its last lease on, whether a FETCH has looked since or not.
            if dead or (max_deliver is not None and deliveries >= max_deliver):
                groups[group_id].dead += count
            else:
                groups[group_id].wait(since)

    def _next_messages(self, groups: Sequence[Row], states: Mapping[int, bytes]) -> list[tuple[int, int]]:
        """Return when the oldest message came that each group was not given yet, by the group's number."""
        found: list[tuple[int, int]] = []
        for start in range(0, len(groups), _AT_ONCE):
            asked: list[int] = []
            for group_id, mailbox_id, *_ in groups[start : start + _AT_ONCE]:
                asked += (group_id, mailbox_id, *rows.position(states[group_id])[0])
            sql = _NEXT.replace("{rows}", ", (?, ?, ?, ?, ?, ?)" * (len(asked) // 6 - 1))
            for group_id, *times in self._execute(sql, asked):
                waiting = [at for at in times if at is not None]
                if waiting:
                    found.append((group_id, min(waiting)))
        return found


_ENDED = "dead = 1 OR (until > 0 AND until <= ?)"
"""Leases that ended without an ACK."""
_BEHIND = "FROM message WHERE mailbox_no = asked.mailbox_no AND msg_id > "
_LANE = f"(SELECT created_at {_BEHIND} %s AND lane = %d ORDER BY msg_id LIMIT 1)"
# The first row tells PostgreSQL the types.
_NEXT = (
    "WITH asked (no, mailbox_no, critical, urgent, normal, low) AS (VALUES"
    f" ({', '.join(['CAST(? AS BIGINT)'] * 6)}){{rows}}) SELECT no, {_LANE % ('critical', 0)}, {_LANE % ('urgent', 1)},"
    f" (SELECT created_at FROM (SELECT lane, created_at {_BEHIND} normal ORDER BY msg_id LIMIT {_NORMAL_WINDOW})"
    f" AS next WHERE lane = 2 LIMIT 1), {_LANE % ('low', 3)} FROM asked"
)
