"""`mediator agent eval` with the model that comes along: every way to ask, and the service's data left alone."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.acceptance.registry.sets import CARDS, OWN, REQUESTS
from tests.harness.models import wants_models


@wants_models
@pytest.mark.timeout(180)
async def test_a_model_is_judged_in_every_mode(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mediator", "agent", "eval", OWN / CARDS, OWN / REQUESTS, "--json"]
    ended = await asyncio.create_subprocess_exec(
        *command, "--save", "run.jsonl", cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await ended.communicate()
    assert ended.returncode == 0, err.decode()
    found = json.loads(out)
    assert found["modes"].keys() == {"text", "semantic", "vectors"}
    assert found["differences"].keys() == {"semantic - text", "vectors - text"}
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
