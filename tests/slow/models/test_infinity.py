"""A server of the ecosystem, infinity, makes the vectors of the default model's weights, and re-ranks."""

import json
import os
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.mailboxes.bounds import Bounds
from registry.metrics import RegistryMetrics
from registry.records import Liveness
from registry.service import outside_services, run_registry
from registry.settings import RegistrySettings
from tests.harness.didcomm_service import missing
from tests.harness.directory import Instance
from tests.harness.models import WEIGHTS, reference_folder, wants_models
from tests.harness.service import free_port, spawn
from tests.harness.stores import ram_store
from tests.harness.waiting import until

PROGRAM = Path(__file__).parents[3] / ".venv-infinity" / "bin" / "infinity_emb"
"""Made by `make peers`."""
STARTS_WITHIN = 120.0
REQUEST = "my loaf did not come out well"

pytestmark = [wants_models, pytest.mark.rule("G3"), pytest.mark.timeout(240)]


def judge(folder: Path) -> Path:
    """Make a cross-encoder, for its form: the default model's weights below a head that was never trained."""
    from safetensors.numpy import load_file, save_file

    source = reference_folder()
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_bytes())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config | {"label2id": {"LABEL_0": 0}}))
    weights = {f"bert.{name}": rows for name, rows in load_file(source / WEIGHTS).items()}
    head = np.random.RandomState(0).standard_normal((1, config["hidden_size"])).astype(np.float32)
    weights |= {"classifier.weight": head, "classifier.bias": np.zeros(1, np.float32)}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


async def listens(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_infinity_embeds_and_re_ranks(tmp_path: Path):
    if not PROGRAM.exists():
        missing("infinity is not there: `make peers` installs it")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    models = {"embedder": reference_folder(), "judge": judge(tmp_path / "judge")}
    command = [str(PROGRAM), "v2", "--host", "127.0.0.1", "--port", str(port), "--engine", "torch", "--device", "cpu"]
    command += ["--no-bettertransformer", "--no-model-warmup"]
    for name, folder in models.items():
        command += ["--model-id", str(folder), "--served-model-name", name]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
    process = spawn(command, tmp_path / "infinity.log", environment)
    async with AsyncExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await until(lambda: listens(session, url), STARTS_WITHIN, "infinity answers")
        metrics, broker = RegistryMetrics(CollectorRegistry()), Broker(ram_store(), Bounds())
        stack.push_async_callback(broker.close)
        options = {"embeddings_url": f"{url}/embeddings", "rerank_url": f"{url}/rerank"}
        chosen = RegistrySettings.model_validate(
            {**options, "model": "embedder", "rerank_model": "judge", "rerank_ms": 10_000}
        )
        servers = await stack.enter_async_context(outside_services(chosen, metrics))
        running = run_registry(
            broker,
            Liveness(),
            0,
            "embedder",
            tmp_path,
            metrics,
            embeddings=servers.embeddings,
            reranker=servers.reranker,
        )
        made = await stack.enter_async_context(running)
        home = Instance(broker, made.updater, made.directory)
        await home.register("bread-baker", "Plans doughs, rising times and oven temperatures for home bakers")
        for number in range(30):
            await home.register(f"ledger{number}", f"Books invoice {number} into an account")
        await until(lambda: made.updater.embedded == 31)

        async def answered() -> bool:
            return (await home.discover(semantic=REQUEST)).note == ""

        await until(answered)
        found = await home.discover(semantic=REQUEST, explain=True)
        assert found.explanations is not None
        first = {
            why.rerank.place: agent.name
            for agent, why in zip(found.agents, found.explanations, strict=True)
            if why.rerank
        }
        assert first[1] == "bread-baker", "by vectors; the judge is not trained"
        assert sorted(first) == [*range(1, 21)]
        assert made.updater.space.startswith("embedder@")
