"""Senders and consumers that keep books: nothing answered is missing, nothing refused is there, nothing is there twice.

What is done to the service meanwhile is the test's business.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from mediator.errors import BusyError, UnavailableError
from tests.harness.client import PAUSE, Answer, Client, Unanswered, payload_of
from tests.harness.waiting import until

SENDERS = 50
CONSUMERS = 6
BOXES = 24
LEASE = 1000
RELEASED_WITHIN = 40.0
HISTORY = 40
REFUSED = (UnavailableError.code, BusyError.code)
"""Answers that say that nothing was changed (N3)."""


@dataclass
class Kept:
    """One message as its sender knows it."""

    payload: bytes
    box: str
    delay: int = 0
    dedup_id: str | None = None
    msg_id: int = -1


@dataclass
class Books:
    """What was answered with success."""

    kept: dict[bytes, Kept] = field(default_factory=dict)
    uncertain: dict[bytes, Kept] = field(default_factory=dict)
    """Sent, and not answered, or answered that nobody knows."""
    refused: dict[bytes, Kept] = field(default_factory=dict)
    """What was answered not to be kept, and never sent again."""
    lost: deque[Kept] = field(default_factory=deque)
    """What may be sent again: a dedup id keeps it from doubling (S3)."""
    numbers: defaultdict[str, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    delivered: defaultdict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """Per mailbox, what its consumers got."""
    settled: defaultdict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """Per mailbox, when the ACK of each msg_id was answered."""
    history: defaultdict[str, deque[str]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=HISTORY)))
    """Per mailbox, the last that its consumers asked and were answered, for a complaint."""
    answers: int = 0
    counted: Counter[str] = field(default_factory=Counter)

    def number(self, box: str, msg_id: int, payload: bytes) -> None:
        """Enter under which number a message is known."""
        other = self.numbers[box].setdefault(msg_id, payload)
        assert other == payload, f"A3: {box} gave the number {msg_id} twice: {other!r} and {payload!r}"

    def seen(self, box: str, answer: Answer) -> list[int]:
        """Enter the messages of a reply."""
        ids = []
        for item in answer.messages:
            payload = payload_of(item)
            assert payload not in self.refused, f"N3: {box} has {payload!r}, which was refused"
            assert payload in self.kept or payload in self.uncertain, f"{box} has {payload!r}, which nobody sent"
            self.number(box, item["msg_id"], payload)
            ids.append(int(item["msg_id"]))
        return ids


def done(answer: Answer) -> None:
    """Fail on an answer that a test like this never asks for."""
    assert not answer.error, answer.error


class Load:
    """Senders and consumers, and what they were answered."""

    def __init__(self, chance: random.Random, name: str = "crash") -> None:
        """``name`` is what the addresses of its mailboxes begin with."""
        self.chance = chance
        self.books = Books()
        self.numbers = itertools.count()
        self.boxes = [f"{name}{number}" for number in range(BOXES)]
        self._tasks: list[asyncio.Task[None]] = []
        self._working = False

    async def create(self, client: Client) -> None:
        """Make the mailboxes: some keep, some are work queues with leases."""
        for box in self.boxes:
            retention = "until_ack" if self._works(box) else "keep"
            assert not (await client.create(name=box, retention=retention)).error

    def _works(self, box: str) -> bool:
        return self.boxes.index(box) % 3 == 0

    async def work(self, client: Client, meanwhile: Callable[[], Awaitable[object]]) -> None:
        """Send and consume until ``meanwhile`` has ended; then break off in the midst of it."""
        books = self.books
        self._working = True
        self._tasks = [asyncio.create_task(self._send(client)) for _ in range(SENDERS)]
        # One consumer a mailbox: what an ACK covers of a reply that another never got, nobody here could say (K2).
        self._tasks += [asyncio.create_task(self._consume(client, self.boxes[n::CONSUMERS])) for n in range(CONSUMERS)]
        try:
            await meanwhile()
        finally:
            # A request whose answer comes as it is cancelled may not notice that it was.
            self._working = False
            for task in self._tasks:
                task.cancel()
            ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        books.lost = deque(kept for kept in books.uncertain.values() if kept.dedup_id is not None)
        wrong = [end for end in ends if isinstance(end, Exception)]
        assert not wrong, wrong

    async def answered(self, count: int, within: float = 30.0) -> None:
        """Wait until so many more SENDs were answered with success."""
        enough = self.books.answers + count

        def look() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return self.books.answers >= enough

        await until(look, within, "the service answers")

    async def _send(self, client: Client) -> None:
        books = self.books
        while self._working:
            again = self._again()
            kept = again or self._new()
            books.uncertain[kept.payload] = kept
            headers = {"delay": kept.delay or None, "dedup_id": kept.dedup_id}
            given = {name: value for name, value in headers.items() if value is not None}
            try:
                priority = self.chance.choice(("critical", "normal"))
                answer = await client.send(kept.box, kept.payload, priority=priority, **given)
            except Unanswered as error:
                books.counted[error.code or "unanswered"] += 1
                if error.code in REFUSED and again is None:
                    books.refused[kept.payload] = books.uncertain.pop(kept.payload)
                await asyncio.sleep(PAUSE)
                continue
            done(answer)
            del books.uncertain[kept.payload]
            books.kept[kept.payload] = kept
            books.answers += 1
            kept.msg_id = answer.body["msg_id"]
            if kept.msg_id >= 0:
                books.number(kept.box, kept.msg_id, kept.payload)
            else:
                assert kept.delay
                books.counted["delayed"] += 1

    def _new(self) -> Kept:
        number = next(self.numbers)
        kept = Kept(b"message %d" % number, self.chance.choice(self.boxes))
        if self.chance.random() < 0.5:
            kept.dedup_id = f"once-{number}"
        if self.chance.random() < 0.1:
            kept.delay = self.chance.randint(1, 4)
        return kept

    def _again(self) -> Kept | None:
        """Take one that was not answered in a life before, and that a dedup id keeps from doubling (S3)."""
        if not self.books.lost:
            return None
        self.books.counted["sent again"] += 1
        return self.books.lost.popleft()

    async def _consume(self, client: Client, boxes: list[str]) -> None:
        books = self.books
        while self._working:
            box = self.chance.choice(boxes)
            lease = {"ack_wait_ms": LEASE} if self._works(box) else {}
            with contextlib.suppress(Unanswered):
                fetching = client.fetch(box, "crew", deliver="earliest", max_wait_ms=0, num_msgs=20, **lease)
                answer = await self._remember(box, "FETCH", fetching)
                done(answer)
                ids = books.seen(box, answer)
                self._got(box, ids, answer)
                if ids:
                    acked = await self._remember(box, f"ACK {ids}", client.ack(box, "crew", ids))
                    done(acked)
                    books.settled[box].update(dict.fromkeys(ids, acked.answered_at))
                    books.counted["acknowledged"] += len(ids)

    def _got(self, box: str, ids: list[int], answer: Answer) -> None:
        for msg_id in ids:
            again = self.books.settled[box].get(msg_id, answer.asked_at)
            assert again >= answer.asked_at, f"{box} delivered {msg_id} again after its ACK was answered"
            self.books.delivered[box].add(self.books.numbers[box][msg_id])

    async def _remember(self, box: str, what: str, asking: Awaitable[Answer]) -> Answer:
        """Ask as a consumer, and keep it for a complaint."""
        asked_at, outcome = time.time(), "no answer"
        try:
            answer = await asking
            outcome = str([item["msg_id"] for item in answer.body.get("messages", ())])
            return answer
        finally:
            # What found nothing would push out what matters.
            if (what, outcome) != ("FETCH", "[]"):
                self.books.history[box].append(f"  {asked_at % 1000:.3f}-{time.time() % 1000:.3f} {what}: {outcome}")

    # In the end.

    async def hold(self, client: Client) -> None:
        """Read everything, and compare it with the books."""
        for box in self.boxes:
            await self._drain(client, box)
        for box in self.boxes:
            await self._compare(client, box)

    async def _drain(self, client: Client, box: str) -> None:
        """Let the group have all that is left, delayed messages too."""
        owed = {kept.payload for kept in self._of(box)}
        end = time.monotonic() + RELEASED_WITHIN
        while True:
            lease = {"ack_wait_ms": LEASE} if self._works(box) else {}
            wait = 1500 if owed - self.books.delivered[box] else 0
            fetching = client.fetch(box, "crew", deliver="earliest", max_wait_ms=wait, num_msgs=1000, **lease)
            answer = await self._remember(box, "FETCH", fetching)
            ids = self.books.seen(box, answer)
            self._got(box, ids, answer)
            if ids:
                assert not (await self._remember(box, f"ACK {ids}", client.ack(box, "crew", ids))).error
                self.books.settled[box].update(dict.fromkeys(ids, time.time()))
            elif not owed - self.books.delivered[box]:
                return
            missed = [kept for kept in self._of(box) if kept.payload not in self.books.delivered[box]]
            before = "\n".join(self.books.history[box])
            assert time.monotonic() < end, f"A8: {box} never delivered {missed}:\n{before}"

    async def _compare(self, client: Client, box: str) -> None:
        found = await client.query_all(box)
        shown = {int(item["msg_id"]): payload_of(item) for item in found}
        for msg_id, payload in shown.items():
            self.books.number(box, msg_id, payload)
        if self._works(box):
            left = set(shown) & set(self.books.settled[box])
            assert not left, f"A5: {box} still has {left}, which were acknowledged"
            return
        missing = [kept for kept in self._of(box) if kept.msg_id >= 0 and shown.get(kept.msg_id) != kept.payload]
        assert not missing, f"A8: {box} lost {missing}"
        copies = Counter(shown.values())
        unseen = [kept.payload for kept in self._of(box) if not copies[kept.payload]]
        assert not unseen, f"A8: {box} lost {unseen}"
        known = self.books.kept | self.books.uncertain
        doubled = [known[payload] for payload, count in copies.items() if count > 1]
        assert not doubled, f"S3: {box} stored {doubled} more than once"
        assert sorted(shown) == list(range(len(shown))), f"A3: {box} left out numbers"

    def _of(self, box: str) -> Iterator[Kept]:
        return (kept for kept in self.books.kept.values() if kept.box == box)
