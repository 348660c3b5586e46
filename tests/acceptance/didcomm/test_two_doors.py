"""One queue, two doors: what comes by NATS is picked up by wallets, what is forwarded is fetched by NATS (D11)."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from pickup.client import DeliveredMessage, Holder, Sender, Wallet
from pickup.client.conversation import ClientResources
from pickup.client.sender import forward_v2
from pickup.rules.records import Generation
from tests.harness.client import Answer, Client, payload_of
from tests.harness.didcomm_service import Door, Invites, note, note_v2, text, texts
from tests.harness.live import Live
from tests.harness.waiting import until

DELAY = 2.5
EXPIRES = 5
SKEW = 300
"""Seconds for which what has just expired is still taken (D12)."""
GONE_WITHIN = 30.0
WAIT_MS = 20_000

each = pytest.mark.parametrize("options", [{"handshake": "didexchange/1.1"}, {"mediation": "3.0"}], ids=["v1", "v2"])


@pytest.fixture
async def nats(door: Door, stack: AsyncExitStack) -> AsyncIterator[Client]:
    """An agent that knows nothing of DIDComm."""
    client = await Client.connect(door.service.nats_url, tries=3)
    yield client
    await client.close()


async def connected(door: Door, invites: Invites, options: dict[str, Any]) -> tuple[Holder, str]:
    """Connect a holder with mediation; return it and its key."""
    holder = await door.holder(invites.v1 if "handshake" in options else invites.v2, **options)
    await holder.mediate()
    return holder, await holder.add_key()


async def sealed(sender: Sender, holder: Holder, key: str, said: str) -> bytes:
    """Seal a note for a holder, with no forward around it."""
    if holder.generation is Generation.V1:
        return await sender.pack_v1(key, [], note(said))
    return await sender.pack_v2(key, None, note_v2(said))


async def forward(sender: Sender, holder: Holder, key: str, said: str) -> None:
    """Send a note through the holder's mediator."""
    link = holder.link
    if holder.generation is Generation.V1:
        await sender.send_v1(key, link.routing, link.url("http"), note(said))
    else:
        await sender.send_v2(key, link.routing[0], link.url("http"), note_v2(said))


async def operate(door: Door, *words: str) -> Any:
    """Run a command of the operator's and return its answer."""
    return json.loads(await door.command(*words, "--json", "--data-dir", str(door.service.data_dir)))


async def mailbox_of_newest(door: Door) -> str:
    """Return the address of the newest connection's mailbox, as an operator finds it."""
    connections = (await operate(door, "connections", "list", "--limit", "1000"))["connections"]
    return str(max(connections, key=lambda row: row["connection"])["mail_address"])


async def opened(holder: Holder, answer: Answer) -> list[str]:
    """Open what NATS handed out."""
    assert not answer.error, answer.error
    return [await text(holder, DeliveredMessage("", payload_of(item))) for item in answer.messages]


@each
@pytest.mark.rule("D3", "D6", "D11", "A2")
async def test_an_envelope_that_comes_by_nats_is_picked_up(
    door: Door, invites: Invites, nats: Client, options: dict[str, Any]
):
    (holder, key), sender = await connected(door, invites, options), await door.sender()
    address = await mailbox_of_newest(door)
    envelopes = [await sealed(sender, holder, key, said) for said in ("plain", "live", "urgent")]
    sent = await nats.send(address, envelopes[0])
    assert (sent.error, sent.body["msg_id"]) == ("", 0)
    # It is the key's mail, as if it had been forwarded.
    assert (await holder.status(key)).count == 1
    assert await texts(holder, await holder.fetch(key=key)) == ["plain"]
    async with Live.of(holder) as live:
        assert not (await nats.send(address, envelopes[1])).error
        assert await live.text() == "live"
    await live.ended()
    assert not (await nats.send(address, envelopes[2], priority="urgent")).error
    mails = await holder.fetch()
    assert await texts(holder, mails) == ["urgent", "plain", "live"]
    assert [mail.envelope for mail in mails] == [envelopes[2], *envelopes[:2]]
    assert (await holder.received([mail.id for mail in mails])).count == 0
    assert await nats.query_all(address) == []


@each
@pytest.mark.rule("D1", "D11", "Q1")
async def test_nats_and_the_operator_see_the_queue(door: Door, invites: Invites, nats: Client, options: dict[str, Any]):
    (holder, key), sender = await connected(door, invites, options), await door.sender()
    address = await mailbox_of_newest(door)
    for number in range(3):
        await forward(sender, holder, key, f"note {number}")
    assert await opened(holder, await nats.query(address)) == [f"note {number}" for number in range(3)]
    first, *_ = await holder.fetch(limit=1)
    await holder.received([first.id])
    await door.service.restart()
    assert await opened(holder, await nats.query(address)) == ["note 1", "note 2"]
    view = await operate(door, "mailbox", "show", address)
    assert (view["retention"], view["messages"], view["next_id"]) == ("until_ack", 2, 3)
    shown = await door.command("mailbox", "show", address, "--data-dir", str(door.service.data_dir))
    assert "DIDComm mediation" in shown
    # Who knows the address may delete by NATS (A7), and the wallet is told the truth.
    assert (await nats.delete(address, 1)).body["deleted"]
    assert (await holder.status()).count == 1
    assert await texts(holder, await holder.fetch()) == ["note 2"]


@each
@pytest.mark.rule("D9", "D11", "F2")
async def test_mail_for_an_attached_key_is_fetched_by_a_group(
    door: Door, invites: Invites, nats: Client, options: dict[str, Any]
):
    # The holder serves only to open: its key is known to the mediator by the operator alone.
    (holder, own), sender = await connected(door, invites, options), await door.sender()
    key = holder.wallet.new_key() if holder.generation is Generation.V1 else holder.wallet.new_did()
    await forward(sender, holder, key, "before it was attached")
    inbox, archive = f"inbox.{holder.generation.value}", f"archive.{holder.generation.value}"
    for name, retention in ((inbox, "until_ack"), (archive, "keep")):
        assert not (await nats.create(name=name, retention=retention)).error
    with pytest.raises(AssertionError, match="until_ack"):
        await operate(door, "keys", "attach", key, archive)
    with pytest.raises(AssertionError, match="keylist"):
        await operate(door, "keys", "attach", own, inbox)
    await operate(door, "keys", "attach", key, inbox)

    waiting = asyncio.ensure_future(nats.fetch(inbox, "crew", deliver="earliest", max_wait_ms=WAIT_MS))
    await forward(sender, holder, key, "wakes a FETCH")
    got = await waiting
    assert await opened(holder, got) == ["wakes a FETCH"]
    await forward(sender, holder, key, "waits")
    await door.service.restart()
    attached = (await operate(door, "keys", "list"))["keys"]
    assert [row["mail_address"] for row in attached].count(inbox) == 1
    got = await nats.fetch(inbox, "crew", max_wait_ms=0)
    assert await opened(holder, got) == ["wakes a FETCH", "waits"]
    assert not (await nats.ack(inbox, "crew", [item["msg_id"] for item in got.messages])).error
    await forward(sender, holder, key, "after the restart")
    assert await opened(holder, await nats.fetch(inbox, "crew", max_wait_ms=WAIT_MS)) == ["after the restart"]
    # An attached key does not take what else such a mailbox is used for.
    assert not (await nats.send(inbox, b"no envelope")).error

    await operate(door, "keys", "detach", key)
    await forward(sender, holder, key, "for nobody")
    left = await nats.query_all(inbox)
    assert len(left) == 2
    assert payload_of(left[1]) == b"no envelope"
    assert (await holder.status()).count == 0


@pytest.mark.rule("D11", "S4")
async def test_delayed_mail_comes_in_its_time_by_either_door(door: Door, invites: Invites, nats: Client):
    (holder, key), sender = await connected(door, invites, {}), await door.sender()
    address = await mailbox_of_newest(door)
    async with Live.of(holder) as live:
        sent_at = time.time()
        await forward_with(holder, sender, key, "forwarded", delay_milli=int(DELAY * 1000))
        assert not (await nats.send(address, await sealed(sender, holder, key, "by NATS"), delay=3)).error
        assert (await holder.status()).count == 0
        assert await holder.fetch() == []
        assert await live.text() == "forwarded"
        assert time.time() - sent_at >= DELAY
        assert await live.text() == "by NATS"
        assert time.time() - sent_at >= 3
    due_at = time.time() + DELAY
    await forward_with(holder, sender, key, "over a kill", delay_milli=int(DELAY * 1000))
    await door.service.restart()

    async def is_there() -> bool:
        return (await holder.status()).count == 3

    await until(is_there, GONE_WITHIN, "the delayed message is there")
    assert time.time() >= due_at
    assert await texts(holder, await holder.fetch()) == ["forwarded", "by NATS", "over a kill"]


@pytest.mark.rule("D9", "D11", "S5")
async def test_mail_whose_time_is_over_is_gone_by_either_door(door: Door, invites: Invites, nats: Client):
    (holder, key), sender = await connected(door, invites, {}), await door.sender()
    address = await mailbox_of_newest(door)
    ends_at = int(time.time()) + EXPIRES
    await forward_with(holder, sender, key, "forwarded", expires_time=ends_at)
    assert not (await nats.send(address, await sealed(sender, holder, key, "by NATS"), ttl=EXPIRES)).error
    # Nobody is told that a forward comes too late, or will come too late (D9).
    await forward_with(holder, sender, key, "late", expires_time=ends_at - EXPIRES - SKEW)
    await forward_with(holder, sender, key, "never", expires_time=ends_at, delay_milli=60_000)
    assert await texts(holder, await holder.fetch()) == ["forwarded", "by NATS"]
    await door.service.restart()

    async def is_empty() -> bool:
        return (await holder.status()).count == 0

    await until(is_empty, GONE_WITHIN, "nothing is left")
    assert time.time() >= ends_at
    assert await holder.fetch() == []
    assert await nats.query_all(address) == []
    await forward(sender, holder, key, "next")
    assert await texts(holder, await holder.fetch()) == ["next"]


async def forward_with(
    holder: Holder,
    sender: Sender,
    key: str,
    said: str,
    *,
    expires_time: int | None = None,
    delay_milli: int | None = None,
) -> None:
    """Forward a note of v2 with a time."""
    routing = holder.link.routing[0]
    message = forward_v2(key, [await sealed(sender, holder, key, said)], routing)
    if expires_time is not None:
        message["expires_time"] = expires_time
    if delay_milli is not None:
        message["body"]["delay_milli"] = delay_milli
    tools = ClientResources(Wallet())
    try:
        envelope = await tools.envelopes.seal_v2(message, routing, None)
    finally:
        await tools.close()
    await sender.deliver(envelope, holder.link.url("http"), Generation.V2)
