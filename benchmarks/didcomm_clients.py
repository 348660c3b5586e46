"""DIDComm clients: holders and senders in their own process, which prints its results as one line of JSON.

`python -m benchmarks.didcomm_clients '{"invitation": …}'`; :func:`run` starts it for the benchmark.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from typing import Any

import aiohttp
import orjson
import uvloop

from mediator.system.usage import cpu_seconds
from pickup.client import Holder, Sender
from pickup.client.conversation import MEDIA_TYPES
from pickup.rules.records import Generation

HOLDERS = 16
SENDERS = 16
BATCH = 10
TEXT = "x" * 1000
IDLE_SECONDS = 1.0
"""A peer that answers before it has finished counts as finished after this time without CPU use."""

Result = dict[str, Any]


def run(**spec: Any) -> Result:
    """Run the load and return its results."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.didcomm_clients"],
        input=json.dumps(spec),
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the wallets failed: {done.stderr.strip()[-2000:]}")
    return dict(json.loads(done.stdout))


async def load(spec: Result) -> Result:
    """Forward ``count`` messages to holders in turn; with ``pickup``, all holders then pick up and acknowledge."""
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(Sender())
        holders = []
        for number in range(HOLDERS):
            made = Holder.connect(spec["invitation"], label=f"holder {number}", handshake=spec["handshake"], seconds=60)
            holders.append(await stack.enter_async_context(await made))
        packed = await _packed(sender, holders, spec["count"])
        url = holders[0].link.endpoint or holders[0].link.url("http", "https")
        forwarded = await forward(url, packed, holders[0].generation, spec)
        return {"forward": forwarded, "pickup": await _pick_up(holders, spec) if spec["pickup"] else None}


async def _packed(sender: Sender, holders: list[Holder], count: int) -> list[bytes]:
    ready = []
    for holder in holders:
        grant = await holder.mediate()
        ready.append((grant, await holder.add_key()))
    packed = []
    for number in range(count):
        grant, key = ready[number % len(ready)]
        if holders[0].generation is Generation.V1:
            old = {"@type": "https://didcomm.org/basicmessage/1.0/message", "@id": str(number), "content": TEXT}
            packed.append(await sender.pack_v1(key, grant.routing, old))
        else:
            packed.append(await sender.pack_v2(key, grant.routing[0], note(str(number))))
    return packed


def note(id: str) -> Result:
    """Return a v2 message of 1 kB."""
    return {"id": id, "type": "https://didcomm.org/basicmessage/2.0/message", "body": {"content": TEXT}}


async def forward(url: str, packed: list[bytes], generation: Generation, spec: Result) -> Result:
    waiting = iter(packed)
    spent: list[float] = []
    headers = {"Content-Type": MEDIA_TYPES[generation]}

    async def sender(session: aiohttp.ClientSession) -> None:
        for envelope in waiting:
            started = time.perf_counter()
            async with session.post(url, data=envelope, headers=headers) as answer:
                await answer.read()
                assert 200 <= answer.status < 300, answer.status
            spent.append(time.perf_counter() - started)

    async with aiohttp.ClientSession() as session:
        cpu, started = cpu_seconds(spec["pid"]), time.perf_counter()
        await asyncio.gather(*(sender(session) for _ in range(SENDERS)))
        seconds = time.perf_counter() - started
    if spec["settles"]:
        await _idle(spec["pid"])
    return figures(spent, len(packed), seconds, cpu_seconds(spec["pid"]) - cpu)


async def _idle(pid: int) -> None:
    before = -1.0
    while (now := cpu_seconds(pid)) > before + 0.02:
        before = now
        await asyncio.sleep(IDLE_SECONDS)


async def _pick_up(holders: list[Holder], spec: Result) -> Result:
    spent: list[float] = []
    taken = 0

    async def pick_up(holder: Holder) -> None:
        nonlocal taken
        while True:
            started = time.perf_counter()
            mails = await holder.fetch(limit=BATCH)
            if not mails:
                return
            await holder.received([mail.id for mail in mails])
            spent.append(time.perf_counter() - started)
            taken += len(mails)

    cpu, started = cpu_seconds(spec["pid"]), time.perf_counter()
    await asyncio.gather(*map(pick_up, holders))
    seen = figures(spent, taken, time.perf_counter() - started, cpu_seconds(spec["pid"]) - cpu)
    assert taken == spec["count"], f"{spec['count']} were forwarded, {taken} picked up"
    return seen


def figures(spent: list[float], count: int, seconds: float, cpu: float) -> Result:
    spent.sort()
    return {
        "rate": count / seconds,
        "cpu_us": cpu / count * 1e6,
        "p50_ms": spent[len(spent) // 2] * 1e3,
        "p99_ms": spent[int(len(spent) * 0.99)] * 1e3,
    }


if __name__ == "__main__":
    print(orjson.dumps(uvloop.run(load(json.load(sys.stdin)))).decode())
