"""How far subscribers have confirmed the mail of each mailbox, collected for a while and stored in few writes (E4)."""

import asyncio
from collections.abc import Sequence

import structlog

from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.mailboxes import pushing
from mediator.mailboxes.pushing import Item

STORE_SECONDS = 0.25
AT_ONCE = 500
"""Mailboxes in one write."""

log = structlog.get_logger("push")


class ReadMarks:
    """Collects marks; a crash loses those of the last moment, and shows mail as unread that was read."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._marks: dict[int, list[int]] = {}
        self._something = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start storing what is collected."""
        self._task = asyncio.create_task(self._run(), name="push-confirmed")

    def add(self, mailbox_no: int, items: Sequence[Item]) -> None:
        """Add messages of a mailbox that were confirmed."""
        marks = pushing.highest(items)
        before = self._marks.get(mailbox_no)
        self._marks[mailbox_no] = marks if before is None else list(map(max, before, marks))
        self._something.set()

    async def close(self) -> None:
        """Store what is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._store()

    async def _run(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            await self._store()
            await asyncio.sleep(STORE_SECONDS)

    async def _store(self) -> None:
        marks, self._marks = self._marks, {}
        numbers = sorted(marks)
        for start in range(0, len(numbers), AT_ONCE):
            some = {no: marks[no] for no in numbers[start : start + AT_ONCE]}
            try:
                await self._broker.note_read(some)
            except MediatorError as error:
                log.warning("read marks not stored", error=str(error))
