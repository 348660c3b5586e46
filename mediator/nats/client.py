"""A NATS client that nobody else's bytes can disconnect, and that no error of the server ends for good.

The server passes subjects and headers on as their sender wrote them; nats-py stops reading at some of these bytes.
Requests go from the parser straight to who serves them, and answers into the socket many at a time: nats-py's queue,
task and flush for each message cost as much as all that the mediator does with it.
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

from mediator.nats.encrypting import EncryptingClient

_CRLF = b"\r\n"
_ABOUT_ASKER = b"Nats-Request-Info:"
_ASKER_LINE = _CRLF + _ABOUT_ASKER
_STATUS = slice(9, 12)  # of "NATS/1.0 503"

log = structlog.get_logger("nats")


class Request(NamedTuple):
    """A message as it came; ``reply`` is where an answer goes, empty when none is wanted."""

    subject: str
    reply: bytes
    data: bytes
    headers: dict[str, str] | None
    block: bytes = b""
    """The headers as they stand on the wire, the server's own line about the asker among them."""

    @property
    def client_name(self) -> str:
        """What the asker's connection calls itself; empty where the server does not tell."""
        return self._asker[1]

    @property
    def asker(self) -> str:
        """Names the asker's connection, in a cluster too; empty where the server does not tell."""
        return self._asker[0]

    @property
    def _asker(self) -> tuple[str, str]:
        # What a sender writes cannot hold a line break, so this is a line, and the last; the server takes out a
        # sender's own.
        _, found, told = self.block.partition(_ASKER_LINE)
        return _read_asker(told) if found else ("", "")

    @property
    def inbox(self) -> bytes:
        """The first two words of the reply subject, in which most clients keep all answers to one connection."""
        return b".".join(self.reply.split(b".", 2)[:2])


@lru_cache(maxsize=10_000)
def _read_asker(told: bytes) -> tuple[str, str]:
    """Return a name for a connection, and what its client calls itself."""
    try:
        fields = orjson.loads(told.partition(_CRLF)[0])
        server, number, name = fields.get("server"), fields.get("id"), fields.get("name")
    except (orjson.JSONDecodeError, AttributeError):
        return "", ""
    return f"{server} {number}", name if isinstance(name, str) else ""


Received = Callable[[Request], None]


class SturdyClient(EncryptingClient):
    """Takes whatever a server may hand over; the reader of a message refuses what is wrong in it."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Parser(self)
        self._receivers: dict[int, Received] = {}

    def receive(self, sid: int, received: Received | None) -> None:
        """Hand the messages of a subscription to ``received``, which must neither wait nor raise; None: no more."""
        if received is None:
            self._receivers.pop(sid, None)
        else:
            self._receivers[sid] = received

    def hand_over(self, sid: int, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> bool:
        """Give a message to its receiver; False: the subscription has none."""
        received = self._receivers.get(sid)
        if received is None:
            return False
        found = read_headers(headers.partition(_CRLF)[2]) if headers else None
        try:
            received(Request(subject.decode("utf-8", "replace"), reply, payload, found, headers))
        except Exception:
            log.exception("request")
        return True

    async def send_all(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        """Send messages, subject and payload each, with one write; waits while the server takes none."""
        await self.send_frames([b"PUB %b %d\r\n%b\r\n" % (subject, len(data), data) for subject, data in messages])

    async def send_frames(self, frames: Iterable[bytes]) -> None:
        """Send what the protocol's own words stand in already, with one write; waits while the server takes none."""
        written = b"".join(frames)
        if not self.is_connected and self._pending_data_size + len(written) > self._max_pending_size:
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
        first, _, rest = headers.partition(_CRLF)
        found = read_headers(rest)
        # The server says so that nobody answers a request.
        if first[_STATUS].isdigit():
            found["Status"] = first[_STATUS].decode()
        return found or None

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            # Whoever waited for it gave up, as a stalled server makes them; nats-py would fail on the old future.
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
        # The server ends the connection after all others; it may take us again later.
        if PERMISSIONS_ERR not in err_msg:
            await self._process_op_err(error)


def read_headers(lines: bytes) -> dict[str, str]:
    """Read header lines; bytes that are no UTF-8 become lone surrogates, which no reader takes for text.

    The server's own line about the asker is left out: it is in every request, and is none of the sender's.
    """
    found: dict[str, str] = {}
    for line in lines.split(_CRLF):
        if line and not line.startswith(_ABOUT_ASKER):
            name, _, value = line.decode("utf-8", "surrogateescape").partition(":")
            found[name.strip(" \t")] = value.strip(" \t")
    return found


class _Parser(Parser):
    """Reads messages as the server writes them: its words are parted by spaces, whatever else is inside of one."""

    def reset(self) -> None:
        super().reset()
        self._unread = bytearray()

    async def parse(self, data: bytes = b"") -> None:
        unread = self._unread
        unread += data
        at = 0
        try:
            while (end := unread.find(_CRLF, at)) >= 0:
                line = bytes(unread[at:end])
                start = end + len(_CRLF)
                if not line.startswith((b"MSG ", b"HMSG ")):
                    at = start
                    await super().parse(line + _CRLF)
                    continue
                sid, subject, reply, head, size = _message_line(line)
                end = start + size
                if len(unread) < end + len(_CRLF):
                    return
                headers, payload = bytes(unread[start : start + head]), bytes(unread[start + head : end])
                at = end + len(_CRLF)
                if not self.nc.hand_over(sid, subject, reply, headers, payload):
                    await self.nc._process_msg(sid, subject, reply, payload, headers)
        finally:
            del unread[:at]


def _message_line(line: bytes) -> tuple[int, bytes, bytes, int, int]:
    """Return sid, subject, reply subject, and the bytes of headers and of all; ProtocolError if it is not so."""
    words = line.split(b" ")
    sizes = 2 if words[0] == b"HMSG" else 1
    try:
        subject, sid, *reply = words[1:-sizes]
        numbers = [int(word) for word in words[-sizes:]]
        return int(sid), subject, reply[0] if reply else b"", numbers[0] if sizes == 2 else 0, numbers[-1]
    except ValueError as error:
        raise ProtocolError("nats: malformed MSG") from error
