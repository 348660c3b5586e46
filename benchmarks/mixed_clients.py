"""Clients of `mixed`: requests of every kind at fixed rates (open loop), and books on what has to arrive.

`python -m benchmarks.mixed_clients nats|didcomm '{"url": …}'` answers each line of its standard input with a line of
JSON: what it did since the line before. After the line `end` it sends no more and fetches what is left.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks import catalog
from benchmarks.didcomm_clients import note
from benchmarks.nats_clients import open_loop
from benchmarks.prefill import PAYLOAD
from benchmarks.subscribers import SubscriberGroup
from mediator.client import Client, Mailbox
from pickup.client import DeliveredMessage, Holder, Sender
from pickup.rules.records import Generation

SENDS, EXPIRING, DELAYED, PUSHED = 100, 20, 5, 10
"""SENDs a second: to workers, to expire unread, delayed, and to a subscriber. All rates are far below saturation."""
FETCHES = 10
CREATES = QUERIES = 1
REGISTERS, REPORTS, DISCOVERS = 0.5, 5, 2
FORWARDS, PICKUPS = 5, 2
WORK = [f"work.{number}" for number in range(20)]
"""Mailboxes of workers, that a group empties."""
WAITING = "work.waiting"
"""One whose consumer waits for mail."""
BRIEF = [f"brief.{number}" for number in range(5)]
"""Mailboxes whose mail expires before anybody fetches it."""
BRIEF_SECONDS = 45
SUBSCRIBED = "push.live"
DELAY_SECONDS = 5
LEASE_SECONDS = 30
AGENTS = 300
CARDS = 3_000
REQUESTS = 4_000
"""More different ones than the model caches."""
HOLDERS = 4
"""Who picks up over HTTP, half of them with DIDComm v1; one more is live on a WebSocket."""
DRAIN_SECONDS = 30.0
"""At the end, for what is still to arrive."""
TROUBLES = 50
"""Kinds of failures that are kept by their text."""

Once = Callable[[int], Awaitable[object]]


class Books:
    """What was sent with success and has not arrived."""

    def __init__(self) -> None:
        self._owed: set[int] = set()
        self._early: set[int] = set()

    def sent(self, number: int) -> None:
        """Enter a message whose sender has an answer."""
        self._flip(number, self._early, self._owed)

    def arrived(self, number: int) -> None:
        """Enter one that its reader got, which may be before its sender has an answer."""
        self._flip(number, self._owed, self._early)

    def _flip(self, number: int, one: set[int], other: set[int]) -> None:
        if number in one:
            one.remove(number)
        else:
            other.add(number)

    @property
    def missing(self) -> int:
        return len(self._owed)

    @property
    def unaccounted(self) -> int:
        """Return how many arrived twice, or although their sender got no answer."""
        return len(self._early)


@dataclass
class Records:
    """What happened since the last look."""

    spent_ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Latencies by kind of request, from when it was due."""
    troubles: Counter[str] = field(default_factory=Counter)
    """Requests that failed, by kind and reason."""
    notes: Counter[str] = field(default_factory=Counter)

    def trouble(self, kind: str, error: object) -> None:
        text = f"{kind}: {error!r:.200}"
        self.troubles[text if text in self.troubles or len(self.troubles) < TROUBLES else "others"] += 1

    @contextlib.contextmanager
    def timed(self, kind: str, due: float) -> Iterator[None]:
        """Record how long a request took, or why it failed."""
        try:
            yield
        except Exception as error:
            # Whatever it is: that nothing fails is what is measured.
            self.trouble(kind, error)
        else:
            self.spent_ms[kind].append(round((time.perf_counter() - due) * 1000, 2))

    def take(self) -> dict[str, Any]:
        """Return everything, and begin anew."""
        taken = {"spent_ms": self.spent_ms, "troubles": self.troubles, "notes": self.notes}
        self.spent_ms, self.troubles, self.notes = defaultdict(list), Counter(), Counter()
        return taken


class MixedLoad:
    """What both kinds of clients have in common: books, records, and loops that end together."""

    def __init__(self) -> None:
        self.books = Books()
        self.records = Records()
        self.numbers = itertools.count()
        self._ended = False
        self._loops: list[asyncio.Future[None]] = []

    def at_rate(self, kind: str, rate: float, once: Once) -> None:
        """Ask at a fixed rate until the end."""

        async def one(number: int, due: float) -> None:
            with self.records.timed(kind, due):
                await once(number)

        numbers = itertools.takewhile(lambda _: not self._ended, itertools.count())
        self._loops.append(asyncio.ensure_future(open_loop(one, rate, numbers)))

    async def end(self) -> None:
        """Send no more, and wait for the answers."""
        self._ended = True
        await asyncio.gather(*self._loops)

    async def drain(self, once: Callable[[], Awaitable[object]]) -> None:
        """Fetch what is left."""
        end = time.monotonic() + DRAIN_SECONDS
        while self.books.missing and time.monotonic() < end:
            with self.records.timed("the rest", time.perf_counter()):
                await once()
            await asyncio.sleep(0.2)
        if self.books.missing:
            self.records.troubles["sent with success and never fetched"] = self.books.missing
        if self.books.unaccounted:
            self.records.troubles["fetched twice, or sent without an answer"] = self.books.unaccounted


# Mailboxes, subscriptions and the registry.


@contextlib.asynccontextmanager
async def nats(spec: dict[str, Any]) -> AsyncIterator[MixedLoad]:
    """Send, fetch, subscribe, register and discover."""
    load = NatsLoad()
    async with contextlib.AsyncExitStack() as stack:
        # Nothing is tried again, so whatever fails is seen.
        clients = [Client(spec["url"], patience=0, name=name) for name in ("senders", "workers", "agents")]
        senders, workers, agents = [await stack.enter_async_context(client) for client in clients]
        group = SubscriberGroup(spec["url"])
        stack.callback(group.close)
        await load.start(senders, workers, agents, group)
        yield load


class NatsLoad(MixedLoad):
    """The load on the NATS port."""

    def __init__(self) -> None:
        super().__init__()
        self._cards = [json.loads(card) for card in catalog.cards(CARDS)]
        self._requests = catalog.requests(REQUESTS, 1, "mixed")
        self._pushed = 0
        self._work: list[Mailbox] = []
        self._brief: list[Mailbox] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, senders: Client, workers: Client, agents: Client, group: SubscriberGroup) -> None:
        """Make the mailboxes and agents, and begin."""
        for name in (*WORK, WAITING):
            await senders.create(name, retention="until_ack")
        for name in (*BRIEF, SUBSCRIBED):
            await senders.create(name)
        for number in range(AGENTS):
            await agents.register(self._card(number))
        self._group = group
        await group.join(f"$mq9.AI.MAILBOX.MSG.{SUBSCRIBED}.*")
        self._work = [workers.mailbox(name) for name in WORK]
        self._brief = [senders.mailbox(name) for name in BRIEF]
        to_work = [senders.mailbox(name) for name in WORK]
        waiting, subscribed = senders.mailbox(WAITING), senders.mailbox(SUBSCRIBED)

        async def create(number: int) -> None:
            await senders.create(f"short.{number}", ttl=BRIEF_SECONDS)

        async def push(_number: int) -> None:
            await subscribed.send(PAYLOAD, ttl=BRIEF_SECONDS)
            self._pushed += 1

        async def discover(number: int) -> None:
            kind = ("semantic", "text")[number % 2]
            found = await agents.request("AGENT.DISCOVER", {kind: self._requests[number % REQUESTS], "limit": 10})
            if found.get("note"):
                self.records.notes[f"DISCOVER: {found['note']:.100}"] += 1

        self._tasks = [asyncio.create_task(self._consume(workers.mailbox(WAITING)))]
        gc.collect()
        gc.freeze()
        self.at_rate("SEND", SENDS, lambda number: self._send(to_work[number % len(WORK)]))
        self.at_rate("SEND", DELAYED, lambda number: self._send(to_work[number % len(WORK)], delay=DELAY_SECONDS))
        self.at_rate("SEND", DELAYED, lambda _: self._send(waiting))
        self.at_rate("SEND", EXPIRING, lambda n: self._brief[n % len(BRIEF)].send(PAYLOAD, ttl=BRIEF_SECONDS))
        self.at_rate("SEND", PUSHED, push)
        self.at_rate("FETCH + ACK", FETCHES, lambda number: self._fetch(self._work[number % len(WORK)]))
        self.at_rate("CREATE", CREATES, create)
        self.at_rate("QUERY", QUERIES, lambda number: self._brief[number % len(BRIEF)].query(limit=20))
        self.at_rate("REGISTER", REGISTERS, lambda number: agents.register(self._card(number)))
        self.at_rate("REPORT", REPORTS, lambda number: agents.report(f"agent.{number % AGENTS}", {"load": 0.5}))
        self.at_rate("DISCOVER", DISCOVERS, discover)

    def _card(self, number: int) -> dict[str, Any]:
        return {**self._cards[number % CARDS], "mailbox": f"agent.{number % AGENTS}"}

    async def _send(self, box: Mailbox, **options: Any) -> None:
        number = next(self.numbers)
        await box.send(str(number).rjust(len(PAYLOAD)), **options)
        self.books.sent(number)

    async def _fetch(self, box: Mailbox) -> None:
        messages = await box.fetch(group="workers", limit=100, wait=0, lease=LEASE_SECONDS)
        for message in messages:
            self.books.arrived(int(message.payload))
        await box.ack(*messages, group="workers")

    async def _consume(self, box: Mailbox) -> None:
        try:
            async for delivery in box.consume(group="workers", lease=LEASE_SECONDS):
                async with delivery:
                    self.books.arrived(int(delivery.payload))
        except Exception as error:
            self.records.trouble("a consumer that waits", error)

    async def end(self) -> None:
        await super().end()
        await self.drain(lambda: asyncio.gather(*map(self._fetch, self._work)))
        with contextlib.suppress(TimeoutError):
            await self._group.until(self._pushed)
        if lost := self._pushed - self._group.seen:
            self.records.troubles["messages that were not pushed"] = lost
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# Wallets.


@contextlib.asynccontextmanager
async def didcomm(spec: dict[str, Any]) -> AsyncIterator[MixedLoad]:
    """Forward, pick up, and listen."""
    load = WalletLoad()
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(Sender())
        holders = []
        for number in range(HOLDERS + 1):
            made = await Holder.connect(spec["invitations"][number % 2], label=f"holder {number}")
            holders.append(await stack.enter_async_context(made))
        await load.start(sender, holders)
        yield load


class WalletLoad(MixedLoad):
    """The load on the DIDComm door."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: Sequence[Holder] = ()
        self._listening: asyncio.Task[None] | None = None

    async def start(self, sender: Sender, holders: Sequence[Holder]) -> None:
        """Get mediation, and begin."""
        ready = [(holder, await holder.mediate(), await holder.add_key()) for holder in holders]
        *self._holders, live = holders

        async def forward(number: int) -> None:
            holder, grant, key = ready[number % len(ready)]
            own = next(self.numbers)
            if holder.generation is Generation.V1:
                old = {"@type": "https://didcomm.org/basicmessage/1.0/message", "@id": str(own), "content": "x" * 1000}
                envelope = await sender.pack_v1(key, grant.routing, old)
            else:
                envelope = await sender.pack_v2(key, grant.routing[0], note(str(own)))
            await sender.deliver(envelope, holder.link.endpoint or holder.link.url("http", "https"), holder.generation)
            self.books.sent(own)

        self._listening = asyncio.create_task(self._listen(live))
        gc.collect()
        gc.freeze()
        self.at_rate("forward", FORWARDS, forward)
        self.at_rate("pickup", PICKUPS, lambda number: self._pick_up(self._holders[number % HOLDERS]))

    async def _pick_up(self, holder: Holder) -> None:
        if mails := await holder.fetch(limit=20):
            for mail in mails:
                await self._open(holder, mail)
            await holder.received([mail.id for mail in mails])

    async def _open(self, holder: Holder, mail: DeliveredMessage) -> None:
        plain = (await holder.open(mail)).message
        self.books.arrived(int(plain.get("id") or plain["@id"]))

    async def _listen(self, holder: Holder) -> None:
        while True:
            try:
                async with contextlib.aclosing(holder.mail()) as mails:
                    async for mail in mails:
                        await self._open(holder, mail)
                        await holder.received([mail.id])
            except Exception as error:
                self.records.trouble("a live WebSocket", error)
                await asyncio.sleep(1)

    async def end(self) -> None:
        await super().end()
        await self.drain(lambda: asyncio.gather(*map(self._pick_up, self._holders)))
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)


async def _main(name: str, spec: dict[str, Any]) -> None:
    async with LOADS[name](spec) as load:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print("{}", flush=True)
        while line := await reader.readline():
            if line == b"end\n":
                await load.end()
            print(json.dumps(load.records.take()), flush=True)


LOADS = {load.__name__: load for load in (nats, didcomm)}

if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], json.loads(sys.argv[2])))
