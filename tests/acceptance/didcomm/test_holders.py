"""Holders of either generation, by every handshake and version: mail sent through the mediator reaches them, once."""

import asyncio
import contextlib
from typing import Any

import pytest

from pickup.client import Holder, NoAnswerError, Sender, Wallet
from tests.harness.didcomm_service import Door, Invites, note, note_v2, text, texts
from tests.harness.waiting import until

V1: list[dict[str, Any]] = [
    {"handshake": "didexchange/1.1"},
    {"handshake": "didexchange/1.0"},
    {"handshake": "connections/1.0"},
    {"handshake": "didexchange/1.1", "pickup": "4.0"},
]
V2: list[dict[str, Any]] = [
    {"mediation": "3.0", "pickup": "3.0"},
    {"mediation": "2.0", "pickup": "3.0"},
    {"mediation": "3.0", "pickup": "4.0"},
]
LIVE_WITHIN = 30.0

every = pytest.mark.parametrize("options", V1 + V2, ids=lambda options: " ".join(options.values()))
of_each_generation = pytest.mark.parametrize("options", [V1[0], V2[0]], ids=["v1", "v2"])


async def connected(door: Door, invites: Invites, options: dict[str, Any]) -> Holder:
    """Connect in the way the options say."""
    return await door.holder(invites.v1 if options in V1 else invites.v2, **options)


async def send(sender: Sender, holder: Holder, key: str, said: str) -> None:
    """Send through the holder's mediator."""
    link = holder.link
    if holder.generation == "v1":
        assert link.endpoint is not None
        await sender.send_v1(key, link.routing, link.endpoint, note(said))
    else:
        await sender.send_v2(key, link.routing[0], link.url("http"), note_v2(said))


@every
@pytest.mark.rule("D1", "D2", "D3")
async def test_mail_is_picked_up_and_stays_until_it_is_acknowledged(
    door: Door, invites: Invites, options: dict[str, Any]
):
    holder, sender = await connected(door, invites, options), await door.sender()
    await holder.mediate()
    key = await holder.add_key()
    assert (await holder.status()).count == 0
    assert await holder.fetch() == []
    for number in range(5):
        await send(sender, holder, key, f"note {number}")
    status = await holder.status()
    assert status.count == 5
    first = await holder.fetch(limit=3)
    assert await texts(holder, first) == ["note 0", "note 1", "note 2"]
    # Nothing was acknowledged, so it comes again.
    again = await holder.fetch(limit=10)
    assert [mail.id for mail in again[:3]] == [mail.id for mail in first]
    assert await texts(holder, again) == [f"note {number}" for number in range(5)]
    letter = await holder.open(again[0])
    assert letter.sender in (sender.key, sender.did)
    left = await holder.received([first[1].id, "no such id"])
    assert left.count == 4
    assert await texts(holder, await holder.fetch()) == ["note 0", "note 2", "note 3", "note 4"]
    assert (await holder.received([mail.id for mail in again])).count == 0
    assert await holder.fetch() == []


@of_each_generation
@pytest.mark.rule("D1", "A8")
async def test_mail_survives_a_kill(door: Door, invites: Invites, options: dict[str, Any]):
    holder, sender = await connected(door, invites, options), await door.sender()
    grant = await holder.mediate()
    key = await holder.add_key()
    await send(sender, holder, key, "before")
    await door.service.restart()
    await send(sender, holder, key, "after")
    assert await holder.mediate() == grant
    mails = await holder.fetch()
    assert await texts(holder, mails) == ["before", "after"]
    assert (await holder.received([mail.id for mail in mails])).count == 0


@of_each_generation
@pytest.mark.rule("D1", "D6")
async def test_a_photograph_comes_whole(door: Door, invites: Invites, options: dict[str, Any]):
    holder, sender = await connected(door, invites, options), await door.sender()
    await holder.mediate()
    key = await holder.add_key()
    photograph = "x" * 3_000_000
    await send(sender, holder, key, photograph)
    await send(sender, holder, key, "with greetings")
    assert await texts(holder, await holder.fetch(limit=1)) == [photograph]
    first, *_ = await holder.fetch()
    await holder.received([first.id])
    assert await texts(holder, await holder.fetch()) == ["with greetings"]
    async with contextlib.aclosing(holder.live()) as live, asyncio.timeout(2 * LIVE_WITHIN):
        arriving = asyncio.ensure_future(anext(live))
        await until(lambda: door_is_live(holder), LIVE_WITHIN, "live mode is on")
        await send(sender, holder, key, photograph)
        assert await text(holder, await arriving) == photograph


@every
@pytest.mark.rule("D6")
async def test_live_mail_comes_by_itself_and_the_backlog_when_asked(
    door: Door, invites: Invites, options: dict[str, Any]
):
    holder, sender = await connected(door, invites, options), await door.sender()
    await holder.mediate()
    key = await holder.add_key()
    await send(sender, holder, key, "backlog")
    async with contextlib.aclosing(holder.live()) as live:
        arriving = asyncio.ensure_future(anext(live))
        await until(lambda: door_is_live(holder), LIVE_WITHIN, "live mode is on")
        await send(sender, holder, key, "live")
        async with asyncio.timeout(LIVE_WITHIN):
            mail = await arriving
        assert await text(holder, mail) == "live"
        # Unacknowledged, it is not handed out again while the session lasts; the backlog is.
        assert await texts(holder, await holder.fetch()) == ["backlog"]
        assert (await holder.received([mail.id])).count == 1
    assert await texts(holder, await holder.fetch()) == ["backlog"]


@of_each_generation
@pytest.mark.rule("D6")
async def test_mail_that_comes_while_live_mode_begins_is_not_missed(
    door: Door, invites: Invites, options: dict[str, Any]
):
    holder, sender = await connected(door, invites, options), await door.sender()
    await holder.mediate()
    key = await holder.add_key()
    sent = [f"note {number}" for number in range(24)]
    # More than one page waits, and the rest comes while the queue is read.
    for said in sent[:12]:
        await send(sender, holder, key, said)

    async def go_on() -> None:
        for said in sent[12:]:
            await send(sender, holder, key, said)

    going_on = asyncio.create_task(go_on())
    came = []
    async with contextlib.aclosing(holder.mail()) as mails, asyncio.timeout(3 * LIVE_WITHIN):
        while len(came) < len(sent):
            mail = await anext(mails)
            came.append(await text(holder, mail))
            status = await holder.received([mail.id])
    await going_on
    assert sorted(came) == sorted(sent)
    assert came[:12] == sent[:12]
    assert status.count == 0


async def door_is_live(holder: Holder) -> bool:
    """Whether the mediator says so on the very socket."""
    return holder.on_socket and (await holder.status()).live is True


@of_each_generation
@pytest.mark.rule("D6", "A8")
async def test_a_dead_socket_loses_nothing(door: Door, invites: Invites, options: dict[str, Any]):
    holder, sender = await connected(door, invites, options), await door.sender()
    await holder.mediate()
    key = await holder.add_key()
    async with contextlib.aclosing(holder.live()) as live:
        arriving = asyncio.ensure_future(anext(live))
        await until(lambda: door_is_live(holder), LIVE_WITHIN, "live mode is on")
        await door.service.kill()
        with pytest.raises(NoAnswerError):
            await arriving
    await door.service.serve()
    await send(sender, holder, key, "while it was gone")
    async with contextlib.aclosing(holder.live()) as live:
        arriving = asyncio.ensure_future(anext(live))
        await until(lambda: door_is_live(holder), LIVE_WITHIN, "live mode is on")
        mails = await holder.fetch()
        assert await texts(holder, mails) == ["while it was gone"]
        await send(sender, holder, key, "now")
        async with asyncio.timeout(LIVE_WITHIN):
            assert await text(holder, await arriving) == "now"


@pytest.mark.rule("D7")
async def test_a_batch_is_acknowledged_by_the_next_request(door: Door, invites: Invites):
    holder, sender = await door.holder(invites.v1, pickup="1.0"), await door.sender()
    await holder.mediate()
    key = await holder.add_key()
    for number in range(3):
        await send(sender, holder, key, f"note {number}")
    assert (await holder.status()).count == 3
    assert await texts(holder, await holder.fetch(limit=2)) == ["note 0", "note 1"]
    assert await texts(holder, await holder.fetch(limit=2)) == ["note 2"]
    assert (await holder.status()).count == 0


async def test_a_wallet_file_carries_on(door: Door, invites: Invites, tmp_path: Any):
    path = tmp_path / "wallet.json"
    holder, sender = await door.holder(invites.v1, wallet=Wallet.load(path)), await door.sender()
    await holder.mediate()
    key = await holder.add_key()
    assert path.stat().st_mode & 0o777 == 0o600
    await send(sender, holder, key, "for later")
    async with Holder.resume(Wallet.load(path)) as later:
        assert await texts(later, await later.fetch()) == ["for later"]
