"""The client for programs without an event loop: the same methods under the same names, which wait for what they do.

Each client has a thread, whose event loop keeps the connection, extends leases and sends reports meanwhile. It may be
used from several threads.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from mediator import client as aio
from mediator.client.client import PATIENCE, Start
from mediator.client.login import LoginOptions
from mediator.client.message import Message, Outgoing
from mediator.client.registry import Agent
from mediator.errors import BadRequestError

__all__ = ["Agent", "Client", "Delivery", "LoginOptions", "Mailbox", "Message", "Outgoing", "Registration"]

P = ParamSpec("P")
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


def _waiting(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that does what one of the client with an event loop does, and waits for it."""

    @wraps(method)
    def wait(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        result: T = self.runner.run(method(self.inner, *args, **options))
        return result

    return wait


def _making(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, aio.Mailbox]],
) -> Callable[Concatenate[Any, P], "Mailbox"]:
    """Do the same with one that makes a mailbox."""

    @wraps(method)
    def make(self: Any, /, *args: P.args, **options: P.kwargs) -> "Mailbox":
        return Mailbox(self, self.runner.run(method(self.inner, *args, **options)))

    return make


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

    ack = _waiting(aio.Delivery.ack)
    nack = _waiting(aio.Delivery.nack)
    extend = _waiting(aio.Delivery.extend)

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
        self.inner = inner
        self.runner = runner

    report = _waiting(aio.Registration.report)


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

    def mailbox(self, address: str) -> "Mailbox":
        """Return a mailbox by its address, without asking whether it is there."""
        return Mailbox(self, self.inner.mailbox(address))

    create = _making(aio.Client.create)
    request = _waiting(aio.Client.request)
    register = _waiting(aio.Client.register)
    unregister = _waiting(aio.Client.unregister)
    report = _waiting(aio.Client.report)
    discover = _waiting(aio.Client.discover)

    @contextmanager
    def registered(self, card: Mapping[str, Any], *, ttl: float = 60.0) -> Iterator[Registration]:
        """Keep an agent registered while the block runs."""
        entered = self.inner.registered(card, ttl=ttl)
        registration = self.runner.run(_wait(entered.__aenter__()))
        try:
            yield Registration(registration, self.runner)
        finally:
            self.runner.run(_wait(entered.__aexit__(None, None, None)))


class Mailbox:
    """A mailbox; see :class:`mediator.client.Mailbox` for each method."""

    def __init__(self, client: Client, inner: aio.Mailbox) -> None:
        self.client = client
        self.address = inner.address
        self.send_address = inner.send_address
        self.token = inner.token
        self.inner = inner
        self.runner = client.runner

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
        return repr(self.inner)

    def mailbox(self, address: str) -> "Mailbox":
        """Return another mailbox, reached by the same connection."""
        return self.client.mailbox(address)

    send = _waiting(aio.Mailbox.send)
    send_many = _waiting(aio.Mailbox.send_many)
    reply = _waiting(aio.Mailbox.reply)
    fetch = _waiting(aio.Mailbox.fetch)
    ack = _waiting(aio.Mailbox.ack)
    nack = _waiting(aio.Mailbox.nack)
    extend = _waiting(aio.Mailbox.extend)
    query = _waiting(aio.Mailbox.query)
    delete = _waiting(aio.Mailbox.delete)
    register = _waiting(aio.Mailbox.register)
    discover = _waiting(aio.Mailbox.discover)

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
        messages = self.inner.consume(group=group, lease=lease, start=start, prefetch=prefetch, max_deliver=max_deliver)
        try:
            while True:
                yield Delivery.of(self.runner.run(_wait(anext(messages))), self.runner)
        finally:
            self.runner.finish(_wait(messages.aclose()))

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
        """Call ``handler`` with each message, for ever, in ``concurrency`` threads; at the end it waits for these."""
        # Not the loop's own threads: they are few, and the loop needs one to find a host when it connects again.
        with ThreadPoolExecutor(concurrency, "mediator worker") as threads:

            async def handle(delivery: aio.Delivery) -> None:
                message = Delivery.of(delivery, self.runner)
                await asyncio.get_running_loop().run_in_executor(threads, handler, message)

            self.runner.run(
                self.inner.work(
                    handle, group=group, lease=lease, concurrency=concurrency, start=start, max_deliver=max_deliver
                )
            )

    @contextmanager
    def registered(self, card: Mapping[str, Any], *, ttl: float = 60.0) -> Iterator[Registration]:
        """Keep an agent that is reached at this mailbox registered while the block runs."""
        with self.client.registered(self.inner.with_mailbox(card), ttl=ttl) as registration:
            yield registration


async def _wait(work: Awaitable[T]) -> T:
    return await work
