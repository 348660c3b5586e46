"""Pushing against a model: subscribers come, go, crash and are slow, while senders send in all lanes (A8, E6–E8)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mediator.errors import NoSuchMessageError
from mediator.mailboxes import pushing
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.pushing import LEASE, Cursor, Item, QueueGroupRequest
from mediator.mailboxes.rows import StoredMessage
from mediator.store.base import Store
from tests.harness.broker import BOX, DAY, SECOND, TENANT, Broker
from tests.harness.stores import ram_store

PLACE = TENANT, BOX
QUEUE = "workers"
KEEP = 7 * DAY
AMPLE = 1 << 30
SOME = st.lists(st.sampled_from(LANES), min_size=1, unique=True).map(sorted)


@dataclass(eq=False)
class Follower:
    """A subscription without a queue."""

    cursor: Cursor
    got: list[Item] = field(default_factory=list)


@dataclass(eq=False)
class Member:
    """A subscription with a queue."""

    held: list[Item] = field(default_factory=list)
    done: list[Item] = field(default_factory=list)


class Pushing(RuleBasedStateMachine):
    """One mailbox, some subscriptions, and one queue."""

    def __init__(self, store: Store | None = None) -> None:
        super().__init__()
        self.broker = Broker(store or ram_store())
        self.mail: dict[int, tuple[Lane, int | None]] = {}
        """Lane and end of all that may still be there."""
        self.followers: list[Follower] = []
        self.members: list[Member] = []
        self.running: dict[int, int] = {}
        """Until when what members hold is kept from the others."""
        self.confirmed: set[int] = set()
        self.seen = dict.fromkeys(LANES, -1)
        """The highest msg_id that the queue was given, by lane."""

    @initialize()
    def create(self) -> None:
        self.no = self.broker.create().mailbox.id
        # Hypothesis leaves out some of the rules in most runs; with these there is always something to do.
        for lane in reversed(LANES):
            self.send(lane, 10, None, 2)
        self.subscribe(list(LANES), 1, AMPLE, 1)
        self.join()

    def live(self, lanes: Sequence[Lane] = LANES) -> set[int]:
        now = self.broker.now
        return {i for i, (lane, end) in self.mail.items() if lane in lanes and (end is None or end > now)}

    # Senders.

    @rule(
        lane=st.sampled_from(LANES),
        size=st.integers(0, 40),
        ttl=st.sampled_from([None, None, SECOND, 30 * SECOND]),
        count=st.integers(1, 5),
    )
    def send(self, lane: Lane, size: int, ttl: int | None, count: int) -> None:
        for _ in range(count):
            msg_id = self.broker.send(b"x" * size, lane=lane, ttl=ttl)
            self.mail[msg_id] = lane, None if ttl is None else self.broker.now + ttl

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.mail:
            msg_id = data.draw(st.sampled_from(sorted(self.mail)))
            if msg_id in self.live():
                self.broker.delete(msg_id)
            else:
                with pytest.raises(NoSuchMessageError):
                    self.broker.delete(msg_id)
            del self.mail[msg_id]

    @rule(span=st.sampled_from([1, SECOND, LEASE, 60 * SECOND]))
    def advance(self, span: int) -> None:
        self.broker.advance(span)

    # Without a queue.

    @precondition(lambda self: len(self.followers) < 4)
    @rule(
        lanes=SOME,
        limit=st.integers(1, 6),
        budget=st.sampled_from([1, 50, AMPLE]),
        taken=st.sampled_from([0, 1, 3, AMPLE, AMPLE]),
    )
    def subscribe(self, lanes: list[Lane], limit: int, budget: int, taken: int) -> None:
        no, cursor, first = self.broker.run(
            lambda tx: pushing.open_cursor(tx, PLACE, lanes, limit, budget, self.broker.now)
        )
        assert no == self.no
        self.followers.append(Follower(cursor))
        self.give(self.followers[-1], first, limit, budget, taken)

    @precondition(lambda self: self.followers)
    @rule(
        data=st.data(),
        limit=st.integers(1, 6),
        budget=st.sampled_from([1, 50, AMPLE]),
        taken=st.sampled_from([1, 3, AMPLE, AMPLE]),
    )
    def look(self, data: st.DataObject, limit: int, budget: int, taken: int) -> None:
        follower = data.draw(st.sampled_from(self.followers))
        cursor = follower.cursor
        found = self.broker.run(
            lambda tx: pushing.read_next(tx, PLACE, self.no, cursor, limit, budget, self.broker.now)
        )
        self.give(follower, found, limit, budget, taken)

    def give(self, follower: Follower, found: pushing.NextMessages, limit: int, budget: int, taken: int) -> None:
        cursor = follower.cursor
        assert len(found.messages) <= limit
        assert len(found.messages) <= 1 or sum(message.size for message in found.messages) <= budget
        assert found.messages or found.complete
        fits = found.messages[:taken]
        for message in fits:
            self.check_followed(follower, message)
            cursor.gave(pushing.lane_runs([message]))
        if len(fits) == len(found.messages):
            cursor.marks = found.marks
            if found.complete:
                given = {msg_id for _, msg_id in follower.got}
                assert self.live(cursor.lanes) <= given, "nothing is skipped"

    def check_followed(self, follower: Follower, message: StoredMessage) -> None:
        item, until = (message.lane, message.msg_id), follower.cursor.until
        assert message.msg_id in self.live(follower.cursor.lanes), "only what is there, and is wanted"
        assert item not in follower.got, "once"
        if message.msg_id < until:
            assert all(each[1] < until and each < item for each in follower.got), "first what was there, in lane order"
        lane = [msg_id for lane, msg_id in follower.got if lane is message.lane]
        assert all(msg_id < message.msg_id for msg_id in lane), "first in, first out"
        follower.got.append(item)

    @precondition(lambda self: len(self.followers) > 2)
    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        self.followers.remove(data.draw(st.sampled_from(self.followers)))

    # With a queue.

    @precondition(lambda self: len(self.members) < 3)
    @rule()
    def join(self) -> None:
        assert self.broker.run(lambda tx: pushing.join_queue_group(tx, PLACE, QUEUE, KEEP, self.broker.now)) == self.no
        self.members.append(Member())

    @precondition(lambda self: self.members)
    @rule(
        data=st.data(),
        room=st.sampled_from([0, 2, 100, 100]),
        budget=st.sampled_from([1, 900, AMPLE]),
        lanes=st.one_of(st.just(list(LANES)), SOME),
        reads=st.sampled_from([0, 1, AMPLE]),
        renews=st.booleans(),
    )
    def take(self, data: st.DataObject, room: int, budget: int, lanes: list[Lane], reads: int, renews: bool) -> None:
        """A member confirms some of what it has, and is given more."""
        member = data.draw(st.sampled_from(self.members))
        confirmed, member.held = member.held[:reads], member.held[reads:]
        renewed = [msg_id for _, msg_id in member.held] if renews else []
        member.done += confirmed
        for _, msg_id in confirmed:
            self.running.pop(msg_id, None)
            self.confirmed.add(msg_id)
        for msg_id in renewed:
            # Whom it went to meanwhile may have confirmed it.
            if msg_id in self.running:
                self.running[msg_id] = self.broker.now + LEASE
        found = self.turn(confirmed=confirmed, waiting=renewed, lanes=lanes, room=room, budget=budget)
        for message in found:
            self.check_shared(message, lanes)
            member.held.append((message.lane, message.msg_id))
        if room and not found:
            waiting = {i for i, until in self.running.items() if until > self.broker.now}
            assert self.live(lanes) <= self.confirmed | waiting, "nothing is skipped"

    def turn(self, **told: object) -> list[StoredMessage]:
        request = QueueGroupRequest(PLACE, self.no, QUEUE, **told)  # type: ignore[arg-type]
        broker = self.broker
        return broker.run(lambda tx: pushing.serve_queue_group(tx, broker.bounds, request, broker.now)).messages

    def check_shared(self, message: StoredMessage, lanes: list[Lane]) -> None:
        msg_id, now = message.msg_id, self.broker.now
        assert msg_id in self.live(lanes), "only what is there, and is wanted"
        assert self.running.get(msg_id, now) <= now, "one member at a time"
        assert msg_id not in self.confirmed, "what was confirmed does not come again"
        if msg_id not in self.running:
            assert msg_id > self.seen[message.lane], "first deliveries in order"
            self.seen[message.lane] = msg_id
        self.running[msg_id] = now + LEASE

    @precondition(lambda self: self.members)
    @rule(data=st.data(), broken=st.booleans())
    def leave(self, data: st.DataObject, broken: bool) -> None:
        member = data.draw(st.sampled_from(self.members))
        self.members.remove(member)
        again = [item for item in member.done if item[1] in self.confirmed] if broken else []
        assert self.turn(returned=member.held, again=again) == []
        assert PLACE in self.broker.woken or not (member.held or again)
        back = {msg_id for _, msg_id in member.held if msg_id in self.running}
        # What somebody else was given meanwhile is not taken from them.
        back |= {msg_id for _, msg_id in again if msg_id not in self.running}
        self.confirmed -= back
        self.running |= dict.fromkeys(back, self.broker.now)


TestPushing = Pushing.TestCase
TestPushing.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPushing = pytest.mark.rule("A8", "E6", "E7", "E8")(TestPushing)
