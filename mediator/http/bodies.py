"""Reads what other servers answer, which may come in pieces and have no end."""

from aiohttp import ClientResponse


async def read_body(response: ClientResponse, max_bytes: int) -> bytes:
    """Return the body of a response, or its first ``max_bytes`` bytes where it is longer.

    aiohttp's own ``content.read(n)`` returns what is there already, such as the first segment of TCP.
    """
    body = bytearray()
    while len(body) < max_bytes and (piece := await response.content.read(max_bytes - len(body))):
        body += piece
    return bytes(body)
