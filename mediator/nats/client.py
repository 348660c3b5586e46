"""The service's NATS client: no bytes of other clients can disconnect it, and no server error ends it for good.

The server passes subjects and headers on as their sender wrote them, and nats-py stops reading at some of these bytes.
Messages go from the parser straight to their handler, and replies are written to the socket many at a time: nats-py's
queue, task and flush for each message would cost as much as all the work of the mediator.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import OutboundBufferLimitError, ProtocolError
from nats.protocol.parser import PERMISSIONS_ERR, Parser

from mediator.nats.frames import (
    CLIENT_INFO,
    CRLF,
    ProtocolViolationError,
    decode_headers,
    decode_message_line,
    encode_publish,
)
from mediator.nats.subjects import API
from mediator.nats.tls import TlsClient

# A sender's value cannot hold a line break, so this is a line of its own, and the last of its name.
_CLIENT_LINE = CRLF + CLIENT_INFO
MAX_KNOWN = 1024
"""Bytes of a client's description up to which it is remembered: without accounts clients could write it themselves."""
_STATUS = slice(9, 12)  # of "NATS/1.0 503"

log = structlog.get_logger("nats")


class ClientInfo(NamedTuple):
    """Who made a request, as the server or the gateway says; empty where it does not tell."""

    connection: str = ""
    """Identifies the client's connection, also in a cluster."""
    name: str = ""
    """The name in the client's CONNECT."""
    login: str = ""
    """The client's login at the server; empty for anonymous ones."""


class Request(NamedTuple):
    """A message as it came; ``reply`` is where an answer goes, empty when none is wanted."""

    subject: str
    reply: bytes
    data: bytes
    headers: dict[str, str] | None
    client: ClientInfo = ClientInfo()
    answer: Callable[[bytes], object] | None = None
    """What takes the answer to a request that came in memory; None: it is published to ``reply``."""

    @property
    def login(self) -> str:
        """The client's login, empty where the server does not vouch for it."""
        return "" if self.subject.startswith(API) else self.client.login

    @property
    def inbox(self) -> bytes:
        """The first two tokens of the reply subject, which most clients use for all replies to one connection."""
        return b".".join(self.reply.split(b".", 2)[:2])


def find_client(headers: bytes) -> ClientInfo:
    """Read the line in which the server describes the client; ``headers`` are as they are on the wire."""
    _, found, rest = headers.rpartition(_CLIENT_LINE)
    line = rest.partition(CRLF)[0]
    if not found:
        return ClientInfo()
    return _known_client(line) if len(line) <= MAX_KNOWN else _read_client(line)


def _read_client(line: bytes) -> ClientInfo:
    try:
        fields = orjson.loads(line)
        server, number, name, user = (fields.get(key) for key in ("server", "id", "name", "user"))
    except (orjson.JSONDecodeError, AttributeError):
        return ClientInfo()
    return ClientInfo(
        f"{server} {number}", name if isinstance(name, str) else "", user if isinstance(user, str) else ""
    )


_known_client = lru_cache(maxsize=10_000)(_read_client)


MessageHandler = Callable[[Request], None]


class NatsClient(TlsClient):
    """Accepts whatever a server may send; the reader of a message refuses what is wrong in it."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = MessageParser(self)
        self._handlers: dict[int, MessageHandler] = {}

    def receive(self, sid: int, handler: MessageHandler | None) -> None:
        """Call ``handler`` with the messages of a subscription; it must neither wait nor raise. None: no more."""
        if handler is None:
            self._handlers.pop(sid, None)
        else:
            self._handlers[sid] = handler

    def hand_over(self, sid: int, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> bool:
        """Pass a message to its handler; False: the subscription has none."""
        handler = self._handlers.get(sid)
        if handler is None:
            return False
        found = decode_headers(headers.partition(CRLF)[2]) if headers else None
        try:
            handler(Request(subject.decode("utf-8", "replace"), reply, payload, found, find_client(headers)))
        except Exception:
            log.exception("message handler failed")
        return True

    async def send_all(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        """Send messages, subject and payload each, with one write; waits while the server is not reading."""
        await self.send_frames([encode_publish(subject, data) for subject, data in messages])

    async def send_frames(self, frames: Iterable[bytes]) -> None:
        """Send frames with one write; waits while the server is not reading."""
        written = b"".join(frames)
        if not self.is_connected and self.pending_data_size + len(written) > self._max_pending_size:
            raise OutboundBufferLimitError
        await self._send_command(written)
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()

    def _build_message(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Any) -> Msg:
        return self.msg_class(
            subject=subject.decode("utf-8", "replace"),
            reply=reply.decode("utf-8", "replace"),
            data=data,
            headers=headers,
            _client=self,
            _sid=sid,
        )

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        if not headers:
            return None
        first, _, rest = headers.partition(CRLF)
        found = decode_headers(rest)
        # With this status the server reports that a request has no responders.
        if first[_STATUS].isdigit():
            found["Status"] = first[_STATUS].decode()
        return found or None

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            # The waiter gave up, as with a stalled server; nats-py would fail on the old future.
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _read_loop(self) -> None:
        """Connect again at once when the loop ends by an error that nats-py only logs and does not recover from."""
        await super()._read_loop()
        if self.is_connected and asyncio.current_task() is self._reading_task:
            await self._process_op_err(NatsError("nats: what the server sent could not be read"))

    async def _process_err(self, err_msg: str) -> None:
        error = NatsError(f"nats: {err_msg}")
        await self._error_cb(error)
        # The server closes the connection after all other errors; it may accept it again later.
        if PERMISSIONS_ERR not in err_msg:
            await self._process_op_err(error)


class MessageParser(Parser):
    """Reads messages as the server writes them: words are separated by spaces, whatever else a word contains."""

    def reset(self) -> None:
        """Forget what was read of a message, for a new connection."""
        super().reset()
        self._unread = bytearray()

    async def parse(self, data: bytes = b"") -> None:
        """Parse what the server sent, and pass its messages to their handlers."""
        unread = self._unread
        unread += data
        at = 0
        try:
            while (end := unread.find(CRLF, at)) >= 0:
                line = bytes(unread[at:end])
                start = end + len(CRLF)
                if not line.startswith((b"MSG ", b"HMSG ")):
                    at = start
                    await super().parse(line + CRLF)
                    continue
                sid, subject, reply, head, size = decode_message_line(line)
                end = start + size
                if len(unread) < end + len(CRLF):
                    return
                headers, payload = bytes(unread[start : start + head]), bytes(unread[start + head : end])
                at = end + len(CRLF)
                if not self.nc.hand_over(sid, subject, reply, headers, payload):
                    await self.nc._process_msg(sid, subject, reply, payload, headers)
        except ProtocolViolationError as error:
            raise ProtocolError(f"nats: {error}") from error
        finally:
            del unread[:at]
