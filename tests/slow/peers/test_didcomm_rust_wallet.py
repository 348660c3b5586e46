"""A v2 holder on didcomm-rust, with resolver, DIDs and sockets of its own: nothing of ours on its side."""

import asyncio
import json
from typing import Any

import pytest

from tests.harness.didcomm_service import Door, Invites
from tests.harness.node import FOLDER, Rust

STEPS = ["granted", "registered", "forwarded", "picked up", "refused", "live", "removed"]
WITHIN = 60.0


@pytest.mark.parametrize("version", ["2.0", "3.0"])
@pytest.mark.rule("D1", "D2", "D3", "D6", "D9")
async def test_the_life_of_a_holder_on_didcomm_rust(rust: Rust, door: Door, invites: Invites, version: str):
    process = await asyncio.create_subprocess_exec(
        "node", "--no-warnings", "--experimental-websocket", str(FOLDER / "holder.js"), invites.v2, version,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(WITHIN):
            said, complained = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    steps: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines()]
    assert [step["step"] for step in steps] == STEPS, (steps[-1:], complained.decode())
    assert process.returncode == 0
    assert not door.service.complaints()
