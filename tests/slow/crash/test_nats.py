"""kill -9, twenty times under load: nothing that was answered is missing, and nothing is there twice (A3, A8).

Fifty senders and a few consumers work until the process is killed in the midst of their requests; then it starts again
on the same data. On PostgreSQL the server's backends are killed as well, some of them while the service lives.
"""

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from mediator.errors import UncertainError
from tests.harness.client import Answer, Client, Unanswered, payload_of
from tests.harness.postgres import Server, answers, disturbing
from tests.harness.service import Service, Services
from tests.harness.waiting import until

KILLS = int(os.environ.get("MEDIATOR_TEST_KILLS", "20"))
SEED = int(os.environ.get("MEDIATOR_TEST_SEED", "20260102"))
SENDERS = 50
CONSUMERS = 6
BOXES = 24
ANSWERS = (50, 400)
"""How many answers a life lasts, from and to."""
LEASE = 1000
RELEASED_WITHIN = 10.0


@dataclass
class Kept:
    """One message as its sender knows it."""

    payload: bytes
    box: str
    delay: int = 0
    dedup_id: str | None = None
    answered: bool = False
    msg_id: int = -1
    due_by: float = 0.0


@dataclass
class Books:
    """What was answered with success."""

    kept: dict[bytes, Kept] = field(default_factory=dict)
    uncertain: dict[bytes, Kept] = field(default_factory=dict)
    """Sent, and not answered."""
    lost: deque[Kept] = field(default_factory=deque)
    """Those of them that may be sent again: the life they were sent in is over."""
    numbers: defaultdict[str, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    delivered: defaultdict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """Per mailbox, what its consumers got."""
    settled: defaultdict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """Per mailbox, when the ACK of each msg_id was answered."""
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
            assert payload in self.kept or payload in self.uncertain, f"{box} has {payload!r}, which nobody sent"
            self.number(box, item["msg_id"], payload)
            ids.append(int(item["msg_id"]))
        return ids


@pytest.mark.timeout(200)
@pytest.mark.rule("A3", "A8", "S3", "S4", "F1", "K2", "K3")
async def test_sqlite_survives_kill_9(services: Services):
    await survives(services.new(), lambda _life: None)


@pytest.mark.timeout(200)
@pytest.mark.postgres
@pytest.mark.rule("A3", "A8", "A9", "S3", "S4", "F1", "K2", "K3")
async def test_postgres_survives_kill_9(services: Services, postgres: Server):
    with postgres.database() as url:
        try:
            await survives(services.new(database_url=url), disturbing(postgres, url))
        finally:
            services.close()
            await until(lambda: answers(url), 30, "PostgreSQL has recovered")


async def survives(service: Service, disturb: Callable[[int], None]) -> None:
    """Kill a service again and again under load, and hold it to what it answered."""
    chance = random.Random(SEED)
    print(f"seed {SEED}, {KILLS} kills")
    load = Load(service, chance)
    started = time.monotonic()
    for life in range(KILLS):
        service.start()
        await service.ready()
        async with load.connected() as client:
            if life == 0:
                await load.create(client)
            await load.until_killed(client, disturb, life)
    service.start()
    await service.ready()
    async with load.connected(tries=10) as client:
        await load.hold(client)
    print(f"{time.monotonic() - started:.0f} s", dict(load.books.counted))
    assert load.books.counted["lives"] == KILLS


def done(answer: Answer) -> None:
    """Take an answer that says that nobody knows for none."""
    if answer.error == str(UncertainError()):
        raise Unanswered(answer.error)
    assert not answer.error, answer.error


class Load:
    """Senders and consumers, and what they were answered."""

    def __init__(self, service: Service, chance: random.Random) -> None:
        self.service = service
        self.chance = chance
        self.books = Books()
        self.numbers = itertools.count()
        self.boxes = [f"crash{number}" for number in range(BOXES)]

    @contextlib.asynccontextmanager
    async def connected(self, tries: int = 1) -> AsyncIterator[Client]:
        """Connect for as long as the process lives."""
        client = await Client.connect(self.service.nats_url, tries=tries)
        try:
            yield client
        finally:
            await client.close()

    async def create(self, client: Client) -> None:
        """Make the mailboxes: some keep, some are work queues with leases."""
        for box in self.boxes:
            retention = "until_ack" if self._works(box) else "keep"
            assert not (await client.create(name=box, retention=retention)).error

    def _works(self, box: str) -> bool:
        return int(box.removeprefix("crash")) % 3 == 0

    async def until_killed(self, client: Client, disturb: Callable[[int], None], life: int) -> None:
        """Work until the process was killed in the midst of it."""
        books = self.books
        enough = books.answers + self.chance.randint(*ANSWERS)
        tasks = [asyncio.create_task(self._send(client)) for _ in range(SENDERS)]
        # One consumer a mailbox: what an ACK covers of a reply that another never got, nobody here could say (K2).
        tasks += [asyncio.create_task(self._consume(client, self.boxes[n::CONSUMERS])) for n in range(CONSUMERS)]
        try:
            await self._answered(enough, tasks)
            await asyncio.to_thread(disturb, life)
            # The service goes on, or comes back by itself, before it is killed.
            await self._answered(books.answers + SENDERS, tasks)
            await self.service.kill()
            books.counted["lives"] += 1
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        books.lost = deque(kept for kept in books.uncertain.values() if kept.dedup_id is not None)
        wrong = [end for end in ends if isinstance(end, Exception)]
        assert not wrong, wrong

    async def _answered(self, enough: int, tasks: list[asyncio.Task[None]]) -> None:
        def look() -> bool:
            for task in tasks:
                if task.done():
                    task.result()
            return self.books.answers >= enough

        await until(look, 30, "the service answers")

    async def _send(self, client: Client) -> None:
        books = self.books
        while True:
            kept = self._again() or self._new()
            books.uncertain[kept.payload] = kept
            headers = {"delay": kept.delay or None, "dedup_id": kept.dedup_id}
            priority = self.chance.choice(("critical", "normal"))
            with contextlib.suppress(Unanswered):
                given = {name: value for name, value in headers.items() if value is not None}
                answer = await client.send(kept.box, kept.payload, priority=priority, **given)
                done(answer)
                del books.uncertain[kept.payload]
                books.kept[kept.payload] = kept
                books.answers += 1
                kept.answered, kept.msg_id = True, answer.body["msg_id"]
                kept.due_by = answer.answered_at + kept.delay
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
        while True:
            box = self.chance.choice(boxes)
            lease = {"ack_wait_ms": LEASE} if self._works(box) else {}
            with contextlib.suppress(Unanswered):
                answer = await client.fetch(box, "crew", deliver="earliest", max_wait_ms=0, num_msgs=20, **lease)
                done(answer)
                ids = books.seen(box, answer)
                self._got(box, ids, answer)
                if ids:
                    acked = await client.ack(box, "crew", ids)
                    done(acked)
                    books.settled[box].update(dict.fromkeys(ids, acked.answered_at))
                    books.counted["acknowledged"] += len(ids)

    def _got(self, box: str, ids: list[int], answer: Answer) -> None:
        for msg_id in ids:
            again = self.books.settled[box].get(msg_id, answer.asked_at)
            assert again >= answer.asked_at, f"{box} delivered {msg_id} again after its ACK was answered"
            self.books.delivered[box].add(self.books.numbers[box][msg_id])

    # In the end.

    async def hold(self, client: Client) -> None:
        """Read everything, and compare it with the books."""
        for kept in self.books.kept.values():
            assert kept.answered
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
            answer = await client.fetch(box, "crew", deliver="earliest", max_wait_ms=wait, num_msgs=1000, **lease)
            ids = self.books.seen(box, answer)
            self._got(box, ids, answer)
            if ids:
                assert not (await client.ack(box, "crew", ids)).error
                self.books.settled[box].update(dict.fromkeys(ids, time.time()))
            elif not owed - self.books.delivered[box]:
                return
            assert time.monotonic() < end, f"A8: {box} never delivered {sorted(owed - self.books.delivered[box])}"

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
