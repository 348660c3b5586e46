"""Exports the model once for all services under test, and runs the encoder in the benchmark's process."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.servers import SHARED_MODELS
from mediator.errors import UnavailableError
from mediator.ops.control import send_command
from registry.embedding.encoder import DEFAULT_MODEL, Encoder
from registry.embedding.texts import TEMPLATE

READY_SECONDS = 600.0
"""Time allowed to export the model."""
LOOK_SECONDS = 0.05


def share(folder: Path) -> None:
    """Export the model into ``folder``, which every service gets a copy of; without a model do nothing."""

    async def export() -> None:
        async with _running(folder):
            os.environ[SHARED_MODELS] = str(folder)

    try:
        asyncio.run(export())
    except UnavailableError:
        return


def shared() -> Path:
    """Return the folder with the exported model; raise :class:`UnavailableError` if there is none."""
    if SHARED_MODELS not in os.environ:
        raise UnavailableError("the model is not available")
    return Path(os.environ[SHARED_MODELS])


@asynccontextmanager
async def encoder() -> AsyncIterator[Encoder]:
    """Run an encoder; raise :class:`UnavailableError` if the model is not available."""
    async with _running(shared()) as made:
        yield made


@asynccontextmanager
async def _running(folder: Path) -> AsyncIterator[Encoder]:
    made = Encoder(DEFAULT_MODEL, folder, TEMPLATE)
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
