"""Loss of power at any moment: what had left the service before is on the disk, and the database is whole (A8).

A service runs with a recorder of its writes and syncs (``power_recorder.c``). Afterwards its files are put together as
a loss of power could have left them at random moments: with all that was written before the last sync began, and with
any part of what came later, in any order, pages torn. MEDIATOR_TEST_CUTS sets at how many moments.
"""

import asyncio
import itertools
import os
import random
import re
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator, Set
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import nats
import pytest

from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from tests.harness.client import Client
from tests.harness.service import Service, Services
from tests.harness.stores import ram_path
from tests.harness.verified import damage_in

CUTS = int(os.environ.get("MEDIATOR_TEST_CUTS", "200"))
SEED = int(os.environ.get("MEDIATOR_TEST_SEED", "20260104"))
BOX = "power"
IN_FLIGHT = (1, 4, 30, 12)
"""Requests that are made at the same time, in one burst after the other."""
SENT_IN_A_BURST = 250
PAUSE = 1.3
"""Seconds between two bursts: the log is copied into the database meanwhile, and begins anew."""
PAGE, SECTOR = 4096, 512

DATABASE, LOG, SOCKET = 1, 2, 3
HEADER = struct.Struct("<cBHIqq")
ANSWER = re.compile(rb'\{"error":"","msg_id":(\d+)[,}]')
PUSH = re.compile(rb"MSG \$mq9\.AI\.MAILBOX\.MSG\.power\.[^\r]*\r\n(?:NATS/1\.0\r\n(?:[^\r]+\r\n)*\r\n)?<<(\d+)>>")
DELETION = re.compile(rb"(?:MSG|PUB) deleted\.(\d+) [^\r]*\r\n\{\"error\":\"\"")
DELETED_OF = 5
"""One in so many messages is deleted after its burst."""
TAIL = 1000
"""Bytes of what went to a socket that are looked at again with the next: a frame may come in two pieces."""


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that the service did, see ``power_recorder.c``."""

    op: bytes
    kind: int
    fd: int
    offset: int
    sync: int
    data: bytes


def read_trace(path: Path) -> Iterator[Record]:
    trace = path.read_bytes()
    at = 0
    while at + HEADER.size <= len(trace):
        op, kind, fd, length, offset, sync = HEADER.unpack_from(trace, at)
        at += HEADER.size
        yield Record(op, kind, fd, offset, sync, trace[at : at + length])
        at += length


@dataclass
class DiskFile:
    """A file on a disk: what is certainly there, and what was written since."""

    synced: bytearray = field(default_factory=bytearray)
    unsynced: list[Record] = field(default_factory=list)
    begun: dict[int, int] = field(default_factory=dict)
    """By the number of a sync that has not ended: how much of ``unsynced`` it covers."""
    deleted: "DiskFile | None" = None
    """The former file of this name, until a sync makes its end certain."""

    def begin_sync(self, number: int) -> None:
        self.begun[number] = len(self.unsynced)

    def end_sync(self, number: int) -> None:
        covered = self.begun.pop(number)
        for change in self.unsynced[:covered]:
            _apply(self.synced, change.op, change.offset, change.data)
        del self.unsynced[:covered]
        self.begun = {other: max(0, count - covered) for other, count in self.begun.items()}
        self.deleted = None

    def cut(self, chance: random.Random) -> bytearray:
        """Return what a loss of power may leave."""
        if self.deleted is not None and chance.random() < 0.5:
            return self.deleted.cut(chance)
        content = bytearray(self.synced)
        share = chance.choice((0.0, 0.5, 0.9, 1.0))
        for change in self.unsynced:
            if change.op == b"t":
                if chance.random() < share:
                    _apply(content, b"t", change.offset, b"")
                continue
            for start, end in _pages(change.offset, len(change.data)):
                if chance.random() < share:
                    first, last = _tear(start, end, chance) if share < 1 and chance.random() < 0.2 else (start, end)
                    _apply(content, b"w", first, change.data[first - change.offset : last - change.offset])
        return content


def _pages(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Return where each page of a write begins and ends."""
    start, last = offset, offset + length
    while start < last:
        end = min(last, (start // PAGE + 1) * PAGE)
        yield start, end
        start = end


def _tear(start: int, end: int, chance: random.Random) -> tuple[int, int]:
    """Return the first or the last sectors of a page."""
    middle = max(start, min(end, (start + chance.randrange(PAGE)) // SECTOR * SECTOR))
    return (start, middle) if chance.random() < 0.5 else (middle, end)


def _apply(content: bytearray, op: bytes, offset: int, data: bytes) -> None:
    if op == b"t":
        del content[offset:]
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


class Disk:
    """The files of a database, as a trace of the service goes on, and what has left the service."""

    def __init__(self, database: bytes) -> None:
        self.files = {DATABASE: DiskFile(bytearray(database)), LOG: DiskFile()}
        self.answered: set[int] = set()
        """Each msg_id in an answer that has left the service."""
        self.pushed: set[int] = set()
        """The number of each message that was pushed."""
        self.deleted: set[int] = set()
        """Each msg_id whose deletion was answered."""
        self.to_delete: dict[int, int] = {}
        """The number of each message that is deleted at some time, by msg_id."""
        self.restarts = self.copied = 0
        self._tails: dict[int, bytes] = {}

    def follow(self, record: Record) -> None:
        if record.kind == SOCKET:
            seen = self._tails.get(record.fd, b"") + record.data
            self.answered.update(map(int, ANSWER.findall(seen)))
            self.pushed.update(map(int, PUSH.findall(seen)))
            self.deleted.update(map(int, DELETION.findall(seen)))
            self._tails[record.fd] = seen[-TAIL:]
            return
        file = self.files[record.kind]
        if record.op == b"b":
            file.begin_sync(record.sync)
        elif record.op == b"e":
            file.end_sync(record.sync)
        elif record.op == b"d":
            self.files[record.kind] = DiskFile(deleted=file)
        else:
            self.restarts += record.kind == LOG and record.offset == 0
            self.copied += record.kind == DATABASE
            file.unsynced.append(record)

    def lost(self, path: Path, chance: random.Random) -> int:
        """Lose power now, start, and return how much is lost that had left the service; the rest must be whole."""
        path.write_bytes(self.files[DATABASE].cut(chance))
        path.with_name(f"{path.name}-wal").write_bytes(self.files[LOG].cut(chance))
        with closing(SqliteStore(path)) as store:
            assert damage_in(store) == []
            with store.reading() as tx:
                rows = tx.session.dialect.execute(
                    "SELECT msg_id, payload FROM message JOIN mailbox ON no = mailbox_no WHERE address = ?", (BOX,)
                )
        stored = {msg_id: number_in(payload) for msg_id, payload in rows}
        answered = self.answered - stored.keys() - self.to_delete.keys()
        pushed = self.pushed - set(stored.values()) - set(self.to_delete.values())
        return len(answered | (self.deleted & stored.keys())) + len(pushed)


def payload_of(number: int) -> bytes:
    return b"<<%d>>" % number + b"x" * 256


def number_in(payload: bytes) -> int:
    """Return the number of a message, which must be whole."""
    payload = bytes(payload)
    number = int(payload[2 : payload.index(b">")])
    assert payload == payload_of(number)
    return number


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        reason = "no C compiler is installed"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    made = tmp_path_factory.mktemp("recorder") / "power_recorder.so"
    source = Path(__file__).with_name("power_recorder.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


async def recorded(service: Service, recorder: Path) -> tuple[Disk, list[Record]]:
    """Run a service under load and end it, twice; return its disk as it was before, and what the service did."""
    service.forked = False
    trace = service.log.with_name("trace")
    await service.serve()
    async with connected(service) as client:
        assert not (await client.create(name=BOX)).error
    service.terminate()
    await service.ended()
    disk = Disk(database_path(service.data_dir).read_bytes())
    service.environment |= {"LD_PRELOAD": str(recorder), "POWER_TRACE": str(trace)}
    for _ in range(2):
        await service.serve()
        async with connected(service) as client:
            for in_flight in IN_FLIGHT:
                sent = await burst(client, in_flight)
                disk.to_delete |= dict(sorted(sent.items())[::DELETED_OF])
                await delete(service, sent.keys() & disk.to_delete.keys())
                await asyncio.sleep(PAUSE)
            service.terminate()
            await service.ended()
    return disk, list(read_trace(trace))


async def burst(client: Client, in_flight: int) -> dict[int, int]:
    """Send so many messages at the same time, again and again; return the number of each by its msg_id."""
    sent: dict[int, int] = {}

    async def sender() -> None:
        while next(count) <= SENT_IN_A_BURST:
            number = next(_numbers)
            answer = await client.send(BOX, payload_of(number))
            assert not answer.error
            sent[answer.body["msg_id"]] = number

    count = itertools.count(1)
    await asyncio.gather(*(sender() for _ in range(in_flight)))
    return sent


async def delete(service: Service, ids: Set[int]) -> None:
    """Delete messages, and have each answered at a subject that says which."""
    client = await nats.connect(service.nats_url)
    answers = await client.subscribe("deleted.*", max_msgs=len(ids))
    for msg_id in ids:
        await client.publish(f"$mq9.AI.MSG.DELETE.{BOX}.{msg_id}", reply=f"deleted.{msg_id}")
    async for _ in answers.messages:
        pass
    await client.close()


_numbers = itertools.count()


@asynccontextmanager
async def connected(service: Service) -> AsyncIterator[Client]:
    """Connect, and subscribe to the mail."""
    client = await Client.connect(service.nats_url, connections=3)
    subscriber = await nats.connect(service.nats_url, allow_reconnect=False, error_cb=ignored)
    try:
        await subscriber.subscribe(f"$mq9.AI.MAILBOX.MSG.{BOX}.*", cb=ignored)
        await subscriber.flush()
        yield client
    finally:
        await subscriber.close()
        await client.close()


async def ignored(_what: object) -> None:
    """What counts is the frame of a push on the service's socket; the end of the connection is expected."""


def losses(disk: Disk, records: list[Record]) -> list[int]:
    """Cut the power at random moments; return how much each cost."""
    chance, path = random.Random(SEED), ram_path()
    moments = set(chance.sample(range(len(records)), min(CUTS, len(records))))
    cost = []
    for moment, record in enumerate(records):
        disk.follow(record)
        if moment in moments:
            cost.append(disk.lost(path, chance))
    return cost


@pytest.mark.timeout(300)
@pytest.mark.rule("A8")
async def test_loss_of_power_costs_nothing_answered(services: Services, recorder: Path):
    disk, records = await recorded(services.new(), recorder)
    assert losses(disk, records) == [0] * CUTS
    print(
        f"seed {SEED}, {CUTS} cuts, {len(disk.answered)} answered, {len(disk.pushed)} pushed, {disk.restarts} restarts"
    )
    assert len(disk.answered) == len(disk.pushed) == 2 * len(IN_FLIGHT) * SENT_IN_A_BURST
    assert disk.deleted == disk.to_delete.keys()
    assert disk.restarts >= len(IN_FLIGHT), "the log began anew"
    assert disk.copied, "the log was copied into the database"


@pytest.mark.timeout(300)
async def test_loss_of_power_costs_what_is_not_synced(services: Services, recorder: Path):
    service = services.new()
    service.environment |= {"MEDIATOR_STORE__SYNC": "interval", "MEDIATOR_STORE__SYNC_INTERVAL": "0.2"}
    disk, records = await recorded(service, recorder)
    assert any(losses(disk, records)), "the recorder sees answers that come too early"
