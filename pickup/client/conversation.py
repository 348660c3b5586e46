"""Requests and replies with one mediator, over HTTP, or over a WebSocket while one is open."""

import asyncio
import contextlib
import io
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

import aiohttp
import orjson

from mediator.errors import MediatorError
from mediator.http.bodies import read_body
from mediator.http.guard import Guard
from pickup.client.plaintext import (
    ClientError,
    HttpStatusError,
    Json,
    NoAnswerError,
    Plaintext,
    ProblemError,
    id_of,
    read,
)
from pickup.client.wallet import Link, Wallet
from pickup.dids.document import DidDocument, DidResolver
from pickup.dids.resolver import CachingResolver, DidWebResolver
from pickup.envelope import Envelopes, OpenedEnvelope
from pickup.envelope.library import DIDCOMM_MESSAGING, LibraryEnvelopes, load_library
from pickup.message import encode
from pickup.rules.names import canonical
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
            return body or None
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


async def _read(answer: aiohttp.ClientResponse, url: str) -> bytes:
    body = await read_body(answer, MAX_BYTES + 1)
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


MAX_HOPS = 3
"""DIDs that may follow each other as endpoints."""
EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
"""A client may call what its user names, in private networks too."""


class _NoDids:
    """No DIDs are known in advance: those of a client carry their documents."""

    def document(self, did: str) -> DidDocument | None:
        return None

    async def long_form(self, short: str) -> str | None:
        return None


class ClientResources:
    """Needs a running event loop; its maker closes it."""

    def __init__(self, wallet: Wallet) -> None:
        self.wallet = wallet
        self._guard = Guard(EVERYWHERE)
        self.resolver: DidResolver = CachingResolver(_NoDids(), DidWebResolver(self._guard))
        self.envelopes: Envelopes = LibraryEnvelopes(
            self.resolver, wallet, max_bytes=MAX_BYTES, v2=load_library(DIDCOMM_MESSAGING)
        )
        self.session = aiohttp.ClientSession()

    async def endpoints(self, did: str) -> tuple[str, ...]:
        """Return the URLs of a v2 DID, HTTP before WebSocket; those of its mediator when it names one."""
        for _ in range(MAX_HOPS):
            services = (await self.resolver.resolve(did.partition("#")[0])).services
            urls = [service.endpoint for service in services if not service.endpoint.startswith("did:")]
            if urls:
                return tuple(sorted(urls, key=lambda url: not url.startswith("http")))
            if not services:
                break
            did = services[0].endpoint
        raise ClientError("the DID's document names no endpoint")

    async def close(self) -> None:
        """Close all connections."""
        await self._guard.close()
        await self.session.close()


MAX_PUSHED = 1000
"""Frames that wait for a reader of live mail; beyond it the socket is closed, and the mail stays queued."""


@dataclass(frozen=True, slots=True)
class UnsolicitedMessage:
    """A frame that is no reply: a message of the mediator, or the envelope of a third party (implicit pickup)."""

    plain: Plaintext | None
    envelope: bytes


class Conversation:
    """Seals for the mediator, opens its messages, and matches replies to requests."""

    def __init__(self, link: Link, resources: ClientResources, seconds: float) -> None:
        self.link = link
        self._envelopes = resources.envelopes
        self._session = resources.session
        self._seconds = seconds
        self._wire: _Wire | None = None

    async def ask(self, message: Json) -> Plaintext:
        """Send a message and return the reply in its thread.

        Raises :class:`ProblemError` for a problem report, :class:`NoAnswerError` without a reply.
        """
        sealed = await self._seal(message)
        if self._wire is not None:
            answer = await self._wire.ask(id_of(message), sealed, self._seconds)
        else:
            body = await self._post(sealed)
            if body is None:
                raise NoAnswerError("the mediator took the message and sent no answer with its HTTP response")
            answer = await self._from_mediator(body)
            # Some mediators name no thread in a grant; in an HTTP response it can only be the reply.
            if (answer.thid or answer.pthid) and id_of(message) not in (answer.thid, answer.pthid):
                raise ClientError(f"the mediator answered in another thread: {answer.type}")
        raise_problem(answer)
        return answer

    async def tell(self, message: Json) -> Plaintext | None:
        """Send a message without waiting for a reply; return one that came with the HTTP response."""
        sealed = await self._seal(message)
        if self._wire is not None:
            await self._wire.send(sealed)
            return None
        body = await self._post(sealed)
        if body is None:
            return None
        answer = await self._from_mediator(body)
        raise_problem(answer)
        return answer

    async def _seal(self, message: Json) -> bytes:
        link = self.link
        if link.generation is Generation.V1:
            return await self._envelopes.seal_v1(encode(message), [link.theirs], link.mine)
        addressed = {**message, "from": link.mine, "to": [link.theirs]}
        return await self._envelopes.seal_v2(addressed, link.theirs, link.mine)

    async def _post(self, sealed: bytes) -> bytes | None:
        url = self.link.url("http", "https")
        return await post(self._session, url, sealed, self.link.generation, self._seconds)

    async def _from_mediator(self, envelope: bytes) -> Plaintext:
        try:
            opened = await self._envelopes.open(envelope)
        except MediatorError as error:
            raise ClientError(f"the mediator's answer cannot be opened: {error}") from error
        if not self._is_mediator(opened):
            raise ClientError("the answer is not from the mediator")
        return read(opened.plaintext, opened.generation)

    def _is_mediator(self, opened: OpenedEnvelope) -> bool:
        return opened.sender is not None and canonical(opened.sender) == canonical(self.link.theirs)

    async def classify(self, envelope: bytes) -> UnsolicitedMessage:
        """Tell messages of the mediator from envelopes of others."""
        with contextlib.suppress(MediatorError):
            opened = await self._envelopes.open(envelope)
            if self._is_mediator(opened):
                return UnsolicitedMessage(read(opened.plaintext, opened.generation), envelope)
        return UnsolicitedMessage(None, envelope)

    # The socket.

    @property
    def on_socket(self) -> bool:
        """Whether a WebSocket is open, which then carries everything."""
        return self._wire is not None

    @contextlib.asynccontextmanager
    async def socket(self) -> AsyncIterator["_Wire"]:
        """Use a WebSocket inside this block."""
        if self._wire is not None:
            raise ClientError("a socket is open already")
        opened = await ClientSocket.connect(self._session, self.link.url("ws", "wss"), self._seconds)
        self._wire = wire = _Wire(opened, self)
        try:
            yield wire
        finally:
            self._wire = None
            await wire.close()


class _Wire:
    """A WebSocket, and the requests that wait for replies on it."""

    def __init__(self, socket: ClientSocket, conversation: Conversation) -> None:
        self._socket = socket
        self._conversation = conversation
        self._waiting: dict[str, asyncio.Future[Plaintext]] = {}
        self._pushed: asyncio.Queue[UnsolicitedMessage | None] = asyncio.Queue()
        self._why = "the mediator closed the socket"
        self._reading = asyncio.create_task(self._read())

    async def send(self, sealed: bytes) -> None:
        await self._socket.send(sealed)

    async def ask(self, id: str, sealed: bytes, seconds: float) -> Plaintext:
        if self._reading.done():
            raise NoAnswerError(self._why)
        answer: asyncio.Future[Plaintext] = asyncio.get_running_loop().create_future()
        self._waiting[id] = answer
        try:
            await self._socket.send(sealed)
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise NoAnswerError(f"no answer on the socket within {seconds:g} s") from None
        finally:
            del self._waiting[id]

    async def pushed(self) -> AsyncIterator[UnsolicitedMessage]:
        """Yield frames that are no replies; raises :class:`NoAnswerError` when the socket closes."""
        while (frame := await self._pushed.get()) is not None:
            yield frame
        raise NoAnswerError(self._why)

    async def _read(self) -> None:
        try:
            while (envelope := await self._socket.receive()) is not None:
                self._take(await self._conversation.classify(envelope))
                if self._pushed.qsize() > MAX_PUSHED:
                    self._why = f"closed: more than {MAX_PUSHED} live messages were not read"
                    await self._socket.close()
        except ClientError as error:
            self._why = str(error)
            await self._socket.close()
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(NoAnswerError(self._why))
            self._pushed.put_nowait(None)

    def _take(self, frame: UnsolicitedMessage) -> None:
        if frame.plain is not None:
            for id in (frame.plain.thid, frame.plain.pthid):
                answer = self._waiting.get(id or "")
                if answer is not None and not answer.done():
                    answer.set_result(frame.plain)
                    return
        self._pushed.put_nowait(frame)

    async def close(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        await self._socket.close()


def raise_problem(answer: Plaintext) -> None:
    """Raise :class:`ProblemError` when the answer is a problem report, of whichever protocol."""
    if answer.name != "problem-report":
        return
    description = answer.body.get("description")
    if isinstance(description, str):
        raise ProblemError(str(answer.body.get("problem-code", "")), description)
    if isinstance(description, dict):
        raise ProblemError(str(description.get("code", "")), str(description.get("en", "")))
    raise ProblemError(str(answer.body.get("code", answer.body.get("problem-code", ""))), _comment(answer))


def _comment(answer: Plaintext) -> str:
    return render_comment(answer.body) or str(answer.body.get("explain", ""))


def render_comment(body: Mapping[str, Any]) -> str:
    """Put ``args`` into a ``comment``: a missing one is ``?``, one too many is appended (DIDComm v2.1)."""
    listed = body.get("args")
    args = ["?" if one is None else str(one) for one in listed] if isinstance(listed, list) else []
    used: set[int] = set()

    def fill(place: re.Match[str]) -> str:
        number = int(place[1])
        used.add(number)
        return args[number - 1] if 0 < number <= len(args) else "?"

    text = re.sub(r"\{(\d{1,3})\}", fill, str(body.get("comment", "")))
    return ", ".join([text, *(arg for number, arg in enumerate(args, 1) if number not in used)])
