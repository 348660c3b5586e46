"""Requests and replies with one mediator, over HTTP, or over a WebSocket while one is open."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from mediator.errors import MediatorError
from pickup.client import transport
from pickup.client.errors import ClientError, NoAnswerError, ProblemError
from pickup.client.link import Link
from pickup.client.plaintext import Json, Plaintext, id_of, read
from pickup.client.resources import ClientResources
from pickup.envelope import OpenedEnvelope
from pickup.message import encode
from pickup.rules.names import canonical
from pickup.rules.records import Generation

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
        return await transport.post(self._session, url, sealed, self.link.generation, self._seconds)

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
        opened = await transport.ClientSocket.connect(self._session, self.link.url("ws", "wss"), self._seconds)
        self._wire = wire = _Wire(opened, self)
        try:
            yield wire
        finally:
            self._wire = None
            await wire.close()


class _Wire:
    """A WebSocket, and the requests that wait for replies on it."""

    def __init__(self, socket: transport.ClientSocket, conversation: Conversation) -> None:
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
