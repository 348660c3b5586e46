"""A service whose model changes: searches go on through loading, re-reading, and kills in the midst of it."""

import asyncio
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mediator.operate.control import send_command
from tests.harness.client import Client
from tests.harness.models import copy_model, exports, mirror, wants_models
from tests.harness.service import Service, Services
from tests.harness.waiting import until

pytestmark = [wants_models, pytest.mark.timeout(300)]

COUNT = 300
SKILLS = [{"name": f"invoice {kind}", "description": f"Books an invoice {kind}"} for kind in ("early", "late", "twice")]
REQUEST = "my loaf did not come out well"
RIGHT = "own.bread-baker"
LOADS_WITHIN = 100.0
READS_WITHIN = 120.0


async def register(client: Client, mailbox: str, description: str, skills: list[dict[str, str]]) -> None:
    card = {"mailbox": mailbox, "name": mailbox, "description": description, "skills": skills}
    assert (await client.ask("AGENT.REGISTER", card)).error == ""


async def fill(client: Client) -> None:
    """Register the right agent and many others, which share no word with the request."""
    await register(client, RIGHT, "Plans doughs, rising times and oven temperatures for home bakers", [])
    for number in range(1, COUNT):
        await register(client, f"own.ledger{number}", f"Keeps account {number}", SKILLS)


async def note(client: Client) -> str:
    """Ask for the right agent: an answer by meaning has it, one by keywords says why it is none."""
    answer = await client.ask("AGENT.DISCOVER", {"semantic": REQUEST, "limit": 3})
    assert answer.error == ""
    found = [agent["mailbox"] for agent in answer.body["agents"]]
    said = str(answer.body.get("note", ""))
    assert found[:1] == ([] if said else [RIGHT]), (said, found)
    return said


async def state(service: Service) -> dict[str, Any]:
    return await send_command(service.data_dir, "registry")


async def read(service: Service) -> int:
    """How many cards the configured model has read."""
    return int((await state(service))["model"]["embedded"])


async def all_read(service: Service) -> bool:
    said = await state(service)
    return said["loaded"] and said["space"] == said["model"]["space"] and said["embedded"] == said["agents"] == COUNT


def worker(service: Service, model: Path) -> int:
    """Return the process that holds a model."""
    told = [line for line in service.events("search by meaning is ready") if line["model"] == str(model)]
    [process] = told[-1]["pids"]
    return int(process)


def loading(service: Service) -> int:
    """Return the process that is to load the model, from its first moment on; 0 before there is one."""
    tasks = Path(f"/proc/{service.process.pid}/task")
    with suppress(OSError):  # of a thread or a child that has ended meanwhile
        for child in " ".join(children.read_text() for children in tasks.glob("*/children")).split():
            if b"registry.embedding.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return 0


async def doctor(service: Service) -> tuple[int, str]:
    """Run the command; return its exit code and what it says."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mediator", "doctor", "--data-dir", str(service.data_dir)),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports(tmp_path_factory)


def use(service: Service, model: Path) -> None:
    service.environment["MEDIATOR_REGISTRY__MODEL"] = str(model)
    service.start()


@pytest.mark.rule("G3")
async def test_searches_are_answered_while_the_model_loads(services: Services) -> None:
    service = services.new(semantic=True)
    service.environment["MEDIATOR_LOG_LEVEL"] = "debug"
    service.start()
    worker = await until(lambda: loading(service))
    os.kill(worker, signal.SIGSTOP)
    await service.ready()
    client = await Client.connect(service.nats_url)
    try:
        await register(client, "own.tide", "Tells high and low water for harbours", [])
        answer = await client.ask("AGENT.DISCOVER", {"semantic": "is the water high?"})
        assert [agent["mailbox"] for agent in answer.body["agents"]] == ["own.tide"]
        assert answer.body["note"] == "answered by keywords: the model is being loaded"
        assert service.events("search by meaning is ready") == []
        os.kill(worker, signal.SIGCONT)

        async def by_meaning() -> bool:
            return "note" not in (await client.ask("AGENT.DISCOVER", {"semantic": "is the water high?"})).body

        await until(by_meaning, LOADS_WITHIN, "sentences are answered by meaning")
    finally:
        await client.close()
    for word in ("own.tide", "harbours", "is the water high"):
        assert word not in service.said(), "neither cards nor requests are logged"
    assert service.complaints() == []


@pytest.mark.rule("G3")
async def test_embedding_all_cards_again_survives_kills(services: Services, tmp_path: Path, exported: Path) -> None:
    one, two = copy_model(tmp_path / "one"), mirror(copy_model(tmp_path / "two"))
    service = services.new(semantic=True)
    shutil.copytree(exported, service.data_dir / "models")
    use(service, one)
    await service.ready()
    client = await Client.connect(service.nats_url)
    try:
        await fill(client)
        await until(lambda: all_read(service), READS_WITHIN, "all cards are read")
        assert await note(client) == ""
    finally:
        await client.close()
    service.terminate()
    assert await service.ended() == 0

    use(service, two)
    await service.ready()
    client = await Client.connect(service.nats_url)
    try:

        async def by_meaning() -> bool:
            return await note(client) == ""

        async def reading(more_than: int) -> int:
            done = await read(service)
            return done if done > more_than else 0

        await until(by_meaning, LOADS_WITHIN, "the former model answers")
        done = await until(lambda: reading(0), READS_WITHIN, "the new model reads")
        os.kill(worker(service, two), signal.SIGKILL)
        done = await until(lambda: reading(done), READS_WITHIN, "the next worker reads on")
        os.kill(worker(service, two), signal.SIGSTOP)
        assert done < COUNT, "there is something left to do"
        code, said = await doctor(service)
        assert code == 0, said
        assert f"The model {two} reads all cards anew: " in said
    finally:
        await client.close()
    await service.kill()

    await service.serve()
    client = await Client.connect(service.nats_url)
    try:

        async def found() -> bool:
            return (await state(service))["model"]["space"] is not None

        await until(found, LOADS_WITHIN, "the model is found, which says what it has embedded")
        assert await read(service) >= done, "what was read is not read again"
        await until(lambda: all_read(service), READS_WITHIN, "all cards are read by the new model")
        assert await note(client) == ""
    finally:
        await client.close()
    assert service.complaints() == []
