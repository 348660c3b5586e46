"""Sends envelopes by HTTP POST, which may return one, and by WebSocket frames; gets invitations."""

import asyncio
import io
from typing import Any

import aiohttp
import orjson

from pickup.client.errors import ClientError, HttpStatusError, NoAnswerError
from pickup.rules.records import Generation

MEDIA_TYPES = {Generation.V1: "application/didcomm-envelope-enc", Generation.V2: "application/didcomm-encrypted+json"}
MAX_BYTES = 16 * 1024 * 1024
SHOWN = 500
"""Characters of an error body that are shown."""


async def post(
    session: aiohttp.ClientSession, url: str, envelope: bytes, generation: Generation, seconds: float
) -> bytes | None:
    """Post an envelope and return the one in the response, if any.

    Raises :class:`HttpStatusError` for a status other than 2xx, :class:`NoAnswerError` without a response.
    """
    try:
        async with session.post(
            url,
            data=io.BytesIO(envelope),
            headers={"Content-Type": MEDIA_TYPES[generation]},
            timeout=aiohttp.ClientTimeout(seconds),
            allow_redirects=False,
        ) as answer:
            body = await _read(answer, url)
            if not 200 <= answer.status < 300:
                raise HttpStatusError(answer.status, body[:SHOWN].decode(errors="replace"))
            return bytes(body) or None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NoAnswerError(f"{url}: {error or type(error).__name__}") from error


async def get_json(session: aiohttp.ClientSession, url: str, seconds: float) -> Any:
    """Get a JSON value; for a redirect, the URL where it leads, as text.

    Raises as :func:`post`, and :class:`ClientError` for a body that is not JSON.
    """
    try:
        async with session.get(
            url,
            headers={"Accept": "application/json"},
            timeout=aiohttp.ClientTimeout(seconds),
            allow_redirects=False,
        ) as answer:
            if 300 <= answer.status < 400 and "Location" in answer.headers:
                return answer.headers["Location"]
            body = await _read(answer, url)
            if answer.status != 200:
                raise HttpStatusError(answer.status, body[:SHOWN].decode(errors="replace"))
            return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ClientError(f"{url}: expected JSON: {error}") from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise NoAnswerError(f"{url}: {error or type(error).__name__}") from error


async def _read(answer: aiohttp.ClientResponse, url: str) -> bytearray:
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > MAX_BYTES:
            raise ClientError(f"{url} answered more than {MAX_BYTES} bytes")
    return body


class ClientSocket:
    """An open WebSocket; one envelope a frame."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    @classmethod
    async def connect(cls, session: aiohttp.ClientSession, url: str, seconds: float) -> "ClientSocket":
        """Open one; :class:`NoAnswerError` when that fails."""
        try:
            # The heartbeat detects a dead mediator; aiohttp answers the mediator's pings.
            async with asyncio.timeout(seconds):
                return cls(await session.ws_connect(url, max_msg_size=MAX_BYTES, heartbeat=30))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoAnswerError(f"{url}: {error or type(error).__name__}") from error

    async def send(self, envelope: bytes) -> None:
        """Send a frame."""
        try:
            await self._socket.send_bytes(envelope)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise NoAnswerError(f"the socket is closed: {error}") from error

    async def receive(self) -> bytes | None:
        """Return the next frame; None when the socket has been closed."""
        frame = await self._socket.receive()
        match frame.type:
            case aiohttp.WSMsgType.BINARY:
                return bytes(frame.data)
            case aiohttp.WSMsgType.TEXT:
                return str(frame.data).encode()
        return None

    @property
    def close_code(self) -> int | None:
        """The close code of the other side, if it closed."""
        return self._socket.close_code

    async def close(self) -> None:
        """Close it."""
        await self._socket.close()
