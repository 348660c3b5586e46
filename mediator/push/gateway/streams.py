"""Passes chunks of bytes through the gateway, and shows the connection's session the few frames that matter.

Each direction has a stream. What the session returns takes the frame's place; all other bytes are passed on as they
came. A line is passed on only when it is whole, a payload as it comes: so the gateway can insert a frame of its own
wherever no payload is under way. A stream must see exactly the frames that nats-server sees, or a client could hide one
from it: what is not plainly one of them is refused.
"""

import re
from typing import TYPE_CHECKING, Final

from mediator.nats import frames
from mediator.nats.frames import CRLF, MAX_CONNECT, MAX_LINE, ProtocolViolationError
from mediator.push.gateway import publish_policy

if TYPE_CHECKING:
    from mediator.push.gateway.session import GatewaySession

MAX_SERVER_LINE: Final = 1 << 20
MAX_INSPECTED: Final = 256 * 1024
"""Bytes of a payload that the session is shown: nats-server takes no longer metadata of a stream than half of this."""

_PUBLISH: Final = frames.publish_pattern(rb"\$(?:JS\.|SYS\.|mq9\.)|mq9ctl\.")
_MESSAGE: Final = frames.message_pattern()
_TOKENS: Final = rb"[^ \t\r\n.*>]++(?:\.[^ \t\r\n.*>]++)*+"
_REQUEST: Final = re.compile(
    rb"(H?)PUB (\$mq9\.AI\.(?!PUSH\.)%b) (?:(_INBOX\.%b) )?(?:(\d{1,9}) )?(\d{1,9})\r\n" % (_TOKENS, _TOKENS)
)
"""A request to the service as most clients write it: headers or none, verb, reply subject, sizes.

nats-server has answers of its own for subjects with wildcards or empty tokens.
"""


class _Stream:
    """Where the last chunk ended, and inserted frames that wait for the end of a payload."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._missing = 0
        """Bytes that are missing at least before the kept ones make a frame."""
        self._left = 0
        """Bytes of a payload that are still to come."""
        self._dropping = 0
        """Bytes of a refused payload that are still to come."""
        self._waiting: list[bytes] = []
        self._so_far = 0, 0
        self.unfinished = 0
        """Bytes of a frame that waits to be whole, or of what is known of it."""
        self.held = 0
        """Bytes of the inserted frames that wait."""
        self.violation: ProtocolViolationError | None = None
        """What was wrong behind the frames that were passed on last; nothing more may be fed."""

    def insert(self, frame: bytes) -> bytes:
        """Return a frame if it can be inserted now; otherwise :meth:`feed` inserts it as soon as possible."""
        if not self._left:
            return frame
        self._waiting.append(frame)
        self.held += len(frame)
        return b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take a chunk and return what to pass on; sets ``violation``."""
        if self._dropping:
            dropped = min(self._dropping, len(data))
            self._dropping -= dropped
            data = data[dropped:]
            if not data:
                return []
        if self._rest:
            self._rest.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return []
            data = b"".join(self._rest)
            self._rest.clear()
            self.unfinished = 0
        out: list[bytes] = []
        mark = at = min(self._left, len(data))
        self._left -= at
        if self._waiting and not self._left:
            out += (data[:at], *self._waiting)
            self._waiting.clear()
            self.held = 0
        else:
            mark = 0
        try:
            self._frames(data, at, mark, out)
        except ProtocolViolationError as error:
            self.violation = error
            mark, at = self._so_far
            out.append(data[mark:at])
        return out

    def _frames(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        """Read frames from ``at`` on; the bytes from ``mark`` to ``at`` are still to be passed on.

        Raises :class:`ProtocolViolationError`, having set how far the data was good.
        """
        raise NotImplementedError

    def _drop(self, data: bytes, at: int, end: int, mark: int, out: list[bytes]) -> int:
        """Pass on the bytes before ``at``, drop those up to ``end``, and return where to continue."""
        out.append(data[mark:at])
        self._dropping = max(0, end - len(data))
        return min(end, len(data))

    def _end(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        """Pass on up to ``at``, which may be in a later chunk, and keep the rest."""
        if at > len(data):
            self._left = at - len(data)
        elif at < len(data):
            self._rest.append(data[at:])
            self.unfinished = len(data) - at + self._missing
        if mark < at:
            out.append(data[mark:at] if mark or at < len(data) else data)


class ClientStream(_Stream):
    """Reads what a client writes."""

    def __init__(self, session: "GatewaySession") -> None:
        super().__init__()
        self._session = session
        self.count_publishes = True
        """Whether the session is told of each publish."""

    def _frames(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        quick, request, size, session = _PUBLISH.match, _REQUEST.match, len(data), self._session
        self._missing = 0
        while at < size:
            found = quick(data, at) if session.connected else None
            if found is not None:
                at = found.end() + int(found[1]) + 2
                if self.count_publishes:
                    session.publishing()
                continue
            self._so_far = mark, at
            if session.connected and (asked := request(data, at)) is not None:
                after = self._request(data, at, asked)
                if after is None:
                    break
                if after:
                    out.append(data[mark:at])
                    mark = at = after
                    continue
            end = data.find(b"\n", at, at + MAX_CONNECT)
            line = data[at : end if end >= 0 else at + MAX_CONNECT]
            self._so_far = mark, at
            if len(line) > MAX_LINE and not self._may_be_long(line, end >= 0):
                raise ProtocolViolationError("maximum control line exceeded")
            if end < 0:
                break
            verb, words = self._decode(line)
            frame = data[at : end + 1]
            if verb in (b"PUB", b"HPUB"):
                subject, reply, head, length = frames.decode_publish(verb, words)
                after, passes = self._publish(data, end + 1, subject, reply, head, length)
                if passes is None:
                    break
                if not passes:
                    mark = at = self._drop(data, at, after, mark, out)
                    continue
                mark, at = self._mend(data, at, end + 1, subject, mark, out), after
                if self.count_publishes:
                    session.publishing()
                continue
            instead = self._instead(verb, words, frame)
            if instead is None:
                break
            if instead is not frame:
                out += (data[mark:at], instead)
                mark = end + 1
            at = end + 1
        self._end(data, at, mark, out)

    def _decode(self, line: bytes) -> tuple[bytes, list[bytes]]:
        verb, words = frames.decode_command(line)
        if not self._session.connected and verb not in (b"CONNECT", b"PING", b"PONG"):
            # Who has not said who it is keeps nothing waiting here; as nats-server words it.
            raise ProtocolViolationError("Authorization Violation")
        return verb, words

    def _may_be_long(self, line: bytes, whole: bool) -> bool:
        return (
            len(line) < MAX_CONNECT and line[:7].upper() == b"CONNECT" and (whole or self._session.may_wait(len(line)))
        )

    def _request(self, data: bytes, at: int, asked: re.Match[bytes]) -> int | None:
        """Hand a request to the session, if it takes it, and return where it ends.

        0: it may pass to the server, like any publish; None: not decided yet, or not whole.
        """
        head, length, start = asked[4], int(asked[5]), asked.end()
        if bool(asked[1]) is (head is None) or start - at > MAX_LINE:
            return 0
        after = start + length + 2
        if after > len(data) and not self._session.may_wait(after - at):
            # nats-server reads it piece by piece.
            return 0
        reply = asked[3] or b""
        taken = self._session.takes(reply, length, head is not None)
        if not taken:
            return None if taken is None else 0
        if after > len(data):
            self._missing = after - len(data)
            return None
        middle = start + int(head or 0)
        if middle > after - 2 or data[after - 2 : after] != CRLF:
            raise ProtocolViolationError("Unknown Protocol Operation")
        self._session.request(asked[2], reply, data[start:middle], data[middle : after - 2])
        return after

    def _publish(
        self, data: bytes, start: int, subject: bytes, reply: bytes, head: int, length: int
    ) -> tuple[int, bool | None]:
        """Return where a publish ends, and whether it passes; None: its body is not there yet."""
        end = start + length
        passes = self._session.may_publish(subject, reply)
        if passes is None and length <= MAX_INSPECTED:
            missing = end + 2 - len(data)
            if missing <= 0:
                passes = self._session.may_contain(subject, data[start + head : end])
            elif self._session.may_wait(MAX_LINE + length):
                self._missing = missing
                return end + 2, None
            else:
                passes = self._session.may_contain(subject, None)
        elif passes is None:
            passes = self._session.may_contain(subject, None)
        if passes:
            self._session.passing(subject)
        return end + 2, passes

    def _mend(self, data: bytes, at: int, end: int, subject: bytes, mark: int, out: list[bytes]) -> int:
        """Pass on the line of a publish up to ``end`` if nobody could answer it as it is; return the new ``mark``."""
        answerable = publish_policy.without_empty_tokens(subject)
        if answerable is subject:
            return mark
        out += (data[mark:at], data[at:end].replace(subject, answerable, 1))
        return end

    def _instead(self, verb: bytes, words: list[bytes], frame: bytes) -> bytes | None:
        session = self._session
        if verb == b"SUB" and len(words) in (2, 3):
            return session.subscribe(frame, words[0], words[1] if len(words) == 3 else b"", words[-1])
        if verb == b"UNSUB" and len(words) in (1, 2):
            return session.unsubscribe(frame, words[0], frames.decode_count(words[1]) if len(words) == 2 else 0)
        if verb == b"CONNECT":
            return session.connect(frame, frame[7:].strip())
        if verb == b"PONG":
            return session.pong(frame)
        if verb == b"PING":
            session.pinging()
            return frame
        raise ProtocolViolationError("Unknown Protocol Operation")


class ServerStream(_Stream):
    """Reads what a server writes."""

    def __init__(self, session: "GatewaySession") -> None:
        super().__init__()
        self._session = session

    def _frames(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        quick = _MESSAGE.match
        size = len(data)
        while at < size:
            found = quick(data, at)
            if found is not None:
                at = found.end() + int(found[1]) + 2
                continue
            self._so_far = mark, at
            end = data.find(b"\r\n", at) + 2
            if end < 2:
                if size - at > MAX_SERVER_LINE:
                    raise ProtocolViolationError("the server's line is too long")
                break
            frame = data[at:end]
            instead = self._instead(frame)
            if instead is not frame:
                out += (data[mark:at], instead)
                mark = end
            at = end
        self._end(data, at, mark, out)

    def _instead(self, frame: bytes) -> bytes:
        verb = frame[:4].upper()
        if verb == b"PING":
            return self._session.ping(frame)
        if verb == b"-ERR":
            return self._session.failed(frame)
        if verb == b"INFO":
            return self._session.info(frame)
        if verb == b"+OK\r":
            return self._session.succeeded(frame)
        if verb == b"PONG":
            return self._session.flushed(frame)
        raise ProtocolViolationError("unknown operation of the server")
