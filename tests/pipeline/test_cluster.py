"""Executors that are processes of their own, and die at their work: nothing is lost, and nothing there twice."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import nats
import pytest
from deltalake import DeltaTable

from mediator.store.opening import database_path
from tests.acceptance.service import Services
from tests.integration.house import rows
from tests.models import INSTALLED, exports
from tests.pipeline.clustered import COPY
from tests.pipeline.journals import event, held, line, write
from tests.pipeline.test_embedding import card
from tests.pipeline.test_sink import Mail, binary

COUNT = 1000
CARDS = 50


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    return exports(tmp_path_factory) if INSTALLED else None


@pytest.mark.timeout(600)
@pytest.mark.rule("S6", "S3")
async def test_every_command_survives_its_executors(tmp_path: Path, exported: Path | None) -> None:
    services = Services(tmp_path)
    service = services.new()
    data_dir, lake = service.data_dir, service.data_dir / "lake"
    service.environment["MEDIATOR_REGISTRY__SEMANTIC"] = str(INSTALLED)
    # What it tells of itself is of no interest beside a journal that is known.
    service.environment["MEDIATOR_JOURNAL__ENABLED"] = "false"
    if exported:
        shutil.copytree(exported, data_dir / "models")
    try:
        service.start()
        await service.ready()
        client = await nats.connect(service.nats_url)
        mail = Mail(service, client)
        await mail.create("kept", "again", "copied")
        marked = {"mq9-storage": "archive"}
        for start in range(0, COUNT, 100):
            numbers = range(start, start + 100)
            await asyncio.gather(
                *(client.request("$mq9.AI.MSG.SEND.kept", binary(n), headers=marked, timeout=20) for n in numbers)
            )
        lines = [line(seq, [event(seq * 4 + number) for number in range(4)]) for seq in range(1, 5001)]
        for number in range(4):
            write(data_dir / "journal", number + 1, lines[number::4])
        catalog = tmp_path / "cards.jsonl"
        catalog.write_bytes(b"\n".join(card(f"own.{number}", f"keeps account {number}") for number in range(CARDS)))
        keys = tmp_path / "keys"
        keys.touch(0o600)
        keys.write_text("A" * 43 + "=")

        def arrived(address: str) -> list[str]:
            of_it = f"(SELECT no FROM mailbox WHERE address = '{address}')"
            return [str(database_path(data_dir)), f"SELECT count(*) > 100 FROM message WHERE mailbox_no = {of_it}"]

        here, server = ("--data-dir", str(data_dir), "--json"), ("--server", service.nats_url)
        sealed = ("--key-file", str(keys))
        commands: list[tuple[Any, list[str]]] = [
            (f"{lake}/events/0*/_temporary", ["ingest", *here]),
            (f"{lake}/usage_hourly/0*/_temporary", ["report", *here]),
            (f"{lake}/archive/0*/_temporary", ["archive", *sealed, *here]),
            (arrived("again"), ["replay", "again", "--from-mailbox", "kept", *sealed, *server, *here]),
            (arrived("copied"), [COPY, str(data_dir), service.nats_url, "kept", "copied"]),
        ]
        if exported:
            commands.append((f"{lake}/vectors/0*/_temporary", ["embed", str(catalog), *here]))
        told = await asyncio.to_thread(run, tmp_path, *commands)

        ingested, reported, archived, replayed, *embedded = told
        assert ingested["events"] == len(held(lake)) == len(set(held(lake))) == 20_000
        assert reported["totals"]["sent"] == 20_000
        assert archived == {"messages": COUNT, "found": 0}
        assert rows(data_dir, "outbox") == 0
        stored = DeltaTable(lake / "archive").to_pyarrow_table(columns=["msg_id", "key_id"])
        assert sorted(stored["msg_id"].to_pylist()) == list(range(COUNT))
        assert None not in stored["key_id"].to_pylist()
        assert replayed == {"messages": COUNT, "sent": COUNT, "replaced": 0, "missing": 0, "refused": 0}
        assert await mail.payloads("again") == [binary(number) for number in range(COUNT)]
        assert sorted(await mail.payloads("copied")) == sorted(binary(number) for number in range(COUNT))
        if exported:
            assert [(each["encoded"], each["added"], each["bad"]) for each in embedded] == [(CARDS, CARDS, 0)]
            assert DeltaTable(lake / "vectors").to_pyarrow_table(columns=["digest"]).num_rows == CARDS
        await client.close()
    finally:
        services.close()


def run(folder: Path, *commands: tuple[Any, list[str]]) -> list[dict[str, Any]]:
    """Run commands on a cluster and return what they told; each loses an executor."""
    words = [sys.executable, "-m", "tests.pipeline.clustered", *map(json.dumps, commands)]
    with (folder / "said").open("w+") as said:
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True)
        try:
            out, _ = child.communicate()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
        said.seek(0)
        assert child.returncode == 0, said.read()
    return [json.loads(each) for each in out.splitlines() if each.startswith("{")]
