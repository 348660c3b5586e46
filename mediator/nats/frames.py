"""Reads and writes the frames of NATS's client protocol: bytes in, values out, no I/O.

The one place that knows the grammar (https://docs.nats.io/reference/reference-protocols/nats-protocol); the client, the
gateway, the pushes and MSG.BATCH use it. A message with headers is written as its *body*: a line with the bytes of the
headers and of headers and payload, then both, then a line break. HMSG frames end in one, and MSG.BATCH is a sequence of
them (S8).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

CRLF: Final = b"\r\n"
PING: Final = b"PING\r\n"
PONG: Final = b"PONG\r\n"
VERSION: Final = b"NATS/1.0\r\n"
"""The first line of a header block."""
MAX_LINE: Final = 4096
"""Bytes of a client's line, as in nats-server's ``max_control_line``."""
MAX_CONNECT: Final = 65536
"""Bytes of a CONNECT: nats-server may be configured to take tokens that are longer than its lines."""
MAX_ERROR: Final = 1024
"""Characters of the text in ``-ERR``."""
CLIENT_INFO: Final = b"Nats-Request-Info:"
"""The header in which nats-server names the client that made a request; it removes a sender's own."""

_SIZES: Final = re.compile(rb"(0|[1-9][0-9]{0,8}) (0|[1-9][0-9]{0,8})\r\n")
_COMMAND: Final = re.compile(rb"(CONNECT|H?PUB|SUB|UNSUB|PING|PONG)(?:[ \t]+(.*))?", re.IGNORECASE | re.DOTALL)
_WORD: Final = re.compile(rb"[^ \t]+")
_SIZE: Final = re.compile(rb"\d{1,9}")


class ProtocolViolationError(Exception):
    """A peer broke the protocol; the text fits ``-ERR``, after which the connection ends."""


# Writing.


def encode_publish(subject: bytes, payload: bytes) -> bytes:
    """Return a PUB frame."""
    return b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload)


def encode_request(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> bytes:
    """Return an HPUB frame that asks for a reply; ``headers`` is a whole block."""
    sizes = len(headers), len(headers) + len(payload)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, *sizes, headers, payload)


def encode_body(headers: bytes, payload: bytes) -> bytes:
    """Return everything behind the words of an HMSG frame; ``headers`` is a whole block or empty."""
    return b"%d %d\r\n%b%b\r\n" % (len(headers), len(headers) + len(payload), headers, payload)


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Return a header block, empty if there are no headers. Names and values must hold no line breaks."""
    if not headers:
        return b""
    return b"%b%b\r\n" % (VERSION, "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode())


def encode_message(subject: bytes, sid: bytes, payload: bytes, headers: bytes | None = None) -> bytes:
    """Return a MSG frame, or HMSG with ``headers``: a whole block or empty."""
    if headers is not None:
        sizes = len(headers), len(headers) + len(payload)
        return b"HMSG %b %b %d %d\r\n%b%b\r\n" % (subject, sid, *sizes, headers, payload)
    return b"MSG %b %b %d\r\n%b\r\n" % (subject, sid, len(payload), payload)


def encode_subscribe(subject: bytes, sid: bytes) -> bytes:
    """Return a SUB frame without a queue group."""
    return b"SUB %b %b\r\n" % (subject, sid)


def encode_unsubscribe(sid: bytes, max_msgs: int = 0) -> bytes:
    """Return an UNSUB frame that ends a subscription after ``max_msgs`` messages in all; 0: now."""
    return b"UNSUB %b %d\r\n" % (sid, max_msgs) if max_msgs else b"UNSUB %b\r\n" % sid


def encode_info(options: bytes) -> bytes:
    """Return an INFO frame; ``options`` is a JSON object."""
    return b"INFO %b \r\n" % options


def encode_error(text: str) -> bytes:
    """Return an -ERR frame with at most :data:`MAX_ERROR` characters of the text, on one line."""
    return b"-ERR '%b'\r\n" % " ".join(text[:MAX_ERROR].split()).encode("utf-8", "replace")


# Reading what a server writes.


def decode_message_line(line: bytes) -> tuple[int, bytes, bytes, int, int]:
    """Read the line of a MSG or HMSG, without its line break.

    Returns sid, subject, reply subject (empty: none), bytes of the headers, and bytes of headers and payload. Words are
    separated by single spaces, as the server writes them, whatever else a word contains. Raises
    :class:`ProtocolViolationError`.
    """
    words = line.split(b" ")
    try:
        if words[0] == b"HMSG":
            _, subject, sid, *reply, head, size = words
            return int(sid), subject, reply[0] if reply else b"", int(head), int(size)
        _, subject, sid, *reply, size = words
        return int(sid), subject, reply[0] if reply else b"", 0, int(size)
    except ValueError as error:
        raise ProtocolViolationError("malformed MSG") from error


def decode_headers(lines: bytes) -> dict[str, str]:
    """Read header lines, without the first line of the block.

    Bytes that are not UTF-8 become lone surrogates, which no reader takes for text. :data:`CLIENT_INFO` is left out: it
    is in every request, and is not the sender's.
    """
    headers: dict[str, str] = {}
    for line in lines.split(CRLF):
        if line and not line.startswith(CLIENT_INFO):
            name, _, value = line.decode("utf-8", "surrogateescape").partition(":")
            headers[name.strip(" \t")] = value.strip(" \t")
    return headers


def publish_pattern(reserved: bytes) -> re.Pattern[bytes]:
    """Match PUB and HPUB lines that need no second look; group 1 is the bytes of headers and payload.

    ``reserved`` is a pattern: no subject of such a line begins with it. A size has at most nine digits, as nats-server
    counts them.
    """
    subject = rb"(?!%b)[^ \t\r\n]+ " % reserved
    return re.compile(rb"(?:PUB %b(?:%b)?|HPUB %b(?:%b)?\d{1,9} )(\d{1,9})\r\n" % (subject, subject, subject, subject))


def message_pattern() -> re.Pattern[bytes]:
    """Match MSG and HMSG lines; group 1 as in publish_pattern."""
    words = rb"[^ \n]++ [^ \n]++ (?:[^ \n]++ )??"
    return re.compile(rb"(?:MSG %b|HMSG %b\d+ )(\d+)\r\n" % (words, words))


# Reading what a client writes.


def decode_command(line: bytes) -> tuple[bytes, list[bytes]]:
    """Read a client's line, without its line feed: the verb in capitals, and its words.

    Raises :class:`ProtocolViolationError` for anything nats-server might read in another way.
    """
    line = line.removesuffix(b"\r")
    found = _COMMAND.fullmatch(line)
    # nats-server ends a line at a carriage return, wherever it stands.
    if found is None or b"\r" in line:
        raise ProtocolViolationError("Unknown Protocol Operation")
    return found[1].upper(), _WORD.findall(found[2] or b"")


def decode_publish(verb: bytes, words: list[bytes]) -> tuple[bytes, bytes, int, int]:
    """Read the words of a PUB or HPUB: subject, reply subject, bytes of the headers, and of headers and payload.

    Raises :class:`ProtocolViolationError`.
    """
    sizes = 2 if verb == b"HPUB" else 1
    numbers = words[-sizes:]
    if len(words) - sizes not in (1, 2) or not all(_SIZE.fullmatch(number) for number in numbers):
        raise ProtocolViolationError("Unknown Protocol Operation")
    head, length = (int(numbers[0]), int(numbers[1])) if sizes == 2 else (0, int(numbers[0]))
    if head > length:
        raise ProtocolViolationError("Unknown Protocol Operation")
    return words[0], words[1] if len(words) - sizes == 2 else b"", head, length


def decode_count(word: bytes) -> int:
    """Read the number of messages after which an UNSUB ends; 0, now, for what is not a number."""
    return int(word) if _SIZE.fullmatch(word) else 0


# Bodies.


def decode_body(body: bytes) -> tuple[bytes, bytes]:
    """Return header block and payload of one body that :func:`encode_body` wrote."""
    sizes, _, rest = body.partition(CRLF)
    head = int(sizes.split()[0])
    return rest[:head], rest[head:-2]


def decode_bodies(data: bytes, max_bodies: int) -> Iterator[tuple[bytes, bytes]]:
    """Read a sequence of 1 to ``max_bodies`` bodies, as MSG.BATCH has them: header block and payload of each.

    Raises :class:`ProtocolViolationError`, about the body that comes next, for what is not well formed.
    """
    at = count = 0
    while at < len(data) or not count:
        if count == max_bodies:
            raise ProtocolViolationError(f"expected at most {max_bodies} messages in a request")
        sizes = _SIZES.match(data, at)
        if sizes is None:
            raise ProtocolViolationError("expected a line with the bytes of its headers, and of headers and payload")
        start = sizes.end()
        middle, end = start + int(sizes[1]), start + int(sizes[2])
        if middle > end:
            raise ProtocolViolationError("expected no more bytes of headers than of headers and payload")
        if data[end : end + 2] != CRLF:
            raise ProtocolViolationError(f"expected a line break after {end - start} bytes of headers and payload")
        headers = data[start:middle]
        if headers and not (headers.startswith(VERSION) and headers.endswith(CRLF + CRLF)):
            raise ProtocolViolationError("expected headers that begin with the line NATS/1.0 and end with an empty one")
        yield headers, data[middle:end]
        count += 1
        at = end + 2
