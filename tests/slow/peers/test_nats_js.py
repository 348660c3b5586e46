"""nats.js, unchanged: features of NATS through the gateway, and stored mail, also over a crash (E6, E7, N10)."""

import asyncio
import json

import pytest

from tests.conftest import ForeignServer
from tests.harness.node import FOLDER, install

STEPS = ["plain", "streams", "refusals", "mail", "leaving", "back"]
WITHIN = 60.0


@pytest.mark.rule("E6", "E7", "N10")
async def test_what_nats_js_does_against_nats_server_it_does_here(elsewhere: ForeignServer):
    install()
    service = elsewhere.service
    process = await asyncio.create_subprocess_exec(
        "node", str(FOLDER / "stock.js"), elsewhere.url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    steps: list[str] = []
    try:
        async with asyncio.timeout(WITHIN):
            async for line in process.stdout:
                steps.append(json.loads(line)["step"])
                if steps[-1] == "leaving":
                    await service.kill()
                    service.start()
            complained = (await process.stderr.read()).decode()
            assert (await process.wait(), steps) == (0, STEPS), complained
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    await service.ready()
