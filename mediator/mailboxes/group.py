"""A consumer group's position in its mailbox: what is settled, what was delivered, what an ACK covers (F, K).

Per lane there are two marks. Everything up to ``settled`` needs no more delivery, but for the messages that are leased
one by one. Everything up to ``delivered`` was handed out at least once. A FETCH without lease starts behind ``settled``
and moves ``delivered``; an ACK moves ``settled``, never past ``delivered``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mediator.mailboxes.lanes import LANES, Lane

REMEMBERED_REPLIES = 32
MAX_GROUPS = 10_000
MAX_LEASED = 10_000
"""Leases of one group that run at the same time (F6)."""
MAX_DELAYED = 100_000
"""Messages that one group gave back with a delay and has not been given again (F6)."""

Span = tuple[int, int]
"""First and last msg_id of a lane in one reply."""


@dataclass(slots=True)
class Reply:
    """Which messages one FETCH handed out together, per lane (K2)."""

    spans: dict[Lane, Span]

    def holds(self, lane: Lane, msg_id: int) -> bool:
        """Whether the message was in the reply; lanes are FIFO, so a span says it."""
        first, last = self.spans.get(lane, (0, -1))
        return first <= msg_id <= last

    def is_within(self, marks: Sequence[int]) -> bool:
        """Whether all of it stands up to the marks of each lane."""
        return all(last <= marks[lane] for lane, (_, last) in self.spans.items())

    def beyond(self, lane: Lane, msg_id: int) -> "Reply":
        """The reply without what it holds of the lane up to ``msg_id``."""
        first, last = self.spans.get(lane, (0, -1))
        rest = {other: span for other, span in self.spans.items() if other is not lane}
        return Reply(rest | {lane: (max(first, msg_id + 1), last)} if last > msg_id else rest)


@dataclass(frozen=True, slots=True)
class Checked:
    """The state in which all running leases of a group were last found to be of messages that exist (F6)."""

    removed: int
    """How many messages had left the mailbox."""
    first_expiry: int | None
    """When the first of the leased messages expires, those that were leased since included; None: none does."""


@dataclass(slots=True)
class Group:
    """A consumer group (A4); the store gives it its ``id``."""

    id: int
    mailbox_id: int
    name: str
    settled: list[int]
    delivered: list[int]
    replies: list[Reply] = field(default_factory=list)
    max_deliver: int | None = None
    push: bool = False
    """Whether messages are pushed to its members (E7); such groups have names of their own (A4)."""
    seen_at: int = 0
    """When such a group was last known to have members; milliseconds since the epoch."""
    checked: Checked | None = None
    """None: not yet, or leases run again since."""
    shared: bool = False
    """Whether a connection was handed messages behind those that another one claimed (F9).

    From then on, what stands before a message may never have been handed to whoever acknowledges it: only what is known
    of the connection says that (:mod:`.claims`).
    """

    def start_at(self, msg_id: int) -> None:
        """Stand before ``msg_id`` in every lane, with nothing delivered (F1, F4)."""
        self.settled = [msg_id - 1] * len(LANES)
        self.delivered = [msg_id - 1] * len(LANES)
        self.replies = []
        self.shared = False

    def hand_out(self, items: Iterable[tuple[Lane, int]]) -> bool:
        """Note a reply without leases, in its order; True when the group changed and must be saved."""
        spans: dict[Lane, Span] = {}
        for lane, msg_id in items:
            first, _ = spans.get(lane, (msg_id, msg_id))
            # New messages of a lane stand together. What comes again does not, so of that only the last one counts.
            spans[lane] = (first if first > self.settled[lane] else msg_id, msg_id)
        changed = False
        for lane, (_, last) in spans.items():
            if last > self.delivered[lane]:
                self.delivered[lane] = last
                changed = True
        # Of one lane alone too: its last message may be gone when it is acknowledged (K4).
        reply = Reply(spans)
        if spans and not self.shared and (not self.replies or self.replies[-1] != reply):
            self.replies = [*self.replies, reply][-REMEMBERED_REPLIES:]
            changed = True
        return changed

    def record_expiry(self, expire_at: int) -> None:
        """Record when a message expires whose lease begins (F6)."""
        if self.checked is not None:
            first = self.checked.first_expiry
            self.checked = replace(self.checked, first_expiry=expire_at if first is None else min(first, expire_at))

    def lease_out(self, lane: Lane, last: int) -> None:
        """Note that new messages of a lane up to ``last`` are leased: each is settled on its own now (F6)."""
        self.settled[lane] = max(self.settled[lane], last)
        self.delivered[lane] = max(self.delivered[lane], last)
        # No reply may cover them any more, nor be covered through them (K3).
        trimmed = [reply.beyond(lane, last) for reply in self.replies]
        self.replies = [reply for reply in trimmed if reply.spans]

    def was_delivered(self, lane: Lane, msg_id: int) -> bool:
        """Whether the group was ever given the message (K4)."""
        return msg_id <= self.delivered[lane]

    def lane_of_last(self, msg_id: int) -> Lane | None:
        """Return the lane whose last message in a remembered reply it was; None: no such reply is known (K4)."""
        for reply in reversed(self.replies):
            for lane, (_, last) in reply.spans.items():
                if last == msg_id:
                    return lane
        return None

    def covered_by(self, lane: Lane, msg_id: int, no_lease: bool = False, in_all_replies: bool = False) -> list[int]:
        """Per lane, up to which msg_id an ACK of a delivered message without lease reaches; -1: nothing (K2).

        An ACK that comes once more covers by its replies alone: what was delivered since is not before it (K3).
        ``in_all_replies``: of the replies that held the message only what stood before it in all of them, since the one
        that is meant may be any: the others may be on their way, with another consumer, or lost. Of a message that is
        settled (and not handed out again since, ``no_lease``) some of them may be forgotten, so they cover nothing.
        """
        marks = [-1] * len(LANES)
        unsettled = no_lease or msg_id > self.settled[lane]
        if unsettled:
            for higher in LANES[: lane + 1]:
                marks[higher] = min(msg_id, self.delivered[higher])
        if not lane or (in_all_replies and not unsettled):
            return marks
        held = [reply for reply in self.replies if reply.holds(lane, msg_id)]
        if any(len(reply.spans) > 1 for reply in held):
            for higher in LANES[:lane]:
                lasts = [reply.spans.get(higher, (0, -1))[1] for reply in held]
                marks[higher] = max(marks[higher], min(lasts) if in_all_replies else max(lasts))
        return marks

    def settle(self, marks: Sequence[int]) -> None:
        """Move up to ``marks`` and forget the replies that can cover nothing more."""
        self.settled = list(map(max, self.settled, marks))
        self.replies = [reply for reply in self.replies if not reply.is_within(self.settled)]

    def skip_to(self, lane: Lane, last: int) -> None:
        """Move past ids up to ``last`` in a lane that holds nothing behind its mark any more."""
        self.settled[lane] = self.delivered[lane] = last


@dataclass(slots=True)
class Lease:
    """One message handed to one worker. It is due again at ``until``; dead when delivered too often (F6, F7)."""

    msg_id: int
    lane: Lane
    until: int
    """Milliseconds since the epoch; NO_LEASE when it was last delivered without a lease."""
    deliveries: int
    dead: bool = False
    delayed: bool = False
    """Whether it was given back with a delay: nobody works on it until it is leased again."""


NO_LEASE = 0
"""``until`` of a message whose lease ended and that was then delivered without one: an ACK may cover it (K2)."""


class LeaseCount(NamedTuple):
    """How many leases a group has (F6)."""

    running: int
    """Those that workers hold now, of messages that are gone included."""
    due: bool
    """Whether any message that is not dead may be given again."""


NO_LEASES = LeaseCount(0, due=False)


class LiveLeaseCount(NamedTuple):
    """A group's leases of one kind whose messages exist."""

    number: int
    first_expiry: int | None
    """When the first of the messages expires; None: none does."""


class LeaseCursor(NamedTuple):
    """The position of a lease in the order in which all leases end."""

    until: int
    group_id: int
    msg_id: int
