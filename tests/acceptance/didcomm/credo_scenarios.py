"""What is asked of wallets on Credo, whatever the edition."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

from tests.acceptance.didcomm.credo import LIVE, STRATEGIES, Wallet, WalletProcess
from tests.acceptance.didcomm.door import Door
from tests.acceptance.service import until

SETTINGS = {"MEDIATOR_DIDCOMM__LIVE_LEASE_SECONDS": "300"}
"""Wallets are slow to acknowledge where many tests share the machine."""
ONLINE = 5
OFFLINE = 25
BURST = 200
BURST_WITHIN = 120.0
EMPTIED_WITHIN = 30.0


async def emptied(door: Door) -> None:
    """Wait until the mediator keeps nothing any more."""

    async def is_empty() -> bool:
        said = await door.command("connections", "list", "--json", "--data-dir", str(door.service.data_dir))
        return not any(row["messages"] for row in json.loads(said)["connections"])

    await until(is_empty, EMPTIED_WITHIN, "what was picked up is removed")


async def restarted(door: Door) -> None:
    """End the mediator by SIGKILL, and start it again."""
    await door.service.kill()
    door.service.start()
    await door.service.ready()


async def mail_by_each_strategy(edition: str, door: Door, invitation: str, folder: Path, stack: AsyncExitStack) -> None:
    """A friend and a wallet for each strategy write to each other, while the wallets and the mediator are killed."""
    theirs = await WalletProcess.running(edition, folder / "theirs", stack)
    ours = await WalletProcess.running(edition, folder / "ours", stack)
    friend = theirs.wallet("friend", invitation, LIVE)
    wallets = [ours.wallet(strategy, invitation, strategy) for strategy in STRATEGIES]
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
    await restarted(door)
    await ours.start()
    await asyncio.gather(*(wallet.open() for wallet in wallets))
    await asyncio.gather(*(wallet.shows(texts) for wallet, texts in offline.items()))

    # Who has stayed reconnects by itself.
    await both_ways("back", 1)
    await restarted(door)
    await both_ways("again", 1)
    await emptied(door)
    assert not door.service.complaints()


async def live_burst(edition: str, door: Door, invitation: str, folder: Path, stack: AsyncExitStack) -> None:
    """In live mode nothing is shown twice while the session lasts, however much comes at once."""
    process = await WalletProcess.running(edition, folder / "wallets", stack)
    friend = process.wallet("friend", invitation, LIVE)
    wallet = process.wallet("wallet", invitation, LIVE)
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
