"""The pipeline beside a real service: whatever is killed, its report says what the clients counted, to the message.

Agents find each other in the registry and write over NATS, wallets come by the DIDComm door. Between the waves of their
mail `mediator pipeline ingest` is killed where it hurts: before the events it has written are part of the lake, and
before it has told the journal that they are. After the last one the service itself, as configured, makes the report.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="needs the extra pipeline")

from deltalake import DeltaTable

from mediator.operate.control import send_command
from mediator.operate.run_history import SCHEDULED
from pickup.client import Holder
from pipeline.reports.usage import TOTALS
from tests.harness import content
from tests.harness.client import Answer, Client
from tests.harness.didcomm_service import Door, note, note_v2
from tests.harness.service import Services, spawn
from tests.harness.spark import environment
from tests.harness.waiting import until

REQUESTS = 40
"""What each wave sends to the mailbox that two groups read, beside everything else."""
FORWARDS = 4
MAX_DELIVER = 2
ENDS_WITHIN = 120.0
WRITTEN = "events/0*/**/*.parquet"
COMMITTED = "events/_delta_log/*[1-9].json"
LANES = ("normal", "critical", "low", "urgent")


class Wave:
    """Everything that can happen to mail, and how often it did, as those see it who do it."""

    def __init__(self, number: int, client: Client, holders: Sequence[tuple[Holder, str]], door: Door) -> None:
        self._number = number
        self._client = client
        self._holders = holders
        self._door = door
        self._said = content.load()
        self.counted: Counter[str] = Counter()
        self.left = 0
        """What it leaves behind in the mailboxes."""

    async def run(self) -> None:
        readers = self._said.address(self._number)
        await self._registered(readers)
        for name, retention in ((readers, "keep"), (f"{readers}.work", "until_ack"), (f"{readers}.codes", "keep")):
            assert not (await self._client.create(name=name, retention=retention)).error
            self.counted["mailboxes"] += 1
        await self._codes(f"{readers}.codes")
        await self._read(readers)
        await self._work(f"{readers}.work")
        for holder, key in self._holders:
            await self._pick_up(holder, key)

    async def _registered(self, address: str) -> None:
        """Be found by what one's card says."""
        card = {**self._said.card(self._number), "mailbox": address}
        assert not (await self._client.ask("AGENT.REGISTER", card)).error
        found = await self._client.ask("AGENT.DISCOVER", {"text": card["name"], "limit": 100})
        assert address in [agent["mailbox"] for agent in found.body["agents"]]

    async def _send(self, address: str, number: int, headers: dict[str, str]) -> int:
        payload = self._said.request(self._number * 1000 + number).encode()
        answer = await self._client.ask(f"MSG.SEND.{address}", payload, headers)
        assert not answer.error, answer.error
        self.counted["sent"] += 1
        self.counted["delayed"] += "mq9-delay" in headers
        own = [name for name in headers if not name.startswith("mq9-")]
        self.counted["bytes_in"] += len(payload) + len(headers.get("mq9-key", ""))
        self.counted["bytes_in"] += sum(len(tag) + 1 for tag in headers.get("mq9-tags", "").split(",") if tag)
        self.counted["bytes_in"] += sum(len(name.encode()) + len(headers[name].encode()) + 4 for name in own)
        return int(answer.body["msg_id"])

    async def _fetch(self, address: str, group: str, **more: Any) -> Answer:
        answer = await self._client.fetch(address, group, deliver="earliest", num_msgs=17, **more)
        assert not answer.error, answer.error
        self.counted["leased" if "ack_wait_ms" in more else "delivered"] += len(answer.messages)
        return answer

    async def _ack(self, address: str, group: str, ids: Sequence[int]) -> None:
        if ids:
            answer = await self._client.ack(address, group, ids)
            assert not answer.error, answer.error
            self.counted["acknowledged"] += answer.body["acknowledged"]

    async def _codes(self, address: str) -> None:
        """Two codes of three are over before anybody looks; who reads the third acknowledges it alone."""
        for number in range(9):
            await self._send(address, number, {"mq9-ttl": "1"} if number % 3 else {})
        self.counted["expired"] += 6

        async def are_over() -> bool:
            return len((await self._client.query(address)).messages) == 3

        await until(are_over, what="the codes are over")
        answer = await self._fetch(address, "screens")
        assert len(answer.messages) == 3
        await self._ack(address, "screens", [answer.messages[-1]["msg_id"]])
        self.left += 3

    async def _read(self, address: str) -> None:
        """Keys that give way, what comes later, one group that takes all, one that falls behind, and a delete."""
        for number in range(REQUESTS):
            headers = {"mq9-priority": LANES[number % 4], "Own-Wave": f"Wälle {self._number}"}
            if number % 5 == 0:
                headers["mq9-tags"] = "first,other"
            if number % 4 == 3:
                headers["mq9-key"] = f"key {number % 3}"
            if number % 10 == 2:
                headers["mq9-delay"] = "1"
            await self._send(address, number, headers)
        keys = len(range(3, REQUESTS, 4))
        self.counted["compacted"] += keys - 3
        due = REQUESTS - (keys - 3)
        got = 0
        while got < due:
            answer = await self._fetch(address, "all", max_wait_ms=4000)
            assert answer.messages, f"{due - got} do not come"
            got += len(answer.messages)
            await self._ack(address, "all", [item["msg_id"] for item in answer.messages])
        behind = await self._fetch(address, "behind")
        gone = behind.messages[0]["msg_id"]
        assert (await self._client.delete(address, gone)).body["deleted"]
        self.counted["deleted"] += 1
        self.left += due - 1

    async def _work(self, address: str) -> None:
        """Under leases: most is done at once, some after it was given back, some never and dead in the end."""
        for number in range(REQUESTS):
            await self._send(address, number, {})
        dead = 0
        while answer := await self._fetch(address, "crew", ack_wait_ms=60_000, max_deliver=MAX_DELIVER, max_wait_ms=0):
            if not answer.messages:
                break
            ids = [item["msg_id"] for item in answer.messages]
            back = [
                item["msg_id"]
                for item in answer.messages
                if item["msg_id"] % 10 == 1 or (item["msg_id"] % 7 == 3 and item["deliveries"] == 1)
            ]
            if back:
                assert not (await self._client.nack(address, "crew", back, 0)).error
            done = [msg_id for msg_id in ids if msg_id not in back]
            await self._ack(address, "crew", done)
            self.counted["deleted"] += len(done)
        dead = len((await self._client.query(address, dead=True, group_name="crew")).messages)
        assert dead == len(range(1, REQUESTS, 10))
        self.counted["dead"] += dead
        self.left += dead

    async def _pick_up(self, holder: Holder, key: str) -> None:
        """Forwarded by a stranger, picked up, and acknowledged but for the last."""
        sender = await self._door.sender()
        for number in range(FORWARDS):
            text = self._said.request(self._number * 1000 + number)
            if key.startswith("did:peer"):
                await sender.send_v2(key, holder.link.routing[0], holder.link.url("http"), note_v2(text))
            else:
                await sender.send_v1(key, holder.link.routing, holder.link.url("http"), note(text))
        mails = await holder.fetch(limit=100)
        new = mails[-FORWARDS:]
        self.counted["sent"] += FORWARDS
        self.counted["bytes_in"] += sum(len(mail.envelope) for mail in new)
        self.counted["delivered"] += len(mails)
        await holder.received([mail.id for mail in new[:-1]])
        self.counted["acknowledged"] += FORWARDS - 1
        self.counted["deleted"] += FORWARDS - 1
        self.left += 1


async def ingest(door: Door, lake: Path, shows: str) -> None:
    """Run an ingest, and kill it as soon as a file appears; nothing means that it ends by itself."""

    def there() -> set[Path]:
        return set(lake.glob(shows)) if shows else set()

    before = there()
    command = [sys.executable, "-m", "mediator", "pipeline", "ingest", "--data-dir", str(door.service.data_dir)]
    log = door.service.log.with_name("ingest.log")
    process = spawn(command, log, {**os.environ, **door.service.environment})
    try:
        await until(lambda: process.poll() is not None or there() - before, ENDS_WITHIN, shows)
        if shows:
            process.send_signal(signal.SIGKILL)
        assert process.wait() == (-signal.SIGKILL if shows else 0), log.read_text()[-2000:]
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(600)
@pytest.mark.rule("A5", "D1", "D4", "F7", "K2", "K3", "S2", "S4", "S5")
async def test_the_report_says_what_the_clients_counted(services: Services, tmp_path: Path) -> None:
    small = environment()
    async with AsyncExitStack() as stack:
        door = await Door.opened(services, stack, settings=small)
        service, lake = door.service, door.service.data_dir / "lake"
        client = await Client.connect(service.nats_url, tries=3)
        stack.push_async_callback(client.close)
        invites = await door.invite()
        holders = [await door.holder(invites.v1, handshake="didexchange/1.1"), await door.holder(invites.v2)]
        keys = []
        for holder in holders:
            await holder.mediate()
            keys.append((holder, await holder.add_key()))
        counted: Counter[str] = Counter(mailboxes=len(holders))
        left = 0
        for number, shows in enumerate((WRITTEN, COMMITTED, "")):
            wave = Wave(number, client, keys, door)
            await wave.run()
            counted += wave.counted
            left += wave.left
            await door.command("cleanup", "--data-dir", str(service.data_dir))
            await ingest(door, lake, shows)

        service.terminate()
        assert await service.ended() == 0
        service.environment["MEDIATOR_PIPELINE__EVERY"] = "1"
        await service.serve()
        runs = await finished(service.data_dir)
        # What reads a lake maps these libraries; the service leaves all of it to its children.
        assert not {"deltalake", "duckdb", "pyarrow"} & mapped(service.process.pid)
        killed, done = (("ingest", "killed"),) * 2, ((command, "succeeded") for command in SCHEDULED)
        assert [(run["command"], run["outcome"]) for run in runs] == [*killed, *done], runs
        told = {name: runs[-1]["numbers"][name] for name in TOTALS}
        assert told == {name: counted[name] for name in TOTALS}

    hourly = DeltaTable(lake / "usage_hourly").to_pyarrow_table().to_pylist()
    assert len({(row["tenant"], row["mailbox"]) for row in hourly}) == counted["mailboxes"]
    assert sum(row["came"] - row["went"] for row in hourly) == left
    assert "<html" in (lake / "report.html").read_text()
    assert not service.complaints()


def mapped(pid: int) -> set[str]:
    """Return the names of files and folders of what a process has loaded."""
    return set(Path(f"/proc/{pid}/maps").read_text().split("/"))


async def finished(data_dir: Path) -> list[dict[str, Any]]:
    """Wait until the service has made a report, or could not; return all runs, the oldest first."""
    until_at = time.monotonic() + ENDS_WITHIN
    while True:
        runs: list[dict[str, Any]] = (await send_command(data_dir, "run-list", limit=20))["runs"][::-1]
        newest = runs[-1]
        if newest["ended_at"] and (newest["command"] == list(SCHEDULED)[-1] or newest["outcome"] != "succeeded"):
            return runs
        assert time.monotonic() < until_at, json.dumps(runs)
        await asyncio.sleep(0.2)
