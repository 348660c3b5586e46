"""PostgreSQL with a synchronous standby: the primary is killed under load, the standby is promoted (A8, A9).

Two instances share the database and one nats-server. Nobody restarts or reconfigures them.
"""

import asyncio
import base64
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

import aiohttp
import pytest

from mediator.errors import UnavailableError, UncertainError
from mediator.mailboxes.mailbox import NewMailbox
from mediator.store.base import Transaction
from mediator.store.postgres import PostgresStore
from pickup.client import Holder, Sender
from pickup.client.conversation import MEDIA_TYPES
from pickup.rules.records import Generation
from tests.harness.client import Client, Unanswered, payload_of
from tests.harness.didcomm_service import Door, note_v2, text
from tests.harness.load import SENDERS, Load, done
from tests.harness.postgres import Cluster, Standby, ask, cluster, programs_found
from tests.harness.service import Service, Services
from tests.harness.waiting import until

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(100)]

RECOVERS_WITHIN = 40.0
ANSWERS = 400
"""SENDs that are answered before the primary dies, and after the promotion."""
NOT_IN_TIME = 90.0
"""Seconds until an answer is given up that waits for the standby."""
WAITING = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
"""The commits that wait for the standby."""


@dataclass
class Pair:
    """A primary, and the standby that its commits wait for."""

    primary: Cluster
    standby: Standby

    @property
    def url(self) -> str:
        """The database of the service."""
        login = self.primary.url.rpartition("@")[0]
        return f"{login}@{self.primary.place},{self.standby.place}/postgres?target_session_attrs=read-write"

    async def in_step(self) -> None:
        """Wait until commits wait for the standby."""
        synchronous = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
        await until(lambda: ask(self.primary.url, synchronous), what="the standby is in step")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        primary = cluster()
        stack.callback(primary.stop)
        programs = programs_found()
        assert programs is not None
        standby = Standby(programs, primary)
        stack.callback(standby.stop)
        yield Pair(primary, standby)


async def two_instances(services: Services, pair: Pair) -> tuple[list[Service], str]:
    """Start two instances, and return them and the URL of their nats-server."""
    await pair.in_step()
    shared, key = await services.nats_server(), base64.b64encode(bytes(32)).decode()
    instances = [services.new(name, database_url=pair.url, nats_url=shared) for name in ("one", "two")]
    for each in instances:
        each.environment["MEDIATOR_DIDCOMM__KEY"] = key
        each.start()
    for each in instances:
        await each.ready()
    return instances, shared


async def each_one(instances: list[Service], wait: Callable[[Service], Awaitable[object]]) -> None:
    """Wait for all instances at once."""
    await asyncio.gather(*(wait(each) for each in instances))


@pytest.mark.rule("A3", "A8", "A9", "D2", "D9", "N3", "S3", "K2", "K3")
async def test_a_promoted_standby_has_all_that_was_answered(services: Services, stack: AsyncExitStack, pair: Pair):
    instances, shared = await two_instances(services, pair)
    client = await Client.connect(shared, connections=2)
    stack.push_async_callback(client.close)
    load, forwards = Load(random.Random(1)), await Forwards.opened(instances, stack)
    await load.create(client)

    async def failover() -> None:
        await asyncio.gather(load.answered(ANSWERS), forwards.accepted(ANSWERS // 10))
        await asyncio.to_thread(pair.primary.halt)
        await each_one(instances, is_unready)
        await asyncio.to_thread(pair.standby.promote)
        await each_one(instances, lambda each: each.ready(RECOVERS_WITHIN))
        await asyncio.gather(load.answered(ANSWERS), forwards.accepted(ANSWERS // 10))

    await forwards.work(lambda: load.work(client, failover))
    # What is uncertain is sent again, with its dedup id.
    await load.work(client, lambda: load.answered(SENDERS))
    patient = await Client.connect(shared, tries=10)
    stack.push_async_callback(patient.close)
    await load.hold(patient)
    await forwards.hold()
    print(dict(load.books.counted), dict(forwards.counted))
    assert load.books.counted["unavailable"]
    assert forwards.counted["unavailable"]


async def is_unready(instance: Service) -> None:
    """Wait until an instance names the database as the reason why it is not ready."""

    async def named() -> bool:
        return "the database does not answer" in (await instance.get("/readyz"))[1]

    await until(named, what="/readyz says that the database does not answer")


class Forwards:
    """DIDComm forwards to one holder, at the doors of all instances in turn."""

    def __init__(
        self, doors: list[str], posting: aiohttp.ClientSession, sender: Sender, holder: Holder, key: str
    ) -> None:
        self._next_door = itertools.cycle(doors).__next__
        self._posting = posting
        self._sender = sender
        self._holder = holder
        self._key = key
        self._numbers = itertools.count()
        self._working = False
        self._accepted: set[str] = set()
        self._refused: set[str] = set()
        self.counted: Counter[str] = Counter()

    @classmethod
    async def opened(cls, instances: list[Service], stack: AsyncExitStack) -> "Forwards":
        """Connect the holder at the first instance."""
        doors = [Door(each, stack) for each in instances]
        posting = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)))
        holder = await doors[0].holder((await doors[0].invite()).v2, mediation="3.0", pickup="3.0")
        await holder.mediate()
        return cls([door.url for door in doors], posting, await doors[0].sender(), holder, await holder.add_key())

    async def accepted(self, count: int) -> None:
        """Wait until so many more were accepted."""
        enough = len(self._accepted) + count
        await until(lambda: len(self._accepted) >= enough, what="forwards are accepted")

    async def work(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """Post one after the other until ``meanwhile`` has ended."""
        self._working = True
        posting = asyncio.create_task(self._post())
        try:
            await meanwhile()
        finally:
            self._working = False
            await posting

    async def _post(self) -> None:
        while self._working:
            said = f"note {next(self._numbers)}"
            envelope = await self._sender.pack_v2(self._key, self._holder.link.routing[0], note_v2(said))
            headers = {"Content-Type": MEDIA_TYPES[Generation.V2]}
            async with self._posting.post(self._next_door(), data=envelope, headers=headers) as answer:
                if answer.status == 202:
                    self._accepted.add(said)
                    continue
                assert answer.status == UnavailableError.status, await answer.text()
                code = (await answer.json())["code"]
                self.counted[code] += 1
                if code == UnavailableError.code:
                    self._refused.add(said)

    async def hold(self) -> None:
        """Pick up all that is there, and compare it with what was answered."""
        came: Counter[str] = Counter()
        while mails := await self._holder.fetch(limit=100):
            came.update([await text(self._holder, mail) for mail in mails])
            await self._holder.received([mail.id for mail in mails])
        assert self._accepted <= came.keys(), "A8: a forward that was accepted is missing"
        assert not self._refused & came.keys(), "N3: a forward that was refused is there"
        assert set(came.values()) == {1}, "a forward is there twice"


@pytest.mark.rule("A3", "A8", "A9", "N3", "S3")
async def test_what_the_standby_lacks_is_never_answered_ok(services: Services, stack: AsyncExitStack, pair: Pair):
    instances, shared = await two_instances(services, pair)
    client = await Client.connect(shared, within=NOT_IN_TIME)
    stack.push_async_callback(client.close)
    # A commit that waits holds its mailbox.
    boxes = [f"box{number}" for number in range(10)]
    for box in boxes:
        await client.create(name=box)
    sent: dict[tuple[str, bytes], asyncio.Task[str]] = {}

    async def send(box: str, payload: bytes) -> str:
        """Return the code of the error, empty when the message is stored."""
        try:
            done(await client.send(box, payload, dedup_id=payload.decode()))
        except Unanswered as error:
            return error.code
        return ""

    async def send_without_standby(payload: bytes) -> list[asyncio.Task[str]]:
        pair.standby.halt()
        sending = {(box, payload): asyncio.create_task(send(box, payload)) for box in boxes}
        sent.update(sending)
        await until(lambda: ask(pair.primary.url, WAITING), what="a commit waits for the standby")
        await each_one(instances, lambda each: each.unready())
        assert not any(task.done() and not task.result() for task in sending.values())
        return list(sending.values())

    async def shown() -> dict[str, list[bytes]]:
        return {box: [payload_of(item) for item in await client.query_all(box)] for box in boxes}

    # Commits wait while the standby is away; mail that is there can be looked at.
    waiting = await send_without_standby(b"the standby comes back")
    assert not any((await shown()).values())
    await asyncio.to_thread(pair.standby.resume)
    await each_one(instances, lambda each: each.ready(RECOVERS_WITHIN))
    assert "" in await asyncio.gather(*waiting)

    # An administrator may end the wait: the primary keeps the message, and only the primary.
    await pair.in_step()
    waiting = await send_without_standby(b"the standby takes over")
    ask(pair.primary.url, WAITING.replace("pid", "pg_cancel_backend(pid)::int"))
    await until(lambda: any(task.done() for task in waiting), what="what was cancelled is answered")
    await asyncio.to_thread(pair.primary.halt)
    await asyncio.to_thread(pair.standby.resume)
    await asyncio.to_thread(pair.standby.promote)
    said = Counter(await asyncio.gather(*waiting))
    await each_one(instances, lambda each: each.ready(RECOVERS_WITHIN))
    assert said[UncertainError.code]

    # What is there is what was answered; sent again, each is there once.
    there = await shown()
    for box in boxes:
        assert there[box] == [payload for (where, payload), task in sent.items() if where == box and not task.result()]
    for (box, payload), task in sent.items():
        assert not (task.result() and await send(box, payload))
    assert all(len(payloads) == len(set(payloads)) == 2 for payloads in (await shown()).values())


@pytest.mark.rule("A8", "A9")
async def test_a_former_primary_that_comes_back_is_refused(pair: Pair):
    await pair.in_step()
    store = PostgresStore(pair.url)

    def create(address: str) -> None:
        with store.transaction() as tx:
            tx.mailboxes.add(NewMailbox(tenant="default", address=address, created_at=1))

    def found(tx: Transaction, address: str) -> bool:
        return tx.mailboxes.find("default", address) is not None

    with contextlib.closing(store):
        create("before")
        pair.primary.halt()
        pair.standby.promote()
        create("after")
        with store.reading() as known:
            assert found(known, "after")
            pair.primary.resume()
            # Connections that are there stay; a new one would show the mail as it was.
            with pytest.raises(UnavailableError, match="former primary"), store.reading():
                pass
        create("last")
        pair.primary.halt()
        with store.reading() as known, store.reading() as new:
            assert found(known, "last")
            assert found(new, "last")
