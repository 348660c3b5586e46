"""DIDComm on two instances that share a PostgreSQL: a forward at one reaches a live socket at the other."""

import base64
import os
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.bench import Bench, ResultRow, below, headline, number
from benchmarks.didcomm_clients import TEXT
from benchmarks.servers import JetStreamServer, ServiceProcess, running
from mediator.operate.control import send_command
from pickup.client import Holder, Sender
from pickup.rules.records import Generation
from tests.harness import postgres
from tests.harness.live import Live

LIMIT_MS = 50.0
URLS = {Generation.V1: "v1_url", Generation.V2: "v2_url"}


def run(bench: Bench) -> Iterator[ResultRow]:
    programs = postgres.programs_found()
    if programs is None:
        yield ResultRow("DIDComm on two instances", "-", "PostgreSQL is not installed")
        return
    server = postgres.PrivateServer(programs)
    try:
        with server.database() as url:
            nats = JetStreamServer(bench.folder / "nats")
            with running(nats):
                shared = {
                    "MEDIATOR_DATABASE_URL": url,
                    "MEDIATOR_DIDCOMM__KEY": base64.b64encode(os.urandom(32)).decode(),
                }
                a = ServiceProcess(bench.folder / "a", nats_url=nats.url, env=shared)
                with running(a):
                    b = ServiceProcess(bench.folder / "b", nats_url=nats.url, env=shared)
                    with running(b):
                        for generation in Generation:
                            yield from _rows(bench, a, b, generation)
    finally:
        server.stop()


def _rows(bench: Bench, a: ServiceProcess, b: ServiceProcess, generation: Generation) -> Iterator[ResultRow]:
    count = 100 if bench.quick else 1000
    here, there = [], []
    for turn in range(bench.long_rounds):
        bench.status(f"DIDComm {generation} on two instances, round {turn + 1} of {bench.long_rounds}")
        seen = uvloop.run(_times(bench.folder / "a", (a.http_url, b.http_url), generation, count))
        here.append(seen[0])
        there.append(seen[1])
    what = f"DIDComm {generation}, 1 kB, one at a time"
    late = [_p99(times) for times in there]
    yield headline(below(f"{what}: forward at B → live socket at A, p99", "ms", late, LIMIT_MS))
    for name, rounds in (("forward at A → live socket at A", here), ("forward at B → live socket at A", there)):
        p50 = number(median(median(times) for times in rounds), "ms")
        yield ResultRow(f"{what}: {name}", f"p50 {p50}, p99 {number(median(map(_p99, rounds)), 'ms')}")


async def _times(data_dir: Path, urls: tuple[str, str], generation: Generation, count: int) -> tuple[list[float], ...]:
    """Return the milliseconds from the POST until the message is read, for forwards at A and at B, which take turns."""
    made = await send_command(data_dir, "invite", tenant="default", label="", ttl_ms=None, uses=None)
    taken: tuple[list[float], list[float]] = ([], [])
    async with AsyncExitStack() as stack:
        holder = await stack.enter_async_context(await Holder.connect(str(made[URLS[generation]])))
        sender = await stack.enter_async_context(Sender())
        await holder.mediate()
        key = await holder.add_key()
        live = await stack.enter_async_context(Live.of(holder))
        for place in range(2 * count):
            envelope = await _packed(sender, holder, key, str(place))
            started = time.perf_counter()
            await sender.deliver(envelope, f"{urls[place % 2]}/didcomm", generation)
            mail = await live.mail()
            taken[place % 2].append((time.perf_counter() - started) * 1000)
            await holder.received([mail.id])
    return taken


async def _packed(sender: Sender, holder: Holder, key: str, id: str) -> bytes:
    if holder.generation is Generation.V1:
        v1 = {"@type": "https://didcomm.org/basicmessage/1.0/message", "@id": id, "content": TEXT}
        return await sender.pack_v1(key, holder.link.routing, v1)
    v2 = {"id": id, "type": "https://didcomm.org/basicmessage/2.0/message", "body": {"content": TEXT}}
    return await sender.pack_v2(key, holder.link.routing[0], v2)


def _p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]
