"""The client for programs without an event loop: the same methods under the same names, which wait for what they do.

Each client has a thread, whose event loop keeps the connection, extends leases and sends reports meanwhile. It may be
used from several threads.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from mediator import client as aio
from mediator.client.client import PATIENCE, Retention, Start
from mediator.client.login import LoginOptions
from mediator.client.message import Message, Outgoing, Payload, SendOptions
from mediator.client.registry import Agent
from mediator.errors import BadRequestError

__all__ = ["Agent", "Client", "Delivery", "LoginOptions", "Mailbox", "Message", "Outgoing", "Registration"]

T = TypeVar("T")


class _Runner:
    """Runs coroutines on the loop of a thread of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="mediator client", daemon=True)
        self._thread.start()
        self._ready.wait()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        self._loop = None

    def stop(self) -> None:
        """End the thread; what runs in it is cancelled."""
        if self._loop is not None and self._stop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._ready.clear()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine; what interrupts the waiting cancels it."""
        if self._loop is None:
            work.close()
            raise BadRequestError("client", "it is closed, or was never opened")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise BadRequestError("client", "it was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the same where the client may be closed already, or where the garbage collector asks, in any thread."""
        if self._loop is None:
            work.close()
        elif threading.current_thread() is self._thread:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        else:
            self.run(work)


@dataclass(frozen=True)
class Delivery(Message):
    """A leased message; ``with message:`` acknowledges it, gives it back or extends its lease as the block goes."""

    inner: aio.Delivery = field(repr=False, compare=False)
    runner: _Runner = field(repr=False, compare=False)

    @classmethod
    def of(cls, inner: aio.Delivery, runner: _Runner) -> Self:
        """Wrap a message of the client with an event loop."""
        values = {name.name: getattr(inner, name.name) for name in fields(Message)}
        return cls(**values, inner=inner, runner=runner)

    def ack(self) -> None:
        """Acknowledge the message: it is done."""
        self.runner.run(self.inner.ack())

    def nack(self, delay: float = 0) -> None:
        """Give the message back: a member of the group gets it after ``delay`` seconds."""
        self.runner.run(self.inner.nack(delay))

    def extend(self, lease: float) -> None:
        """Lengthen the lease to this many seconds from now; a block does so by itself."""
        self.runner.run(self.inner.extend(lease))

    def __enter__(self) -> Self:
        self.runner.run(self.inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.runner.run(self.inner.__aexit__(kind, error, where))


class Registration:
    """An agent that is registered; it reports again and again, and registers anew where it was forgotten."""

    def __init__(self, inner: aio.Registration, runner: _Runner) -> None:
        self.address = inner.address
        self._inner = inner
        self._runner = runner

    def report(self, **status: Any) -> None:
        """Report now; what is given is the status from now on."""
        self._runner.run(self._inner.report(**status))


class Client:
    """A connection to a mediator, used as ``with``; see :class:`mediator.client.Client` for each method."""

    def __init__(
        self, url: str, *, patience: float = PATIENCE, name: str = "mediator client", **login: Unpack[LoginOptions]
    ) -> None:
        """``url``: ``nats://HOST:PORT``; ``patience``: seconds for which requests are tried again."""
        self.inner = aio.Client(url, patience=patience, name=name, **login)
        self.runner = _Runner()

    def __enter__(self) -> Self:
        """Connect; raises :class:`LoginRefusedError`, or :class:`UnreachableError` when patience is over."""
        self.runner.start()
        try:
            self.runner.run(self.inner.__aenter__())
        except BaseException:
            self.runner.stop()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        """Give back what consumers hold, and disconnect."""
        try:
            self.runner.run(self.inner.__aexit__(None, None, None))
        finally:
            self.runner.stop()

    def request(
        self,
        verb: str,
        body: bytes | Mapping[str, Any] = b"",
        *,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
        repeatable: bool = True,
        patience: float | None = None,
    ) -> aio.Reply:
        """Send any request, and return the fields of its reply."""
        return self.runner.run(
            self.inner.request(verb, body, headers=headers, wait=wait, repeatable=repeatable, patience=patience)
        )

    def mailbox(self, address: str) -> "Mailbox":
        """Return a mailbox by its address, without asking whether it is there."""
        return Mailbox(self, self.inner.mailbox(address))

    def create(
        self,
        address: str | None = None,
        *,
        ttl: float | None = None,
        desc: str = "",
        tags: Sequence[str] = (),
        retention: Retention = "keep",
        archive: bool = False,
        lease: float | None = None,
        exist_ok: bool = False,
    ) -> "Mailbox":
        """Create a mailbox; without an address it gets one that nobody can guess."""
        made = self.inner.create(
            address,
            ttl=ttl,
            desc=desc,
            tags=tags,
            retention=retention,
            archive=archive,
            lease=lease,
            exist_ok=exist_ok,
        )
        return Mailbox(self, self.runner.run(made))

    def register(self, card: Mapping[str, Any]) -> str:
        """Register an agent by its card, which names its ``mailbox``; return the address."""
        return self.runner.run(self.inner.register(card))

    def unregister(self, address: str) -> None:
        """Remove an agent from the registry."""
        self.runner.run(self.inner.unregister(address))

    def report(self, address: str, status: Mapping[str, Any] | None = None) -> None:
        """Give a sign of life for an agent, with any status."""
        self.runner.run(self.inner.report(address, status))

    @contextmanager
    def registered(self, card: Mapping[str, Any], *, ttl: float = 60.0) -> Iterator[Registration]:
        """Keep an agent registered while the block runs."""
        entered = self.inner.registered(card, ttl=ttl)
        registration = self.runner.run(_wait(entered.__aenter__()))
        try:
            yield Registration(registration, self.runner)
        finally:
            self.runner.run(_wait(entered.__aexit__(None, None, None)))

    def discover(
        self,
        text: str = "",
        *,
        limit: int = 10,
        by_words: bool = False,
        tags: Sequence[str] = (),
        skills: Sequence[str] = (),
        min_score: float | None = None,
        explain: bool = False,
    ) -> list[Agent]:
        """Find agents by what they can do, best first."""
        return self.runner.run(
            self.inner.discover(
                text, limit=limit, by_words=by_words, tags=tags, skills=skills, min_score=min_score, explain=explain
            )
        )


class Mailbox:
    """A mailbox; see :class:`mediator.client.Mailbox` for each method."""

    def __init__(self, client: Client, inner: aio.Mailbox) -> None:
        self.client = client
        self.address = inner.address
        self.send_address = inner.send_address
        self.token = inner.token
        self._inner = inner
        self._run = client.runner.run

    @classmethod
    @contextmanager
    def open(
        cls,
        url: str,
        address: str | None = None,
        *,
        create: bool = False,
        patience: float = PATIENCE,
        **login: Unpack[LoginOptions],
    ) -> "Iterator[Mailbox]":
        """Connect for one mailbox; ``create`` makes it if it is not there, and without an address a new one."""
        with Client(url, patience=patience, **login) as client:
            if create or address is None:
                yield client.create(address, exist_ok=True)
            else:
                yield client.mailbox(address)

    def __repr__(self) -> str:
        return repr(self._inner)

    def mailbox(self, address: str) -> "Mailbox":
        """Return another mailbox, reached by the same connection."""
        return self.client.mailbox(address)

    def send(self, payload: Payload, **options: Unpack[SendOptions]) -> int | None:
        """Send a message; return its msg_id once it is on disk, or None while it is delayed."""
        return self._run(self._inner.send(payload, **options))

    def send_many(self, messages: Iterable[Payload | Outgoing]) -> list[int | None]:
        """Send messages in as few requests as they fit into."""
        return self._run(self._inner.send_many(messages))

    def reply(self, message: Message, payload: Payload, **options: Unpack[SendOptions]) -> int | None:
        """Send an answer to where the sender of ``message`` wants it."""
        return self._run(self._inner.reply(message, payload, **options))

    def consume(
        self,
        *,
        group: str,
        lease: float = 30.0,
        start: Start = "earliest",
        prefetch: int = 1,
        max_deliver: int | None = None,
    ) -> Iterator[Delivery]:
        """Yield messages, for ever; take each as a block, ``with message:``, which settles it."""
        messages = self._inner.consume(
            group=group, lease=lease, start=start, prefetch=prefetch, max_deliver=max_deliver
        )
        try:
            while True:
                yield Delivery.of(self._run(_wait(anext(messages))), self.client.runner)
        finally:
            self.client.runner.finish(_wait(messages.aclose()))

    def work(
        self,
        handler: Callable[[Delivery], object],
        *,
        group: str,
        lease: float = 30.0,
        concurrency: int = 1,
        start: Start = "earliest",
        max_deliver: int | None = None,
    ) -> None:
        """Call ``handler`` with each message, for ever, in ``concurrency`` threads."""

        async def handle(delivery: aio.Delivery) -> None:
            await asyncio.to_thread(handler, Delivery.of(delivery, self.client.runner))

        self._run(
            self._inner.work(
                handle, group=group, lease=lease, concurrency=concurrency, start=start, max_deliver=max_deliver
            )
        )

    def fetch(
        self,
        *,
        group: str | None = None,
        limit: int = 100,
        wait: float = 0.5,
        lease: float | None = None,
        start: Start = "earliest",
        reset: bool = False,
        max_deliver: int | None = None,
    ) -> list[Message]:
        """Fetch once; waits for the first message, up to 4.5 s."""
        return self._run(
            self._inner.fetch(
                group=group, limit=limit, wait=wait, lease=lease, start=start, reset=reset, max_deliver=max_deliver
            )
        )

    def ack(self, *messages: Message | int, group: str) -> int:
        """Acknowledge messages for a group; return how many that settled."""
        return self._run(self._inner.ack(*messages, group=group))

    def nack(self, *messages: Message | int, group: str, delay: float = 0) -> int:
        """Give leased messages back; return how many still were leased."""
        return self._run(self._inner.nack(*messages, group=group, delay=delay))

    def extend(self, *messages: Message | int, group: str, lease: float) -> int:
        """Lengthen leases to ``lease`` seconds from now; return how many still ran."""
        return self._run(self._inner.extend(*messages, group=group, lease=lease))

    def query(
        self,
        *,
        key: str | None = None,
        tags: Sequence[str] = (),
        since: datetime | None = None,
        before_id: int | None = None,
        limit: int = 100,
        headers_only: bool = False,
        dead_for: str | None = None,
    ) -> list[Message]:
        """Look at messages without moving any group."""
        return self._run(
            self._inner.query(
                key=key,
                tags=tags,
                since=since,
                before_id=before_id,
                limit=limit,
                headers_only=headers_only,
                dead_for=dead_for,
            )
        )

    def delete(self, message: Message | int) -> None:
        """Delete a message for everybody."""
        self._run(self._inner.delete(message))

    def register(self, card: Mapping[str, Any]) -> str:
        """Register an agent that is reached at this mailbox, unless its card names another; return the address."""
        return self._run(self._inner.register(card))

    @contextmanager
    def registered(self, card: Mapping[str, Any], *, ttl: float = 60.0) -> Iterator[Registration]:
        """Keep an agent that is reached at this mailbox registered while the block runs."""
        with self.client.registered(self._inner.with_mailbox(card), ttl=ttl) as registration:
            yield registration

    def discover(
        self,
        text: str = "",
        *,
        limit: int = 10,
        by_words: bool = False,
        tags: Sequence[str] = (),
        skills: Sequence[str] = (),
        min_score: float | None = None,
        explain: bool = False,
    ) -> list[Agent]:
        """Find agents by what they can do, best first."""
        return self.client.discover(
            text, limit=limit, by_words=by_words, tags=tags, skills=skills, min_score=min_score, explain=explain
        )


async def _wait(work: Awaitable[T]) -> T:
    return await work
