"""Sends messages over one NATS connection, in order, many to a request, each until it has its receipt (S3, S8)."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from mediator.errors import BadRequestError, MessageTooLargeError, UnavailableError, UnreachableError
from pipeline.source import batching
from pipeline.source.asking import (
    ANSWER_SECONDS,
    FIRST_PAUSE,
    FOR_NOW,
    LONGEST_PAUSE,
    SUBJECT,
    Server,
    connect,
    disconnect,
    whole,
    words,
)
from pipeline.source.batching import Batch, Open
from pipeline.source.messages import Message

DEFAULT_IN_FLIGHT = 256
MAX_IN_FLIGHT = 10_000
MAX_BYTES = 16 * 1024 * 1024
"""Bytes under way, in messages that are not the only one."""
REQUESTS = 2
"""Requests under way at a time that ``maxInFlight`` has room for, if it is not 1."""


@dataclass(frozen=True, slots=True)
class Target(Server):
    """Where to send, as whom, how much at a time, and how patiently."""

    in_flight: int
    """Messages without receipt at a time."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options of the sink; :class:`BadRequestError` names a wrong one."""
        server = Server.of(options)
        in_flight = whole(options, "maxInFlight", DEFAULT_IN_FLIGHT, MAX_IN_FLIGHT)
        return cls(server.servers, server.user, server.password, server.patience, in_flight)


class Sender:
    """A connection, used as ``async with`` by one task.

    What is refused for now, gets no answer in time or was under way when the connection broke is sent again, in
    order and with its dedup id, after a pause that grows. A refusal that would be the same next time is raised as
    :class:`BadRequestError` with the row's number and the service's own words; :class:`UnavailableError` says that
    nothing succeeded for ``patience`` seconds.
    """

    def __init__(self, target: Target, where: str) -> None:
        """``where`` follows the number of a row in errors."""
        self._target = target
        self._where = where
        self._client: Client | None = None
        self._inbox = ""
        self._open: dict[int, Open] = {}
        """All without receipt, by row."""
        self._most = min(batching.MAX_MESSAGES, max(1, target.in_flight // REQUESTS))
        self._room = batching.MAX_BYTES
        self._next = Batch(self._most)
        """Those of them that go with the next request."""
        self._asked: dict[int, Batch] = {}
        """Those of them that are under way, by the number of their request."""
        self._requests = 0
        self._bytes = 0
        self._told = asyncio.Event()
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
        """Close the connection; receipts that have not come are not waited for."""
        await self._drop()

    async def send(self, row: int, message: Message, dedup_id: str) -> None:
        """Put a message on its way as soon as there is room; ``row`` is higher than that of the one before."""
        opened = Open(row, message.address, message.frame(dedup_id))
        size = len(opened.frame)
        full = len(self._open) >= self._target.in_flight or (self._open and self._bytes + size > MAX_BYTES)
        if full or self._trouble or self._refused is not None:
            await self._answered(self._target.in_flight - self._most, MAX_BYTES - size)
        if not self._open:
            self._last_good = _now()
        self._open[row] = opened
        self._bytes += size
        await self._gather(opened)

    async def settle(self) -> None:
        """Return when every message has its receipt."""
        await self._answered(0, 0)

    async def _answered(self, most: int, most_bytes: int) -> None:
        """Wait until at most so many messages are open, and none that is to be sent again."""
        self._enough = most
        if not self._trouble:
            await self._ask()
        while True:
            if self._refused is not None:
                row, said = self._refused
                raise BadRequestError(f"row {row} {self._where}", said)
            if self._trouble:
                await self._again()
            elif not self._open or (len(self._open) <= most and self._bytes <= most_bytes):
                return
            else:
                await self._wait()

    async def _wait(self) -> None:
        self._told.clear()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._told.wait()
        except TimeoutError:
            self._trouble = f"no answer within {ANSWER_SECONDS:g} s"
            await self._drop()

    async def _again(self) -> None:
        """After a pause send again, in order, what is open."""
        why, self._trouble = self._trouble, ""
        if self._open:
            await self._rest(why)
        if self._client is None or self._client.is_closed:
            await self._drop()
            await self._connect()
        # Answers to what was asked before tell of other batches than those that are made now.
        self._asked.clear()
        self._next = Batch(self._most)
        for opened in list(self._open.values()):
            await self._gather(opened)
        await self._ask()

    async def _rest(self, why: str) -> None:
        if _now() - self._last_good > self._target.patience:
            row = next(iter(self._open), 0)
            raise UnavailableError(f"row {row} {self._where} was not taken in {self._target.patience:g} s: {why}")
        await asyncio.sleep(self._pause)
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    async def _gather(self, opened: Open) -> None:
        """Put a message into the next request, and send those that are whole."""
        if not self._next.takes(opened, self._room):
            await self._ask()
        self._next.add(opened)
        if self._next.full:
            await self._ask()

    async def _ask(self) -> None:
        """Send what was gathered."""
        batch, self._next = self._next, Batch(self._most)
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
        self._asked[self._requests] = batch
        body = b"".join(opened.frame for opened in batch.messages)
        try:
            await self._client.publish(f"{SUBJECT}BATCH.{first.address}", body, f"{self._inbox}.{self._requests}")
        except (NatsError, OSError) as error:
            self._trouble = words(error)

    async def _received(self, answer: Msg) -> None:
        batch = self._asked.pop(int(answer.subject.rpartition(".")[2]), None)
        if batch is None:
            return
        for opened, said in batch.refusals(answer):
            if not said:
                self._keep_receipt(opened)
            elif said.startswith(FOR_NOW):
                self._trouble = said
            else:
                self._refuse(opened.row, said)
        if self._trouble or self._refused is not None or len(self._open) <= self._enough:
            self._told.set()

    def _keep_receipt(self, opened: Open) -> None:
        del self._open[opened.row]
        self._bytes -= len(opened.frame)
        self._last_good = _now()
        self._pause = FIRST_PAUSE

    def _refuse(self, row: int, said: str) -> None:
        if self._refused is None or row < self._refused[0]:
            self._refused = (row, said)
        self._told.set()

    async def _connect(self) -> None:
        """Try once to connect; where that fails for now, pause, and leave the trouble to the caller."""
        try:
            self._client = await connect(self._target, self._closed)
            self._inbox = self._client.new_inbox()
            self._room = min(batching.MAX_BYTES, self._client.max_payload)
            await self._client.subscribe(self._inbox + ".*", cb=self._received)
        except (UnreachableError, NatsError, OSError) as error:
            await self._drop()
            await self._rest(words(error))
            self._trouble = words(error)

    async def _closed(self) -> None:
        self._trouble = self._trouble or "the connection broke"
        self._told.set()

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await disconnect(client)


def _now() -> float:
    return asyncio.get_running_loop().time()
