"""A stock NATS client: it knows subjects, bytes and headers, and nothing of mailboxes."""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tests.harness.service import Service
from tests.harness.wire import flushed

PREFIX = "$mq9.AI."
PATIENCE = 20.0
"""Seconds until what should come is missing."""

Body = bytes | Mapping[str, Any]


class Stock:
    """Publishes, asks and subscribes; subjects are given without their prefix."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    async def connect(cls, url: str | list[str], stack: AsyncExitStack, **options: Any) -> "Stock":
        """Connect until the end of the test."""

        async def silent(_error: Exception) -> None:
            """What breaks is seen by what does not come."""

        chosen: dict[str, Any] = {
            "error_cb": silent, "max_reconnect_attempts": -1, "reconnect_time_wait": 0.05, **options
        }  # fmt: skip
        client = await nats.connect(url, **chosen)
        stack.push_async_callback(client.close)
        return cls(client)

    async def request(self, subject: str, body: Body = b"", **headers: str) -> dict[str, Any]:
        """Ask, and return the reply, whatever it says."""
        answer = await self.client.request(PREFIX + subject, _bytes(body), timeout=PATIENCE, headers=headers or None)
        reply: dict[str, Any] = json.loads(answer.data)
        return reply

    async def ask(self, subject: str, body: Body = b"", **headers: str) -> dict[str, Any]:
        """Ask for what must succeed."""
        reply = await self.request(subject, body, **headers)
        assert reply["error"] == "", (subject, reply)
        return reply

    async def refused(self, subject: str, body: Body = b"", **headers: str) -> str:
        """Ask for what must fail, and return why."""
        reply = await self.request(subject, body, **headers)
        assert reply["error"], (subject, reply)
        return str(reply["error"])

    async def create(self, **fields: Any) -> str:
        """Make a mailbox and return its address."""
        return str((await self.ask("MAILBOX.CREATE", fields))["mail_id"])

    async def publish(self, subject: str, body: Body = b"", **headers: str) -> None:
        """Publish, and wait for nothing."""
        await self.client.publish(PREFIX + subject, _bytes(body), headers=headers or None)

    async def drain(self) -> None:
        """Say goodbye; what came before has been confirmed by then, and goes to nobody else (E7)."""
        await flushed(self.client)
        await self.client.drain()

    async def subscribe(self, subject: str, queue: str = "") -> Subscription:
        """Subscribe."""
        subscription = await self.client.subscribe(PREFIX + subject, queue=queue)
        await flushed(self.client)
        return subscription


def _bytes(body: Body) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


async def taken(subscription: Subscription, count: int) -> list[Msg]:
    """Return the next so many messages."""
    return [await subscription.next_msg(timeout=PATIENCE) for _ in range(count)]


async def bodies(subscription: Subscription, count: int) -> list[bytes]:
    """Return what the next so many messages hold."""
    return [message.data for message in await taken(subscription, count)]


async def metric(service: Service, name: str) -> float:
    """Read a metric without labels."""
    _, page = await service.get("/metrics")
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} "))


def id_of(message: Msg) -> int:
    """Return the number of a message that was pushed (E6)."""
    return int(message.headers["mq9-msg-id"])


def word_of(message: Msg) -> str:
    """Return the lane word on a subject."""
    return message.subject.rpartition(".")[2]
