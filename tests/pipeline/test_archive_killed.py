"""Mail that is archived, deleted and sent again by a real service, with commands that SIGKILL ends on the way."""

import asyncio
import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import nats
import pytest
from deltalake import DeltaTable

from mediator.store.opening import database_path
from pipeline.replay import ORIGINAL_TIME
from tests.acceptance.service import Services
from tests.integration.house import rows
from tests.pipeline.conftest import Call
from tests.pipeline.killing import killed
from tests.pipeline.test_sink import LANES, Mail, binary, running
from tests.spark import environment

COUNT = 600
BOX, INTO = "kept", "kept.again"
COMMITTED = "archive/_delta_log/*1.json"
"""What appears when messages are in the lake, and in the outbox still."""


def held(data_dir: Path, address: str) -> list[int]:
    """Return the msg_ids that a mailbox holds."""
    with closing(sqlite3.connect(f"{database_path(data_dir).as_uri()}?mode=ro", uri=True)) as connection:
        sql = "SELECT msg_id FROM message JOIN mailbox ON mailbox_no = no WHERE address = ?"
        return [row[0] for row in connection.execute(sql, (address,))]


async def send(client: nats.NATS, number: int) -> dict[str, str]:
    """Send one of them, and return the headers that are its sender's own."""
    own = {"Own-Number": str(number), "X": "Grüße 😀, \\u00fc" if number % 3 else ""}
    ours = {
        "mq9-priority": LANES[number % 4],
        "mq9-storage": "archive",
        "mq9-tags": f"a,t{number % 7}",
        "mq9-dedup-id": f"d{number}",
        "mq9-ttl": "7200",
    }
    if number % 5 == 0:
        ours["mq9-key"] = f"key {number}"
    if number % 6 == 0:
        ours["mq9-reply-to"] = "back"
    answer = await client.request(f"$mq9.AI.MSG.SEND.{BOX}", binary(number), headers={**own, **ours}, timeout=20)
    assert json.loads(answer.data)["error"] == ""
    return own


def comparable(item: dict[str, Any], *, again: bool) -> dict[str, Any]:
    """Return what a message that is sent again has to have in common with the first."""
    headers = dict(item["headers"])
    at = headers.pop(ORIGINAL_TIME) if again else f"{item['create_time']:.3f}"
    kept = {name: item.get(name) for name in ("payload", "priority", "key", "tags", "reply_to")}
    return {**kept, "headers": headers, "second": int(float(at))}


@pytest.mark.timeout(900)
@pytest.mark.rule("S6")
async def test_archived_deleted_and_sent_again_byte_for_byte(call: Call, tmp_path: Path) -> None:
    services = Services(tmp_path)
    try:
        service = await running(services)
        client = await nats.connect(service.nats_url)
        mail = Mail(service, client)

        async def kill(shows: Callable[[], object], *arguments: str) -> None:
            words = [sys.executable, "-m", "mediator", "pipeline", *arguments, "--data-dir", service.data_dir]
            # While it runs the service's own time goes on.
            assert await asyncio.to_thread(killed, words, shows, environment())

        async def run(*arguments: str) -> dict[str, Any]:
            code, out, err = await asyncio.to_thread(call, service.data_dir, *arguments, "--json")
            assert code == 0, err
            return dict(json.loads(out))

        await mail.create(BOX, INTO)
        for start in range(0, COUNT, 50):
            await asyncio.gather(*[send(client, number) for number in range(start, start + 50)])
        sent = await mail.items(BOX)
        assert len(sent) == COUNT

        lake = service.data_dir / "lake"
        await kill(lambda: any(lake.glob(COMMITTED)), "archive")
        told = await run("archive")
        assert told["messages"] + told["found"] <= COUNT
        assert rows(service.data_dir, "outbox") == 0
        assert DeltaTable(lake / "archive").to_pyarrow_table(columns=["msg_id"]).num_rows == COUNT
        assert await run("archive") == {"messages": 0, "found": 0}

        await asyncio.gather(*[mail.ask(f"MSG.DELETE.{BOX}.{item['msg_id']}") for item in sent])
        assert await mail.items(BOX) == []
        replay = ("replay", INTO, "--from-mailbox", BOX, "--server", service.nats_url)

        def some() -> bool:
            return len(held(service.data_dir, INTO)) > COUNT // 10

        await kill(some, *replay)
        told = await run(*replay)
        assert told == {"messages": COUNT, "sent": COUNT, "replaced": 0, "missing": 0, "refused": 0}
        received = sorted(await mail.items(INTO), key=lambda item: item["msg_id"])
        assert [item["msg_id"] for item in received] == list(range(COUNT))
        wanted = sorted(sent, key=lambda item: (int(item["headers"]["Own-Number"]) % 4, item["msg_id"]))
        assert [comparable(item, again=True) for item in received] == [comparable(item, again=False) for item in wanted]
        assert not any(item.get("expire_at") for item in received)
        assert list((lake / "replays").iterdir()) == []
        await client.close()
    finally:
        services.close()
