"""Many messages in one request: reads them, and collects the outcome of each until all are known (S8)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mediator.errors import BadRequestError, UnavailableError
from mediator.mailboxes.message import Draft
from mediator.nats import requests
from mediator.nats.frames import VERSION, ProtocolViolationError, decode_bodies, decode_headers
from mediator.store.writer import Done

MAX_MESSAGES = 1000
REPLY_BYTES = 1024
"""Bytes that the reply may need for one message; a server that takes only small messages takes fewer of them."""


def drafts(body: bytes, budget: int) -> list[Draft | BadRequestError]:
    """Read MSG.BATCH: each message as SEND would, or why it is refused; ``budget`` is that of the reply, in bytes.

    Raises :class:`BadRequestError`, which names the message by its number, when the body is malformed.
    """
    found: list[Draft | BadRequestError] = []
    try:
        for headers, payload in decode_bodies(body, min(MAX_MESSAGES, budget // REPLY_BYTES)):
            found.append(_draft(headers, payload))
    except ProtocolViolationError as error:
        raise BadRequestError(f"message {len(found)}", str(error)) from error
    return found


def _draft(headers: bytes, payload: bytes) -> Draft | BadRequestError:
    try:
        return requests.draft(payload, decode_headers(headers.removeprefix(VERSION)))
    except BadRequestError as error:
        return error


class PendingBatch:
    """The messages of one request on their way to the store."""

    def __init__(self, messages: Sequence[Draft | BadRequestError], done: Callable[[list[Any]], None]) -> None:
        """``done`` is called with the msg_id of each message, or its error, when the last of them is known."""
        self._outcomes: list[Any] = list(messages)
        self._done = done
        self._waiting = 0

    def send(self, submit: Callable[[Draft, Done], None]) -> None:
        """Submit the messages in their order.

        The first that finds no room is refused together with all that follow, so that none overtakes it; if none was
        taken before it, its :class:`UnavailableError` is raised.
        """
        full: UnavailableError | None = None
        for no, draft in enumerate(self._outcomes):
            if not isinstance(draft, Draft):
                continue
            try:
                if full is None:
                    submit(draft, partial(self._submitted, no))
                    self._waiting += 1
            except UnavailableError as error:
                if not self._waiting:
                    raise
                full = error
            if full is not None:
                self._outcomes[no] = full
        if not self._waiting:
            self._done(self._outcomes)

    def _submitted(self, no: int, outcome: Any) -> None:
        self._outcomes[no] = outcome
        self._waiting -= 1
        if not self._waiting:
            self._done(self._outcomes)
