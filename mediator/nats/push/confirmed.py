"""How far the mail of each mailbox was confirmed, gathered for a while and kept with few writes (E4)."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.mailboxes import pushing
from mediator.mailboxes.ports import Transaction
from mediator.mailboxes.pushing import Item

KEEP_SECONDS = 0.25
AT_ONCE = 500
"""Mailboxes in one write."""

log = structlog.get_logger("push")


class Confirmed:
    """Gathers marks; those of the last moment before a crash are lost, and show mail as unread that was read."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._marks: dict[int, list[int]] = {}
        self._something = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to keep what is gathered."""
        self._task = asyncio.create_task(self._run(), name="push-confirmed")

    def add(self, mailbox_no: int, items: Sequence[Item]) -> None:
        """Note what was confirmed at a mailbox."""
        marks = pushing.highest(items)
        before = self._marks.get(mailbox_no)
        self._marks[mailbox_no] = marks if before is None else list(map(max, before, marks))
        self._something.set()

    async def close(self) -> None:
        """Keep what is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._keep()

    async def _run(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            await self._keep()
            await asyncio.sleep(KEEP_SECONDS)

    async def _keep(self) -> None:
        marks, self._marks = self._marks, {}
        numbers = sorted(marks)
        for start in range(0, len(numbers), AT_ONCE):
            some = {no: marks[no] for no in numbers[start : start + AT_ONCE]}
            try:
                await self._broker.write(partial(_note, some), when_full=True)
            except MediatorError as error:
                log.warning("what was confirmed is not kept", error=str(error))


def _note(marks: Mapping[int, Sequence[int]], tx: Transaction, _now: int) -> None:
    pushing.note(tx, marks)
