"""Clients of many DIDComm holders at once, and the latencies they see."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

import aiohttp

from benchmarks.didcomm_clients import SENDERS, Result, figures, forward, note
from benchmarks.prefill_didcomm import EnrolledHolders
from benchmarks.servers import ServiceProcess
from mediator.system.usage import cpu_seconds
from pickup.client import Holder, Sender
from pickup.client.conversation import MEDIA_TYPES, ClientResources
from pickup.rules.records import Generation

SECONDS = 60.0
"""Time for one answer."""
OPENING = 50
"""Sockets that are opened at the same time."""


@dataclass(frozen=True, slots=True)
class Clients:
    """The holders of a enrolled, and a sender to them."""

    enrolled: EnrolledHolders
    service: ServiceProcess
    sender: Sender
    tools: ClientResources
    """Shared by all holders that only POST: they are told apart by their keys, not by their connection."""

    def holder(self, number: int) -> Holder:
        return Holder(self.enrolled.link(number, self.service), self.tools, seconds=SECONDS)

    async def packed(self, number: int) -> bytes:
        """Seal a 1 kB message for a holder inside a forward."""
        return await self.sender.pack_v2(self.enrolled.recipients[number], self.enrolled.mediator, note(str(number)))

    async def forward(self, numbers: Sequence[int]) -> Result:
        """Forward a message to each of these holders."""
        envelopes = [await self.packed(number) for number in numbers]
        spec = {"pid": self.service.pid, "settles": False}
        return await forward(f"{self.service.http_url}/didcomm", envelopes, Generation.V2, spec)

    async def pick_up(self, numbers: Sequence[int]) -> Result:
        """Have each of these holders take one message and acknowledge it."""
        waiting = iter(numbers)
        spent: list[float] = []

        async def client() -> None:
            for number in waiting:
                holder = self.holder(number)
                started = time.perf_counter()
                (mail,) = await holder.fetch(limit=1)
                await holder.received([mail.id])
                spent.append(time.perf_counter() - started)

        cpu, started = cpu_seconds(self.service.pid), time.perf_counter()
        await asyncio.gather(*(client() for _ in range(SENDERS)))
        return figures(spent, len(numbers), time.perf_counter() - started, cpu_seconds(self.service.pid) - cpu)

    async def status_ms(self, number: int) -> float:
        """Return the latency of a status-request in milliseconds."""
        holder = self.holder(number)
        started = time.perf_counter()
        await holder.status()
        return (time.perf_counter() - started) * 1000

    async def drain(self, number: int, batch: int) -> AsyncIterator[tuple[int, float]]:
        """Pick up and acknowledge all mail; yield for each delivery its message count and its duration with the ack."""
        holder = self.holder(number)
        while True:
            started = time.perf_counter()
            mails = await holder.fetch(limit=batch)
            if not mails:
                return
            await holder.received([mail.id for mail in mails])
            yield len(mails), time.perf_counter() - started


@asynccontextmanager
async def clients(enrolled: EnrolledHolders, service: ServiceProcess) -> AsyncIterator[Clients]:
    """Create clients in the running event loop and close them at the end."""
    async with Sender() as sender:
        tools = ClientResources(enrolled.wallet)
        # Garbage collection over the keys of all holders would pause the clients.
        gc.collect()
        gc.freeze()
        try:
            yield Clients(enrolled, service, sender, tools)
        finally:
            gc.unfreeze()
            await tools.close()


class LiveHolders:
    """Holders in live mode, each on its own WebSocket, which acknowledge what is pushed to them."""

    def __init__(self, clients: Clients) -> None:
        self.spent: list[float] = []
        """Seconds from when a forward should have been sent to when it was read on the socket."""
        self._clients = clients
        self._due: dict[int, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, count: int) -> None:
        """Turn on live mode for ``count`` holders; return when the service confirms it."""
        enrolled, service = self._clients.enrolled, self._clients.service
        for start in range(0, count, OPENING):
            for number in range(start, min(start + OPENING, count)):
                enrolled.wallet.links[str(number)] = enrolled.link(number, service).written()
                self._tasks.append(asyncio.create_task(self._listen(number)))
            while await asyncio.to_thread(service.counter, "mediator_didcomm_live ") < len(self._tasks):
                self._check()
                await asyncio.sleep(0.02)

    async def forward(self, count: int, rate: float) -> None:
        """Forward to each in turn at a fixed rate (open loop); return when all messages were read on the sockets."""
        envelopes = [await self._clients.packed(number % len(self._tasks)) for number in range(count)]
        async with aiohttp.ClientSession() as session, asyncio.timeout(SECONDS + count / rate):
            begun = time.perf_counter()
            async with asyncio.TaskGroup() as posts:
                for number, envelope in enumerate(envelopes):
                    due = begun + number / rate
                    await asyncio.sleep(due - time.perf_counter())
                    assert number % len(self._tasks) not in self._due, "the message before it was not pushed yet"
                    self._due[number % len(self._tasks)] = due
                    posts.create_task(self._post(session, envelope))
            while self._due:
                self._check()
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Close all sockets."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _listen(self, number: int) -> None:
        # One HTTP client per socket: sockets of one client would wait for each other.
        async with AsyncExitStack() as stack:
            holder = Holder.resume(self._clients.enrolled.wallet, name=str(number), seconds=SECONDS)
            await stack.enter_async_context(holder)
            pushed = await stack.enter_async_context(aclosing(holder.live()))
            async for mail in pushed:
                self.spent.append(time.perf_counter() - self._due.pop(number))
                await holder.received([mail.id])

    async def _post(self, session: aiohttp.ClientSession, envelope: bytes) -> None:
        headers = {"Content-Type": MEDIA_TYPES[Generation.V2]}
        url = f"{self._clients.service.http_url}/didcomm"
        async with session.post(url, data=envelope, headers=headers) as answer:
            assert answer.status == 202, answer.status
