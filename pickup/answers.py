"""Answers: single envelopes brought to endpoints of peers, beside everything else and not for ever (D5)."""

import asyncio
from dataclasses import dataclass, field

from pickup.meters import Meters
from pickup.outbound import Courier, Outcome, Parcel, Sleep, is_endpoint

PAUSES = (1.0, 5.0, 25.0)
"""Seconds before each further attempt."""
CONCURRENT = 32
MAX_ANSWERS = 1000
"""Answers under way, those that wait for another attempt too; more are dropped."""
MAX_TO_ONE = 200
"""Of them to one server, which may be slow, or made for keeping us busy."""
AT_ONE = 8
"""Attempts at one server at the same time."""
MAX_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class _Server:
    answers: int = 0
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONE))


class Answers:
    """Posts answers; one that does not arrive is asked for again by whoever misses it."""

    def __init__(self, courier: Courier, meters: Meters, sleep: Sleep = asyncio.sleep) -> None:
        self._courier = courier
        self._meters = meters
        self._sleep = sleep
        self._turns = asyncio.Semaphore(CONCURRENT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: dict[str, _Server] = {}
        self._answers = 0
        self._bytes = 0
        self._closing = False

    def send_soon(self, parcel: Parcel) -> None:
        """Bring a parcel beside everything else, with bounded retries; what cannot be brought is dropped."""
        size, name = len(parcel.envelope), _server_of(parcel.endpoint)
        server = self._servers.get(name) or _Server()
        if (
            self._closing
            or not is_endpoint(parcel.endpoint)
            or self._answers >= MAX_ANSWERS
            or server.answers >= MAX_TO_ONE
            or self._bytes + size > MAX_BYTES
        ):
            self._meters.relayed("dropped")
            return
        self._answers += 1
        self._bytes += size
        server.answers += 1
        self._servers[name] = server
        task = asyncio.create_task(self._bring(parcel, name, server), name="answer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _bring(self, parcel: Parcel, name: str, server: _Server) -> None:
        try:
            for pause in (*PAUSES, None):
                async with server.turns, self._turns:
                    outcome = await self._courier.bring(parcel)
                self._meters.relayed(outcome)
                if outcome is not Outcome.FAILED:
                    return
                if pause is not None:
                    await self._sleep(pause)
            self._meters.relayed("gave_up")
        finally:
            # Not by the tasks: one that is done is among them a moment longer.
            self._answers -= 1
            self._bytes -= len(parcel.envelope)
            server.answers -= 1
            if not server.answers:
                del self._servers[name]


def _server_of(endpoint: str) -> str:
    return endpoint.partition("://")[2].partition("/")[0]
