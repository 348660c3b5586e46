"""A holder's live mode, listened to beside whatever else the holder says on its socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from pickup.client import DeliveredMessage, Holder, NoAnswerError
from tests.harness.didcomm_service import text
from tests.harness.waiting import until

LIVE_WITHIN = 30.0


class Live:
    """What is pushed to a holder."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._pushed: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
        self.listening = asyncio.create_task(self._listen())

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, holder: Holder) -> AsyncIterator["Live"]:
        """Go live for the length of the block."""
        live = cls(holder)
        try:
            await until(live.on, LIVE_WITHIN, "live mode is on")
            yield live
        finally:
            live.listening.cancel()
            await asyncio.gather(live.listening, return_exceptions=True)

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._holder.live()) as pushed:
            async for mail in pushed:
                self._pushed.put_nowait(mail)

    async def on(self) -> bool:
        """Whether the mediator says on this very socket that it pushes there."""
        if self.listening.done():
            self.listening.result()
        return self._holder.on_socket and (await self._holder.status()).live is True

    async def off(self) -> None:
        """Wait until the mediator says that it does not push there any more."""

        async def is_off() -> bool:
            return not await self.on()

        await until(is_off, LIVE_WITHIN, "live mode is off")

    async def ended(self) -> None:
        """Wait, after the block, until the mediator has seen the socket close; then nothing is leased to it."""

        async def is_over() -> bool:
            return (await self._holder.status()).live is not True

        await until(is_over, LIVE_WITHIN, "the live session is over")

    async def mail(self) -> DeliveredMessage:
        """Return what was pushed next."""
        async with asyncio.timeout(LIVE_WITHIN):
            return await self._pushed.get()

    async def text(self) -> str:
        """Return what was written in it."""
        return await text(self._holder, await self.mail())

    async def texts(self, count: int) -> list[str]:
        """Return what was written in so many."""
        return [await self.text() for _ in range(count)]

    async def silent(self) -> bool:
        """Whether nothing more was pushed: it would come before the answer to a question that is asked now."""
        await self._holder.status()
        return self._pushed.empty()

    async def broken(self) -> None:
        """Wait until the socket is gone."""
        async with asyncio.timeout(LIVE_WITHIN):
            with contextlib.suppress(NoAnswerError):
                await self.listening
