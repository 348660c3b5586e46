"""Request and reply between agents that are never online together: their mailboxes keep both.

Beside a running service (`mediator serve`)::

    python examples/request_reply.py [nats://HOST:PORT]

That asks, answers and reads, one after the other. With `ask`, `answer` or `read` as its first word it does that one.

A request says in `reply_to` where the answer is wanted. An answer whose `key` names its request replaces an earlier
one, so a request that is answered twice, by an agent that crashed in between, has one answer.
"""

import asyncio
import sys

from mediator.client import Client

WORDS = sys.argv[1:]
URL = WORDS.pop() if WORDS and "://" in WORDS[-1] else "nats://127.0.0.1:4222"
ORACLE, ASKER = "example.oracle", "example.asker"


async def ask(client: Client) -> None:
    """Send a request; nobody has to be there."""
    await client.create(ASKER, exist_ok=True)
    oracle = await client.create(ORACLE, exist_ok=True)
    # Sent again, after a crash for instance, a request with the same dedup_id is stored once.
    number = await oracle.send({"question": "what is 6 * 7?"}, reply_to=ASKER, dedup_id="question 1")
    print(f"asked in message {number}")


async def answer(client: Client) -> None:
    """Answer what has been asked meanwhile."""
    oracle = await client.create(ORACLE, exist_ok=True)
    for request in await oracle.fetch(group="oracle"):
        question = request.json()["question"]
        await oracle.reply(request, {"question": question, "answer": 42}, key=f"answer-{request.msg_id}")
        await oracle.ack(request, group="oracle")  # once the answer is on disk
        print(f"answered {question!r}")


async def read(client: Client) -> None:
    """Read the answers that have come."""
    box = await client.create(ASKER, exist_ok=True)
    for message in await box.fetch(group="asker"):
        reply = message.json()
        print(reply["question"], reply["answer"])
        await box.ack(message, group="asker")


async def main() -> None:
    """Do what the words say, or all three."""
    steps = {"ask": ask, "answer": answer, "read": read}
    for step in WORDS or steps:
        async with Client(URL) as client:
            await steps[step](client)


if __name__ == "__main__":
    asyncio.run(main())
