"""examples/langchain_tools.py, run as its first lines say."""

import asyncio
import sys
from pathlib import Path

from tests.harness.service import Service

EXAMPLE = Path(__file__).parents[2] / "examples/langchain_tools.py"


async def test_an_agent_asks_a_colleague_by_mail(service: Service) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), "--server", service.nats_url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, complaints = await process.communicate()
    assert (process.returncode, complaints.decode()) == (0, "")
    found, sent, read, answer = said.decode().splitlines()
    assert '"name": "Translator"' in found
    assert sent.endswith("-> stored")
    assert "In German: Good morning -> Guten Morgen" in read
    assert answer == "Guten Morgen."
