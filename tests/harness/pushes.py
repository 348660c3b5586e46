"""Subscriptions to stored mail without a connection: the sources of one instance, and subscribers in memory."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mediator.gateway import subscription
from mediator.gateway.opening import make_sources
from mediator.gateway.subscription import InFlightCounter, Subscription
from mediator.gateway.subscriptions import StoredMailSource
from mediator.nats.connection import connect
from mediator.nats.frames import decode_headers
from mediator.nats.subjects import Subject, classify
from tests.harness.door import PATIENCE, PREFIX, PUSH, Service, serving
from tests.harness.waiting import until
from tests.harness.wire import CONTROL_KEY

_FRAME = re.compile(rb"(H?)MSG ([^ ]+) ([^ ]+) (?:(\d+) )?(\d+)\r\n")
_TURNS = 10
"""Reads of the store that a push in the making may need."""


@dataclass(frozen=True, slots=True)
class Push:
    """A message as it was pushed."""

    subject: str
    headers: dict[str, str]
    data: bytes


@dataclass(eq=False)
class Subscriber:
    """One subscription, and its client: what is written to it is parsed, and confirmed as the test says."""

    reads: bool
    """Whether it confirms what it gets, at once."""
    full: bool = False
    """Whether it reads too slowly for more; see :meth:`read`."""
    messages: list[Push] = field(default_factory=list)
    subscription: Subscription | None = None
    """None: it has ended."""

    @property
    def ids(self) -> list[int]:
        """The msg_ids it got, in order."""
        return [int(message.headers[subscription.MSG_ID]) for message in self.messages]

    @property
    def payloads(self) -> list[bytes]:
        """The payloads it got, in order."""
        return [message.data for message in self.messages]

    @property
    def subjects(self) -> list[str]:
        """The subjects it got them on."""
        return [message.subject for message in self.messages]

    async def got(self, count: int) -> None:
        """Wait for so many messages in all; more would be wrong as well."""
        await until(lambda: len(self.messages) >= count)
        assert len(self.messages) == count, len(self.messages)

    def write(self, to: Subscription, pushes: Sequence[bytes]) -> None:
        """Take frames."""
        assert to is self.subscription
        for frame in pushes:
            self.messages.append(_parsed(frame, to.sid))
        if self.reads and pushes:
            # A client's answer never comes while it is being written to.
            asyncio.get_running_loop().call_soon(self.confirm)

    def confirm(self, count: int | None = None) -> None:
        """Confirm so many messages since the opening, or all that came."""
        if self.subscription is not None:
            self.subscription.confirm(len(self.messages) if count is None else count)

    def read(self) -> None:
        """Read again, after it was full."""
        assert self.subscription is not None
        self.full = False
        self.subscription.resume()

    def end(self, how: str) -> None:
        """End it: ``unsub``, ``drained`` or ``broken``."""
        if self.subscription is not None:
            ended, self.subscription = self.subscription, None
            ended.close(how)


class Pushes:
    """What serves subscriptions at one instance."""

    def __init__(self, service: Service, sources: dict[type[Subject], StoredMailSource], push: InFlightCounter) -> None:
        self._service = service
        self._sources = sources
        self._in_flight = push
        self._subscribers: list[Subscriber] = []
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many messages are pushed and not confirmed."""
        return self._in_flight.waiting

    async def subscribe(
        self,
        subject: str,
        queue: str = "",
        *,
        reads: bool = True,
        tenant: str = "default",
        python: bool = False,
        bare: bool = False,
    ) -> Subscriber:
        """Subscribe behind ``$mq9.AI.``; raises :class:`MediatorError`."""
        made = Subscriber(reads)
        text = PREFIX + subject
        opening = Subscription(b"7", text, classify(text), queue, made.write, lambda _: made.full, python, bare, tenant)
        await self._sources[type(opening.subject)].open(opening)
        made.subscription = opening
        opening.start()
        self._subscribers.append(made)
        return made

    def end_all(self) -> None:
        """End all subscriptions, as when their clients go."""
        for each in self._subscribers:
            each.end("unsub")

    async def settled(self) -> None:
        """Wait until what was confirmed, or came, can have led to no further push."""
        for _ in range(_TURNS):
            await self._service.broker.wait_committed()
            await self._service.broker.read(lambda tx, now: None)
            await asyncio.sleep(0)

    async def close(self, seconds: float = PATIENCE) -> None:
        """End the instance, whose subscribers must have ended."""
        if not self._closed:
            self._closed = True
            for source in self._sources.values():
                source.pause()
            for source in self._sources.values():
                await source.close(seconds)


@asynccontextmanager
async def pushes_of(service: Service) -> AsyncIterator[Pushes]:
    """Run what serves subscriptions at one more instance over the same store."""
    async with AsyncExitStack() as stack:
        connection = await connect(service.server.upstreams(CONTROL_KEY), "pushes")
        stack.push_async_callback(connection.close)
        in_flight = InFlightCounter(lambda count: None)
        sources = make_sources(connection, service.broker, service.metrics, in_flight, PUSH)
        for source in sources.values():
            source.start()
        made = Pushes(service, sources, in_flight)
        stack.push_async_callback(made.close)
        stack.callback(made.end_all)
        yield made


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    """Run a service of the test's own."""
    async with serving(tmp_path) as running:
        yield running


@pytest.fixture
async def pushes(service: Service) -> AsyncIterator[Pushes]:
    """Serve subscriptions to its mail."""
    async with pushes_of(service) as running:
        yield running


def _parsed(frame: bytes, sid: bytes) -> Push:
    found = _FRAME.match(frame)
    assert found is not None, frame[:200]
    assert found[3] == sid
    assert bool(found[1]) is (found[4] is not None)
    body = frame[found.end() :]
    head = int(found[4] or 0)
    assert len(body) == int(found[5]) + 2
    assert body.endswith(b"\r\n")
    headers = decode_headers(body[:head].partition(b"\r\n")[2]) or {} if head else {}
    return Push(found[2].decode(), headers, body[head:-2])
