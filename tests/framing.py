"""Writes what MSG.BATCH takes, apart from the service and from the sink (S8)."""

from collections.abc import Iterable, Mapping

Sent = tuple[Mapping[str, str], bytes]
"""Headers and payload of a message."""


def framed(messages: Iterable[Sent]) -> bytes:
    """Write a body."""
    return b"".join(frame(block(headers), payload) for headers, payload in messages)


def block(headers: Mapping[str, str]) -> bytes:
    """Write the headers as NATS has them; none are no bytes."""
    if not headers:
        return b""
    return "".join(["NATS/1.0\r\n", *(f"{name}: {value}\r\n" for name, value in headers.items()), "\r\n"]).encode()


def frame(head: bytes, payload: bytes) -> bytes:
    """Write one message."""
    return b"%d %d\r\n%b%b\r\n" % (len(head), len(head) + len(payload), head, payload)
