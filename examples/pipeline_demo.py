"""From nothing to a report with pictures: ``make pipeline-demo``, or ``python examples/pipeline_demo.py``.

Starts a service in a temporary folder and lets made-up agents send and read a few thousand messages, over NATS as any
client does. Then ``mediator pipeline ingest`` takes the journal into a lake, and ``mediator pipeline report`` shows
what happened: a queue that is kept up with, a group that falls behind, a mailbox that only fills, messages that expire
unread, work that is given up after three attempts.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client

SECONDS = 12.0
"""How long the agents are at it."""
READY_TRIES = 100
EXPIRE_AFTER = 2
PRIORITIES = {"critical": 1, "urgent": 4, "normal": 15}
SENT = {
    "support.inbox": 1_200,
    "builds.queue": 600,
    "alerts.oncall": 300,
    "newsletter.all": 500,
    "login.codes": 400,
    "sensors.latest": 600,
}
"""How many messages each mailbox gets."""


class Agents:
    """What the made-up agents do, and how often they did it."""

    def __init__(self, connection: Client) -> None:
        self._connection = connection
        self._random = random.Random(7)
        self.counts: Counter[str] = Counter()
        self.sending = True

    async def ask(self, verb: str, body: Any, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Make a request; an error ends the demo."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await self._connection.request(f"$mq9.AI.{verb}", data, timeout=10, headers=headers)
        answer: dict[str, Any] = json.loads(reply.data)
        if answer["error"]:
            raise SystemExit(f"{verb}: {answer['error']}")
        return answer

    async def live(self) -> None:
        """Send everything, at random moments, while the readers read; they stop when there is nothing more."""
        for address in SENT:
            await self.ask("MAILBOX.CREATE", {"name": address})
        readers = [
            asyncio.create_task(reader)
            for reader in (
                self.read("support.inbox", "answering", batch=50),
                self.read("support.inbox", "audit", batch=10, pause=0.7, most=SENT["support.inbox"] // 4),
                self.work("builds.queue", "builders"),
                self.read("alerts.oncall", "pager", batch=20),
                self.read("login.codes", "screens", batch=5, pause=0.3),
                self.read("sensors.latest", "dashboard", batch=100, pause=1.0),
            )
        ]
        try:
            await asyncio.gather(*(self.send(address, count) for address, count in SENT.items()))
            self.sending = False
            await asyncio.gather(*readers)
        finally:
            for reader in readers:
                reader.cancel()
        await asyncio.sleep(EXPIRE_AFTER + 1)

    async def send(self, address: str, count: int) -> None:
        """Send to a mailbox, in the lanes and with the headers that are typical of it."""
        for number in range(count):
            await asyncio.sleep(self._random.expovariate(count / SECONDS))
            lanes = ("critical", "urgent") if address.startswith("alerts") else tuple(PRIORITIES)
            [lane] = self._random.choices(lanes, [PRIORITIES[name] for name in lanes])
            headers = {"mq9-priority": lane}
            if address == "login.codes":
                headers["mq9-ttl"] = str(EXPIRE_AFTER)
            if address == "sensors.latest":
                headers["mq9-key"] = f"sensor-{number % 20}"
            if address == "support.inbox" and number % 40 == 0:
                headers["mq9-delay"] = "2"
            payload = f"{address} {number}: ".encode() + b"." * self._random.randrange(20, 2_000)
            await self.ask(f"MSG.SEND.{address}", payload, headers)
            self.counts["sent"] += 1

    async def read(self, address: str, group: str, *, batch: int, pause: float = 0.05, most: int | None = None) -> None:
        """Fetch and acknowledge; a reader that pauses ends with the senders, and any after ``most`` messages."""
        got = 0
        while messages := await self.fetch(address, group, {"num_msgs": batch}):
            await self.acknowledge(address, group, [messages[-1]["msg_id"]])
            await asyncio.sleep(pause)
            got += len(messages)
            if (not self.sending and pause > 0.1) or (most is not None and got >= most):
                return

    async def work(self, address: str, group: str) -> None:
        """Work under leases: some of it fails at first, and some of it always."""
        lease = {"num_msgs": 20, "ack_wait_ms": 30_000, "max_deliver": 3}
        while messages := await self.fetch(address, group, lease):
            ids = [message["msg_id"] for message in messages]
            failed = [no for no in ids if no % 50 == 0 or (no % 7 == 0 and self._random.random() < 0.5)]
            if failed:
                await self.ask(f"MSG.NACK.{address}", {"group_name": group, "msg_ids": failed})
            if done := [no for no in ids if no not in failed]:
                await self.acknowledge(address, group, done)
            self.counts["given back"] += len(failed)

    async def acknowledge(self, address: str, group: str, ids: list[int]) -> None:
        """Acknowledge; what expired or was replaced since the FETCH is not there to be acknowledged."""
        reply = await self.ask(f"MSG.ACK.{address}", {"group_name": group, "msg_ids": ids})
        self.counts["acknowledged"] += reply["acknowledged"]

    async def fetch(self, address: str, group: str, config: dict[str, int]) -> list[dict[str, Any]]:
        """Wait for messages; none means that nobody sends any more."""
        while True:
            body = {"group_name": group, "deliver": "earliest", "config": {"max_wait_ms": 500, **config}}
            messages: list[dict[str, Any]] = (await self.ask(f"MSG.FETCH.{address}", body))["messages"]
            if messages or not self.sending:
                self.counts["delivered"] += len(messages)
                return messages


def mediator(*arguments: object) -> list[str]:
    """Return the command line of a command of this installation."""
    return [sys.executable, "-m", "mediator", *map(str, arguments)]


def free_address() -> str:
    """Return a loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def service(folder: Path) -> Iterator[str]:
    """Run a service on the folder; gives the URL of its NATS server."""
    address = free_address()
    serve = mediator("serve", "--data-dir", folder, "--nats", address, "--http", free_address())
    with (folder / "service.log").open("wb") as log:
        process = subprocess.Popen(serve, stdout=log, stderr=log)
    try:
        for _ in range(READY_TRIES):
            if (
                subprocess.run(mediator("status", "--data-dir", folder), capture_output=True, check=False).returncode
                == 0
            ):
                break
            if process.poll() is not None:
                break
        else:
            process.kill()
        if process.poll() is not None:
            raise SystemExit((folder / "service.log").read_text())
        yield f"nats://{address}"
    finally:
        process.terminate()
        process.wait()


async def converse(url: str) -> Counter[str]:
    """Let the agents send and read; returns what they counted."""
    connection = await nats.connect(url)
    try:
        agents = Agents(connection)
        await agents.live()
        return agents.counts
    finally:
        await connection.close()


def run(*arguments: object) -> None:
    """Show a command and run it; its failure is the demo's."""
    command = mediator(*arguments)
    print(f"\n$ mediator {' '.join(map(str, arguments))}", flush=True)
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="keep everything there; default: a new temporary folder")
    parser.add_argument("--no-open", action="store_true", help="do not open the report in a browser")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="mediator-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    # Settings of this machine's own service are not the demo's.
    for name in [name for name in os.environ if name.startswith("MEDIATOR_")]:
        del os.environ[name]
    with service(folder) as url:
        print(f"{sum(SENT.values()):,} messages to {len(SENT)} mailboxes, {SECONDS:.0f} seconds …", flush=True)
        counts = asyncio.run(converse(url))
        print(", ".join(f"{count:,} {what}" for what, count in counts.items()))
        run("cleanup", "--data-dir", folder)
        run("pipeline", "ingest", "--data-dir", folder)
        run("pipeline", "report", "--addresses", "--data-dir", folder, *([] if options.no_open else ["--open"]))
    print(f"\nEverything is in {folder}; remove it when you have seen enough.")


if __name__ == "__main__":
    main()
