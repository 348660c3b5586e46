"""What each connection was handed without a lease and has not acknowledged: claims, in memory (F9, F10, K2).

Other connections of the group are not handed what is claimed, and an ACK covers what its own connection was handed. To
forget any of it is safe at any time: it costs duplicates only.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from mediator.mailboxes.group import REMEMBERED_REPLIES
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import MailboxKey

MAX_CLAIMED = 10_000
"""Messages claimed in one group; beyond that the oldest replies of the connection that has most are forgotten."""
MAX_ALL_CLAIMED = 500_000
"""Messages claimed in all groups; beyond that groups are forgotten, those first that were used least recently."""
REPLY_COST = 16
"""A reply takes as much memory as so many messages."""


@dataclass(frozen=True, slots=True)
class HandedReply:
    """The messages of one reply, by lane and in order."""

    ids: tuple[int, ...]
    ends: tuple[int, ...]
    """Where each lane ends in ``ids``."""
    until: int
    """When they are claimed no more; milliseconds since the epoch."""

    def of_lane(self, lane: Lane) -> tuple[int, ...]:
        """Return the messages of a lane."""
        return self.ids[self.ends[lane - 1] if lane else 0 : self.ends[lane]]

    def lane_of(self, msg_id: int) -> Lane | None:
        """Return the lane of a message; None: it is not in this reply."""
        start = 0
        for lane in LANES:
            end = self.ends[lane]
            at = bisect_left(self.ids, msg_id, start, end)
            if at < end and self.ids[at] == msg_id:
                return lane
            start = end
        return None

    def is_within(self, marks: Sequence[int]) -> bool:
        """Whether all of it stands up to the marks of each lane."""
        start = 0
        for end, mark in zip(self.ends, marks, strict=True):
            if start < end and self.ids[end - 1] > mark:
                return False
            start = end
        return True

    def without(self, covered: Callable[[Lane, int], bool]) -> "HandedReply | None":
        """Return the reply without what is covered; None: nothing is left."""
        parts = [tuple([i for i in self.of_lane(lane) if not covered(lane, i)]) for lane in LANES]
        ends = tuple(accumulate(map(len, parts)))
        if ends[-1] == len(self.ids):
            return self
        return HandedReply(sum(parts, ()), ends, self.until) if ends[-1] else None


@dataclass(frozen=True, slots=True)
class Consumer:
    """One connection in one group."""

    replies: tuple[HandedReply, ...] = ()
    last: tuple[int, ...] = ()
    """The messages of its last reply (F10)."""
    repeats: int = 0
    """How often it was handed just these again."""
    acks: int = 0
    """How many ACKs the group had had then."""

    @property
    def lanes(self) -> dict[int, Lane]:
        """The messages that it was handed, with their lanes."""
        return {i: lane for reply in self.replies for lane in LANES for i in reply.of_lane(lane)}

    def lane_of(self, msg_id: int) -> Lane | None:
        """Return the lane of a message that it was handed; None: it was not, or that is forgotten."""
        for reply in reversed(self.replies):
            lane = reply.lane_of(msg_id)
            if lane is not None:
                return lane
        return None

    @property
    def size(self) -> int:
        """How much of the bounds it takes; a reply takes as much as some messages."""
        return sum([len(reply.ids) + REPLY_COST for reply in self.replies])


_NOBODY = Consumer()


@dataclass(slots=True)
class GroupClaims:
    """The connections of one group."""

    mailbox_key: MailboxKey
    consumers: dict[str, Consumer] = field(default_factory=dict)
    several: bool = False
    """Whether more than one connection was handed something."""
    acks: int = 0
    size: int = 0

    def live(self, connection: str, now: int) -> Iterator[HandedReply]:
        """Yield what other connections claim."""
        for name, consumer in self.consumers.items():
            if name != connection:
                yield from (reply for reply in consumer.replies if reply.until > now)


class Claims:
    """The claims of all groups of a store, by the groups' numbers. Changes belong to the store's transaction."""

    def __init__(self) -> None:
        self._groups: OrderedDict[int, GroupClaims] = OrderedDict()
        self._of_connection: defaultdict[str, set[int]] = defaultdict(set)
        self.size = 0
        """How much of the bound on all groups is taken."""
        self.undo: list[tuple[int, str, Consumer]] = []
        """What the transaction changed, as it was before; the next transaction clears it."""

    def roll_back(self) -> None:
        """Undo what the transaction handed out and acknowledged; what it forgot stays forgotten."""
        for group_id, connection, before in reversed(self.undo):
            group = self._groups.get(group_id)
            if group is not None and connection in group.consumers:
                self._put(group_id, group, connection, before)
        self.undo.clear()

    def consumer(self, group_id: int, connection: str) -> Consumer:
        """Return what is known of a connection in a group."""
        group = self._groups.get(group_id)
        return _NOBODY if group is None else group.consumers.get(connection, _NOBODY)

    def have_several(self, group_id: int, connection: str) -> bool:
        """Whether another connection than this one was handed something of the group."""
        group = self._groups.get(group_id)
        return group is not None and (group.several or connection not in group.consumers)

    def of_others(self, group_id: int, connection: str, now: int) -> list[set[int]] | None:
        """Return by lane what other connections claim in a group; None: nothing."""
        group = self._groups.get(group_id)
        if group is None or not (group.several or connection not in group.consumers):
            return None
        claimed: list[set[int]] | None = None
        for reply in group.live(connection, now):
            claimed = claimed or [set() for _ in LANES]
            for lane in LANES:
                claimed[lane].update(reply.of_lane(lane))
        return claimed

    def next_end(self, group_id: int, connection: str, now: int) -> int | None:
        """Return when the next claim of another connection ends."""
        group = self._groups.get(group_id)
        return None if group is None else min((reply.until for reply in group.live(connection, now)), default=None)

    def count_repeats(self, group_id: int, connection: str, ids: tuple[int, ...]) -> int:
        """Return how often in a row the connection was handed just these, with no ACK of the group since (F10)."""
        group = self._groups.get(group_id)
        consumer = None if group is None else group.consumers.get(connection)
        if group is None or consumer is None or consumer.last != ids or consumer.acks != group.acks:
            return 0
        return consumer.repeats + 1

    def hand_out(
        self, group_id: int, mailbox_key: MailboxKey, connection: str, items: Sequence[tuple[Lane, int]], until: int
    ) -> None:
        """Note a reply, in its order, which the connection claims until a time."""
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = GroupClaims(mailbox_key)
        self._groups.move_to_end(group_id)
        ids = tuple([msg_id for _, msg_id in items])
        lanes = [lane for lane, _ in items]
        reply = HandedReply(ids, tuple(bisect_right(lanes, lane) for lane in LANES), until)
        before = group.consumers.get(connection, _NOBODY)
        again = bool(before.replies) and before.replies[-1].ids == ids
        replies = (*(before.replies[:-1] if again else before.replies), reply)[-REMEMBERED_REPLIES:]
        repeats = before.repeats + 1 if before.last == ids and before.acks == group.acks else 0
        self._change(group_id, group, connection, Consumer(replies, ids, repeats, group.acks))
        group.several = group.several or len(group.consumers) > 1
        if group.size > MAX_CLAIMED or self.size > MAX_ALL_CLAIMED:
            self._keep_bounds(group_id, group)

    def acknowledge(self, group_id: int, connection: str, covers: Callable[[Lane, int], bool]) -> None:
        """Note an ACK of a connection, and what it covers."""
        group = self._groups.get(group_id)
        if group is None:
            return
        group.acks += 1
        before = group.consumers.get(connection)
        if before is not None and before.replies:
            left = (reply.without(covers) for reply in before.replies)
            self._set_replies(group_id, group, connection, before, [reply for reply in left if reply is not None])

    def acknowledge_up_to(self, group_id: int, connection: str, marks: Sequence[int]) -> None:
        """Note an ACK of the only connection of a group, which settles each lane up to a mark.

        A reply is kept whole until all of it is settled: nobody is handed what is settled, so it hides nothing.
        """
        group = self._groups.get(group_id)
        if group is None:
            return
        group.acks += 1
        before = group.consumers.get(connection)
        if before is not None:
            left = [reply for reply in before.replies if not reply.is_within(marks)]
            if len(left) < len(before.replies):
                self._set_replies(group_id, group, connection, before, left)

    def _set_replies(
        self, group_id: int, group: GroupClaims, connection: str, before: Consumer, replies: Sequence[HandedReply]
    ) -> None:
        if replies:
            self._change(group_id, group, connection, replace(before, replies=tuple(replies)))
        else:
            self.forget(group_id, connection)

    def forget(self, group_id: int, connection: str | None = None) -> None:
        """Forget a connection in a group, None: all of them."""
        group = self._groups.get(group_id)
        if group is None:
            return
        for name in list(group.consumers) if connection is None else [connection]:
            if name in group.consumers:
                size = group.consumers.pop(name).size
                group.size -= size
                self.size -= size
                numbers = self._of_connection[name]
                numbers.discard(group_id)
                if not numbers:
                    del self._of_connection[name]
        if not group.consumers:
            del self._groups[group_id]

    def end(self, connection: str) -> list[MailboxKey]:
        """End all claims of a connection that is over; return where its messages are free now."""
        numbers = sorted(self._of_connection.get(connection, ()))
        keys = [self._groups[group_id].mailbox_key for group_id in numbers]
        for group_id in numbers:
            self.forget(group_id, connection)
        return keys

    def _change(self, group_id: int, group: GroupClaims, connection: str, consumer: Consumer) -> None:
        self.undo.append((group_id, connection, group.consumers.get(connection, _NOBODY)))
        self._put(group_id, group, connection, consumer)

    def _put(self, group_id: int, group: GroupClaims, connection: str, consumer: Consumer) -> None:
        more = consumer.size - group.consumers.get(connection, _NOBODY).size
        group.size += more
        self.size += more
        group.consumers[connection] = consumer
        self._of_connection[connection].add(group_id)

    def _keep_bounds(self, group_id: int, group: GroupClaims) -> None:
        while group.size > MAX_CLAIMED:
            name, largest = max(group.consumers.items(), key=lambda item: item[1].size)
            self._put(group_id, group, name, replace(largest, replies=largest.replies[1:]))
        while self.size > MAX_ALL_CLAIMED and len(self._groups) > 1:
            self.forget(next(iter(self._groups)))
