"""`mediator agent eval` with the model that comes along: every way to ask, and the service's data left alone."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from registry.embedding.models import DEFAULT_MODEL
from tests.acceptance.registry.sets import CARDS, OWN, REQUESTS
from tests.harness.models import copy_model, exports, mirror, wants_models


async def run_eval(folder: Path, *options: str) -> Any:
    """Return what the command prints as JSON."""
    command = [sys.executable, "-m", "mediator", "agent", "eval", OWN / CARDS, OWN / REQUESTS, "--json", *options]
    ended = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await ended.communicate()
    assert ended.returncode == 0, err.decode()
    return json.loads(out)


@wants_models
@pytest.mark.timeout(180)
async def test_a_model_is_judged_in_every_mode(tmp_path: Path) -> None:
    found = await run_eval(tmp_path, "--save", "run.jsonl")
    assert found["modes"].keys() == {"text", "semantic", "vectors"}
    assert found["differences"].keys() == {"semantic - text", "vectors - text"}
    costs = found["costs"]
    assert all(cost["cpu_ms"] > 0 for cost in costs.values())
    assert costs["text"]["memory_mb"] == 0
    assert costs["semantic"]["memory_mb"] > 50
    for mode, figures in found["modes"].items():
        # By chance one of the twenty cards would be right in one of twenty requests.
        assert figures["hit@1"]["mean"] > 0.5, mode
    run = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    ranked = {mode: {line["qid"]: line["ranked"] for line in run if line["mode"] == mode} for mode in found["modes"]}
    assert all(len(answers) == found["requests"] == 20 for answers in ranked.values())
    # Keywords find only who has one of the words; vectors are near to everybody.
    assert {len(answer) for answer in ranked["vectors"].values()} == {10}
    assert min(len(answer) for answer in ranked["text"].values()) < 10
    assert ranked["semantic"] != ranked["vectors"]
    # The packed model is read where it is installed.
    assert os.listdir(tmp_path) == ["run.jsonl"]


@wants_models
@pytest.mark.timeout(240)
async def test_models_and_pairs_of_models_stand_in_one_table(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "models").symlink_to(exports(tmp_path_factory))
    other = str(mirror(copy_model(tmp_path / "other")))
    pair = f"{DEFAULT_MODEL}=0.3+{other}=0.7"
    wanted = [DEFAULT_MODEL, other, f"{DEFAULT_MODEL}=3+{other}=7"]
    models = [text for model in wanted for text in ("--model", model)]
    found = await run_eval(tmp_path, *models, "--mode", "text", "--mode", "vectors", "--data-dir", "data")
    labels = [f"vectors, {model}" for model in (DEFAULT_MODEL, other, pair)]
    assert list(found["modes"]) == ["text", *labels]
    assert found["model"] == f"{DEFAULT_MODEL}, {other}, {pair}"
    # Mirrored, a model finds what it found before; both together do, and cost as much as both.
    first, second, both = (found["modes"][label]["nDCG@10"]["mean"] for label in labels)
    assert (first, second) == (pytest.approx(both, abs=0.1),) * 2
    one, two, together = (found["costs"][label] for label in labels)
    assert together["memory_mb"] > 1.5 * min(one["memory_mb"], two["memory_mb"])
