"""NATS clients: each load runs in its own process (nats-py on uvloop) and prints its results as one line of JSON.

`python -m benchmarks.nats_clients NAME '{"url": …}'`; :func:`run` starts it for the benchmarks.
"""

import asyncio
import json
import resource
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import nats
import uvloop
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig

from benchmarks import counting
from benchmarks.prefill import PAYLOAD
from benchmarks.servers import ServerProcess
from benchmarks.subscribers import live, live_from_stream, replayed
from mediator.system.usage import cpu_seconds, descendants, resident_mb

API = "$mq9.AI."
WARM_SECONDS = 0.3
READ_TIMEOUT = 10
LEASE_MS = 30_000

Result = dict[str, Any]
Once = Callable[[int], Awaitable[None]]


def run(name: str, server: ServerProcess, **spec: Any) -> Result:
    """Run a load against a server and return its results.

    CPU is that of the server with its descendants, or of those that ``pid`` lists.
    """
    spec = {"url": server.url, "pid": server.pid, **spec}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.nats_clients", name],
        input=json.dumps(spec),
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"load {name} failed: {done.stderr.strip()[-2000:]}")
    return dict(json.loads(done.stdout))


async def ask(client: Client, verb: str, body: Any = b"") -> Any:
    """Send one request and return its reply; raise RuntimeError if the reply has an error."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = json.loads((await client.request(API + verb, data, timeout=READ_TIMEOUT)).data)
    if answer["error"]:
        raise RuntimeError(f"{verb}: {answer['error']}")
    return answer


async def closed(once: Once, in_flight: int, seconds: float, pid: int | Sequence[int]) -> Result:
    """Keep ``in_flight`` requests in flight (closed loop), first to warm up, then for ``seconds``."""
    await _keep(once, in_flight, WARM_SECONDS, 0, [])
    spent: list[float] = []
    cpu, started = cpu_seconds(pid), time.perf_counter()
    await _keep(once, in_flight, seconds, 1 << 40, spent)
    return _figures(spent, time.perf_counter() - started, cpu_seconds(pid) - cpu)


async def _keep(once: Once, in_flight: int, seconds: float, first: int, spent: list[float]) -> None:
    end = time.perf_counter() + seconds
    number = first

    async def worker() -> None:
        nonlocal number
        now = time.perf_counter()
        while now < end:
            number += 1
            await once(number)
            before, now = now, time.perf_counter()
            spent.append(now - before)

    await asyncio.gather(*(worker() for _ in range(in_flight)))


def _figures(spent: list[float], seconds: float, cpu: float) -> Result:
    spent.sort()
    count = len(spent)
    return {
        "count": count,
        "rate": count / seconds,
        "cpu_us": cpu / count * 1e6,
        "p50_ms": spent[count // 2] * 1e3,
        "p99_ms": spent[int(count * 0.99)] * 1e3,
    }


# Ours.


async def send(client: Client, spec: Result) -> Result:
    """SEND to the mailboxes in turn."""
    targets = [f"MSG.SEND.{name}" for name in spec["addresses"]]

    async def once(number: int) -> None:
        await ask(client, targets[number % len(targets)], PAYLOAD)

    return await closed(once, spec["in_flight"], spec["seconds"], spec["pid"])


async def create(client: Client, spec: Result) -> Result:
    """CREATE mailboxes with unique names."""
    prefix = spec["prefix"]

    async def once(number: int) -> None:
        await ask(client, "MAILBOX.CREATE", {"name": f"{prefix}.{number}"})

    return await closed(once, spec["in_flight"], spec["seconds"], spec["pid"])


async def make(client: Client, spec: Result) -> Result:
    """CREATE the mailboxes that a benchmark needs."""
    for name in spec["addresses"]:
        await ask(client, "MAILBOX.CREATE", {"name": name})
    return {}


async def touch(client: Client, spec: Result) -> Result:
    """SEND one message to each of ``count`` mailboxes, ``step`` apart."""
    numbers = iter(range(0, spec["count"] * spec["step"], spec["step"]))

    async def worker() -> None:
        for number in numbers:
            await ask(client, f"MSG.SEND.bench.{number}", PAYLOAD)

    await asyncio.gather(*(worker() for _ in range(100)))
    return {}


async def fetch(client: Client, spec: Result) -> Result:
    """Read a whole mailbox with a new group: FETCH 100, then ACK the last message, or each, all at the same time.

    With ``leased`` each message is leased until its ACK, as a JetStream consumer with explicit acknowledgement does.
    """
    config = {"num_msgs": 100, "max_wait_ms": 0, "ack_wait_ms": LEASE_MS if spec["leased"] else 0}
    body = {"group_name": spec["group"], "deliver": "earliest", "config": config}
    seen = 0

    async def ack(msg_id: int) -> None:
        await ask(client, f"MSG.ACK.{spec['address']}", {"group_name": spec["group"], "msg_id": msg_id})

    cpu, started = cpu_seconds(spec["pid"]), time.perf_counter()
    while seen < spec["count"]:
        messages = (await ask(client, f"MSG.FETCH.{spec['address']}", body))["messages"]
        seen += len([b64decode(message["payload"]) for message in messages])
        await asyncio.gather(*(ack(message["msg_id"]) for message in (messages if spec["each"] else messages[-1:])))
    seconds = time.perf_counter() - started
    return {"rate": seen / seconds, "cpu_us": (cpu_seconds(spec["pid"]) - cpu) / seen * 1e6}


async def fetch_all(client: Client, spec: Result) -> Result:
    """Read several mailboxes at the same time; see :func:`fetch`."""
    return await _together(spec, (fetch(client, spec | {"address": address}) for address in spec["addresses"]))


async def _together(spec: Result, readers: Iterable[Awaitable[Result]]) -> Result:
    cpu, started = cpu_seconds(spec["pid"]), time.perf_counter()
    seen = spec["count"] * len(await asyncio.gather(*readers))
    seconds = time.perf_counter() - started
    return {"rate": seen / seconds, "cpu_us": (cpu_seconds(spec["pid"]) - cpu) / seen * 1e6}


async def steady(client: Client, spec: Result) -> Result:
    """Send at a fixed rate from ``at`` on (open loop); return the latencies in the order of sending.

    Latency counts from the moment a message was due, so waiting behind a slow answer counts as well.
    """
    targets = [f"{API}MSG.SEND.{name}" for name in spec["addresses"]]
    count = int(spec["rate"] * spec["seconds"])
    spent_ms = [0.0] * count
    failed = 0

    async def one(number: int, due: float) -> None:
        nonlocal failed
        try:
            answer = await client.request(targets[number % len(targets)], PAYLOAD, timeout=READ_TIMEOUT)
            failed += b'"error":""' not in answer.data
        except NatsError:
            failed += 1
        spent_ms[number] = (time.perf_counter() - due) * 1e3

    await asyncio.sleep(max(0.0, spec["at"] - time.time()))
    began_at = time.time()
    await open_loop(one, spec["rate"], range(count))
    return {"began_at": began_at, "spent_ms": spent_ms, "failed": failed}


async def open_loop(one: Callable[[int, float], Awaitable[None]], rate: float, numbers: Iterable[int]) -> None:
    """Call ``one`` with each number and with when it was due, ``rate`` times a second, however long they take."""
    under_way: set[asyncio.Future[None]] = set()
    started = time.perf_counter()
    for place, number in enumerate(numbers):
        due = started + place / rate
        rest = due - time.perf_counter()
        if rest > 0:
            await asyncio.sleep(rest)
        task = asyncio.ensure_future(one(number, due))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)


async def until_killed(client: Client, spec: Result) -> Result:
    """SEND numbered messages until the service is killed; return the msg_id answered for each number."""
    answered: dict[int, int] = {}
    number = spec["first"]
    gone = False

    async def worker() -> None:
        nonlocal number, gone
        while not gone:
            mine, number = number, number + 1
            try:
                reply = await client.request(f"{API}MSG.SEND.{spec['address']}", b"%d" % mine, timeout=1)
            except (NatsError, OSError):
                gone = True
                return
            answer = json.loads(reply.data)
            if not answer["error"]:
                answered[mine] = answer["msg_id"]

    await asyncio.gather(*(worker() for _ in range(100)))
    return {"answered": answered, "next": number}


async def read_all(client: Client, spec: Result) -> Result:
    """Return number and msg_id of every message in a mailbox."""
    found: list[tuple[int, int]] = []
    after = 0
    while True:
        body = {"deliver": "from_id", "from_id": after, "config": {"num_msgs": 1000, "max_wait_ms": 0}}
        messages = (await ask(client, f"MSG.FETCH.{spec['address']}", body))["messages"]
        if not messages:
            return {"found": found}
        found += [(int(b64decode(message["payload"])), message["msg_id"]) for message in messages]
        after = messages[-1]["msg_id"] + 1


async def idle(_client: Client, spec: Result) -> Result:
    """Connect ``count`` clients, from several addresses, that stay idle after CONNECT and an optional SUB.

    Returns by how much the memory of the server and of its children grew, in MB.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    port = urlsplit(spec["url"]).port
    places = asyncio.Semaphore(100)
    hello = b"SUB %b 1\r\n" % spec["subject"].encode() if "subject" in spec else b""

    async def connect(number: int) -> asyncio.StreamWriter:
        async with places:
            local = (f"127.0.0.{2 + number % 8}", 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=local, limit=4096)
            await reader.readline()
            writer.write(b'CONNECT {"verbose":false,"pedantic":false}\r\n%bPING\r\n' % hello)
            while (line := await reader.readline()) != b"PONG\r\n":
                if not line or line.startswith(b"-ERR"):
                    raise RuntimeError(f"client {number} was refused: {line!r}")
            return writer

    def memory() -> tuple[float, float]:
        return resident_mb(spec["pid"]), sum(map(resident_mb, descendants(spec["pid"])))

    before = memory()
    writers = await asyncio.gather(*(connect(number) for number in range(spec["count"])))
    found = memory()
    for writer in writers:
        writer.close()
    return {"service_mb": found[0] - before[0], "children_mb": found[1] - before[1]}


# The peer.


async def counted(client: Client, spec: Result) -> Result:
    """Keep requests in flight with a client that only counts the replies that have ``good`` in them."""
    await client.close()
    cpu = cpu_seconds(spec["pid"])
    seen = counting.keep(
        spec["url"], spec["subject"], PAYLOAD, spec["good"].encode(), spec["in_flight"], spec["seconds"]
    )
    return {
        "count": seen.count,
        "rate": seen.count / seen.seconds,
        "cpu_us": (cpu_seconds(spec["pid"]) - cpu) / seen.count * 1e6,
        "client_us": seen.client_seconds / seen.count * 1e6,
    }


async def publish(client: Client, spec: Result) -> Result:
    """Publish to a stream and wait for its acknowledgement, for ``seconds`` or ``count`` messages."""
    stream = client.jetstream(timeout=READ_TIMEOUT)
    await stream.add_stream(name=spec["stream"], subjects=[f"{spec['stream']}.>"])
    if "count" in spec:
        numbers = iter(range(spec["count"]))

        async def worker() -> None:
            for number in numbers:
                await stream.publish(f"{spec['stream']}.{number if spec['subject_each'] else 0}", PAYLOAD)

        await asyncio.gather(*(worker() for _ in range(100)))
        return {}

    async def once(_number: int) -> None:
        await stream.publish(f"{spec['stream']}.0", PAYLOAD)

    return await closed(once, spec["in_flight"], spec["seconds"], spec["pid"])


async def pull(client: Client, spec: Result) -> Result:
    """Read a whole stream with a new pull consumer, 100 at a time; acknowledge only the last message, or each.

    With ``answered`` it waits for the answers, all of a batch in flight at the same time; `ack()` of nats-py does not.
    """
    stream = client.jetstream(timeout=READ_TIMEOUT)
    policy = AckPolicy.EXPLICIT if spec["each"] else AckPolicy.ALL
    consumer = await stream.pull_subscribe(
        f"{spec['stream']}.>", durable=spec["group"], config=ConsumerConfig(ack_policy=policy)
    )
    seen = 0
    cpu, started = cpu_seconds(spec["pid"]), time.perf_counter()
    while seen < spec["count"]:
        messages = await consumer.fetch(100, timeout=READ_TIMEOUT)
        seen += len(messages)
        chosen = messages if spec["each"] else messages[-1:]
        await asyncio.gather(*(m.ack_sync(READ_TIMEOUT) if spec["answered"] else m.ack() for m in chosen))
    await client.flush()
    seconds = time.perf_counter() - started
    return {"rate": seen / seconds, "cpu_us": (cpu_seconds(spec["pid"]) - cpu) / seen * 1e6}


async def pull_all(client: Client, spec: Result) -> Result:
    """Read several streams at the same time; see :func:`pull`."""
    return await _together(spec, (pull(client, spec | {"stream": stream}) for stream in spec["streams"]))


async def add_streams(client: Client, spec: Result) -> Result:
    """Create ``count`` streams with file storage and one subject each."""
    stream = client.jetstream(timeout=READ_TIMEOUT)
    started = time.perf_counter()
    for number in range(spec["count"]):
        await stream.add_stream(name=f"box{number}", subjects=[f"box.{number}"])
    return {"rate": spec["count"] / (time.perf_counter() - started)}


LOADS: dict[str, Callable[[Client, Result], Awaitable[Result]]] = {
    load.__name__: load
    for load in (
        send,
        create,
        make,
        touch,
        fetch,
        fetch_all,
        steady,
        until_killed,
        read_all,
        replayed,
        live,
        live_from_stream,
        idle,
        publish,
        pull,
        pull_all,
        counted,
        add_streams,
    )
}


async def _main(name: str, spec: Result) -> None:
    async def quiet(_error: Exception) -> None:
        """Ignore the error; the load notices that its server is gone."""

    client = await nats.connect(spec["url"], allow_reconnect=False, error_cb=quiet)
    print(json.dumps(await LOADS[name](client, spec)), flush=True)
    if client.is_connected:
        await client.close()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], json.load(sys.stdin)))
