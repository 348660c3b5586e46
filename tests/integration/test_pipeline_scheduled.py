"""A real service that runs the real pipeline by itself: what becomes of it, and that Spark stays outside."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

pytest.importorskip("pyspark", reason="needs the extra pipeline")

from tests.spark import environment

SERVICE = """
import asyncio, json, sys
from pathlib import Path
from mediator.mailboxes.creating import Create
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.operators.control import ask
from mediator.service import running
from mediator.settings import Settings

async def main(data_dir):
    settings = Settings(data_dir=data_dir, nats="127.0.0.1:0", http="127.0.0.1:0", registry={"enabled": False},
                        didcomm={"enabled": False}, pipeline={"every": 1})
    async with running(settings) as service:
        await service.broker.create(Create("default", "task"))
        for number in range(10):
            await service.broker.send(Send("default", "task", Draft(b"x")))
        runs = []
        while not any(run["command"] == "ingest" and run["ended_at"] for run in runs):
            await asyncio.sleep(0.2)
            runs = (await ask(data_dir, "run-list", limit=10))["runs"]
        spark = [name for name in sys.modules if name.split(".")[0] in ("pyspark", "pyarrow", "deltalake", "pandas")]
    (data_dir / "told").write_text(json.dumps({"runs": runs, "spark": spark}))

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.timeout(300)
async def test_one_line_of_configuration_brings_the_journal_into_the_lake(tmp_path: Path) -> None:
    await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", SERVICE, str(tmp_path / "data")],
        env={**os.environ, **environment(tmp_path / "spark")},
        timeout=280,
        check=True,
    )
    told = orjson.loads((tmp_path / "data" / "told").read_bytes())
    assert told["spark"] == []
    # The report comes next, and ends with the service.
    ingest = told["runs"][-1]
    assert (ingest["command"], ingest["outcome"], ingest["error"]) == ("ingest", "succeeded", "")
    # A mailbox and its messages; how many came before the child asked is its own matter.
    assert ingest["numbers"]["events"] > 0
    assert (tmp_path / "data" / "lake" / "events").is_dir()
