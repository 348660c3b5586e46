"""What tests of Spark do with the mailboxes of a service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pyspark.sql import DataFrame

from tests.harness.client import Client, payload_of
from tests.harness.service import Service


class Mail:
    """A service and what is in its mailboxes."""

    def __init__(self, service: Service, client: Client) -> None:
        self.service = service
        self.client = client

    async def ask(self, verb: str, **body: Any) -> dict[str, Any]:
        answer = await self.client.ask(verb, body)
        assert answer.error == "", answer
        return answer.body

    async def create(self, *addresses: str) -> None:
        for address in addresses:
            await self.ask("MAILBOX.CREATE", name=address)

    async def items(self, address: str) -> list[dict[str, Any]]:
        """Return all that a mailbox holds, by msg_id, with payloads as bytes."""
        return [item | {"payload": payload_of(item)} for item in await self.client.query_all(address)]

    async def payloads(self, address: str) -> list[bytes]:
        return [item["payload"] for item in await self.items(address)]

    def write(self, frame: DataFrame, **options: Any) -> None:
        """Send a frame; an option's underscore stands for a dot."""
        named = {name.replace("_", "."): value for name, value in options.items()}
        frame.write.format("mq9").mode("append").options(**{"nats.url": self.service.nats_url}, **named).save()


@asynccontextmanager
async def mail_of(service: Service) -> AsyncIterator[Mail]:
    """Connect to a service."""
    client = await Client.connect(service.nats_url, within=40)
    try:
        yield Mail(service, client)
    finally:
        await client.close()
