"""What every test with a NATS client needs to know of nats-py."""

from nats.aio.client import Client


async def flushed(client: Client) -> None:
    """Wait until the server has all that the client sent.

    nats-py writes the PING of a flush past what still waits to be sent; only a second one comes after that.
    """
    await client.flush()
    await client.flush()
