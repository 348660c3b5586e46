"""nats.js, unchanged: features of NATS through the gateway, and stored mail, also over a crash (E6, E7, N10)."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.acceptance.editions.conftest import LIGHT
from tests.acceptance.service import Services, free_port
from tests.node import FOLDER, install

STEPS = ["plain", "streams", "refusals", "mail", "leaving", "back"]
WITHIN = 60.0


@pytest.mark.rule("E6", "E7", "N10")
async def test_what_nats_js_does_against_nats_server_it_does_here(services: Services, tmp_path: Path):
    install()
    port = free_port()
    service = services.new(nats_url=await services.nats_server("-js", "-sd", str(tmp_path / "streams")))
    service.environment |= {**LIGHT, "MEDIATOR_GATEWAY__LISTEN": f"127.0.0.1:{port}"}
    service.start()
    await service.ready()
    process = await asyncio.create_subprocess_exec(
        "node", str(FOLDER / "stock.js"), f"127.0.0.1:{port}",
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
    assert service.complaints() == []
