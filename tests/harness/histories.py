"""Histories of mailboxes as the journal tells them, and what a report on them must say, in plain Python."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import floor
from typing import Any

from hypothesis import strategies as st

from mediator.mailboxes.events import Event, EventType

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
START = int(datetime(2026, 3, 1, 20, 0, tzinfo=UTC).timestamp() * 1000)
HOUR = 3_600_000
GONE = (EventType.EXPIRED, EventType.COMPACTED, EventType.DELETED)
ENDED = (EventType.MAILBOX_EXPIRED, EventType.MAILBOX_DELETED)
GIVEN = (EventType.DELIVERED, EventType.LEASED)


def moment(milliseconds: int) -> datetime | None:
    return EPOCH + timedelta(milliseconds=milliseconds) if milliseconds else None


def rows(events: Iterable[Event], first: int = 1) -> list[tuple[Any, ...]]:
    """Return rows of the lake, each event in a line of its own."""
    found = []
    for seq, event in enumerate(events, first):
        at = moment(event.at)
        assert at is not None
        found.append(
            (
                *("host-1", seq, 0, event.tenant, at, int(event.type), event.mailbox_id, event.lane, event.msg_id),
                *(event.size, moment(event.created_at), event.group_id, at.date()),
            )
        )
    return found


@dataclass
class _Message:
    msg_id: int
    size: int
    created_at: int


class _History:
    """A small world of mailboxes that does what it is told, if it can."""

    def __init__(self) -> None:
        self.now = START
        self.last_at = START
        self.next_id = {1: 0, 2: 0, 3: 0}
        self.there: dict[int, list[_Message]] = {1: [], 2: [], 3: []}
        self.waiting: dict[int, list[tuple[int, int]]] = {1: [], 2: [], 3: []}
        self.events: list[Event] = []

    def tell(self, what: EventType, box: int, message: _Message | None = None, group: int = 0) -> None:
        if message is None:
            self.events.append(Event(what, self.now, "", box, created_at=START))
        else:
            place = (message.msg_id, message.size, message.created_at, group)
            self.events.append(Event(what, self.now, "", box, 2, *place))

    def show(self, box: int, size: int, what: EventType) -> None:
        self.last_at = max(self.now, self.last_at)
        message = _Message(self.next_id[box], size, self.last_at)
        self.next_id[box] += 1
        self.there[box].append(message)
        self.tell(what, box, message)

    def step(self, verb: str, box: int, number: int, ahead: int) -> None:
        self.now += ahead
        if box not in self.there:
            return
        waiting = self.waiting[box]
        if verb == "send":
            self.show(box, number, EventType.STORED)
        elif verb == "delay":
            waiting.append((number, self.now))
            self.tell(EventType.DELAYED, box, _Message(-1, number, self.now))
        elif verb == "release" and waiting:
            self.show(box, waiting.pop()[0], EventType.RELEASED)
        elif verb == "lapse" and waiting:
            self.tell(EventType.EXPIRED, box, _Message(-1, *waiting.pop()))
        elif verb == "end":
            self.tell(ENDED[number % 2], box)
            del self.there[box]
        elif self.there[box]:
            self.handle(verb, box, self.there[box][number % len(self.there[box])], 1 + number % 2)

    def handle(self, verb: str, box: int, message: _Message, group: int) -> None:
        if verb == "give":
            self.tell(GIVEN[message.size % 2], box, message, group)
        elif verb == "ack":
            self.tell(EventType.ACKNOWLEDGED, box, message, group)
        elif verb == "die":
            self.events.append(Event(EventType.DEAD, self.now, "", box, 2, message.msg_id, group_id=group))
        elif verb == "remove":
            self.there[box].remove(message)
            self.tell(GONE[message.size % 3], box, message)


_STEPS = st.tuples(
    st.sampled_from(["send"] * 4 + ["give"] * 4 + ["ack"] * 3 + ["delay", "release", "lapse", "remove", "die", "end"]),
    st.sampled_from([1, 1, 1, 2, 2, 3]),
    st.integers(0, 400),
    st.sampled_from([0, 1, 900, 61_003, 1_000_007, 3_600_000, 15_000_011, -1, -5_000_003]),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Return events in no order, some with what else the journal may tell: beginnings that come again otherwise."""
    world = _History()
    for step in draw(st.lists(_STEPS, min_size=5, max_size=60)):
        world.step(*step)
    born = [event for event in world.events if event.type in (EventType.STORED, EventType.RELEASED)]
    again = draw(st.lists(st.sampled_from(born), max_size=3)) if born else []
    events = world.events + [replace_event(event) for event in again]
    return draw(st.permutations(events))


def replace_event(event: Event) -> Event:
    """Return a beginning as a start after a crash tells it."""
    return event._replace(type=EventType.STORED, at=event.created_at)


def hour(milliseconds: int) -> int:
    return milliseconds // HOUR


def percentile(values: Sequence[int], share: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass
class Known:
    """What is known of a message when all is told."""

    size: int = 0
    came: int | None = None
    gone: int | None = None
    expired: bool = False
    released: bool = False
    created_at: int = 0
    given: int | None = None
    acked: int | None = None


class Calculated:
    """What a report on one tenant must say, message by message."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.messages: dict[tuple[int, int], Known] = defaultdict(Known)
        self.counts: dict[tuple[int, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.ends: dict[int, int] = {}
        self.groups: dict[tuple[int, int, int], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.hours: dict[int, int] = {}
        for event in events:
            self._learn(event)
        for (box, _), message in self.messages.items():
            if message.came is not None:
                self._begin(box, message)

    def _learn(self, event: Event) -> None:
        box, at = event.mailbox_id, hour(max(event.at, event.created_at))
        known = self.messages[box, event.msg_id] if event.msg_id >= 0 else Known()
        if event.type in (EventType.STORED, EventType.RELEASED):
            known.came, known.size, known.created_at = hour(event.created_at), event.size, event.created_at
            known.released |= event.type is EventType.RELEASED
            return
        self.hours[box] = min(at, self.hours.get(box, at))
        counts = self.counts[box, at]
        if event.type in ENDED:
            self.ends[box] = at
            return
        counts[event.type.name.lower()] += 1
        if event.type is EventType.DELAYED:
            counts["sent"] += 1
            counts["bytes_in"] += event.size
        elif event.type in GONE:
            known.gone, known.expired = at, event.type is EventType.EXPIRED
        elif event.type in GIVEN:
            known.created_at = event.created_at
            known.given = min(event.at, known.given or event.at)
            self.groups[box, event.group_id, hour(event.created_at)]["given"].add(event.msg_id)
        elif event.type is EventType.ACKNOWLEDGED:
            known.acked = min(event.at, known.acked or event.at)
            self.groups[box, event.group_id, hour(event.created_at)]["acknowledged"].add(event.msg_id)

    def _begin(self, box: int, message: Known) -> None:
        assert message.came is not None
        self.hours[box] = min(message.came, self.hours.get(box, message.came))
        counts = self.counts[box, message.came]
        if not message.released:
            counts["sent"] += 1
            counts["bytes_in"] += message.size

    def depth(self, box: int, at: int) -> tuple[int, int]:
        """Return messages and bytes that are there at the end of an hour."""
        if box in self.ends and self.ends[box] <= at:
            return 0, 0
        sizes = [
            message.size
            for (of, _), message in self.messages.items()
            if of == box and message.came is not None and message.came <= at
            if message.gone is None or message.gone > at
        ]
        return len(sizes), sum(sizes)

    def fates(self) -> dict[tuple[int, int], dict[str, int]]:
        """Return by mailbox and hour what has become of the messages that became visible in it."""
        found: dict[tuple[int, int], dict[str, int]] = {}
        for (box, _), message in self.messages.items():
            if message.came is not None:
                untouched = message.given is None and message.acked is None and message.gone is None
                is_of = {
                    "came": True,
                    "delivered": message.given is not None,
                    "acknowledged": message.acked is not None,
                    "expired": message.expired,
                    "expired_unread": message.expired and message.given is None,
                    "unread": untouched,
                }
                counts = found.setdefault((box, message.came), dict.fromkeys(is_of, 0))
                for name, holds in is_of.items():
                    counts[name] += holds
        return found

    def waits(self, at: int, box: int | None = None) -> dict[str, list[int]]:
        """Return the waits of messages that became visible in an hour, in one mailbox or all."""
        found: dict[str, list[int]] = {"first": [], "ack": []}
        for (of, _), message in self.messages.items():
            if box in (None, of) and hour(message.created_at) == at:
                for wait, end in (("first", message.given), ("ack", message.acked)):
                    if end is not None:
                        found[wait].append(max(0, end - message.created_at))
        return found


def of_tenant(events: Iterable[Event], tenant: str) -> list[Event]:
    return [event._replace(tenant=tenant) for event in events]
