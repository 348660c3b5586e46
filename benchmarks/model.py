"""Runs the encoder in the benchmark's process and gives its exported model to the services under test."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from mediator.ops.control import send_command
from registry.embedding.encoder import DEFAULT_MODEL, Encoder
from registry.embedding.texts import TEMPLATE
from registry.service import MODELS

FAST = "onnx"
READY_SECONDS = 600.0
"""Time allowed to export the model."""
LOOK_SECONDS = 0.05


@asynccontextmanager
async def encoder(folder: Path) -> AsyncIterator[Encoder]:
    """Run an encoder and export its model into ``folder``.

    Raises :class:`UnavailableError` if the model is not available, :class:`TimeoutError` if the export takes too long.
    """
    made = Encoder(DEFAULT_MODEL, folder, TEMPLATE)
    await made.start()
    try:
        await made.wait_ready()
        yield made
    finally:
        await made.stop()


def give_model(folder: Path, data_dir: Path) -> None:
    """Copy the exported model into ``data_dir``, where a service finds it as after its first start."""
    shutil.copytree(folder, data_dir / MODELS)


async def loaded(data_dir: Path) -> None:
    """Wait until the service has all agents in its index."""

    async def holds() -> bool:
        return bool((await send_command(data_dir, "registry"))["loaded"])

    await _until(holds)


async def reading(data_dir: Path) -> None:
    """Wait until the service encodes requests with the exported model."""

    async def holds() -> bool:
        return bool((await send_command(data_dir, "registry"))["model"]["runs"] == FAST)

    await _until(holds)


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            if await holds():
                return
            await asyncio.sleep(LOOK_SECONDS)
