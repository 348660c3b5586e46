"""A catalog that the pipeline embeds: found by meaning at a real service, which has read none of its cards."""

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mediator.operate.control import send_command
from tests.harness.client import Client
from tests.harness.models import copy_model, exports, mirror, wants_models
from tests.harness.service import Service, Services
from tests.harness.waiting import until

pytest.importorskip("pyspark", reason="needs the extra pipeline")

from tests.harness.spark import environment

pytestmark = [wants_models, pytest.mark.timeout(600)]

COUNT = 300
REQUEST = "my loaf did not come out well"
RIGHT = "own.bread-baker"
LOADS_WITHIN = 100.0


def catalog() -> bytes:
    """Return cards, of which only the right one shares a thought with the request, and none a word."""
    cards: list[dict[str, Any]] = [
        {"mailbox": f"own.ledger{number}", "name": f"Ledger {number}", "description": f"Keeps account {number}"}
        for number in range(1, COUNT)
    ]
    baker = {
        "mailbox": RIGHT,
        "name": "Bread Baker",
        "description": "Plans doughs, rising times and oven temperatures for home bakers",
        "skills": [{"name": "plan dough"}],
    }
    return b"".join(json.dumps(card).encode() + b"\n" for card in [*cards, baker, {"description": "homeless"}])


async def pipeline(service: Service, small: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Run `mediator pipeline embed` on a small Spark, and return what it counted."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mediator", "pipeline", "embed", *arguments, "--json"),
        *("--conf", "spark.sql.shuffle.partitions=1", "--data-dir", str(service.data_dir)),
        stdout=subprocess.PIPE,
        env={**os.environ, **service.environment, **small},
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    # Java may have had something to say before.
    told: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert told.pop("error") == ""
    return told


async def found(client: Client) -> bool:
    """Ask for the right agent by meaning; False while keywords answer."""
    answer = await client.ask("AGENT.DISCOVER", {"semantic": REQUEST, "limit": 3})
    assert answer.error == ""
    if "note" in answer.body:
        return False
    assert answer.body["agents"][0]["mailbox"] == RIGHT
    return True


def written_by_the_service(service: Service) -> int:
    """Return how many agents changed after their cards came: vectors that come later are such a change."""
    with closing(sqlite3.connect(service.data_dir / "mediator.db")) as database:
        return int(database.execute("SELECT count(*) FROM agent WHERE revision <> card_revision").fetchone()[0])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports(tmp_path_factory)


@pytest.mark.rule("G1", "G3")
async def test_a_catalog_embedded_by_spark_is_found_by_meaning(
    services: Services, tmp_path: Path, exported: Path
) -> None:
    one, two = copy_model(tmp_path / "one"), mirror(copy_model(tmp_path / "two"))
    service = services.new(semantic=True)
    shutil.copytree(exported, service.data_dir / "models")
    service.environment["MEDIATOR_REGISTRY__MODEL"] = str(one)
    await service.serve()
    (tmp_path / "cards.jsonl").write_bytes(catalog())

    small = environment()
    done = await pipeline(service, small, str(tmp_path / "cards.jsonl"))
    assert (done["cards"], done["encoded"], done["added"], done["bad"]) == (COUNT, COUNT, COUNT, 1)
    client = await Client.connect(service.nats_url)
    try:
        await until(lambda: found(client), LOADS_WITHIN, "requests are answered by meaning")
    finally:
        await client.close()
    assert written_by_the_service(service) == 0

    done = await pipeline(service, small, "--registered", "--model", str(two))
    assert (done["cards"], done["encoded"], done["embedded"]) == (COUNT, COUNT, COUNT)
    service.terminate()
    await service.ended()
    service.environment["MEDIATOR_REGISTRY__MODEL"] = str(two)
    await service.serve()
    client = await Client.connect(service.nats_url)
    try:
        await until(lambda: found(client), LOADS_WITHIN, "requests are answered by the other model")
    finally:
        await client.close()
    said = await send_command(service.data_dir, "registry")
    assert said["space"] == said["model"]["space"]
    assert str(two) in said["space"]
    assert said["embedded"] == COUNT
    assert service.events("embedding all cards with another model") == []
    assert service.complaints() == []
