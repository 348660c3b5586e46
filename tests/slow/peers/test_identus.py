"""Wallets on the Identus SDK as they are, which know the mediator by its DID alone and speak DIDComm v2."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import orjson
import pytest

from tests.harness.didcomm_service import Door
from tests.harness.service import Services
from tests.slow.peers.node_wallets import WalletProcess, emptied

pytestmark = pytest.mark.timeout(300)
MIB = 1024 * 1024
OFFLINE = 25
"""More than such a wallet asks for at once."""


@pytest.mark.rule("A8", "D2", "D3", "D4", "D6", "D7")
async def test_two_wallets_get_all_mail_after_kills(services: Services, tmp_path: Path, stack: AsyncExitStack):
    door = await Door.opened(services, stack)
    status, said = await door.service.get("/didcomm/did")
    assert status == 200
    dids = orjson.loads(said)
    theirs = await WalletProcess.running("identus", tmp_path / "theirs", stack)
    ours = await WalletProcess.running("identus", tmp_path / "ours", stack)
    polling = ours.wallet("polling", mediator=dids["did"], live=False)
    # Before it goes live it looks for the WebSocket in the DID.
    live = theirs.wallet("live", mediator=dids["socket_did"], live=True)
    to_polling, to_live = await asyncio.gather(polling.open(), live.open())

    async def both_ways(word: str) -> None:
        for sender, to, receiver in ((live, to_polling, polling), (polling, to_live, live)):
            text = f"{word} for {receiver.name}"
            await sender.write(to, [text])
            await receiver.shows([text if len(text) < MIB else f"{len(text)} times x"])

    await both_ways("online")
    for size in (MIB, 4 * MIB):
        await both_ways("x" * size)

    await ours.kill()
    offline = [f"offline {number}" for number in range(OFFLINE)]
    await live.write(to_polling, offline)
    await door.service.restart()
    await ours.start()
    assert await polling.open() == to_polling
    await polling.shows(offline)

    # The SDK does not open its socket again; the wallet does, and is sent the rest.
    await theirs.kill()
    await theirs.start()
    assert await live.open() == to_live
    await both_ways("again")
    await emptied(door)
    assert not door.service.complaints()
