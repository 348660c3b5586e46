"""A nats-server that is not the service's own, with whatever configuration a test wants."""

import asyncio
import contextlib
import json
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from pathlib import Path

from mediator.nats.server import find_binary
from tests.harness.waiting import until


@contextlib.asynccontextmanager
async def nats_server(folder: Path, config: str, port: int = -1) -> AsyncIterator[tuple[int, Process]]:
    """Run one, on a port of its choice unless one is given; gives port and process."""
    file = folder / "nats.conf"
    file.write_text(f"listen: 127.0.0.1:{port}\n{config}\n")
    process = await asyncio.create_subprocess_exec(
        find_binary(), "-c", file, "--ports_file_dir", folder, stdout=DEVNULL, stderr=DEVNULL
    )
    try:
        ports = folder / f"nats-server_{process.pid}.ports"
        await until(lambda: ports.is_file() and ports.read_text())
        yield int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2]), process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
