"""Finds the frames of NATS's protocol in chunks of bytes, and hands on all that nobody has to look at as it came.

Each direction has a stream. It tells its watcher of the few frames that matter; what the watcher returns takes the
frame's place. A line is handed on only when it is whole, a payload as it comes: so a frame of our own can be put in
wherever no payload is under way. A stream must see the frames that nats-server sees, or a client could hide one from
it: what is not plainly one of them is refused.
"""

import re
from typing import Final, Protocol

MAX_LINE: Final = 4096
"""Bytes of a client's line, as nats-server has it."""
MAX_CONNECT: Final = 65536
"""Bytes of a CONNECT: nats-server may be configured to take tokens that are longer than its lines."""
MAX_SERVER_LINE: Final = 1 << 20
MAX_HELD: Final = 1 << 20
"""Bytes of a payload that is looked into."""
AHEAD: Final = 80
"""Bytes of a push's headers in which its msg_id and its lane stand, if it has them."""

# What publishes without being looked at. A size has at most nine digits, as nats-server counts them.
_OTHERS: Final = rb"(?!\$(?:JS\.|SYS\.|mq9\.(?:AI\.)?PUSH\.)|mq9ctl\.)[^ \t\r\n]+ "
_PUBLISH: Final = re.compile(
    rb"(?:PUB %b(?:%b)?|HPUB %b(?:%b)?\d{1,9} )(\d{1,9})\r\n" % (_OTHERS, _OTHERS, _OTHERS, _OTHERS)
)
_COMMAND: Final = re.compile(rb"(CONNECT|H?PUB|SUB|UNSUB|PING|PONG)(?:[ \t]+(.*))?", re.IGNORECASE | re.DOTALL)
_WORD: Final = re.compile(rb"[^ \t]+")
_SIZE: Final = re.compile(rb"\d{1,9}")

_NOT_PRIVATE: Final = rb"(?!\$mq9\.PUSH\.)[^ \n]++ [^ \n]++ (?:[^ \n]++ )??"
_MESSAGE: Final = re.compile(rb"(?:MSG %b|HMSG %b\d+ )(\d+)\r\n" % (_NOT_PRIVATE, _NOT_PRIVATE))
_PRIVATE: Final = rb"\$mq9\.PUSH\.([^ .\n]++)\.([^ \n]++) ([^ \n]++) (?:[^ \n]++ )??"
_BARE_PUSH: Final = re.compile(rb"MSG %b(\d+)\r\n" % _PRIVATE)
_KEPT: Final = rb"NATS/1\.0\r\nmq9-msg-id: ?(\d+)\r\n(?:mq9-priority: ?(critical|urgent|low)\r\n)?"
_PUSH: Final = re.compile(rb"HMSG %b(\d+) (\d+)\r\n(?=(?:%b)?)" % (_PRIVATE, _KEPT))


class ProtocolViolationError(Exception):
    """A peer broke the protocol; the text is for ``-ERR``, and the connection ends."""


class ClientWatcher(Protocol):
    """Is told what a client says that matters; what it returns goes to the server in place of the frame."""

    def connect(self, frame: bytes, options: bytes) -> bytes:
        """Take a CONNECT."""

    def subscribe(self, frame: bytes, subject: bytes, queue: bytes, sid: bytes) -> bytes | None:
        """Take a SUB; an empty queue is none. None: it cannot be decided yet, and nothing behind it is read.

        Asked again with each chunk.
        """

    def unsubscribe(self, frame: bytes, sid: bytes, most: int) -> bytes:
        """Take an UNSUB after ``most`` messages in all; 0 is now."""

    def pong(self, frame: bytes) -> bytes:
        """Take a PONG."""

    def publishing(self) -> None:
        """Learn that a publish passes; told only while ``count_publishes`` says so."""

    def may_publish(self, subject: bytes, reply: bytes) -> bool | None:
        """Say whether a publish to a subject of ours or of JetStream passes; None: that depends on its body.

        Asked again with each chunk until the body is there.
        """

    def may_contain(self, subject: bytes, body: bytes | None) -> bool:
        """Say whether a publish with this body passes; None: it has more than :data:`MAX_HELD` bytes."""


class ServerWatcher(Protocol):
    """Is told what a server says that matters; what it returns goes to the client in place of the frame."""

    def info(self, frame: bytes) -> bytes:
        """Take an INFO."""

    def ping(self, frame: bytes) -> bytes:
        """Take a PING."""

    def succeeded(self, frame: bytes) -> bytes:
        """Take a +OK."""

    def failed(self, frame: bytes) -> bytes:
        """Take an -ERR."""

    def flushed(self, frame: bytes) -> bytes:
        """Take a PONG: the server has read what came before the PING that it answers."""

    def pushed(self, token: bytes, sid: bytes, msg_id: bytes | None, lane: bytes | None) -> bool:
        """Say whether a push passes; what made its subject private is cut off then. No lane is the normal one."""


class _Stream:
    """Where the last chunk ended, and frames of our own that wait for the end of a payload."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._missing = 0
        """Bytes without which what is kept makes no frame."""
        self._left = 0
        """Bytes of a payload that are still to come."""
        self._dropping = 0
        """Bytes of a refused payload that are still to come."""
        self._waiting: list[bytes] = []
        self._so_far = 0, 0
        self.held = 0
        """Bytes of the frames of our own that wait."""
        self.violation: ProtocolViolationError | None = None
        """What was wrong behind the frames that were handed on last; nothing more may be fed."""

    def insert(self, frame: bytes) -> bytes:
        """Return a frame of our own if it can be written now; else it comes as soon as a chunk has room for it."""
        if not self._left:
            return frame
        self._waiting.append(frame)
        self.held += len(frame)
        return b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take a chunk and return what to hand on; sets ``violation``."""
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
        """Read frames from ``at`` on; what stands before, from ``mark`` on, is still to be handed on.

        Raises :class:`ProtocolViolationError`, having set what was found good so far.
        """
        raise NotImplementedError

    def _drop(self, data: bytes, at: int, end: int, mark: int, out: list[bytes]) -> int:
        """Hand on what stands before ``at``, leave out what stands up to ``end``, and return where to go on."""
        out.append(data[mark:at])
        self._dropping = max(0, end - len(data))
        return min(end, len(data))

    def _end(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        """Hand on up to ``at``, which may lie in chunks to come, and keep the rest."""
        if at > len(data):
            self._left = at - len(data)
        elif at < len(data):
            self._rest.append(data[at:])
        if mark < at:
            out.append(data[mark:at] if mark or at < len(data) else data)


class ClientStream(_Stream):
    """Reads what a client writes."""

    def __init__(self, watcher: ClientWatcher) -> None:
        super().__init__()
        self._watcher = watcher
        self.count_publishes = True
        """Whether the watcher is told of each publish."""

    def _frames(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        quick = _PUBLISH.match
        size = len(data)
        self._missing = 0
        while at < size:
            found = quick(data, at)
            if found is not None:
                at = found.end() + int(found[1]) + 2
                if self.count_publishes:
                    self._watcher.publishing()
                continue
            end = data.find(b"\n", at, at + MAX_CONNECT)
            line = data[at : end if end >= 0 else at + MAX_CONNECT]
            self._so_far = mark, at
            if len(line) > MAX_LINE and (len(line) == MAX_CONNECT or line[:7].upper() != b"CONNECT"):
                raise ProtocolViolationError("maximum control line exceeded")
            if end < 0:
                break
            verb, words = _command(line)
            frame = data[at : end + 1]
            if verb in (b"PUB", b"HPUB"):
                subject, reply, head, length = _publish_words(verb, words)
                after = end + 1 + length + 2
                passes = self._watcher.may_publish(subject, reply)
                if passes is None and length > MAX_HELD:
                    passes = self._watcher.may_contain(subject, None)
                elif passes is None:
                    if after > size:
                        self._missing = after - size
                        break
                    passes = self._watcher.may_contain(subject, data[end + 1 + head : end + 1 + length])
                if passes:
                    at = after
                    if self.count_publishes:
                        self._watcher.publishing()
                    continue
                mark = at = self._drop(data, at, after, mark, out)
                continue
            instead = self._instead(verb, words, frame)
            if instead is None:
                break
            if instead is not frame:
                out += (data[mark:at], instead)
                mark = end + 1
            at = end + 1
        self._end(data, at, mark, out)

    def _instead(self, verb: bytes, words: list[bytes], frame: bytes) -> bytes | None:
        watcher = self._watcher
        if verb == b"SUB" and len(words) in (2, 3):
            return watcher.subscribe(frame, words[0], words[1] if len(words) == 3 else b"", words[-1])
        if verb == b"UNSUB" and len(words) in (1, 2):
            most = int(words[1]) if len(words) == 2 and _SIZE.fullmatch(words[1]) else 0
            return watcher.unsubscribe(frame, words[0], most)
        if verb == b"CONNECT":
            return watcher.connect(frame, frame[7:].strip())
        if verb == b"PONG":
            return watcher.pong(frame)
        if verb == b"PING":
            return frame
        raise ProtocolViolationError("Unknown Protocol Operation")


class ServerStream(_Stream):
    """Reads what a server writes."""

    def __init__(self, watcher: ServerWatcher) -> None:
        super().__init__()
        self._watcher = watcher

    def _frames(self, data: bytes, at: int, mark: int, out: list[bytes]) -> None:
        quick, pushed, watcher = _MESSAGE.match, _PUSH.match, self._watcher
        size = len(data)
        while at < size:
            found = quick(data, at)
            if found is not None:
                at = found.end() + int(found[1]) + 2
                continue
            before = at
            # Pushes come many together.
            while (push := pushed(data, at)) is not None:
                token, _, sid, head, total, msg_id, lane = push.groups()
                start = push.end()
                if size - start < AHEAD and size - start < int(head):
                    self._end(data, at, mark, out)
                    return
                after = start + int(total) + 2
                if watcher.pushed(token, sid, msg_id, lane):
                    out.append(data[mark : at + 5])
                    mark, at = push.start(2), after
                else:
                    mark = at = self._drop(data, at, after, mark, out)
            if (push := _BARE_PUSH.match(data, at)) is not None:
                after = push.end() + int(push[4]) + 2
                if watcher.pushed(push[1], push[3], None, None):
                    out.append(data[mark : at + 4])
                    mark, at = push.start(2), after
                else:
                    mark = at = self._drop(data, at, after, mark, out)
            if at != before:
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
            return self._watcher.ping(frame)
        if verb == b"-ERR":
            return self._watcher.failed(frame)
        if verb == b"INFO":
            return self._watcher.info(frame)
        if verb == b"+OK\r":
            return self._watcher.succeeded(frame)
        if verb == b"PONG":
            return self._watcher.flushed(frame)
        raise ProtocolViolationError("the server said what it should not")


def _command(line: bytes) -> tuple[bytes, list[bytes]]:
    line = line.removesuffix(b"\r")
    found = _COMMAND.fullmatch(line)
    # nats-server takes the end of a line off at a carriage return, wherever it stands.
    if found is None or b"\r" in line:
        raise ProtocolViolationError("Unknown Protocol Operation")
    return found[1].upper(), _WORD.findall(found[2] or b"")


def _publish_words(verb: bytes, words: list[bytes]) -> tuple[bytes, bytes, int, int]:
    """Return subject, reply subject, and the bytes of headers and of all."""
    sizes = 2 if verb == b"HPUB" else 1
    numbers = words[-sizes:]
    if len(words) - sizes not in (1, 2) or not all(_SIZE.fullmatch(number) for number in numbers):
        raise ProtocolViolationError("Unknown Protocol Operation")
    head, length = (int(numbers[0]), int(numbers[1])) if sizes == 2 else (0, int(numbers[0]))
    if head > length:
        raise ProtocolViolationError("Unknown Protocol Operation")
    return words[0], words[1] if len(words) - sizes == 2 else b"", head, length
