"""Subscribers that come, go, crash and read slowly while others send in all lanes, and the books on what each one got.

Every message has a number in its mailbox and one lane; what was answered with a number is owed to every subscriber and
to every queue, unless somebody deletes it.
"""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tests.harness.stock import PATIENCE, PREFIX, Stock, id_of, word_of
from tests.harness.waiting import until
from tests.harness.wire import flushed, transport_of

LANES = ("critical", "urgent", "normal", "low")
WAYS = {
    "critical": ("MAILBOX.MSG.{}.critical", "MAILBOX.MSG.{}.high"),
    "urgent": ("MAILBOX.MSG.{}.urgent", "INBOX.{}.urgent"),
    "normal": ("MAILBOX.MSG.{}", "MAILBOX.MSG.{}.normal", "INBOX.{}.normal"),
    "low": ("MAILBOX.MSG.{}.low", "INBOX.{}.notify"),
}
"""How to send into each lane in the older editions."""
CATCH_UP = 30.0
HELD = 20
"""Looks in a row at which a socket was not read, until it counts as stopped."""


@dataclass(eq=False)
class Member:
    """A subscriber on a connection of its own; it stays, left, or crashed."""

    client: Stock
    queue: str
    gone: frozenset[int]
    """What was deleted before it came."""
    fate: str = "stays"
    got: list[tuple[int, str]] = field(default_factory=list)
    """Numbers and lanes, in the order of arrival."""
    confirmed: int = 0
    """How many of these it had answered for when it left."""
    subscription: Subscription | None = None

    async def take(self, message: Msg) -> None:
        """Receive a message."""
        self.got.append((id_of(message), word_of(message)))

    @property
    def ids(self) -> list[int]:
        """What it got, in the order of arrival."""
        return [number for number, _ in self.got]

    async def stop_reading(self) -> None:
        """Read no more. A stream that was full resumes its socket once it is emptied, so hold on until it does not."""
        transport, held = transport_of(self.client.client), 0

        def holds() -> bool:
            nonlocal held
            held = 0 if transport.is_reading() else held + 1
            transport.pause_reading()
            return held == HELD

        await until(holds)

    def read_again(self) -> None:
        """Read as before."""
        transport_of(self.client.client).resume_reading()


class Crowd:
    """One mailbox, and all who write to it and read it."""

    def __init__(self, urls: Sequence[str], stack: AsyncExitStack, seed: int) -> None:
        self._urls = itertools.cycle(urls)
        self._stack = stack
        self._random = random.Random(seed)
        self.box = ""
        self.lanes: dict[str, list[int]] = {lane: [] for lane in LANES}
        self.deleted: set[int] = set()
        self.members: list[Member] = []

    async def connect(self) -> Stock:
        """Connect a client, to each gateway in turn; what breaks stays broken."""
        return await Stock.connect(next(self._urls), self._stack, allow_reconnect=False)

    @property
    def owed(self) -> set[int]:
        """What is there to be got."""
        return {number for ids in self.lanes.values() for number in ids} - self.deleted

    @property
    def sent(self) -> int:
        """How many messages there are."""
        return sum(map(len, self.lanes.values()))

    def lane_of(self, number: int) -> str:
        """The lane of a message."""
        return next(lane for lane, ids in self.lanes.items() if number in ids)

    # What happens.

    async def send(self, client: Stock, count: int) -> int:
        """Send so many messages, each when the one before is stored; return the number of the last."""
        number = -1
        for _ in range(count):
            lane = self._random.choice(LANES)
            size = self._random.choice((0, 20, 300, 4000, 20_000))
            way = self._random.choice(WAYS[lane]).format(self.box)
            number = (await client.ask(way, bytes(size)))["msg_id"]
            self.lanes[lane].append(number)
        return number

    async def come(self, queue: str = "") -> Member:
        """Subscribe to all lanes."""
        client = await self.connect()
        member = Member(client, queue, frozenset(self.deleted))
        subject = f"{PREFIX}MAILBOX.MSG.{self.box}.*"
        member.subscription = await client.client.subscribe(subject, queue=queue, cb=member.take)
        await flushed(client.client)
        self.members.append(member)
        return member

    async def leave(self, member: Member) -> None:
        """Say goodbye; what came before is answered for."""
        member.confirmed = len(member.got)
        member.fate = "left"
        await member.client.drain()

    def crash(self, member: Member) -> None:
        """Break the connection without a word."""
        member.fate = "crashed"
        transport_of(member.client.client).abort()

    async def delete(self, client: Stock, number: int) -> None:
        """Delete a message."""
        assert (await client.ask(f"MAILBOX.DELETE.{self.box}.{number}"))["deleted"] is True
        self.deleted.add(number)

    # In the end.

    async def hold(self, *, strict: Sequence[str]) -> None:
        """Wait until everybody has what is owed, and compare; in the ``strict`` queues nobody ever goes."""
        owed = self.owed
        for member in self._alone():
            await until(lambda member=member: owed <= set(member.ids), CATCH_UP, "A8: a subscriber gets everything")
        queues = defaultdict(list)
        for member in self.members:
            queues[member.queue].append(member)
        for queue, crew in queues.items():
            # What a member had that died is for those who live.
            living = [member for member in crew if member.fate != "crashed"]
            if queue:
                await until(
                    lambda living=living: owed <= {number for member in living for number in member.ids},
                    CATCH_UP, f"E7: the queue {queue} gets everything",
                )  # fmt: skip
        await self._nothing_more()
        for member in self.members:
            assert not set(member.ids) & member.gone, "E8: what is deleted is pushed no more"
            assert all(self.lane_of(number) == word for number, word in member.got), "E1: each has the word of its lane"
        for member in queues.pop("", []):
            self._in_order(member)
            self._without_a_gap(member)
        for queue, crew in queues.items():
            if queue in strict:
                for member in crew:
                    self._in_order(member)
            self._once(queue, crew)

    async def _nothing_more(self) -> None:
        """Let a last message come to all: what was on the way before it has come, too."""
        client = await self.connect()
        last = await self.send(client, 1)
        for member in self._alone():
            await until(lambda member=member: last in member.ids, PATIENCE, "the last message comes")

    def _alone(self) -> list[Member]:
        return [member for member in self.members if not member.queue and member.fate == "stays"]

    def _in_order(self, member: Member) -> None:
        for lane, stored in self.lanes.items():
            ids = [number for number, word in member.got if word == lane]
            assert ids == sorted(set(ids)), f"A2: {lane} of {member.queue or 'a subscriber'} is out of order"
            assert set(ids) <= set(stored)

    def _without_a_gap(self, member: Member) -> None:
        for lane, stored in self.lanes.items():
            ids = [number for number, word in member.got if word == lane and number not in self.deleted]
            owed = [number for number in sorted(stored) if number not in self.deleted]
            if member.fate == "stays":
                assert ids == owed, f"E6: {lane} is not all there"
            assert ids == owed[: len(ids)], f"E6: there is a gap in {lane}"

    def _once(self, queue: str, crew: Sequence[Member]) -> None:
        """Each message came once, but for what somebody had who died, or went before he had answered for it."""
        times: Counter[int] = Counter()
        for member in crew:
            assert len(set(member.ids)) == len(member.ids), f"E7: {queue} gave one member the same twice"
            if member.fate != "crashed":
                times.update(member.ids if member.fate == "stays" else member.ids[: member.confirmed])
        twice = {number for number, count in times.items() if count > 1}
        assert not twice, f"E7: {queue} gave {len(twice)} messages to two, {sorted(twice)[:9]} among them"
