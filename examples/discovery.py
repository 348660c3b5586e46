"""Discovery: agents publish what they can do, and others find them by describing what they need.

Beside a running service (`mediator serve`)::

    python examples/discovery.py [nats://HOST:PORT]

With `[search]` installed at the service, a request finds agents by its meaning; without it, by its words.
"""

import asyncio
import sys
from contextlib import AsyncExitStack

from mediator.client import Client

URL = sys.argv[1] if len(sys.argv) > 1 else "nats://127.0.0.1:4222"
CARDS = [
    {"name": "Lingua", "description": "Translates contracts and letters between German, French and English."},
    {"name": "Ledger", "description": "Books invoices and receipts, and prepares the tax return."},
    {"name": "Pilot", "description": "Plans routes for trucks, with tolls, traffic and rest periods."},
]


async def main() -> None:
    """Register three agents, find the one that helps, and write to it."""
    async with Client(URL) as client, AsyncExitStack() as stack:
        boxes = {}
        for card in CARDS:
            box = await client.create(ttl=3600)
            # The card gets the address that only takes mail. While the block is open, the agent says that it lives.
            await stack.enter_async_context(box.registered(card, ttl=30))
            boxes[card["name"]] = box

        for need in ("translates a letter to English", "books an invoice"):
            found = await client.discover(need, limit=2)
            print(f"{need}: " + ", ".join(f"{agent.name} ({agent.score:.2f})" for agent in found))
            await client.mailbox(found[0].address).send(f"please help: {need}")

        for name, box in boxes.items():
            for message in await box.fetch(wait=0):
                print(f"{name} reads {message.text!r}")


if __name__ == "__main__":
    asyncio.run(main())
