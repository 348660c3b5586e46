"""A wallet behind a mediator: it connects by an invitation, is offline while somebody writes, and picks its mail up.

Beside a running service (`mediator serve`), from the same folder::

    python examples/wallet_pickup.py "$(mediator invite --link)"

Any other mediator's link that speaks DIDComm v1 (Aries) does as well. The mediator reads none of it: each message is
sealed for a key of the wallet, and then for the mediator around that. A v2 link, or a mediator's DID, makes this
DIDComm v2; `sender.send_v2` is its way of writing.
"""

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

from pickup.client import Grant, Holder, Sender, Wallet


async def write(key: str, grant: Grant, text: str) -> None:
    """What another agent does. It has the key and the address from the wallet's own invitation."""
    note = {"@type": "https://didcomm.org/basicmessage/1.0/message", "@id": text, "content": text}
    async with Sender() as sender:
        await sender.send_v1(key, grant.routing, grant.endpoint, note)


async def main(invitation: str) -> None:
    """Connect, go offline, come back."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "wallet.json")  # the keys are kept there, with mode 600
        async with await Holder.connect(invitation, wallet=Wallet.load(file), label="example") as holder:
            grant = await holder.mediate()
            key = await holder.add_key()
            print("connected, reached at", grant.endpoint)

        await write(key, grant, "you were away")

        async with Holder.resume(Wallet.load(file)) as holder:
            writing = asyncio.create_task(write(key, grant, "now you are there"))
            # What waits, and then what arrives, on a WebSocket. `fetch` asks once instead, over HTTP.
            async with contextlib.aclosing(holder.mail()) as arriving:
                for _ in range(2):
                    mail = await anext(arriving)
                    print("picked up:", (await holder.open(mail)).message["content"])
                    await holder.received([mail.id])  # until then the mediator keeps it
            await writing
            await holder.remove_key(key)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
