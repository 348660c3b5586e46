"""The journal over a real store: every event reaches the files at least once, whatever ends the service in between."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mediator.broker import Broker, wall_clock
from mediator.errors import SetupError, UnavailableError
from mediator.journal import FOLDER, events
from mediator.journal import writer as journal_module
from mediator.journal.segments import ACTIVE, Segments, closed_segments, read_gaps, read_segment
from mediator.journal.writer import JournalWriter
from mediator.mailboxes import collecting, sending
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.events import EventType
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.group import NO_LEASE, LeaseCursor
from mediator.mailboxes.mailbox import MailboxKey, Retention
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.mailboxes.settling import Ack
from mediator.mailboxes.transaction import Transaction
from mediator.metrics import Metrics
from mediator.operate.audit import AuditLog
from mediator.operate.operations import Actor, Operation, Operations, Right
from mediator.settings.sections import JournalSettings
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore
from tests.harness.postgres import Server
from tests.harness.stores import ram_store
from tests.harness.waiting import until

TENANT = "default"
SECRET = "zanzibar"
SECOND = 1000
PATIENCE = 20.0
ROUNDS = 3


class Shaky(SqliteStore):
    """A store that fails right before a commit when it is told to."""

    fail = 0

    @contextmanager
    def transaction(self, places: Sequence[MailboxKey] = ()) -> Iterator[Transaction]:
        with super().transaction(places) as tx:
            yield tx
            if self.fail and tx.events:
                self.fail -= 1
                raise UnavailableError("told to fail")


@dataclass
class Run:
    """A broker and a journal, from start to stop or to a crash."""

    data_dir: Path
    instance: str = "host-1"
    ahead: int = 0
    store: Store = field(init=False)
    broker: Broker = field(init=False)
    journal: JournalWriter = field(init=False)

    async def start(self, store: Store | None = None, **options: Any) -> "Run":
        self.store = store or Shaky(self.data_dir / "mail.db")
        self.journal = JournalWriter(JournalSettings(**options), self.data_dir, self.instance, Metrics())
        self.broker = Broker(
            self.store, Bounds(), observers=[self.journal.observe], clock=lambda: wall_clock() + self.ahead
        )
        await self.journal.start(self.broker)
        return self

    async def stop(self) -> None:
        await self.journal.stop()
        await self.broker.close()
        self.store.close()

    def crash(self, to: Path) -> "Run":
        """Copy what is on the disk this moment, as a kill would leave it."""
        shutil.copytree(self.data_dir, to)
        return Run(to, self.instance, self.ahead)

    async def create(self, address: str = "box", **options: Any) -> int:
        return (await self.broker.create(Create(TENANT, address, **options))).mailbox.id

    async def send(self, to: str = "box", **draft: Any) -> int:
        return await self.broker.send(Send(TENANT, to, Draft(b"payload", **draft)))

    async def fetch(self, address: str = "box", **options: Any) -> list[int]:
        request = Fetch(TENANT, address, "g", Deliver.EARLIEST, max_wait=0, **options)
        return [message.msg_id for message in (await self.broker.fetch(request)).messages]

    def told(self) -> list[dict[str, Any]]:
        return list(events(self.data_dir / FOLDER))

    def identities(self) -> list[tuple[str, int, int]]:
        return [(event["instance"], event["seq"], event["position"]) for event in self.told()]

    def stored(self) -> list[tuple[int, int]]:
        """Mailbox and msg_id of what the journal says came into being, told twice or not."""
        storing = (EventType.STORED, EventType.RELEASED)
        return [(event["mailbox"], event["msg_id"]) for event in self.told() if event["what"] in storing]

    async def until_told(self, count: int) -> None:
        await until(lambda: len(self.told()) >= count)

    def tail(self) -> int:
        with self.store.reading() as tx:
            return len(tx.tail.read(0, 10_000))


@pytest.fixture
def never_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the relay write only at start and stop."""
    monkeypatch.setattr(journal_module, "FLUSH_SECONDS", 3600.0)


async def test_every_kind_of_event_is_told(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    box = await run.create(desc=SECRET)
    await run.create("gone", ttl=60 * SECOND)
    await run.create("deleted")
    await run.create("settling", retention=Retention.UNTIL_ACK)
    await run.send(key=SECRET, tags=(SECRET,), headers={SECRET: SECRET})
    await run.send(key=SECRET)
    await run.send(delay=10 * SECOND)
    await run.send(ttl=20 * SECOND)
    await run.send()
    await run.send("settling")
    await run.fetch("settling")
    await run.broker.ack(Ack(TENANT, "settling", "g", [0]))
    assert await run.fetch(ack_wait=1 * SECOND, max_deliver=1) == [1, 2, 3]
    await run.broker.delete(TENANT, "box", 3)
    run.ahead = 15 * SECOND
    await run.broker.write_background(lambda tx, now: sending.release(tx, now, 10))
    await run.broker.write_background(
        lambda tx, now: collecting.ended_leases(tx, LeaseCursor(NO_LEASE, -1, -1), now, 10)
    )
    run.ahead = 90 * SECOND
    await run.broker.write_background(lambda tx, now: collecting.expired_messages(tx, now, 10))
    await run.broker.write_background(lambda tx, now: collecting.expired_mailboxes(tx, now, 10))
    await run.broker.delete_mailbox(TENANT, "deleted")
    operations = Operations(AuditLog(run.broker, "here").record)
    operations.add(Operation("act", run.journal.rotate, Right.OPERATE, "", {}, method="POST"))
    await operations.run(Actor(SECRET, frozenset(Right), "token"), "act", {})
    await run.stop()

    told = run.told()
    assert {event["what"] for event in told} == set(EventType)
    assert len(set(run.identities())) == len(told)
    first = next(event for event in told if event["what"] == EventType.STORED)
    assert first["tenant"] == TENANT
    assert (first["mailbox"], first["lane"], first["msg_id"], first["group"]) == (box, 2, 0, 0)
    assert first["bytes"] > len(b"payload")
    assert abs(first["created_at"] - wall_clock()) < 60 * SECOND
    assert first["at"] == first["created_at"]
    expired = next(event for event in told if event["what"] == EventType.EXPIRED)
    assert expired["at"] - expired["created_at"] >= 20 * SECOND
    assert all(event["group"] > 0 for event in told if event["what"] in (EventType.DELIVERED, EventType.DEAD))
    on_disk = b"".join(path.read_bytes() for path in (tmp_path / FOLDER).iterdir())
    for secret in (SECRET, "payload", "settling"):
        assert secret.encode() not in on_disk


async def test_events_come_soon_and_leave_no_rows_behind(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    await run.create()
    for _ in range(3):
        await run.send(key="k")
    await run.until_told(6)
    await until(lambda: run.tail() == 0)
    assert await run.journal.check() is None
    await run.stop()


async def test_a_reader_has_all_that_was_committed_before_it_asked(tmp_path: Path, never_by_itself: None) -> None:
    run = await Run(tmp_path).start()
    await run.create()
    for number in range(3):
        await run.send()
        assert await run.journal.rotate({}) == {}
        closed = closed_segments(tmp_path / FOLDER)
        assert len(closed) == number + 1
        assert [line["msg_id"] for line in read_segment(closed[-1])][-1][-1] == number
    await run.journal.rotate({})
    assert len(closed_segments(tmp_path / FOLDER)) == 3
    await run.stop()
    assert len(set(run.identities())) == len(run.told()) == 4


async def test_who_asks_hears_that_the_disk_took_nothing(tmp_path: Path, never_by_itself: None) -> None:
    run = await Run(tmp_path).start()
    shutil.rmtree(tmp_path / FOLDER)
    await run.create()
    with pytest.raises(UnavailableError, match="the journal cannot be written: No such file"):
        await run.journal.rotate({})
    await run.stop()
    off = await Run(tmp_path / "off").start(enabled=False)
    with pytest.raises(SetupError, match=r"journal\.enabled"):
        await off.journal.rotate({})
    await off.stop()


async def test_a_stop_leaves_closed_files_and_the_next_run_goes_on(tmp_path: Path) -> None:
    for number in range(3):
        run = await Run(tmp_path).start()
        await run.create(f"box{number}")
        await run.send(f"box{number}")
        await run.stop()
    lines = [line for path in closed_segments(tmp_path / FOLDER) for line in read_segment(path)]
    assert not list((tmp_path / FOLDER).glob(f"*{ACTIVE}"))
    assert [line["after"] for line in lines[1:]] == [line["seq"] for line in lines[:-1]]
    assert Counter(event["what"] for event in run.told()) == {EventType.MAILBOX_CREATED: 3, EventType.STORED: 3}


@pytest.mark.usefixtures("never_by_itself")
async def test_what_only_messages_tell_is_rebuilt_after_a_crash(tmp_path: Path) -> None:
    run = await Run(tmp_path / "a").start()
    await run.create()
    await asyncio.gather(*[run.send() for _ in range(300)])
    rows = run.tail()
    await asyncio.gather(*[run.send() for _ in range(2000)])
    assert run.tail() == rows, "a plain SEND needs no row"
    assert run.told() == []
    after = run.crash(tmp_path / "b")
    await run.stop()
    await after.start()
    assert sorted(after.stored()) == [(1, number) for number in range(2300)]
    await after.send()
    await after.stop()
    assert sorted(after.stored()) == [(1, number) for number in range(2301)]


@pytest.mark.usefixtures("never_by_itself")
async def test_mail_removed_before_the_relay_ran_was_told_as_stored(tmp_path: Path) -> None:
    run = await Run(tmp_path / "a").start()
    await run.create()
    for _ in range(5):
        await run.send(key="k")
    await run.broker.delete(TENANT, "box", 4)
    after = run.crash(tmp_path / "b")
    await run.stop()
    await after.start()
    await after.stop()
    assert sorted(after.stored()) == [(1, number) for number in range(5)]
    assert Counter(event["what"] for event in after.told())[EventType.COMPACTED] == 4


@pytest.mark.usefixtures("never_by_itself")
async def test_places_that_are_taken_anew_hide_nothing(tmp_path: Path) -> None:
    """The clean-up removes the newest messages without an event of their own; their places go to new messages."""
    run = await Run(tmp_path / "a").start()
    await run.create()
    other = await run.create("other")
    await asyncio.gather(*[run.send() for _ in range(50)])
    await run.broker.delete_mailbox(TENANT, "box")
    while (await run.broker.write_background(lambda tx, now: collecting.retired_mailboxes(tx, now, 10))).total:
        pass
    await asyncio.gather(*[run.send("other") for _ in range(20)])
    after = run.crash(tmp_path / "b")
    await run.stop()
    await after.start()
    await after.stop()
    assert sorted(after.stored()) == [(1, n) for n in range(50)] + [(other, n) for n in range(20)]


async def test_lines_not_yet_marked_come_again_under_the_same_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "FLUSH_SECONDS", 3600.0)
    run = await Run(tmp_path / "a").start()
    await run.create()
    for _ in range(10):
        await run.send(key="k")
    written = await asyncio.to_thread(run.journal.flush)
    assert written
    assert run.tail() > 0
    before = run.told()
    after = run.crash(tmp_path / "b")
    await run.stop()
    await after.start()
    await after.stop()
    names, told = after.identities(), after.told()
    assert len(told) > len(before), "nothing came twice, so this test shows nothing"
    by_name = dict(zip(names, told, strict=True))
    assert all(by_name[name] == event for name, event in zip(names, told, strict=True))
    assert sorted(by_name) == sorted((e["instance"], e["seq"], e["position"]) for e in before)


async def test_commits_after_the_stop_are_told_by_the_next_run(tmp_path: Path) -> None:
    run = await Run(tmp_path).start()
    await run.create()
    await run.journal.stop()
    await run.send()
    await run.stop()
    assert run.stored() == []
    run = await Run(tmp_path).start()
    await run.stop()
    assert run.stored() == [(1, 0)]


async def test_what_was_taken_back_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "FLUSH_SECONDS", 3600.0)
    run = await Run(tmp_path).start()
    await run.create()
    assert isinstance(run.store, Shaky)
    await run.send()
    run.store.fail = 2  # the writer tries once more by itself
    with pytest.raises(UnavailableError):
        await run.send()
    run.store.fail = 1
    assert await run.send(key="k") == 1
    assert await run.send(key="k") == 2
    await run.stop()
    assert sorted(set(run.stored())) == [(1, 0), (1, 1), (1, 2)]
    told = Counter(run.told()[index]["what"] for index in {name: i for i, name in enumerate(run.identities())}.values())
    assert told == {EventType.MAILBOX_CREATED: 1, EventType.STORED: 3, EventType.COMPACTED: 1}


async def test_a_store_without_order_tells_all_by_the_tail(tmp_path: Path) -> None:
    store = ram_store()
    run = await Run(tmp_path).start(store)
    await run.create()
    await asyncio.gather(*[run.send() for _ in range(50)])
    await run.stop()
    assert len(run.stored()) == 50
    assert run.tail() == 0


async def test_rows_of_a_gone_instance_are_adopted_after_a_minute(tmp_path: Path) -> None:
    store = ram_store()
    with store.transaction() as tx:
        for number, instance in enumerate(("host-0", "host-1", "host-2")):
            line = {
                "instance": instance,
                "seq": 5,
                "after": 4,
                "at": [1],
                "tenant": "t",
                "what": [1],
                "mailbox": [number],
            }
            line |= {"lane": [-1], "msg_id": [-1], "bytes": [0], "created_at": [1], "group": [0]}
            age = 61 * SECOND if instance == "host-0" else SECOND
            tx.tail.add(instance, json.dumps(line).encode() + b"\n", wall_clock() - age)
    run = await Run(tmp_path).start(store)
    await run.journal.stop()
    assert {event["instance"] for event in run.told()} == {"host-0", "host-1"}
    with store.reading() as tx:
        assert [row.instance for row in tx.tail.read(0, 10)] == ["host-2"]
    await run.broker.close()


async def test_a_disk_that_takes_nothing_stops_no_mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await Run(tmp_path).start()
    await run.create()
    await run.until_told(1)
    takes = Segments.append
    refused = asyncio.Event()
    loop = asyncio.get_running_loop()

    def refuse(segments: Segments, lines: bytes) -> None:
        loop.call_soon_threadsafe(refused.set)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Segments, "append", refuse)
    monkeypatch.setattr(journal_module, "WAITING_BYTES", 20_000)
    await run.send(key="k")
    await asyncio.wait_for(refused.wait(), PATIENCE)
    assert "No space left" in await until(run.journal.check)
    for _ in range(300):
        await run.send(key="k")
    waiting = run.tail()
    for _ in range(50):
        await run.send(key="k")
    assert run.tail() <= waiting, "the tail is bounded"
    monkeypatch.setattr(Segments, "append", takes)

    async def well() -> bool:
        return await run.journal.check() is None

    await until(well)
    await run.send(key="k")
    await run.stop()
    (gap,) = read_gaps(tmp_path / FOLDER)
    assert gap["why"] == "waiting"
    told = run.told()
    # Each SEND but the first also replaced one.
    assert len(told) + gap["events"] == 1 + 352 + 351
    seqs = {event["seq"] for event in told}
    first, last = gap["seqs"]["host-1"]
    assert not seqs & set(range(first, last + 1))
    assert {first - 1, last + 1} <= seqs


async def test_a_disk_that_takes_nothing_until_the_stop_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await Run(tmp_path).start()
    await run.create()

    def refuse(segments: Segments, lines: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Segments, "append", refuse)
        await asyncio.gather(*[run.send() for _ in range(20)])
        await run.send(key="k")
        await run.stop()
    run = await Run(tmp_path).start()
    await run.stop()
    assert sorted(set(run.stored())) == [(1, number) for number in range(21)]


async def test_a_journal_that_is_off_does_nothing(tmp_path: Path) -> None:
    journal = JournalWriter(JournalSettings(enabled=False), tmp_path, "host-1", Metrics())
    store = ram_store()
    broker = Broker(store, Bounds())
    await journal.start(broker)
    assert await journal.check() is None
    await journal.stop()
    await broker.close()
    assert not (tmp_path / FOLDER).exists()


SENDER = """
import asyncio, sys
from pathlib import Path
from tests.integration.test_journal import Run

async def main():
    run = await Run(Path(sys.argv[1])).start()
    box = f"box{sys.argv[2]}"
    await run.create(box)

    async def sender(number):
        while True:
            # One in four replaces what came before, so that messages go as well as come.
            msg_id = await run.send(box, key=f"k{number}" if number % 4 == 0 else None)
            print(msg_id, flush=True)

    await asyncio.gather(*[sender(number) for number in range(20)])

asyncio.run(main())
"""


async def test_killed_again_and_again(tmp_path: Path) -> None:
    answered: dict[str, set[int]] = {}
    for number in range(ROUNDS):
        with closing(_Child(tmp_path, number)) as child:
            answered[f"box{number}"] = child.killed_after(1500)
    run = await Run(tmp_path).start()
    await run.stop()
    stored = Counter(run.stored())
    names, told = run.identities(), run.told()
    by_name = dict(zip(names, told, strict=True))
    assert all(by_name[name] == event for name, event in zip(names, told, strict=True))
    distinct = Counter((e["mailbox"], e["msg_id"]) for e in by_name.values() if e["what"] == EventType.STORED)
    assert set(distinct.values()) == {1}
    with closing(SqliteStore(tmp_path / "mail.db")) as store, store.reading() as tx:
        for address, ids in answered.items():
            mailbox = tx.mailboxes.find(TENANT, address)
            assert max(ids) < mailbox.next_id
            # Every msg_id was given to a message, whether its sender heard of it or not.
            assert {(mailbox.id, msg_id) for msg_id in range(mailbox.next_id)} == {
                place for place in stored if place[0] == mailbox.id
            }
            kept = {ref.msg_id for ref in tx.messages.first(mailbox, 1_000_000)}
            replaced = {e["msg_id"] for e in told if e["what"] == EventType.COMPACTED and e["mailbox"] == mailbox.id}
            assert kept | replaced == set(range(mailbox.next_id))
            assert not kept & replaced


class _Child:
    """A process that sends until it is killed."""

    def __init__(self, data_dir: Path, number: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SENDER, str(data_dir), str(number)], stdout=subprocess.PIPE, text=True
        )

    def killed_after(self, answers: int) -> set[int]:
        ids = {int(self._process.stdout.readline()) for _ in range(answers)}
        os.kill(self._process.pid, signal.SIGKILL)
        return ids | {int(line) for line in self._process.stdout if line.endswith("\n")}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@pytest.mark.postgres
async def test_instances_that_share_a_database_keep_a_journal_each(tmp_path: Path, postgres: Server) -> None:
    from mediator.store.postgres import PostgresStore

    with postgres.database(migrated=True) as url:
        first = await Run(tmp_path / "a", "host-1").start(PostgresStore(url))
        second = await Run(tmp_path / "b", "host-2").start(PostgresStore(url))
        await first.create()
        await asyncio.gather(*[run.send() for run in (first, second) for _ in range(50)])
        await first.stop()
        assert len(first.stored()) == 50
        # The second dies: its rows stay, and are the third's a minute later.
        await second.until_told(50)
        await until(lambda: second.tail() == 0)
        (relay,) = [task for task in asyncio.all_tasks() if task.get_name() == "journal"]
        relay.cancel()
        await second.send()
        assert second.tail() == 1
        await second.broker.close()
        second.store.close()
        third = await Run(tmp_path / "c", "host-3", ahead=61 * SECOND).start(PostgresStore(url))
        await third.stop()
        assert {event["instance"] for event in third.told()} == {"host-2"}
        assert len({*first.stored(), *second.stored(), *third.stored()}) == 101
