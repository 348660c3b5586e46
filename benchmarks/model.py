"""The encoder in the benchmark's own process, and its exported model for the services that are measured."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from mediator.operators.control import ask
from registry.assembly import MODELS
from registry.embedding.encoder import DEFAULT_MODEL, Encoder
from registry.texts import TEMPLATE

FAST = "onnx"
READY_SECONDS = 600.0
"""Time to export the model."""
LOOK_SECONDS = 0.05


@asynccontextmanager
async def encoder(folder: Path) -> AsyncIterator[Encoder]:
    """Run an encoder with the exported model, which is in ``folder`` from then on.

    Raises :class:`UnavailableError` when it cannot be had, :class:`TimeoutError` when it does not come.
    """
    made = Encoder(DEFAULT_MODEL, folder, TEMPLATE)
    await made.start()
    try:
        await made.wait_ready()
        yield made
    finally:
        await made.stop()


def give_model(folder: Path, data_dir: Path) -> None:
    """Let the service on ``data_dir`` begin with the exported model, as it does from its second start on."""
    shutil.copytree(folder, data_dir / MODELS)


async def loaded(data_dir: Path) -> None:
    """Wait until a service has all its agents in its index."""

    async def holds() -> bool:
        return bool((await ask(data_dir, "registry"))["loaded"])

    await _until(holds)


async def reading(data_dir: Path) -> None:
    """Wait until a service reads requests with the exported model."""

    async def holds() -> bool:
        return bool((await ask(data_dir, "registry"))["model"]["runs"] == FAST)

    await _until(holds)


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            if await holds():
                return
            await asyncio.sleep(LOOK_SECONDS)
