"""Two instances on one PostgreSQL, with a nats-server between them, are one mediator to holders and senders."""

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from pickup.client import Holder, HttpStatusError, ProblemError, Sender
from pickup.rules.records import Generation
from tests.conftest import SERVICES
from tests.harness.didcomm_service import Door, note, note_v2, texts
from tests.harness.live import Live
from tests.harness.postgres import Server
from tests.harness.service import Services

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

TURNS = 5
HOLDERS: list[dict[str, Any]] = [{"handshake": "didexchange/1.1"}, {"mediation": "3.0"}]
"""One of each generation."""
each = pytest.mark.parametrize("options", HOLDERS, ids=["v1", "v2"])


@dataclass(frozen=True, slots=True)
class Pair:
    """Two instances that share all but their ports."""

    a: Door
    b: Door
    stack: AsyncExitStack

    async def holder(self, options: dict[str, Any], door: Door | None = None) -> Holder:
        """Connect a holder, at A unless said otherwise."""
        door = door or self.a
        invites = await door.invite()
        holder = await door.holder(invites.v1 if "handshake" in options else invites.v2, **options)
        await holder.mediate()
        return holder

    async def elsewhere(self, holder: Holder, door: Door) -> Holder:
        """Return the same holder, as one whom a load balancer leads to another instance."""
        name = door.service.name
        holder.wallet.links[name] = {**holder.link.written(), "endpoints": [door.url, door.ws]}
        return await self.stack.enter_async_context(Holder.resume(holder.wallet, name=name))


@pytest.fixture(scope="module", params=["one URL", "a URL each"])
def instances(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres: Server
) -> Iterator[Services]:
    """Start two instances at the same time on an empty database; each test brings holders of its own."""

    async def start() -> None:
        shared = {"database_url": url, "nats_url": await services.nats_server()}
        both = [services.new(name, **shared) for name in ("a", "b")]
        key = base64.b64encode(os.urandom(32)).decode()
        for service in both:
            service.environment["MEDIATOR_DIDCOMM__KEY"] = key
            if request.param == "one URL":
                service.environment["MEDIATOR_DIDCOMM__PUBLIC_URL"] = f"http://127.0.0.1:{both[0].http_port}"
            service.start()
        for service in both:
            await service.ready()

    services = Services(tmp_path_factory.mktemp("instances"))
    with postgres.database() as url:
        try:
            asyncio.run(start())
            yield services
        finally:
            services.close()


@pytest.fixture
async def pair(request: pytest.FixtureRequest, instances: Services) -> AsyncIterator[Pair]:
    """Give the two instances to a test, and remove the connections that it made."""
    request.node.stash[SERVICES] = instances
    async with AsyncExitStack() as stack:
        pair = Pair(*(Door(service, stack) for service in instances.all), stack)
        yield pair
        for connection in await listed(pair.a):
            await remove(pair.a, connection)


async def packed(sender: Sender, holder: Holder, key: str, said: str, through: str | None = None) -> bytes:
    """Seal for a key of the holder, and a forward around it for the mediator's key or DID."""
    if holder.generation is Generation.V1:
        return await sender.pack_v1(key, [through] if through else holder.link.routing, note(said))
    return await sender.pack_v2(key, through or holder.link.routing[0], note_v2(said))


async def send(sender: Sender, holder: Holder, key: str, said: str, door: Door) -> None:
    """Forward through an instance."""
    await sender.deliver(await packed(sender, holder, key, said), door.url, holder.generation)


async def remove(door: Door, connection: dict[str, Any]) -> None:
    """Remove a connection as an operator."""
    number = str(connection["connection"])
    await door.command("connections", "remove", number, "--yes", "--data-dir", str(door.service.data_dir))


async def listed(door: Door) -> list[dict[str, Any]]:
    """Return the connections as an operator of an instance sees them."""
    said = await door.command("connections", "list", "--json", "--data-dir", str(door.service.data_dir))
    found: list[dict[str, Any]] = json.loads(said)["connections"]
    return found


@each
@pytest.mark.rule("D6", "A8")
async def test_a_forward_at_one_reaches_a_live_socket_at_the_other(pair: Pair, options: dict[str, Any]):
    holder, sender = await pair.holder(options), await pair.a.sender()
    key = await holder.add_key()
    async with Live.of(holder) as live:
        for number in range(TURNS):
            for door in (pair.a, pair.b):
                said = f"note {number} at {door.service.name}"
                await send(sender, holder, key, said, door)
                assert await live.text() == said
        assert await live.silent()
    await live.ended()
    assert (await holder.status()).count == 2 * TURNS


@each
@pytest.mark.rule("D6")
async def test_who_came_by_one_is_live_at_the_other_at_once(pair: Pair, options: dict[str, Any]):
    """Instances that were started at the same time need not know yet what the other is called."""
    for came, goes in ((pair.a, pair.b), (pair.b, pair.a)):
        holder, sender = await pair.holder(options, came), await goes.sender()
        key, there = await holder.add_key(), await pair.elsewhere(holder, goes)
        async with Live.of(there) as live:
            await send(sender, holder, key, "welcome", came)
            assert await live.text() == "welcome"
    assert not [said for door in (pair.a, pair.b) for said in door.service.events("cannot push mail")]


@each
@pytest.mark.rule("D6")
async def test_the_newest_session_gets_the_mail_wherever_it_is(pair: Pair, options: dict[str, Any]):
    at_a, sender = await pair.holder(options), await pair.a.sender()
    key, at_b = await at_a.add_key(), await pair.elsewhere(at_a, pair.b)
    async with Live.of(at_a) as first:
        await send(sender, at_a, key, "to the first", pair.b)
        assert await first.text() == "to the first"
        async with Live.of(at_b) as second:
            await first.off()
            for number in range(4):
                await send(sender, at_a, key, f"to the second {number}", (pair.a, pair.b)[number % 2])
            assert await second.texts(4) == [f"to the second {number}" for number in range(4)]
            assert await first.silent()
            # And back, on the socket that is still open.
            await at_a.ask(f"messagepickup/{at_a.pickup}/live-delivery-change", {"live_delivery": True})
            await second.off()
            await send(sender, at_a, key, "to the first again", pair.b)
            assert await first.text() == "to the first again"
            assert await second.silent()
    await first.ended()
    await second.ended()
    assert (await at_b.status()).count == 6


@each
@pytest.mark.rule("D2", "D6", "A8")
async def test_who_was_live_at_a_killed_instance_goes_on_at_the_other(pair: Pair, options: dict[str, Any]):
    at_a, sender = await pair.holder(options), await pair.b.sender()
    key, at_b = await at_a.add_key(), await pair.elsewhere(at_a, pair.b)
    await send(sender, at_a, key, "backlog", pair.a)
    async with Live.of(at_a) as live:
        await send(sender, at_a, key, "read", pair.a)
        await at_a.received([(await live.mail()).id])
        await send(sender, at_a, key, "pushed and not read", pair.b)
        assert await live.text() == "pushed and not read"
        await pair.a.service.kill()
        await send(sender, at_a, key, "while it is gone", pair.b)
        await live.broken()
    left = ["backlog", "pushed and not read", "while it is gone"]
    async with Live.of(at_b) as live:
        assert await texts(at_b, await at_b.fetch()) == left
        await send(sender, at_a, key, "live again", pair.b)
        assert await live.text() == "live again"
        assert [one["live"] for one in await listed(pair.b)] == [True]
        await pair.a.service.serve()
        assert [one["live"] for one in await listed(pair.a)] == [False]
        await send(sender, at_a, key, "from the one that is back", pair.a)
        assert await live.text() == "from the one that is back"
    await live.ended()
    mails = await at_a.fetch()
    assert await texts(at_a, mails) == [*left, "live again", "from the one that is back"]
    assert (await at_a.received([mail.id for mail in mails])).count == 0
    assert (await at_b.status()).count == 0


@pytest.mark.rule("A6")
async def test_what_one_rotates_opens_at_the_other_at_once(pair: Pair):
    holders = [await pair.holder(options) for options in HOLDERS]
    keys = [await holder.add_key() for holder in holders]
    sender = await pair.b.sender()
    for turn in range(2):
        said = await pair.a.command("identity", "rotate", "--json", "--data-dir", str(pair.a.service.data_dir))
        rotated = json.loads(said)
        news = [
            await packed(sender, holder, key, f"{turn}.{number}", rotated[through])
            for holder, key, through in zip(holders, keys, ("key", "did"), strict=True)
            for number in range(5)
        ]
        # All at once: none may be refused because another is just having the new key looked up.
        generations = [holder.generation for holder in holders for _ in range(5)]
        async with asyncio.TaskGroup() as group:
            for envelope, generation in zip(news, generations, strict=True):
                group.create_task(sender.deliver(envelope, pair.b.url, generation))
    for holder in holders:
        # Who knew the mediator before goes on as before, at either instance.
        for where in (holder, await pair.elsewhere(holder, pair.b)):
            mails = await where.fetch()
            assert sorted(await texts(where, mails)) == [f"{turn}.{number}" for turn in range(2) for number in range(5)]
    later = await pair.b.invite()
    assert later.v2 != (await pair.a.invite()).v2


@pytest.mark.rule("D12")
async def test_strangers_cannot_keep_a_rotated_key_out(pair: Pair):
    """Each envelope for a key that is not known makes an instance look for new ones, but not without bounds."""
    holder, sender = await pair.holder(HOLDERS[1]), await pair.b.sender()
    key = await holder.add_key()
    stranger = await sender.pack_v2(holder.wallet.new_did(), None, note_v2("for somebody else"))

    async def pester() -> None:
        while True:
            with pytest.raises(HttpStatusError):
                await sender.deliver(stranger, pair.b.url, Generation.V2)

    pestering = asyncio.create_task(pester())
    try:
        for turn in range(3):
            said = await pair.a.command("identity", "rotate", "--json", "--data-dir", str(pair.a.service.data_dir))
            envelope = await packed(sender, holder, key, f"{turn}", json.loads(said)["did"])
            await sender.deliver(envelope, pair.b.url, Generation.V2)
    finally:
        pestering.cancel()
        ended = (await asyncio.gather(pestering, return_exceptions=True))[0]
        assert isinstance(ended, asyncio.CancelledError), ended
    assert await texts(holder, await holder.fetch()) == ["0", "1", "2"]


@each
@pytest.mark.rule("D8", "D9")
async def test_a_connection_removed_at_one_is_gone_at_the_other(pair: Pair, options: dict[str, Any]):
    at_a, sender = await pair.holder(options), await pair.b.sender()
    key, at_b = await at_a.add_key(), await pair.elsewhere(at_a, pair.b)
    await send(sender, at_a, key, "waits", pair.b)
    async with Live.of(at_b):
        (connection,) = await listed(pair.b)
        await remove(pair.a, connection)
        for where in (at_a, at_b):
            with pytest.raises(ProblemError) as refused:
                await where.status()
            assert "not-enrolled" in refused.value.code
        # Its sender learns nothing of it (D9).
        await send(sender, at_a, key, "for nobody", pair.b)
        assert await listed(pair.a) == await listed(pair.b) == []
        with pytest.raises(AssertionError, match="does not exist"):
            await pair.b.command(
                "mailbox", "show", connection["mail_address"], "--data-dir", str(pair.b.service.data_dir)
            )
    other = await pair.holder(options)
    assert await other.change_keys([(key, "add")]) == ["success"]
    assert (await other.status()).count == 0
