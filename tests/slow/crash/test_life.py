"""The whole life of a thousand mailboxes, through the public subjects alone, and every message accounted for.

Agents create mailboxes, send each other requests and answers, read them in groups with and without leases, crash,
give back, delete and look, while an accountant keeps books beside the service. MEDIATOR_TEST_MAILBOXES sets how many
mailboxes there are (default 1000: half a minute for a variant on two busy cores), MEDIATOR_TEST_SEED the course.
"""

import asyncio
import base64
import contextlib
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from tests.harness import content
from tests.harness.accountant import Accountant, Box, Group, Sent, covered
from tests.harness.client import Answer, Client
from tests.harness.service import Service, Services
from tests.harness.waiting import until

MAILBOXES = int(os.environ.get("MEDIATOR_TEST_MAILBOXES", "1000"))
SEED = int(os.environ.get("MEDIATOR_TEST_SEED", "20260101"))

CONNECTIONS = 4
AT_ONCE = 60
"""Agents that act at the same time; the workers of their groups come on top."""
SESSIONS = 300
REQUESTS = 4
"""What an agent sends of its own accord, beside its card."""
LEASE = 1000
PHOENIX_TTL = 2
SETTLES_WITHIN = 60.0
"""Seconds in which groups must get something of what they are owed, once the last agent is done."""
ENOUGH = 1000
"""Mailboxes among which everything happens that can."""
TRIES = 10
TAGS = ("billing", "travel", "quick", "draft", "eu", "retry")
BOARDS = 20
"""Mailboxes to which agents post their cards, by key."""

Task = asyncio.Task[None]


@dataclass
class Served:
    """What clients connect to, and the processes behind it."""

    url: str
    instances: list[Service]
    victim: Service | None = None


@contextlib.asynccontextmanager
async def sqlite(services: Services, _request: pytest.FixtureRequest) -> Any:
    service = await services.running()
    yield Served(service.nats_url, [service])


@contextlib.asynccontextmanager
async def postgres_alone(services: Services, request: pytest.FixtureRequest) -> Any:
    with request.getfixturevalue("postgres").database() as url:
        service = await services.running(database_url=url)
        yield Served(service.nats_url, [service])
        services.close()


@contextlib.asynccontextmanager
async def postgres_three(services: Services, request: pytest.FixtureRequest) -> Any:
    with request.getfixturevalue("postgres").database() as url:
        nats_url = await services.nats_server()
        three = [services.new(name, database_url=url, nats_url=nats_url) for name in ("first", "second", "third")]
        key = base64.b64encode(bytes(32)).decode()
        for service in three:
            service.environment["MEDIATOR_DIDCOMM__KEY"] = key
            service.start()
        for service in three:
            await service.ready()
        yield Served(nats_url, three, victim=three[1])
        services.close()


@pytest.mark.timeout(400)
@pytest.mark.rule("A1", "A2", "A3", "A4", "A5", "A8", "M1", "M2", "N6", "N8", "N9", "S1", "S2", "S3", "S4", "S5")
@pytest.mark.rule("F1", "F2", "F3", "F5", "F6", "F7", "F8", "K2", "K3", "K4", "Q1", "Q2")
@pytest.mark.parametrize(
    "serving",
    [
        pytest.param(sqlite, id="sqlite"),
        pytest.param(postgres_alone, id="postgres", marks=pytest.mark.postgres),
        pytest.param(postgres_three, id="postgres-three-one-killed", marks=pytest.mark.postgres),
    ],
)
async def test_every_message_is_accounted_for(serving: Any, services: Services, request: pytest.FixtureRequest):
    async with serving(services, request) as served:
        client = await Client.connect(served.url, connections=CONNECTIONS, tries=TRIES)
        try:
            life = Life(client, served, random.Random(SEED))
            print(f"seed {SEED}, {MAILBOXES} mailboxes, content from {life.content.source}")
            await life.run()
        finally:
            await client.close()
        for service in served.instances:
            if service is not served.victim:
                assert service.alive
                assert not service.complaints()


class Life:
    """What all agents do, and the books on it."""

    def __init__(self, client: Client, served: Served, chance: random.Random) -> None:
        self.client = client
        self.served = served
        self.chance = chance
        self.content = content.load()
        self.books = Accountant(lossless=served.victim is None)
        self.boxes: list[Box] = []
        self.phoenixes: list[Box] = []
        self.numbers = itertools.count()
        self.sessions: set[Task] = set()
        self.agents = asyncio.Semaphore(AT_ONCE)
        self.workers = asyncio.Semaphore(SESSIONS)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open = False
        """Whether the groups of mailboxes that are not eager read already."""
        self.repeatable: list[Sent] = []
        self.answered: set[int] = set()
        self.killed_at = 0

    async def run(self) -> None:
        """Live, settle, and close the books."""
        with self._timed("create"):
            await self._all(self._create(number) for number in range(MAILBOXES))
        with self._timed("open groups"):
            latest = [group for box in self.boxes for group in box.groups.values() if group.deliver == "latest"]
            await self._all(self._fetch(group, 0) for group in latest)
        with self._timed("live"):
            lives = [self._agent(box, number) for number, box in enumerate(self.boxes)]
            rebirths = [self._phoenix(box) for box in self.phoenixes]
            killing = [self._kill()] if self.served.victim is not None else []
            await self._all([*lives, *rebirths, *killing], limited=False)
        with self._timed("settle"):
            self.open = True
            for box in self.boxes:
                self._poke(box)
            await self._settled()
        with self._timed("look"):
            await self._all(self._audit(box) for box in self.boxes)
            await self._all(self._repeat(sent) for sent in self.repeatable[:50])
        fates = self.books.close(time.time())
        print("counts", dict(self.books.count))
        print("fates", dict(fates))
        self._enough(fates)

    def _enough(self, fates: Counter[str]) -> None:
        """Hold that the course met each of the fates, so that none of the checks stood idle."""
        if MAILBOXES < ENOUGH:
            return
        expected = {"delivered and acknowledged", "acknowledged elsewhere", "compacted", "deleted", "dead", "expired"}
        expected |= {"expired with its mailbox", "not for this group"}
        assert not expected - set(fates), f"nothing was {expected - set(fates)}"
        counted = {"crashes", "nacks", "extends", "repeats", "answers", "re-created"}
        assert not counted - set(self.books.count), f"there were no {counted - set(self.books.count)}"
        if self.served.victim is not None:
            assert not self.served.victim.alive
            assert self.books.count["sent"] > self.killed_at > 0

    # Setting up.

    async def _create(self, number: int) -> None:
        chance = self.chance
        box = Box(self.content.address(number), eager=chance.random() < 0.25)
        if chance.random() < 0.3:
            box.retention = "until_ack"
        kind = chance.random()
        if number >= BOARDS and kind < 0.05:
            box.ttl = PHOENIX_TTL
            self.phoenixes.append(box)
            return
        if kind < 0.3:
            box.ttl = 3600
        if kind > 0.95:
            box.ack_wait = LEASE
        if kind > 0.98:
            # The service makes the address (A1).
            box.address = ""
        self._groups(box)
        self.boxes.append(box)
        await self._make(box)

    def _groups(self, box: Box) -> None:
        box.groups["readers"] = self._group(box, "readers", "earliest")
        if self.chance.random() < 0.12:
            box.groups["late"] = self._group(box, "late", "latest")
        if self.chance.random() < 0.12:
            box.groups["again"] = self._group(box, "again", "earliest")

    def _group(self, box: Box, name: str, deliver: str, start: int = 0) -> Group:
        group = Group(box, name, deliver, start)
        if box.ack_wait is not None:
            group.lease, group.ask_lease = box.ack_wait, False
        elif self.chance.random() < 0.3:
            group.lease = LEASE
        if group.lease and self.chance.random() < 0.5:
            group.max_deliver = 2
        return group

    async def _make(self, box: Box) -> None:
        fields: dict[str, Any] = {"retention": box.retention, "desc": self._words()[:200]}
        if box.address:
            fields["name"] = box.address
        if box.ttl:
            fields["ttl"] = box.ttl
        if box.ack_wait is not None:
            fields["ack_wait_ms"] = box.ack_wait
        answer = await self.client.create(**fields)
        again = answer.attempts > 1 and answer.error == f"mailbox {box.address} already exists"
        assert not answer.error or again, answer.error
        box.address = box.address or answer.body["mail_address"]
        self._made(box, answer)

    def _made(self, box: Box, answer: Answer) -> None:
        box.created_from, box.created_by = answer.first_at, answer.answered_at
        self.books.boxes.append(box)
        self.books.count["mailboxes"] += 1

    # What an agent does.

    async def _agent(self, box: Box, number: int) -> None:
        async with self.agents:
            chance = self.chance
            await self._send(self.chance.choice(self.boxes[:BOARDS]), self._card(number), key=f"card.{number % 40}")
            for _ in range(REQUESTS):
                reply_to = box.address if chance.random() < 0.4 else None
                sent = await self._send(chance.choice(self.boxes), self._words().encode(), reply_to=reply_to)
                if sent is not None and sent.dedup_id and not sent.ttl and chance.random() < 0.12:
                    self.repeatable.append(sent)
                    await self._repeat(sent)
            if chance.random() < 0.1:
                await self._look(box)
            if chance.random() < 0.05:
                await self._delete(box)
            if chance.random() < 0.05:
                self._late_group(box)

    def _late_group(self, box: Box) -> None:
        """Let a group begin in the midst of things (F1)."""
        if self.chance.random() < 0.5:
            group = self._group(box, "since", "from_time", int(time.time()))
        else:
            group = self._group(box, "from", "from_id", 2)
        box.groups[group.name] = group
        self._poke(box)

    async def _send(
        self, box: Box, text: bytes, *, key: str | None = None, reply_to: str | None = None, plain: bool = False
    ) -> Sent | None:
        chance, uid = self.chance, next(self.numbers)
        sent = Sent(uid, box, b"%08d" % uid + text, key=key, reply_to=reply_to)
        if not plain:
            sent.lane = chance.choices(("critical", "urgent", "normal", "low"), (8, 15, 62, 15))[0]
            sent.delay, sent.ttl = chance.choices(
                ((0, 0), (1, 0), (2, 600), (2, 1), (0, 1), (0, 600)), (84, 4, 1, 1, 4, 6)
            )[0]
            if key is None and chance.random() < 0.12:
                sent.key = chance.choice(("status", "plan"))
            if chance.random() < 0.3:
                sent.tags = tuple(sorted(chance.sample(TAGS, chance.randint(1, 2))))
            if chance.random() < 0.5:
                sent.dedup_id = f"once-{uid}"
        self.books.sending(sent)
        answer = await self.client.send(box.address, sent.payload, **sent.headers)
        if answer.error:
            assert answer.error == f"mailbox {box.address} does not exist", answer.error
            assert answer.answered_at > box.ends_from, "a living mailbox does not exist"
            self.books.refused(sent)
            return None
        self.books.stored(sent, answer)
        self._poke(box)
        return sent

    async def _repeat(self, first: Sent) -> None:
        """Send something else under a dedup id that was used: it must not be stored (S3)."""
        uid = next(self.numbers)
        sent = Sent(uid, first.box, b"%08d" % uid + b"again", dedup_id=first.dedup_id, repeats=first)
        self.books.sending(sent)
        answer = await self.client.send(first.box.address, sent.payload, **sent.headers)
        assert not answer.error, answer.error
        self.books.stored(sent, answer)

    async def _look(self, box: Box) -> None:
        filters: dict[str, Any] = self.chance.choice(
            ({"key": "plan"}, {"tags": [TAGS[0]]}, {"tag": TAGS[1]}, {"since": int(time.time()) - 1}, {})
        )
        answer = await self.client.query(box.address, **filters)
        assert not answer.error, answer.error
        self.books.looked(box, answer)
        for item in answer.messages:
            assert matches(item, filters), (item, filters)

    async def _delete(self, box: Box) -> None:
        answer = await self.client.query(box.address)
        assert not answer.error, answer.error
        self.books.looked(box, answer)
        # A dedup id ends with its message (S3), so those are left.
        found = [item["msg_id"] for item in answer.messages if "dedup_id" not in item]
        if found:
            msg_id = self.chance.choice(found)
            box.deleting.add(msg_id)
            self.books.deleted(box, msg_id, await self.client.delete(box.address, msg_id))

    async def _phoenix(self, box: Box) -> None:
        """Let a mailbox end by its TTL and another one live under its address (A3, M1, F5)."""
        async with self.agents:
            box.groups["readers"] = Group(box, "readers")
            await self._make(box)
            for delay in (0, 0, 0, PHOENIX_TTL + 1):
                uid = next(self.numbers)
                sent = Sent(uid, box, b"%08d" % uid + self._words().encode(), delay=delay)
                self.books.sending(sent)
                answer = await self.client.send(box.address, sent.payload, **sent.headers)
                if answer.error:
                    assert answer.answered_at > box.ends_from, "a living mailbox does not exist"
                    self.books.refused(sent)
                else:
                    self.books.stored(sent, answer)
            group = box.groups["readers"]
            fetched = await self._fetch(group, 0, num_msgs=2)
            if fetched is not None:
                ids = [item["msg_id"] for item in fetched.messages]
                await self._ack(group, fetched, ids[:1])
        taken = await self.client.create(name=box.address)
        if taken.answered_at < box.ends_from:
            assert taken.error == f"mailbox {box.address} already exists", taken.body
        # It waits at the mailbox's end for mail that comes too late.
        while taken.error and (await self.client.fetch(box.address, "waiting", max_wait_ms=4500)).error == "":
            assert time.time() < box.ends_by + 5, "the mailbox does not end"
        assert time.time() > box.ends_from, "the mailbox ended too early"
        risen = Box(box.address, "keep", eager=True)
        risen.groups["readers"] = Group(risen, "readers")
        if taken.error:
            await self._make(risen)
        else:
            self._made(risen, taken)
        self.books.count["re-created"] += 1
        sent_first = await self._send(risen, self._words().encode(), plain=True)
        assert sent_first.msg_id == 0 or sent_first.attempts > 1, "numbers go on from those of the mailbox before"
        self.boxes.append(risen)

    async def _kill(self) -> None:
        """Kill one of the instances when half of what agents send is stored."""
        half = MAILBOXES * (REQUESTS + 1) // 2
        await until(lambda: self.books.count["sent"] > half, 120, "half of the messages are sent")
        assert self.served.victim is not None
        self.killed_at = self.books.count["sent"]
        await self.served.victim.kill()

    # What the workers of a group do.

    def _poke(self, box: Box) -> None:
        """See that somebody reads."""
        if not (self.open or box.eager):
            return
        for group in box.groups.values():
            if group.sessions < (2 if group.lease else 1):
                group.sessions += 1
                task = asyncio.create_task(self._work(group))
                self.sessions.add(task)
                task.add_done_callback(self._worked)

    def _worked(self, task: Task) -> None:
        self.sessions.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            self.failed.set_exception(task.exception() or RuntimeError)

    async def _work(self, group: Group) -> None:
        try:
            while True:
                async with self.workers:
                    now = time.time()
                    owed = list(self.books.owed(group, now))
                    if not owed:
                        return
                    due = min(sent.visible_from for sent in owed)
                    if due <= now and not group.held:
                        wait = 200
                    else:
                        wait = min(4500, max(LEASE + 200, int((due - now) * 1000)))
                    answer = await self._fetch(group, wait, num_msgs=self.chance.choice((5, 20, 100, 100)))
                    if answer is None:
                        return
                    if answer.messages:
                        await self._process(group, answer)
                    elif group.max_deliver is not None:
                        self.books.buried(
                            group, await self.client.query(group.box.address, dead=True, group_name=group.name)
                        )
        finally:
            group.sessions -= 1

    async def _fetch(self, group: Group, wait: int, **more: Any) -> Answer | None:
        answer = await self.client.fetch(group.box.address, group.name, max_wait_ms=wait, **group.fetch, **more)
        if answer.error:
            assert answer.error == f"mailbox {group.box.address} does not exist", answer.error
            assert answer.answered_at > group.box.ends_from, "a living mailbox does not exist"
            return None
        self.books.delivered(group, answer)
        return answer

    async def _process(self, group: Group, answer: Answer) -> None:
        if self.chance.random() < 0.08:
            # The worker crashes: nobody acknowledges.
            self.books.count["crashes"] += 1
            return
        for item in answer.messages:
            await self._answer(group, item)
        if group.lease:
            await self._settle_leased(group, answer)
        else:
            await self._settle_plain(group, answer)

    async def _answer(self, group: Group, item: dict[str, Any]) -> None:
        """Answer a request at the address it names (N8), once whoever of the groups gets it."""
        sent = group.box.by_id[item["msg_id"]]
        if "reply_to" in item and sent.uid not in self.answered:
            self.answered.add(sent.uid)
            there = next(box for box in self._by_address(item["reply_to"]))
            self.books.count["answers"] += 1
            await self._send(there, b"answer to " + sent.payload[:200])

    async def _settle_plain(self, group: Group, answer: Answer) -> None:
        ids = [item["msg_id"] for item in answer.messages]
        match self.chance.choices(("last", "all", "each", "half"), (60, 25, 5, 10))[0]:
            case "last":
                await self._ack(group, answer, ids[-1:])
            case "all":
                await self._ack(group, answer, ids)
            case "each":
                for msg_id in ids[:5]:
                    await self._ack(group, answer, [msg_id])
            case "half":
                await self._ack(group, answer, [ids[len(ids) // 2]])

    async def _settle_leased(self, group: Group, answer: Answer) -> None:
        ids = [item["msg_id"] for item in answer.messages]
        done, back = [], []
        for msg_id in ids:
            # Nobody gets done with one in forty: it comes until it is dead.
            poison = group.max_deliver is not None and group.box.by_id[msg_id].uid % 40 == 0
            if not poison:
                (back if self.chance.random() < 0.06 else done).append(msg_id)
        if self.chance.random() < 0.1:
            self.books.count["extends"] += 1
            extended = await self.client.extend(group.box.address, group.name, ids, 2 * LEASE)
            self.books.extended(group, ids, 2 * LEASE / 1000, extended)
        if back:
            delay = self.chance.choice((0, 0, 200))
            self.books.count["nacks"] += 1
            self.books.returning(group, back, delay / 1000)
            given = await self.client.nack(group.box.address, group.name, back, delay)
            assert not given.error, given.error
        if done:
            await self._ack(group, answer, done)

    async def _ack(self, group: Group, fetched: Answer, ids: Sequence[int]) -> None:
        shown = [item["msg_id"] for item in fetched.messages]
        self.books.acking(group, ids if group.lease else covered(ids, shown))
        answer = await self.client.ack(group.box.address, group.name, ids)
        if answer.error:
            assert answer.error == f"mailbox {group.box.address} does not exist", answer.error
            assert answer.answered_at > group.box.ends_from
            return
        self.books.acked(group, ids, shown, answer)

    # In the end.

    async def _settled(self) -> None:
        """Wait until no group is owed anything, for as long as groups get something."""
        end, deliveries = time.monotonic() + SETTLES_WITHIN, 0
        while time.monotonic() < end:
            if deliveries < (deliveries := self.books.count["deliveries"]):
                end = time.monotonic() + SETTLES_WITHIN
            if not self.sessions:
                now = time.time()
                owing = [box for box in self.boxes if any(self.books.has_owed(g, now) for g in box.groups.values())]
                if not owing:
                    return
                for box in owing:
                    self._poke(box)
            await asyncio.wait(
                {*self.sessions, self.failed}, timeout=end - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            if self.failed.done():
                self.failed.result()
        # Too late: what is owed is told by the books as they are.
        for task in self.sessions:
            task.cancel()
        await asyncio.gather(*self.sessions, return_exceptions=True)
        self.books.close(time.time())

    async def _audit(self, box: Box) -> None:
        first_at = time.time()
        whole = await self.client.query(box.address, limit=1000)
        if whole.error:
            assert whole.answered_at > box.ends_from, "a living mailbox does not exist"
            return
        items = whole.messages
        if len(items) == 1000:
            items = await self.client.query_all(box.address)
        now = time.time()
        self.books.audit(box, items, Answer(whole.body, first_at, first_at, now, whole.attempts))
        for group in box.groups.values():
            if group.max_deliver is not None:
                dead = await self.client.query(box.address, dead=True, group_name=group.name)
                self.books.buried(group, dead)
        if self.chance.random() < 0.1:
            await self._filters(box, items)

    async def _filters(self, box: Box, items: list[dict[str, Any]]) -> None:
        """Hold that each filter of QUERY shows what it should, no more and no less (Q1)."""
        middle = items[len(items) // 2]["create_time"] if items else 0
        for filters in ({"key": "plan"}, {"tags": ",".join(TAGS[:2])}, {"tag": TAGS[2]}, {"since": middle}):
            answer = await self.client.query(box.address, limit=1000, **filters)
            now = time.time()
            # What ends meanwhile may be missing.
            expected = [x["msg_id"] for x in items if matches(x, filters) and x.get("expire_at", now + 9) > now + 1]
            assert set(expected) <= {item["msg_id"] for item in answer.messages}
            assert all(matches(item, filters) for item in answer.messages)

    # Odds and ends.

    def _words(self) -> str:
        return self.content.request(self.chance.randrange(len(self.content.requests)))

    def _card(self, number: int) -> bytes:
        return orjson.dumps(self.content.card(number))

    def _by_address(self, address: str) -> Iterator[Box]:
        if not hasattr(self, "_addresses"):
            self._addresses: dict[str, Box] = {}
        if address not in self._addresses:
            self._addresses.update({box.address: box for box in self.boxes})
        yield self._addresses[address]

    async def _all(self, work: Iterable[Coroutine[Any, Any, Any]], limited: bool = True) -> None:
        async def one(piece: Coroutine[Any, Any, Any]) -> None:
            if limited:
                async with self.agents:
                    await piece
            else:
                await piece

        async with asyncio.TaskGroup() as group:
            for piece in work:
                group.create_task(one(piece))
            self._check_failed()

    def _check_failed(self) -> None:
        if self.failed.done():
            self.failed.result()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        print(f"{name}: {time.monotonic() - started:.1f} s")


def matches(item: dict[str, Any], filters: dict[str, Any]) -> bool:
    """Whether a message fits the filters of a QUERY (Q1)."""
    tags = filters.get("tags", [])
    wanted = {*(tags.split(",") if isinstance(tags, str) else tags), *([filters["tag"]] if "tag" in filters else [])}
    return (
        filters.get("key") in (None, item.get("key"))
        and wanted <= set(item.get("tags", ()))
        and item["create_time"] >= filters.get("since", 0)
    )
