"""A service on a machine without the libraries for models: sentences are answered by keywords, and it says so."""

from pathlib import Path
from typing import Any

import nats
import orjson
import pytest

from mediator.operate import control
from registry.cards.sources import read_sources
from registry.evaluation import read_catalog
from tests.acceptance.registry.asking import PREFIX
from tests.acceptance.registry.sets import CARDS, OWN
from tests.harness.service import Services
from tests.harness.waiting import until

BARRED = ("sentence_transformers", "torch", "onnxruntime", "onnx", "tokenizers", "transformers", "numkong")
BARRIER = f"""
import sys
from importlib.machinery import PathFinder

class Barrier(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {BARRED!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Barrier
"""


@pytest.mark.rule("G3")
async def test_without_the_libraries_keywords_answer_and_say_so(services: Services, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BARRIER)
    service = services.new(semantic=True)
    service.environment = {"PYTHONPATH": str(tmp_path / "site")}
    await service.serve()
    client = await nats.connect(service.nats_url)

    async def ask(verb: str, body: bytes) -> dict[str, Any]:
        reply: dict[str, Any] = orjson.loads((await client.request(PREFIX + verb, body, 20)).data)
        assert reply["error"] == ""
        return reply

    async def said() -> bool:
        """Until the service has found out, it says that the model is being loaded."""
        reply = await ask("DISCOVER", orjson.dumps({"semantic": "when is the next high water?"}))
        assert reply["mode"] == "semantic"
        assert reply["agents"][0]["name"] == "Tide Table"
        return "agent-mediator[search]" in str(reply["note"])

    try:
        for card in read_catalog(read_sources([str(OWN / CARDS)])).cards:
            await ask("REGISTER", card)
        await until(said, what="the note names what is to be installed")
        findings = (await control.send_command(service.data_dir, "installation"))["findings"]
        assert [finding["text"] for finding in findings if finding["level"] == "problem"] == []
        (found,) = (finding for finding in findings if finding["text"].startswith("No search by meaning"))
        assert "pip install" in found["advice"]
    finally:
        await client.close()
    assert service.complaints() == []
