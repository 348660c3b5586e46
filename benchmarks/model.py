"""Runs the encoder for a benchmark, and waits for the index of a service."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from mediator.operate.control import send_command
from registry.embedding.encoder import Encoder
from registry.embedding.local import LocalModel
from registry.embedding.models import DEFAULT_MODEL
from registry.embedding.texts import TEMPLATE

READY_SECONDS = 600.0
"""Time allowed to load the model, or all agents."""
LOOK_SECONDS = 0.05


@asynccontextmanager
async def encoder() -> AsyncIterator[Encoder]:
    """Run an encoder; raise :class:`UnavailableError` if the model is not available."""
    made = Encoder(LocalModel(DEFAULT_MODEL, Path("unused")), TEMPLATE)
    await made.start()
    try:
        async with asyncio.timeout(READY_SECONDS):
            await made.wait_ready()
        yield made
    finally:
        await made.stop()


async def loaded(data_dir: Path) -> None:
    """Wait until the service has all agents in its index."""

    async def holds() -> bool:
        return bool((await send_command(data_dir, "registry"))["loaded"])

    await _until(holds)


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            if await holds():
                return
            await asyncio.sleep(LOOK_SECONDS)
