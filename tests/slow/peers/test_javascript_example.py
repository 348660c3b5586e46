"""examples/javascript: what nats.js needs to send, find an agent, and work on leased mail, in 40 lines."""

import asyncio
from pathlib import Path

from tests.harness.node import install
from tests.harness.service import Services

FOLDER = Path(__file__).parents[3] / "examples" / "javascript"
WITHIN = 60.0


async def run(url: str) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        "node", str(FOLDER / "mailbox.js"), url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), WITHIN)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, err.decode()) == (0, "")
    return out.decode().splitlines()


async def test_the_example_in_javascript_gets_its_mail_by_priority(services: Services):
    install(FOLDER)
    service = await services.running()
    for _ in range(2):
        assert await run(service.nats_url) == ["urgent Storm at six!", "normal Is there water at noon?"]


def test_the_example_in_javascript_has_40_lines():
    assert len((FOLDER / "mailbox.js").read_text().splitlines()) <= 40
