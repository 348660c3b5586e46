"""Ends and faults at the NATS door: what was answered is on disk, and what fails is said and mended (A8, A9)."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import threading
from asyncio.subprocess import DEVNULL
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from mediator.errors import SetupError, UnavailableError
from mediator.login import Login
from mediator.mailboxes.mailbox import MailboxKey
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.mailboxes.transaction import Transaction
from mediator.nats import connection as connection_module
from mediator.nats import server as server_module
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection, Upstreams, connect
from mediator.nats.door import QUEUE
from mediator.nats.frames import encode_unsubscribe
from mediator.nats.server import find_binary
from mediator.store.sqlite import SqliteStore
from tests.harness.door import PREFIX, both_ways, ids, parsed, payloads, refused, serving
from tests.harness.stores import migrated
from tests.harness.waiting import until

__all__ = ["both_ways"]
pytestmark = pytest.mark.usefixtures("both_ways")


class Gated(SqliteStore):
    """A store whose transactions wait for a gate, and fail while it is told so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.broken = False

    @property
    def commits_fast(self) -> bool:
        """Let nobody but the thread wait for the gate."""
        return False

    @commits_fast.setter
    def commits_fast(self, measured: bool) -> None:
        """However fast they are."""

    @contextmanager
    def transaction(self, places: Sequence[MailboxKey] = ()) -> Iterator[Transaction]:
        self.entered.set()
        assert self.gate.wait(30)
        if self.broken:
            raise UnavailableError("disk I/O error")
        with super().transaction(places) as tx:
            yield tx


@contextlib.contextmanager
def reopened(folder: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(migrated(folder / "mail.db"))
    try:
        yield store
    finally:
        store.close()


def stored(store: SqliteStore, box: str = "task") -> list[bytes]:
    """Return the payloads of a mailbox in order of msg_id."""
    with store.reading() as tx:
        mailbox = tx.mailboxes.find("default", box)
        assert mailbox is not None
        refs = tx.messages.first(mailbox, 100_000)
        return [m.payload for m in tx.messages.pick(mailbox, [h.msg_id for h in refs], 1 << 30, 0)]


async def attempt(client: Client, payload: bytes) -> str | None:
    """SEND and return the error of the answer, None when no answer came."""
    try:
        answer = await client.request(PREFIX + "MSG.SEND.task", payload, timeout=3)
    except (NatsError, TimeoutError):
        return None
    return str(parsed(answer.data)["error"])


# Stopping.


@pytest.mark.rule("A8")
async def test_requests_in_flight_are_answered_or_leave_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.create()
        client = await service.client()
        results: dict[bytes, str | None] = {}

        async def sender(no: int) -> None:
            for count in range(10_000):
                payload = b"%d.%d" % (no, count)
                try:
                    answer = await client.request(PREFIX + "MSG.SEND.task", payload, timeout=30)
                except NoRespondersError:
                    results[payload] = None
                    return
                results[payload] = str(parsed(answer.data)["error"])

        senders = [asyncio.create_task(sender(no)) for no in range(50)]
        await until(lambda: len(results) > 500)
        await service.stop(30)
        await asyncio.gather(*senders)
    answered = {payload for payload, error in results.items() if error == ""}
    assert len(answered) > 500
    with reopened(tmp_path) as store:
        kept = stored(store)
    assert len(kept) == len(set(kept)), "nothing twice"
    assert set(kept) == answered, "what is kept was answered, and what was answered is kept"


@pytest.mark.rule("F2", "A8")
async def test_a_fetch_that_waits_is_answered_when_the_door_closes(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.create()
        bodies = [{"config": {"max_wait_ms": 4500}}, {"group_name": "g", "config": {"max_wait_ms": 4500}}]
        waiting = [asyncio.create_task(service.ask("MSG.FETCH.task", body)) for body in bodies * 5]
        await service.waits(10)
        await service.stop(30)
        assert await asyncio.gather(*waiting) == [{"error": "", "messages": []}] * 10


@pytest.mark.rule("A8")
async def test_a_slow_commit_is_waited_for_when_the_door_closes(tmp_path: Path) -> None:
    store = Gated(tmp_path / "mail.db")
    async with serving(tmp_path, store=store) as service:
        await service.create()
        store.gate.clear()
        asked = [
            asyncio.create_task(service.ask("MSG.SEND.task", b"slow")),
            asyncio.create_task(service.ask("MAILBOX.CREATE", {"name": "slow"})),
            asyncio.create_task(service.ask("MSG.FETCH.task", {"group_name": "g", "deliver": "earliest"})),
        ]
        await until(lambda: service.door.held_bytes == 4 and service.door.tasks == 2)
        closing = asyncio.create_task(service.stop(30))
        async with asyncio.timeout(30):
            with contextlib.suppress(NoRespondersError):
                while await service.ask("MSG.NOTHING"):
                    pass
        store.gate.set()
        await closing
        sent, created, fetched = await asyncio.gather(*asked)
        assert sent == {"error": "", "msg_id": 0}
        assert created["mail_address"] == "slow"
        assert fetched["error"] == ""
    with reopened(tmp_path) as again:
        assert stored(again) == [b"slow"]
        assert stored(again, "slow") == []


async def test_a_server_that_reads_nothing_does_not_delay_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "PENDING_BYTES", 1 << 16)
    async with serving(tmp_path) as service:
        await service.create()
        waiting = [
            asyncio.create_task(service.ask("MSG.FETCH.task", {"config": {"max_wait_ms": 4500}})) for _ in "0" * 30
        ]
        await service.waits(30)
        pid = service.server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await service.broker.send(Send("default", "task", Draft(bytes(1 << 20))))
            await service.waits(0)
            async with asyncio.timeout(20):
                await service.stop(1)
        finally:
            os.kill(pid, signal.SIGCONT)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.rule("A8")
async def test_after_the_end_nobody_answers(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.create()
        await service.stop(30)
        with pytest.raises(NoRespondersError):
            await service.ask("MSG.SEND.task", b"late")


@pytest.mark.rule("A8", "K2", "S3", "S4")
async def test_a_restart_keeps_what_was_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.create()
        for no in range(5):
            await service.send(b"%d" % no, dedup_id=no)
        assert await service.send(b"later", delay=1) == -1
        assert ids(await service.fetch(group_name="g")) == [0, 1, 2, 3, 4]
        await service.done("MSG.ACK.task", {"group_name": "g", "msg_id": 2})
        assert ids(await service.fetch(group_name="l", config={"ack_wait_ms": 60_000})) == [0, 1, 2, 3, 4]
    async with serving(tmp_path) as service:
        assert ids(await service.fetch(group_name="g")) == [3, 4]
        assert await service.fetch(group_name="l", config={"ack_wait_ms": 60_000}) == []
        assert await service.send(b"again", dedup_id=4) == 4
        service.clock.ahead = 2000
        assert await service.release() == 1
        assert payloads(await service.query())[-1] == b"later"
        assert await service.send(b"new") == 6


# Losing the server, the connection, the subscription.


@pytest.mark.rule("A8", "A9")
async def test_the_server_is_killed_and_the_door_serves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_BACK_OFF", (0.01, 0.1))
    async with serving(tmp_path) as service:
        await service.create()
        await service.send(b"before")
        for number in range(2):
            pid, lost = service.server.pid, service.lost
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda lost=lost: service.lost > lost and service.connection.connected)
            client = await service.client()
            async with asyncio.timeout(30):
                while await attempt(client, b"%d" % number) is None:
                    pass
            assert await service.door.check() is None
        assert set(payloads(await service.query())) == {b"before", b"0", b"1"}


@pytest.mark.rule("A9")
async def test_while_the_server_is_away_the_check_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.server.stop()
        await until(lambda: not service.connection.connected)
        assert await service.door.check() == "not connected to NATS"
        await service.server.start()
        await until(lambda: service.connection.connected)
        assert await service.door.check() is None


@pytest.mark.rule("A9")
@pytest.mark.parametrize("how", ["the server forgets it", "somebody ends it"])
async def test_a_dead_subscription_is_noticed_and_made_anew(tmp_path: Path, how: str) -> None:
    async with serving(tmp_path, short_way=False) as service:
        await service.create()
        subscription = service.door.subscription
        assert subscription is not None
        if how == "the server forgets it":
            await service.connection.write([encode_unsubscribe(b"%d" % subscription.sid)])
        else:
            await subscription.drop()
        await service.connection.flush(30)
        with pytest.raises((NoRespondersError, TimeoutError, NatsError)):
            await service.ask("MSG.SEND.task", b"nobody listens", seconds=0.2)
        assert await service.door.check() is None
        assert await service.door.check() is None
        answered = [await service.send(b"%d" % no) for no in range(3)]
        assert len(set(answered)) == 3, "and each request is answered once"
        assert payloads(await service.query())[-3:] == [b"0", b"1", b"2"]


@pytest.mark.rule("A9")
async def test_a_live_subscription_among_many_is_left_alone(tmp_path: Path) -> None:
    answers: list[asyncio.Task[None]] = []
    async with serving(tmp_path) as service, contextlib.AsyncExitStack() as stack:
        for number in range(15):
            other = await connect(service.server.upstreams(), "other")
            stack.push_async_callback(other.close)

            def answer(request: Request, other: NatsConnection = other, number: int = number) -> None:
                answers.append(asyncio.create_task(other.publish([(request.reply, b"other %d" % number)])))

            await other.subscribe("mq9.*.$mq9.AI.>", QUEUE, answer)
            await other.flush(5)
        subscription = service.door.subscription
        for _ in range(40):
            assert await service.door.check() is None
        assert service.door.subscription is subscription


@pytest.mark.rule("A9")
async def test_a_server_that_turns_the_service_away_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the server ended the connection of a plain client for good."""
    config = tmp_path / "nats.conf"

    def write(password: str) -> None:
        config.write_text(
            f'host: "127.0.0.1"\nport: -1\nauthorization {{ users: [ {{user: m, password: "{password}"}} ] }}\n'
        )

    write("right")
    process = await asyncio.create_subprocess_exec(
        find_binary(), "-c", config, "--ports_file_dir", tmp_path, stderr=DEVNULL, stdin=DEVNULL
    )
    try:
        file = tmp_path / f"nats-server_{process.pid}.ports"
        await until(lambda: server_module.read_port(file))
        url = f"nats://127.0.0.1:{server_module.read_port(file)}"
        with monkeypatch.context() as hurried:
            hurried.setattr(connection_module, "CONNECT_SECONDS", 2.0)
            with pytest.raises(SetupError, match=r"(?i)authorization violation"):
                await _connected(url, "wrong")
        connection = await _connected(url, "right")
        write("changed")
        process.send_signal(signal.SIGHUP)
        await until(lambda: not connection.connected)
        write("right")
        process.send_signal(signal.SIGHUP)
        await until(lambda: connection.connected)
        await connection.flush(5)
        await connection.close()
    finally:
        process.kill()
        await process.wait()


async def _connected(url: str, password: str) -> NatsConnection:
    return await connect(Upstreams([url], Login("", user="m", password=password)), "mediator")


# Too much.


@pytest.mark.rule("A9", "N1")
async def test_more_waiting_than_the_bound_is_refused_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, door_pending=5) as service:
        await service.create()
        wait = {"config": {"max_wait_ms": 4500}}
        waiting = [asyncio.create_task(service.ask("MSG.FETCH.task", wait)) for _ in range(3)]
        await service.waits(3)
        reply = await service.ask("MSG.FETCH.task", wait)
        text = "server busy: this connection has 3 FETCH requests under way, its share of 5"
        assert reply == refused("MSG.FETCH", text)
        # Others need no room among those that wait, and let them go on.
        assert (await service.ask("MSG.DELETE.task.0"))["error"] == "message not found"
        assert await service.send(b"1") == 0
        assert [ids(reply["messages"]) for reply in await asyncio.gather(*waiting)] == [[0]] * 3
        assert ids(await service.fetch()) == [0]


@pytest.mark.rule("A9", "N1")
async def test_the_bodies_of_requests_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.nats.door.MAX_BODY_BYTES", 100_000)
    async with serving(tmp_path) as service:
        await service.create()
        wait = {"config": {"max_wait_ms": 4500}, "padding": "x" * 30_000}
        waiting = [asyncio.create_task(service.ask("MSG.FETCH.task", wait)) for _ in range(3)]
        await service.waits(3)
        reply = await service.ask("MSG.FETCH.task", wait)
        assert reply == refused("MSG.FETCH", "server busy: too many bytes are under way")
        assert await service.send(b"1") == 0
        assert [ids(reply["messages"]) for reply in await asyncio.gather(*waiting)] == [[0]] * 3
        assert ids((await service.done("MSG.QUERY.task", {"padding": "x" * 90_000}))["messages"]) == [0]


@pytest.mark.rule("A9", "N1", "A8")
async def test_more_sends_than_the_bound_are_refused_at_once(tmp_path: Path) -> None:
    store = Gated(tmp_path / "mail.db")
    async with serving(tmp_path, store=store, max_pending=3) as service:
        await service.create()
        store.gate.clear()
        store.entered.clear()
        sends = [asyncio.create_task(service.ask("MSG.SEND.task", b"0"))]
        assert await asyncio.to_thread(store.entered.wait, 30)
        sends += [asyncio.create_task(service.ask("MSG.SEND.task", b"%d" % no)) for no in range(1, 4)]
        await until(lambda: service.broker.pending == 3)
        reply = await service.ask("MSG.SEND.task", b"too many")
        assert reply == refused("MSG.SEND", "server busy: 3 requests wait already")
        store.gate.set()
        assert [reply["msg_id"] for reply in await asyncio.gather(*sends)] == [0, 1, 2, 3]
        assert len(await service.query()) == 4


# A store that cannot be written.

VERBS = {
    "MAILBOX.CREATE": ("MAILBOX.CREATE", {"name": "new"}),
    "MSG.SEND": ("MSG.SEND.task", {}),
    "MSG.FETCH": ("MSG.FETCH.task", {"group_name": "g"}),
    "MSG.ACK": ("MSG.ACK.task", {"group_name": "g", "msg_id": 0}),
    "MSG.NACK": ("MSG.NACK.task", {"group_name": "g", "msg_id": 0}),
    "MSG.EXTEND": ("MSG.EXTEND.task", {"group_name": "g", "msg_id": 0, "ack_wait_ms": 1000}),
    "MSG.DELETE": ("MSG.DELETE.task.0", {}),
}


@pytest.mark.rule("A9", "A8", "N1")
async def test_a_store_that_fails_is_an_error_and_no_silence(tmp_path: Path) -> None:
    store = Gated(tmp_path / "mail.db")
    async with serving(tmp_path, store=store) as service:
        await service.create()
        await service.send(b"before")
        store.broken = True
        for verb, (subject, body) in VERBS.items():
            assert await service.ask(subject, body) == refused(verb, "unavailable: disk I/O error")
        assert await service.broker.check() == "unavailable: disk I/O error"
        assert payloads(await service.query()) == [b"before"], "what is there can be read"
        store.broken = False
        assert await service.broker.check() is None
        assert await service.send(b"after") == 1
        assert payloads(await service.fetch(group_name="g")) == [b"before", b"after"]


@pytest.mark.rule("A9", "A8")
async def test_a_database_that_became_read_only(tmp_path: Path) -> None:
    store = SqliteStore(migrated(tmp_path / "mail.db"))
    async with serving(tmp_path, store=store) as service:
        await service.create()
        await service.send(b"before")
        with store.transaction() as tx:
            writer = tx.session.dialect
            writer.execute("PRAGMA query_only = 1")
        for verb, (subject, body) in VERBS.items():
            if verb in ("MSG.ACK", "MSG.NACK", "MSG.EXTEND"):
                continue  # these have nothing to write for a group that is not there
            reply = await service.ask(subject, body)
            assert reply == refused(verb, "unavailable: attempt to write a readonly database")
        assert payloads(await service.query()) == [b"before"]
        writer.execute("PRAGMA query_only = 0")
        assert await service.send(b"after") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no small disk can be mounted: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.rule("A8", "A9")
async def test_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (4 << 20))
    acknowledged: list[bytes] = []
    refusals: list[str] = []
    store = SqliteStore(small_disk / "mail.db")
    async with serving(tmp_path, store=store) as service:
        await service.create()
        client = await service.client()
        for no in range(200):
            payload = b"%03d" % no * 20_000
            error = await attempt(client, payload)
            assert error is not None, "an error and no silence"
            if error == "":
                acknowledged.append(payload)
            else:
                refusals.append(error)
            if len(refusals) == 5:
                break
        assert acknowledged
        assert len(refusals) == 5
        assert all(error.startswith("unavailable: ") for error in refusals), refusals
        assert await service.broker.check() is None or "unavailable" in str(await service.broker.check())
        shown = await service.query(limit=1000, headers_only=True)
        assert len(shown) == len(acknowledged), "what is there can still be read"
        ballast.unlink()
        payload = b"after" * 1000
        assert await attempt(client, payload) == "", "and it goes on without a restart"
        acknowledged.append(payload)
        await asyncio.gather(*(service.send(b"%d" % no) for no in range(20)))
    with contextlib.closing(SqliteStore(small_disk / "mail.db")) as again:
        kept = stored(again)
    assert kept[: len(acknowledged)] == acknowledged
    assert len(kept) == len(acknowledged) + 20


@pytest.mark.rule("N7")
async def test_unread_replies_hold_back_further_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred readers of a large message held a gigabyte when the server did not take the answers."""
    monkeypatch.setattr("mediator.nats.admission.MAX_HELD_BYTES", 4_000_000)
    async with serving(tmp_path) as service:
        await service.create()
        await service.send(b"x" * 1_000_000)
        highest = 0

        def look(*_: object) -> None:
            nonlocal highest
            highest = max(highest, service.door.held_bytes)

        service.broker.listen(look)
        body = {"group_name": "g", "deliver": "earliest"}
        # Fewer bytes in all than nats-server holds for a client before it drops it: 64 MiB.
        asks = [service.done("MSG.FETCH.task", body) for _ in range(45)]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        done = [answer for answer in answers if isinstance(answer, dict)]
        assert all(len(answer["messages"]) == 1 for answer in done)
        assert done, "they are answered one after the other, or told that too much is under way"
        # What was read at the same time may come on top of the bound.
        assert highest < 4_000_000 + 64 * 1_400_000
        assert (await service.done("MSG.FETCH.task", body))["messages"], "and later all is as before"
