"""Many messages in one request: reads their frames, and keeps what became of each until all is known (S8)."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mediator.errors import BadRequestError, UnavailableError
from mediator.mailboxes.message import Draft
from mediator.nats import requests
from mediator.nats.client import read_headers
from mediator.store.writer import Done

MAX_MESSAGES = 1000
REPLY_BYTES = 1024
"""What the reply may need for one message; a server that takes small messages only takes fewer of them."""

_SIZES = re.compile(rb"(0|[1-9][0-9]{0,8}) (0|[1-9][0-9]{0,8})\r\n")
_FIRST_LINE = b"NATS/1.0\r\n"
_CRLF = b"\r\n"


def drafts(body: bytes, budget: int) -> list[Draft | BadRequestError]:
    """Read MSG.BATCH: each message as SEND would, or why it is refused; ``budget`` is that of the reply.

    Raises :class:`BadRequestError`, which names the message by its number, when the body is not made as it should be.
    """
    return [_draft(block, payload) for block, payload in parse(body, min(MAX_MESSAGES, budget // REPLY_BYTES))]


def parse(body: bytes, most: int = MAX_MESSAGES) -> list[tuple[bytes, bytes]]:
    """Return the header block and the payload of each message; raises as :func:`drafts`."""
    found: list[tuple[bytes, bytes]] = []
    at = 0
    while at < len(body) or not found:
        name = f"message {len(found)}"
        if len(found) == most:
            raise BadRequestError(name, f"expected at most {most} messages in a request")
        sizes = _SIZES.match(body, at)
        if sizes is None:
            raise BadRequestError(name, "expected a line with the bytes of its headers, and of headers and payload")
        start = sizes.end()
        middle, end = start + int(sizes[1]), start + int(sizes[2])
        if middle > end:
            raise BadRequestError(name, "expected no more bytes of headers than of headers and payload")
        if body[end : end + len(_CRLF)] != _CRLF:
            raise BadRequestError(name, f"expected a line break after {end - start} bytes of headers and payload")
        block = body[start:middle]
        if block and not (block.startswith(_FIRST_LINE) and block.endswith(_CRLF + _CRLF)):
            raise BadRequestError(name, "expected headers that begin with the line NATS/1.0 and end with an empty one")
        found.append((block, body[middle:end]))
        at = end + len(_CRLF)
    return found


def _draft(block: bytes, payload: bytes) -> Draft | BadRequestError:
    try:
        return requests.draft(payload, read_headers(block.removeprefix(_FIRST_LINE)))
    except BadRequestError as error:
        return error


class Batch:
    """The messages of one request on their way to the store."""

    def __init__(self, messages: Sequence[Draft | BadRequestError], done: Callable[[list[Any]], None]) -> None:
        """``done`` gets the msg_id of each message, or its error, when the last of them is known."""
        self._outcomes: list[Any] = list(messages)
        self._done = done
        self._waiting = 0

    def send(self, submit: Callable[[Draft, Done], None]) -> None:
        """Hand on the messages in their order.

        The one that finds no room is refused with all that follow, so that none overtakes it; where none was taken
        before it, its :class:`UnavailableError` is raised.
        """
        full: UnavailableError | None = None
        for no, draft in enumerate(self._outcomes):
            if not isinstance(draft, Draft):
                continue
            try:
                if full is None:
                    submit(draft, partial(self._told, no))
                    self._waiting += 1
            except UnavailableError as error:
                if not self._waiting:
                    raise
                full = error
            if full is not None:
                self._outcomes[no] = full
        if not self._waiting:
            self._done(self._outcomes)

    def _told(self, no: int, outcome: Any) -> None:
        self._outcomes[no] = outcome
        self._waiting -= 1
        if not self._waiting:
            self._done(self._outcomes)
