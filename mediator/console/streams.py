"""Server-sent events: responses that stay open, few at a time, and end with the service."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Final

from aiohttp import web

from mediator.errors import BusyError
from mediator.http.app import lift_time_limit
from mediator.operate.operations import Actor

MAX_STREAMS: Final = 64
"""Pages that are followed live at once, over all viewers."""
MAX_PER_USER: Final = 12
"""Of those, the ones of one user: nobody takes the place of all others."""
STREAM_SECONDS: Final = 300.0
"""A browser connects again after this time."""
WRITE_SECONDS: Final = 20.0
"""A viewer that reads nothing for so long is dropped."""

_HEADERS: Final = {
    "Content-Type": "text/event-stream",
    # Asks nginx not to collect events before it passes them on.
    "X-Accel-Buffering": "no",
}


def event(name: str, data: str, id: int | None = None) -> bytes:
    """Return one event in the format of the HTML standard; a browser that connects again names the last ``id``."""
    lines = [f"event: {name}", *([] if id is None else [f"id: {id}"]), *(f"data: {line}" for line in data.splitlines())]
    return ("\n".join(lines) + "\n\n").encode()


COMMENT: Final = b":\n\n"
"""Tells nothing; whether the viewer is still there is seen when it is written."""


class Broadcast:
    """Events that are made once for all who follow; who is slow misses what was replaced meanwhile."""

    def __init__(self) -> None:
        self._latest = b""
        self._changed = asyncio.Event()
        self.followers = 0

    def publish(self, data: bytes) -> None:
        """Give all followers some events, in place of those that they have not taken yet."""
        self._latest = data
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self) -> AsyncIterator[bytes]:
        """Yield what is published from now on."""
        self.followers += 1
        try:
            while True:
                changed = self._changed
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), WRITE_SECONDS)
                yield self._latest if changed.is_set() else COMMENT
        finally:
            self.followers -= 1


class Streams:
    """The open streams of the console."""

    def __init__(self, allows: Callable[[web.Request, Actor], bool]) -> None:
        """``allows`` says whether a viewer may still see what the request asked for."""
        self._allows = allows
        self._open: dict[asyncio.Task[None], tuple[web.Request, Actor]] = {}
        """The tasks that write them, and whose they are."""
        self._stopping = False

    async def serve(self, request: web.Request, actor: Actor, events: AsyncIterator[bytes]) -> web.StreamResponse:
        """Answer with events for a while; :class:`BusyError` when too many are open already, in all or of the user."""
        own = sum(viewer.name == actor.name for _, viewer in self._open.values())
        if self._stopping or len(self._open) >= MAX_STREAMS:
            raise BusyError(f"{len(self._open)} pages are followed live already")
        if own >= MAX_PER_USER:
            raise BusyError(f"you follow {own} pages live already; close some of them")
        response = web.StreamResponse(headers=_HEADERS)
        lift_time_limit(request)
        response.force_close()
        await response.prepare(request)
        allowed = partial(self._allows, request, actor)
        task = asyncio.create_task(_write(response, events, allowed), name="console-stream")
        self._open[task] = request, actor
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._open.pop(task, None)
        return response

    async def stop(self, _app: web.Application) -> None:
        """End all streams, and serve no more."""
        self._stopping = True
        for task in self._open:
            task.cancel()

    def end_forbidden(self) -> None:
        """End the streams of those who signed out, were removed, or have other rights now."""
        for task, viewer in self._open.items():
            if not self._allows(*viewer):
                task.cancel()


async def _write(response: web.StreamResponse, events: AsyncIterator[bytes], allowed: Callable[[], bool]) -> None:
    # The viewer may be gone at any time, which shows in a failed write.
    with suppress(TimeoutError, ConnectionError, asyncio.CancelledError):
        async with asyncio.timeout(STREAM_SECONDS), aclosing(events):  # type: ignore[type-var]
            # Headers alone do not open an EventSource everywhere.
            await response.write(COMMENT)
            async for data in events:
                if not allowed():
                    return
                async with asyncio.timeout(WRITE_SECONDS):
                    await response.write(data)
