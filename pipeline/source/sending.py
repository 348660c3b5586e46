"""Sends messages over one NATS connection, many under way at a time, in order, each until it has its receipt (S3)."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import nats
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from mediator.errors import BadRequestError, MessageTooLargeError, SetupError, UnavailableError
from pipeline.source.messages import Message

SUBJECT = "$mq9.AI.MSG.SEND."
DEFAULT_SERVER = "nats://127.0.0.1:4222"
DEFAULT_IN_FLIGHT = 256
MAX_IN_FLIGHT = 10_000
DEFAULT_SECONDS = 60
MAX_SECONDS = 3600
MAX_BYTES = 16 * 1024 * 1024
"""Bytes under way, in messages that are not the only one."""
ANSWER_SECONDS = 5.0
"""How long no receipt at all may come before all that waits for one is sent again."""
CONNECT_SECONDS = 5.0
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
FOR_NOW = ("unavailable:", "quota_exceeded:", "archive_backlog_full:")
"""How refusals begin that a later try may not meet."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send, as whom, and how patiently."""

    servers: tuple[str, ...]
    user: str | None
    password: str | None = field(repr=False)
    in_flight: int
    """Messages without receipt at a time."""
    patience: float
    """Seconds without any success after which a task gives up."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options of the sink; :class:`BadRequestError` names a wrong one."""
        return cls(
            servers=tuple((options.get("nats.url") or DEFAULT_SERVER).split(",")),
            user=options.get("nats.user"),
            password=options.get("nats.password"),
            in_flight=_whole(options, "maxInFlight", DEFAULT_IN_FLIGHT, MAX_IN_FLIGHT),
            patience=_whole(options, "timeoutSeconds", DEFAULT_SECONDS, MAX_SECONDS),
        )


@dataclass(slots=True)
class _Open:
    """A message without receipt."""

    row: int
    subject: str
    payload: bytes
    headers: dict[str, str]
    size: int


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
        self._open: dict[int, _Open] = {}
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
        headers = {**message.headers, "mq9-dedup-id": dedup_id}
        size = len(message.payload) + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items()) + 12
        full = len(self._open) >= self._target.in_flight or (self._open and self._bytes + size > MAX_BYTES)
        if full or self._trouble or self._refused is not None:
            await self._answered(self._target.in_flight * 3 // 4, MAX_BYTES - size)
        if not self._open:
            self._last_good = _now()
        opened = _Open(row, SUBJECT + message.address, message.payload, headers, size)
        self._open[row] = opened
        self._bytes += size
        await self._publish(opened)

    async def settle(self) -> None:
        """Return when every message has its receipt."""
        await self._answered(0, 0)

    async def _answered(self, most: int, most_bytes: int) -> None:
        """Wait until at most so many messages are open, and none that is to be sent again."""
        self._enough = most
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
        if self._client is not None:
            for opened in list(self._open.values()):
                await self._publish(opened)

    async def _rest(self, why: str) -> None:
        if _now() - self._last_good > self._target.patience:
            row = next(iter(self._open), 0)
            raise UnavailableError(f"row {row} {self._where} was not taken in {self._target.patience:g} s: {why}")
        await asyncio.sleep(self._pause)
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    async def _publish(self, opened: _Open) -> None:
        if self._client is None:
            self._trouble = self._trouble or "not connected"
            return
        if opened.size > self._client.max_payload:
            # The server would close the connection instead of refusing the message.
            self._refused = self._refused or (
                opened.row,
                str(MessageTooLargeError(opened.size, self._client.max_payload)),
            )
            self._told.set()
            return
        try:
            await self._client.publish(
                opened.subject, opened.payload, reply=f"{self._inbox}.{opened.row}", headers=opened.headers
            )
        except (NatsError, OSError) as error:
            self._trouble = _words(error)

    async def _received(self, answer: Msg) -> None:
        opened = self._open.get(int(answer.subject.rpartition(".")[2]))
        if opened is None:
            return
        said = _refusal(answer)
        if not said:
            del self._open[opened.row]
            self._bytes -= opened.size
            self._last_good = _now()
            self._pause = FIRST_PAUSE
            if len(self._open) <= self._enough:
                self._told.set()
        elif said.startswith(FOR_NOW):
            self._trouble = said
            self._told.set()
        else:
            if self._refused is None or opened.row < self._refused[0]:
                self._refused = (opened.row, said)
            self._told.set()

    async def _connect(self) -> None:
        """Try once to connect; where that fails for now, pause, and leave the trouble to the caller."""
        said: list[Exception] = []

        async def failed(error: Exception) -> None:
            said[:] = [error]

        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                self._client = await nats.connect(
                    list(self._target.servers),
                    name="mediator pipeline",
                    user=self._target.user,
                    password=self._target.password,
                    connect_timeout=3,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=FIRST_PAUSE,
                    error_cb=failed,
                    closed_cb=self._closed,
                )
                self._inbox = self._client.new_inbox()
                await self._client.subscribe(self._inbox + ".*", cb=self._received)
        except (NatsError, OSError, TimeoutError, ValueError) as error:
            await self._drop()
            why = _words(said[-1] if said else error)
            if "authorization violation" in why.lower():
                raise SetupError(f"nats.user: the server refuses the login, {why}") from None
            await self._rest(f"cannot connect: {why}")
            self._trouble = why

    async def _closed(self) -> None:
        self._trouble = self._trouble or "the connection broke"
        self._told.set()

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(NatsError, OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    await client.close()


def _refusal(answer: Msg) -> str:
    """Return why a message was not taken, "" when it was."""
    if not answer.data and (answer.headers or {}).get("Status") == "503":
        return "unavailable: nobody takes messages there"
    try:
        said = orjson.loads(answer.data)["error"]
    except (ValueError, KeyError, TypeError):
        return "unavailable: an answer that is none of the service"
    return said if isinstance(said, str) else "unavailable: an answer that is none of the service"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()


def _whole(options: Mapping[str, str], name: str, default: int, highest: int) -> int:
    text = options.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= highest:
        raise BadRequestError(name, f'expected a whole number from 1 to {highest}, got "{text[:40]}"')
    return int(text)
