"""Sends messages over one NATS connection, in order and in batches, until each is confirmed (S3, S8)."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from mediator.errors import BadRequestError, MessageTooLargeError, UnavailableError, UnreachableError
from pipeline.source.messages import SinkMessage
from pipeline.source.nats_client import (
    ANSWER_SECONDS,
    FIRST_PAUSE,
    FOR_NOW,
    LONGEST_PAUSE,
    STRANGE,
    SUBJECT,
    ServiceOptions,
    connect,
    disconnect,
    error_text,
    refusal,
)
from pipeline.source.options import read_integer

DEFAULT_IN_FLIGHT = 256
MAX_IN_FLIGHT = 10_000
MAX_BYTES_IN_FLIGHT = 16 * 1024 * 1024
"""Bytes without receipt, unless it is one message alone."""
BATCH_MESSAGES = 60
"""Messages of a request; the service takes so many whatever its max_payload is."""
BATCH_BYTES = 256 * 1024
"""Bytes of a request of more than one message."""
REQUESTS = 2
"""Requests under way at a time that ``maxInFlight`` has room for, if it is not 1."""


@dataclass(slots=True)
class InFlightMessage:
    """An unconfirmed message in a batch."""

    row: int
    address: str
    frame: bytes


@dataclass(slots=True)
class SendBatch:
    """Messages to one mailbox, in order, for one request."""

    most: int
    """The maximum number of messages."""
    messages: list[InFlightMessage] = field(default_factory=list)
    size: int = 0

    @property
    def full(self) -> bool:
        """Whether it has the maximum number of messages."""
        return len(self.messages) >= self.most

    def takes(self, message: InFlightMessage, room: int) -> bool:
        """Whether the message fits: same mailbox, and at most ``room`` bytes together."""
        if not self.messages:
            return True
        return message.address == self.messages[0].address and self.size + len(message.frame) <= room

    def add(self, message: InFlightMessage) -> None:
        """Append a message."""
        self.messages.append(message)
        self.size += len(message.frame)

    def refusals(self, answer: Msg) -> list[tuple[InFlightMessage, str]]:
        """Return each message with its error, "" if it was stored."""
        reason = refusal(answer)
        errors: dict[str, str] = {}
        if not reason:
            try:
                errors = dict(orjson.loads(answer.data)["errors"])
            except (KeyError, TypeError, ValueError):
                reason = STRANGE
        return [(message, reason or errors.get(str(no), "")) for no, message in enumerate(self.messages)]


@dataclass(frozen=True, slots=True)
class SinkOptions(ServiceOptions):
    """Server, login, messages in flight, and how long to retry."""

    in_flight: int
    """Unconfirmed messages at a time."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options of the sink; :class:`BadRequestError` names a wrong one."""
        server = ServiceOptions.of(options)
        in_flight = read_integer(options, "maxInFlight", 1, MAX_IN_FLIGHT) or DEFAULT_IN_FLIGHT
        return cls(server.login, server.patience, in_flight)


class BatchSender:
    """A connection, used as ``async with`` by one task.

    Messages that are refused temporarily, get no reply in time or were in flight when the connection broke are sent
    again, in order and with their dedup ids, with exponential backoff. A permanent refusal is raised as
    :class:`BadRequestError` with the row's number and the service's error; :class:`UnavailableError` means that
    nothing succeeded for ``patience`` seconds.
    """

    def __init__(self, target: SinkOptions, where: str) -> None:
        """``where`` follows the number of a row in errors."""
        self._target = target
        self._where = where
        self._client: Client | None = None
        self._inbox = ""
        self._open: dict[int, InFlightMessage] = {}
        """All unconfirmed messages, by row."""
        self._most = min(BATCH_MESSAGES, max(1, target.in_flight // REQUESTS))
        self._room = BATCH_BYTES
        self._next = SendBatch(self._most)
        """Messages of the next request."""
        self._requested: dict[int, SendBatch] = {}
        """Batches in flight, by the number of their request."""
        self._requests = 0
        self._bytes = 0
        self._answer_arrived = asyncio.Event()
        self._enough = 0
        self._refused: tuple[int, str] | None = None
        self._trouble = ""
        self._last_good = 0.0
        self._pause = FIRST_PAUSE

    async def __aenter__(self) -> Self:
        """Connect; :class:`SetupError` when the login is refused."""
        self._last_good = _now()
        try:
            while self._client is None:
                await self._connect()
        except BaseException:
            await self._drop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close the connection without waiting for outstanding replies."""
        await self._drop()

    async def send(self, row: int, message: SinkMessage, dedup_id: str) -> None:
        """Send a message as soon as there is room; ``row`` must grow."""
        opened = InFlightMessage(row, message.address, message.frame(dedup_id))
        size = len(opened.frame)
        full = len(self._open) >= self._target.in_flight or (self._open and self._bytes + size > MAX_BYTES_IN_FLIGHT)
        if full or self._trouble or self._refused is not None:
            await self._wait_for_receipts(self._target.in_flight - self._most, MAX_BYTES_IN_FLIGHT - size)
        if not self._open:
            self._last_good = _now()
        self._open[row] = opened
        self._bytes += size
        await self._gather(opened)

    async def settle(self) -> None:
        """Wait until every message is confirmed."""
        await self._wait_for_receipts(0, 0)

    async def _wait_for_receipts(self, most: int, most_bytes: int) -> None:
        """Wait until at most so many messages and bytes are unconfirmed, and none must be sent again."""
        self._enough = most
        if not self._trouble:
            await self._ask()
        while True:
            if self._refused is not None:
                row, reason = self._refused
                raise BadRequestError(f"row {row} {self._where}", reason)
            if self._trouble:
                await self._again()
            elif not self._open or (len(self._open) <= most and self._bytes <= most_bytes):
                return
            else:
                await self._wait()

    async def _wait(self) -> None:
        self._answer_arrived.clear()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._answer_arrived.wait()
        except TimeoutError:
            self._trouble = f"no answer within {ANSWER_SECONDS:g} s"
            await self._drop()

    async def _again(self) -> None:
        """Send unconfirmed messages again, in order, after a pause."""
        why, self._trouble = self._trouble, ""
        if self._open:
            await self._rest(why)
        if self._client is None or self._client.is_closed:
            await self._drop()
            await self._connect()
        # Late replies to earlier requests belong to other batches.
        self._requested.clear()
        self._next = SendBatch(self._most)
        for opened in list(self._open.values()):
            await self._gather(opened)
        await self._ask()

    async def _rest(self, why: str) -> None:
        if _now() - self._last_good > self._target.patience:
            row = next(iter(self._open), 0)
            raise UnavailableError(f"row {row} {self._where} was not taken in {self._target.patience:g} s: {why}")
        await asyncio.sleep(self._pause)
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    async def _gather(self, opened: InFlightMessage) -> None:
        """Add a message to the next request, and send the request when it is full."""
        if not self._next.takes(opened, self._room):
            await self._ask()
        self._next.add(opened)
        if self._next.full:
            await self._ask()

    async def _ask(self) -> None:
        """Send the next request."""
        batch, self._next = self._next, SendBatch(self._most)
        if not batch.messages:
            return
        if self._client is None:
            self._trouble = self._trouble or "not connected"
            return
        first = batch.messages[0]
        if batch.size > self._client.max_payload:
            # The server would close the connection instead of refusing the message.
            self._refuse(first.row, str(MessageTooLargeError(batch.size, self._client.max_payload)))
            return
        self._requests += 1
        self._requested[self._requests] = batch
        body = b"".join(opened.frame for opened in batch.messages)
        try:
            await self._client.publish(f"{SUBJECT}BATCH.{first.address}", body, f"{self._inbox}.{self._requests}")
        except (NatsError, OSError) as error:
            self._trouble = error_text(error)

    async def _received(self, answer: Msg) -> None:
        batch = self._requested.pop(int(answer.subject.rpartition(".")[2]), None)
        if batch is None:
            return
        for opened, reason in batch.refusals(answer):
            if not reason:
                self._keep_receipt(opened)
            elif reason.startswith(FOR_NOW):
                self._trouble = reason
            else:
                self._refuse(opened.row, reason)
        if self._trouble or self._refused is not None or len(self._open) <= self._enough:
            self._answer_arrived.set()

    def _keep_receipt(self, opened: InFlightMessage) -> None:
        del self._open[opened.row]
        self._bytes -= len(opened.frame)
        self._last_good = _now()
        self._pause = FIRST_PAUSE

    def _refuse(self, row: int, reason: str) -> None:
        if self._refused is None or row < self._refused[0]:
            self._refused = (row, reason)
        self._answer_arrived.set()

    async def _connect(self) -> None:
        """Try once to connect; on a temporary failure pause and record the error."""
        try:
            self._client = await connect(self._target, self._closed)
            self._inbox = self._client.new_inbox()
            self._room = min(BATCH_BYTES, self._client.max_payload)
            await self._client.subscribe(self._inbox + ".*", cb=self._received)
        except (UnreachableError, NatsError, OSError) as error:
            await self._drop()
            await self._rest(error_text(error))
            self._trouble = error_text(error)

    async def _closed(self) -> None:
        self._trouble = self._trouble or "the connection broke"
        self._answer_arrived.set()

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await disconnect(client)


def _now() -> float:
    return asyncio.get_running_loop().time()
