"""kill -9, twenty times between push, delivery and ack: no answered forward is lost, no ack is undone (A8, D2).

Senders forward v1 and v2 messages over HTTP without a pause; holders poll, go live and acknowledge some of what comes.
Each life ends at one of four moments, as a message is under way through them. On PostgreSQL the server's backends are
killed as well.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from mediator.errors import UnavailableError
from pickup.client import DeliveredMessage, Holder, HttpStatusError, NoAnswerError, ProblemError, Sender
from pickup.client.conversation import MEDIA_TYPES
from pickup.rules.records import Generation
from tests.harness.didcomm_service import Door, note, note_v2, text
from tests.harness.postgres import Server, answers, disturbing
from tests.harness.service import Services
from tests.harness.verified import damage_of
from tests.harness.waiting import until
from tests.slow.crash.test_nats import KILLS, SEED

MOMENTS = ("forward", "push", "delivery", "ack")
"""When a life ends: right after a forward was sent, a push came, mail was asked for, or an ack was sent."""
HOLDERS: list[dict[str, Any]] = [
    {"handshake": "didexchange/1.1"},
    {"handshake": "connections/1.0"},
    {"handshake": "didexchange/1.1", "pickup": "4.0"},
    {"mediation": "2.0", "pickup": "3.0"},
    {"mediation": "3.0", "pickup": "3.0"},
    {"mediation": "3.0", "pickup": "4.0"},
]
IMPLICIT: list[dict[str, Any]] = [{"handshake": "didexchange/1.1"}, {"mediation": "3.0"}]
"""Those that take bare envelopes off their sockets, with nothing to acknowledge (D7)."""
SENDERS = 8
FORWARDS = (40, 100)
"""How many forwards a life takes before its end may come, from and to."""
AHEAD = 100
"""Forwards that may wait to be picked up until senders pause."""
STRUCK_WITHIN = 0.004
"""Seconds from the moment to the kill, at the most."""
LIVES_WITHIN = 30.0


@pytest.mark.timeout(200)
@pytest.mark.rule("A8", "D1", "D2", "D3", "D6", "D7", "D9")
async def test_sqlite_survives_kill_9(services: Services, stack: AsyncExitStack):
    door = await Door.opened(services, stack)
    await survives(door, stack, lambda _life: None)
    assert not door.service.complaints()


@pytest.mark.timeout(200)
@pytest.mark.postgres
@pytest.mark.rule("A8", "A9", "D1", "D2", "D3", "D6", "D7", "D9")
async def test_postgres_survives_kill_9(services: Services, stack: AsyncExitStack, postgres: Server):
    with postgres.database() as url:
        try:
            door = await Door.opened(services, stack, database_url=url)
            await survives(door, stack, disturbing(postgres, url))
        finally:
            services.close()
            await until(lambda: answers(url), 30, "PostgreSQL has recovered")


async def survives(door: Door, stack: AsyncExitStack, disturb: Callable[[int], None]) -> None:
    """Kill a service again and again under load, and hold it to what it answered."""
    print(f"seed {SEED}, {KILLS} kills")
    started = time.monotonic()
    load = await Load.opened(door, stack, random.Random(SEED))
    for life in range(KILLS):
        if life:
            await door.service.serve()
        await load.until_killed(disturb, life)
    await door.service.serve()
    await load.hold()
    assert await asyncio.to_thread(damage_of, door.service) == []
    counted = load.counted
    print(f"{time.monotonic() - started:.0f} s", dict(counted))
    assert sum(counted[f"killed at {moment}"] for moment in MOMENTS) == KILLS
    assert counted["accepted"] >= KILLS * FORWARDS[0]
    assert min(counted[way] for way in ("pushed", "fetched", "implicit", "acknowledged")) >= KILLS


@dataclass(eq=False)
class Party:
    """A holder, and what it got."""

    holder: Holder
    key: str
    implicit: bool
    got: set[str] = field(default_factory=set)
    ids: dict[str, str] = field(default_factory=dict)
    """Under which attachment id each text came."""
    acked: set[str] = field(default_factory=set)
    """Attachment ids whose messages-received was answered."""

    async def took(self, mails: Sequence[DeliveredMessage], offered: dict[str, "Party"]) -> int:
        """Enter what came, and return how many of it for the first time."""
        before = len(self.got)
        for mail in mails:
            assert mail.id not in self.acked, f"D2: {mail.id} came again after its ack was answered"
            said = await text(self.holder, mail)
            assert offered.get(said) is self, f"{said} came, which nobody sent to this holder"
            self.got.add(said)
            if mail.id:
                known = self.ids.setdefault(said, mail.id)
                assert known == mail.id, f"D3: {said} was sent once and is there as {known} and {mail.id}"
        return len(self.got) - before


class Load:
    """Senders and holders, and what they were answered."""

    def __init__(self, door: Door, chance: random.Random, sender: Sender, posting: aiohttp.ClientSession) -> None:
        self._door = door
        self._chance = chance
        self._sender = sender
        self._posting = posting
        self.parties: list[Party] = []
        self._numbers = itertools.count()
        self._moment: str | None = None
        self._offered: dict[str, Party] = {}
        """Everything that was posted, answered or not."""
        self._accepted: dict[str, Party] = {}
        """What was answered 202."""
        self.counted: Counter[str] = Counter()

    @classmethod
    async def opened(cls, door: Door, stack: AsyncExitStack, chance: random.Random) -> "Load":
        """Connect all holders, and register a key of each."""
        posting = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)))
        load = cls(door, chance, await door.sender(), posting)
        invites = await door.invite()
        for options, implicit in [*((one, False) for one in HOLDERS), *((one, True) for one in IMPLICIT)]:
            holder = await door.holder(invites.v1 if "handshake" in options else invites.v2, **options)
            await holder.mediate()
            load.parties.append(Party(holder, await holder.add_key(), implicit))
        return load

    async def until_killed(self, disturb: Callable[[int], None], life: int) -> None:
        """Work until the process was killed in the midst of it."""
        enough = self.counted["accepted"] + self._chance.randint(*FORWARDS)
        senders = [asyncio.create_task(self._send()) for _ in range(SENDERS)]
        holders = [asyncio.create_task(self._receive(party)) for party in self.parties]
        try:
            await self._going(lambda: self.counted["accepted"] >= enough // 2, [*senders, *holders])
            await asyncio.to_thread(disturb, life)
            # The service goes on, or comes back by itself, before it is killed.
            await self._going(lambda: self.counted["accepted"] >= enough, [*senders, *holders])
            self._moment = MOMENTS[life % len(MOMENTS)]
            await self._going(lambda: not self._door.service.alive, [*senders, *holders])
            await self._door.service.kill()
            # What a socket had carried before the end is still read: an implicit pickup has confirmed it.
            async with asyncio.timeout(LIVES_WITHIN):
                await asyncio.gather(*senders, *holders)
        finally:
            for task in (*senders, *holders):
                task.cancel()
            await asyncio.gather(*senders, *holders, return_exceptions=True)

    async def _going(self, reached: Callable[[], bool], tasks: Sequence[asyncio.Task[None]]) -> None:
        def look() -> bool:
            for task in tasks:
                if task.done():
                    task.result()
            return reached()

        try:
            await until(look, LIVES_WITHIN, "the service answers")
        except AssertionError as error:
            waiting = [sum(one is party for one in self._accepted.values()) - len(party.got) for party in self.parties]
            ready = await self._door.service.get("/readyz")
            raise AssertionError(f"{error}: {dict(self.counted)}, not got by each: {waiting}, {ready}") from None

    def _strike(self, moment: str) -> None:
        """Kill the service within the next few milliseconds, if this is the moment for it."""
        if self._moment != moment:
            return
        self._moment = None
        self.counted[f"killed at {moment}"] += 1
        asyncio.get_running_loop().call_later(self._chance.uniform(0, STRUCK_WITHIN), self._door.service.process.kill)

    @contextlib.asynccontextmanager
    async def _bearing(self) -> AsyncIterator[None]:
        """Bear what happens to whoever talks to a service that is killed, or whose database is."""
        try:
            yield
        except NoAnswerError:
            self.counted["unanswered"] += 1
        except HttpStatusError as error:
            if error.status != UnavailableError.status:
                raise
            self.counted["unavailable"] += 1
        except ProblemError as error:
            if error.code != UnavailableError.problem:
                raise
            self.counted["unavailable"] += 1

    # Senders.

    async def _send(self) -> None:
        while self._door.service.alive:
            if len(self._accepted) - sum(len(party.got) for party in self.parties) > AHEAD:
                await asyncio.sleep(0.01)
                continue
            party = self._chance.choice(self.parties)
            said = f"note {next(self._numbers)}"
            envelope = await self._packed(party, said)
            self._offered[said] = party
            self._strike("forward")
            if await self._accepts(envelope, party.holder.generation):
                self._accepted[said] = party
                self.counted["accepted"] += 1

    async def _packed(self, party: Party, said: str) -> bytes:
        link = party.holder.link
        if party.holder.generation is Generation.V1:
            return await self._sender.pack_v1(party.key, link.routing, note(said))
        return await self._sender.pack_v2(party.key, link.routing[0], note_v2(said))

    async def _accepts(self, envelope: bytes, generation: Generation) -> bool:
        headers = {"Content-Type": MEDIA_TYPES[generation]}
        try:
            async with self._posting.post(self._door.url, data=envelope, headers=headers) as answer:
                assert answer.status in (202, UnavailableError.status), await answer.text()
                return answer.status == 202
        except (aiohttp.ClientError, TimeoutError):
            self.counted["unanswered"] += 1
            return False

    # Holders.

    async def _receive(self, party: Party) -> None:
        while self._door.service.alive:
            async with self._bearing():
                if party.implicit:
                    await self._implicit(party)
                elif self._chance.random() < 0.5:
                    await self._live(party)
                else:
                    await self._poll(party)

    async def _implicit(self, party: Party) -> None:
        """Read to the end of the socket: whatever it carried is gone from the queue, or soon will be."""
        async with contextlib.aclosing(party.holder.implicit()) as mails:
            async for mail in mails:
                self.counted["implicit"] += await party.took([mail], self._offered)
                self._strike("push")

    async def _live(self, party: Party) -> None:
        """Acknowledge only what was pushed, so that no push of it can be under way any more."""
        left = self._chance.randint(3, 20)
        async with contextlib.aclosing(party.holder.live()) as pushed:
            async for mail in pushed:
                await party.took([mail], self._offered)
                self.counted["pushed"] += 1
                self._strike("push")
                if self._chance.random() < 0.7:
                    await self._ack(party, [mail])
                left -= 1
                if not left:
                    return

    async def _poll(self, party: Party) -> None:
        """Fetch some, on a socket or over HTTP, and acknowledge some of it."""
        async with party.holder.socket() if self._chance.random() < 0.3 else contextlib.nullcontext():
            for _ in range(self._chance.randint(1, 5)):
                self._strike("delivery")
                mails = await party.holder.fetch(limit=self._chance.choice((1, 5, 20)))
                await party.took(mails, self._offered)
                self.counted["fetched"] += len(mails)
                done = [mail for mail in mails if self._chance.random() < 0.8]
                if done:
                    await self._ack(party, done)

    async def _ack(self, party: Party, mails: Sequence[DeliveredMessage]) -> None:
        self._strike("ack")
        ids = [mail.id for mail in mails]
        await party.holder.received(ids)
        party.acked.update(ids)
        self.counted["acknowledged"] += len(ids)

    # In the end.

    async def hold(self) -> None:
        """Pick up all that is left, and compare it with what was answered."""
        for party in self.parties:
            while mails := await party.holder.fetch(limit=100):
                await party.took(mails, self._offered)
                await self._ack(party, mails)
            assert (await party.holder.status()).count == 0
        lost = [said for said, party in self._accepted.items() if said not in party.got]
        assert not lost, f"A8: {lost} were answered 202 and never came"
        self.counted["came unanswered"] = sum(len(party.got) for party in self.parties) - len(self._accepted)
