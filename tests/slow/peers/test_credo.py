"""Wallets on Credo as they are: connected by an ordinary invitation, in each of their strategies."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.harness.didcomm_service import Door, Invites
from tests.harness.service import Services
from tests.slow.peers.node_wallets import Wallet, WalletProcess, emptied

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("edition", ["0.5", "0.6"])]
LIVE = "PickUpV2LiveMode"
STRATEGIES = (LIVE, "PickUpV2", "PickUpV1", "Implicit")
"""The ways in which such wallets pick up, by Credo's own names."""
SETTINGS = {"MEDIATOR_DIDCOMM__LIVE_LEASE_SECONDS": "300"}
"""Wallets are slow to acknowledge where many tests share the machine."""
ONLINE = 5
OFFLINE = 25
BURST = 200
BURST_WITHIN = 120.0


@pytest.fixture
async def door(services: Services, stack: AsyncExitStack) -> Door:
    """Start a service of the test's own: the test looks at everything in it."""
    return await Door.opened(services, stack, settings=SETTINGS)


@pytest.fixture
async def invites(door: Door) -> Invites:
    """Make an invitation to it."""
    return await door.invite()


@pytest.mark.rule("A8", "D2", "D3", "D5", "D6", "D7")
async def test_each_strategy_gets_all_mail_after_kills(
    edition: str, door: Door, invites: Invites, tmp_path: Path, stack: AsyncExitStack
):
    theirs = await WalletProcess.running(f"credo/{edition}", tmp_path / "theirs", stack)
    ours = await WalletProcess.running(f"credo/{edition}", tmp_path / "ours", stack)
    friend = theirs.wallet("friend", invitation=invites.v1_short, strategy=LIVE)
    wallets = [ours.wallet(strategy, invitation=invites.v1, strategy=strategy) for strategy in STRATEGIES]
    await asyncio.gather(*(wallet.open() for wallet in (friend, *wallets)))
    to_friend = await connected(friend, wallets)

    async def both_ways(word: str, count: int) -> None:
        """Messages from the friend to each wallet, and one back when they are there."""

        async def round_trip(wallet: Wallet) -> None:
            texts = [f"{word} {number} for {wallet.name}" for number in range(count)]
            await friend.write(friend.connections[hello(wallet)], texts)
            await wallet.shows(texts)
            await wallet.write(to_friend[wallet.name], [f"{word} from {wallet.name}"])
            await friend.shows([f"{word} from {wallet.name}"])

        await asyncio.gather(*map(round_trip, wallets))

    await both_ways("online", ONLINE)

    await ours.kill()
    offline = {wallet: [f"offline {number} for {wallet.name}" for number in range(OFFLINE)] for wallet in wallets}
    for wallet, texts in offline.items():
        await friend.write(friend.connections[hello(wallet)], texts)
    await door.service.restart()
    await ours.start()
    await asyncio.gather(*(wallet.open() for wallet in wallets))
    await asyncio.gather(*(wallet.shows(texts) for wallet, texts in offline.items()))

    # Who has stayed reconnects by itself.
    await both_ways("back", 1)
    await door.service.restart()
    await both_ways("again", 1)
    await emptied(door)
    assert not door.service.complaints()


@pytest.mark.rule("D6")
async def test_a_live_burst_is_shown_once(
    edition: str, door: Door, invites: Invites, tmp_path: Path, stack: AsyncExitStack
):
    process = await WalletProcess.running(f"credo/{edition}", tmp_path / "wallets", stack)
    friend = process.wallet("friend", invitation=invites.v1, strategy=LIVE)
    wallet = process.wallet("wallet", invitation=invites.v1, strategy=LIVE)
    await asyncio.gather(friend.open(), wallet.open())
    await connected(friend, [wallet])
    texts = [f"burst {number}" for number in range(BURST)]
    await friend.write(friend.connections[hello(wallet)], texts)
    await wallet.shows(texts, BURST_WITHIN)
    await emptied(door)
    # Whatever is still under way comes before this.
    await friend.write(friend.connections[hello(wallet)], ["last"])
    await wallet.shows(["last"])
    again = wallet.repeated(texts)
    assert not again, f"{len(again)} of {BURST} were shown more than once: {again}"
    assert not door.service.complaints()


async def connected(friend: Wallet, wallets: list[Wallet]) -> dict[str, str]:
    """Have wallets connect to a friend and greet it; return their connections to it, by name."""
    to_friend = {}
    for wallet in wallets:
        to_friend[wallet.name] = await wallet.accept(await friend.invite())
        await wallet.write(to_friend[wallet.name], [hello(wallet)])
    await friend.shows(map(hello, wallets))
    return to_friend


def hello(wallet: Wallet) -> str:
    """Return what a wallet greets its friend with."""
    return f"hello from {wallet.name}"
