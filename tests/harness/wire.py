"""What every test with a NATS client needs to know of nats-py, and of the service's own connections."""

import asyncio
from typing import Final

from nats.aio.client import Client

CONTROL_KEY: Final = bytes(range(32))
"""What the connections of one test share that speak to each other on control subjects."""


async def flushed(client: Client) -> None:
    """Wait until the server has all that the client sent.

    nats-py writes the PING of a flush past what still waits to be sent; only a second one comes after that.
    """
    await client.flush()
    await client.flush()


def transport_of(client: Client) -> asyncio.WriteTransport:
    """Return the socket below a client, to break it or to stop reading; the library shows it nowhere."""
    return client._transport._io_writer.transport
