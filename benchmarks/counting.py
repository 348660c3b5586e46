"""A NATS client that does nothing but count replies, for rates that nats-py cannot reach."""

import re
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

INBOX = b"_INBOX.counting"
HELLO = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\nSUB %b.* 1\r\nPING\r\n'
CHUNK = 1 << 18
_REPLY = re.compile(rb"MSG _INBOX\.counting\.\d+ ")
_END = b"}\r\n"
"""End of every reply that is counted: all of them are JSON objects."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What was answered, in how many seconds, and how many of these the client computed."""

    count: int
    seconds: float
    client_seconds: float


def keep(url: str, subject: str, payload: bytes, good: bytes, in_flight: int, seconds: float) -> Counted:
    """Keep ``in_flight`` requests in flight (closed loop) for some seconds, then wait for the last answers.

    Raises RuntimeError if a reply does not contain ``good`` or the connection ends.
    """
    where = urlsplit(url)
    head, tail = b"PUB %b %b." % (subject.encode(), INBOX), b" %d\r\n%b\r\n" % (len(payload), payload)
    with socket.create_connection((where.hostname, where.port), timeout=10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(HELLO % INBOX)
        while b"PONG\r\n" not in client.recv(CHUNK):
            pass
        sent, seen, fine, rest = in_flight, 0, 0, b""
        started, worked = time.perf_counter(), time.process_time()
        client.sendall(b"".join(head + b"%d" % number + tail for number in range(sent)))
        while seen < sent:
            chunk = client.recv(CHUNK)
            if not chunk:
                raise RuntimeError("the server closed the connection")
            if b"PING\r\n" in chunk:
                client.sendall(b"PONG\r\n")
            rest += chunk
            whole = rest.rfind(_END) + len(_END)
            if whole < len(_END):
                continue
            replies, rest = rest[:whole], rest[whole:]
            now = len(_REPLY.findall(replies))
            seen, fine = seen + now, fine + replies.count(good)
            if time.perf_counter() < started + seconds:
                client.sendall(b"".join([head + b"%d" % number + tail for number in range(sent, sent + now)]))
                sent += now
        spent = Counted(seen, time.perf_counter() - started, time.process_time() - worked)
    if fine != seen:
        raise RuntimeError(f"{seen - fine} of {seen} requests were refused")
    return spent
