"""Backups under load at both doors, and a move to PostgreSQL: what was answered before is there, and no id comes twice.

Senders and consumers work over NATS and others forward to wallets, while `mediator backup` runs as operators run it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from mediator.backup import MIN_SKIP
from pickup.client import Holder, Sender
from pickup.rules.records import Generation
from tests.harness.client import Client, payload_of
from tests.harness.didcomm_service import Door, note, note_v2, texts
from tests.harness.load import Load
from tests.harness.service import Services
from tests.harness.waiting import until
from tests.slow.crash.test_nats import connected

SEED = 20261123
ANSWERS = 200
FORWARDS = 10
"""How many of each are answered before the backup, and again while it runs or after it."""

pytestmark = pytest.mark.timeout(200)


class Wallets:
    """A wallet of each generation of DIDComm, and what was forwarded to it."""

    def __init__(self, url: str, sender: Sender, parties: list[tuple[Holder, str]]) -> None:
        self._url = url
        self._sender = sender
        self._parties = parties
        self.accepted: list[set[str]] = [set() for _ in parties]

    @classmethod
    async def connected(cls, door: Door) -> "Wallets":
        invites = await door.invite()
        holders = [await door.holder(invites.v1, handshake="didexchange/1.1"), await door.holder(invites.v2)]
        for holder in holders:
            await holder.mediate()
        return cls(door.url, await door.sender(), [(holder, await holder.add_key()) for holder in holders])

    async def forward(self) -> None:
        """Forward to the one and the other in turn, until this is cancelled."""
        number = 0
        while True:
            for (holder, key), accepted in zip(self._parties, self.accepted, strict=True):
                number += 1
                said, link = f"note {number}", holder.link
                if holder.generation is Generation.V1:
                    await self._sender.send_v1(key, link.routing, self._url, note(said))
                else:
                    await self._sender.send_v2(key, link.routing[0], self._url, note_v2(said))
                accepted.add(said)

    async def pick_up(self) -> list[set[str]]:
        """Take all that waits, and return what it says."""
        found: list[set[str]] = []
        for holder, _ in self._parties:
            got: set[str] = set()
            while mails := await holder.fetch(limit=100):
                got |= set(await texts(holder, mails))
                await holder.received([mail.id for mail in mails])
            found.append(got)
        return found


class Traffic:
    """What is sent and consumed at both doors of one service, on whatever database it runs."""

    def __init__(self, door: Door, load: Load, wallets: Wallets) -> None:
        self.door = door
        self.load = load
        self.wallets = wallets

    @classmethod
    async def opened(cls, services: Services, stack: AsyncExitStack, **options: Any) -> "Traffic":
        door = await Door.opened(services, stack, **options)
        load = Load(random.Random(SEED), "backup")
        async with connected(door.service) as client:
            await load.create(client)
        return cls(door, load, await Wallets.connected(door))

    async def flow(self, meanwhile: Callable[[], Awaitable[object]]) -> None:
        """Send and consume until ``meanwhile`` has ended."""
        async with connected(self.door.service) as client:
            forwarding = asyncio.create_task(self.wallets.forward())
            try:
                await self.load.work(client, meanwhile)
            finally:
                assert not forwarding.done() or forwarding.exception() is None
                forwarding.cancel()
                await asyncio.wait([forwarding])

    async def answered(self) -> None:
        """Wait until some more was answered at both doors."""
        enough = [len(accepted) + FORWARDS for accepted in self.wallets.accepted]
        await self.load.answered(ANSWERS)
        await until(lambda: [len(accepted) for accepted in self.wallets.accepted] >= enough, what="forwards are taken")

    async def end(self) -> None:
        """Stop the service."""
        self.door.service.terminate()
        assert await self.door.service.ended() == 0

    async def serve(self, data_dir: Path, database_url: str | None) -> None:
        """Start it on another database, at the same address."""
        service = self.door.service
        service.data_dir = data_dir
        service.options.pop("database_url", None)
        if database_url is not None:
            service.options["database_url"] = database_url
        await service.serve()


def database(url: str | None) -> list[str]:
    return [] if url is None else ["--database-url", url]


async def backed_up(traffic: Traffic, file: Path, url: str | None) -> Callable[[], Awaitable[None]]:
    """Back up in the midst of the traffic, and return a check of what is restored."""
    load, wallets = traffic.load, traffic.wallets
    sure: list[Any] = []

    async def meanwhile() -> None:
        await traffic.answered()
        sure.append(list(load.books.kept.values()))
        sure.append([set(accepted) for accepted in wallets.accepted])
        data_dir = str(traffic.door.service.data_dir)
        await traffic.door.command("backup", str(file), "--with-keys", "--data-dir", data_dir, *database(url))
        await traffic.answered()

    await traffic.flow(meanwhile)
    kept, forwarded = sure

    async def check() -> None:
        async with connected(traffic.door.service) as client:
            # Consumers may have taken off a work queue what they acknowledged later.
            settled = {load.books.numbers[box][no] for box in load.boxes for no in load.books.settled[box]}
            owed = {each.payload for each in kept} - settled
            await until(lambda: holds(client, load, owed), what="delayed messages are there too")
            for box in load.boxes:
                answer = await client.send(box, b"after")
                assert answer.body["msg_id"] >= MIN_SKIP > max(load.books.numbers[box]), f"A3: {box}: {answer.body}"
        for got, expected, ever in zip(await wallets.pick_up(), forwarded, wallets.accepted, strict=True):
            assert expected <= got <= ever, (expected - got, got - ever)

    return check


async def holds(client: Client, load: Load, owed: set[bytes]) -> bool:
    """Whether all that is owed is there; what had a number has it still."""
    there: set[bytes] = set()
    for box in load.boxes:
        for item in await client.query_all(box):
            payload, known = payload_of(item), load.books.numbers[box].get(item["msg_id"])
            assert known in (payload, None), f"A3: {box} has {payload!r} under the number of {known!r}"
            there.add(payload)
    return owed <= there


@pytest.mark.postgres
@pytest.mark.rule("A3", "A8", "D2")
@pytest.mark.parametrize(("source", "targets"), [("sqlite", ("sqlite", "postgres")), ("postgres", ("postgres",))])
async def test_a_backup_under_load_has_all_answered_before(source, targets, services, stack, postgres, tmp_path):
    urls = {name: stack.enter_context(postgres.database()) for name in ("source", "target")}
    url = urls["source"] if source == "postgres" else None
    traffic = await Traffic.opened(services, stack, **({} if url is None else {"database_url": url}))
    file = tmp_path / "b.tar"
    check = await backed_up(traffic, file, url)
    await traffic.end()
    for target in targets:
        data_dir, url = tmp_path / f"on-{target}", urls["target"] if target == "postgres" else None
        await traffic.door.command("restore", str(file), "--data-dir", str(data_dir), *database(url))
        await traffic.serve(data_dir, url)
        await check()
        await traffic.end()
    assert not traffic.door.service.complaints()


@pytest.mark.postgres
@pytest.mark.rule("A3", "A8", "D2", "K2")
async def test_a_service_goes_on_where_it_moved_to(services, stack, postgres):
    traffic = await Traffic.opened(services, stack)
    await traffic.flow(traffic.answered)
    await traffic.end()
    url = stack.enter_context(postgres.database())
    data_dir = traffic.door.service.data_dir
    await traffic.door.command("migrate-to", url, "--data-dir", str(data_dir))
    await traffic.serve(data_dir, url)
    await traffic.flow(traffic.answered)
    async with connected(traffic.door.service) as client:
        await traffic.load.hold(client)
    for got, accepted in zip(await traffic.wallets.pick_up(), traffic.wallets.accepted, strict=True):
        assert accepted <= got, accepted - got
    assert not traffic.door.service.complaints()
