"""The commands that tune the default model, with a few steps on a small set."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.acceptance.registry.sets import CARDS, OWN, REQUESTS
from tests.harness.models import wants_models

pytestmark = [wants_models, pytest.mark.timeout(600)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "own"
    folder.mkdir(parents=True)
    os.symlink(OWN / CARDS, folder / "catalog.jsonl")
    os.symlink(OWN / REQUESTS, folder / "queries.jsonl")
    return folder.parent


def test_an_interrupted_run_goes_on_and_ends_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import load_file

    from minilm import tune

    def run(*arguments: str | Path) -> None:
        monkeypatch.setattr(sys, "argv", ["tune", *map(str, arguments)])
        assert tune.main() == 0

    monkeypatch.setattr(tune, "CHECKPOINT", 2)
    training = [data, "--steps", "4", "--tokens", "24"]
    run("train", *training[:1], tmp_path / "whole", *training[1:])
    draw, drawn = tune.draw_batch, []

    def interrupted(*arguments):
        drawn.append(1)
        if len(drawn) == 4:
            raise KeyboardInterrupt
        return draw(*arguments)

    monkeypatch.setattr(tune, "draw_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("train", *training[:1], tmp_path / "halves", *training[1:])
    run("train", *training[:1], tmp_path / "halves", *training[1:])
    assert len(drawn) == 4 + 2, "the first two steps were kept"
    whole, halves = (load_file(tmp_path / name / "seed1-steps4.safetensors") for name in ("whole", "halves"))
    assert whole.keys() == halves.keys()
    assert all(name.startswith("encoder.layer.") for name in whole), "embeddings are frozen"
    for name, values in whole.items():
        assert np.array_equal(values, halves[name]), name
    assert any(values.any() for values in whole.values())

    difference = tmp_path / "difference.safetensors"
    run("average", tmp_path / "whole" / "seed1-steps4.safetensors", difference)
    capsys.readouterr()
    for exact in ([], ["--float"]):
        run("measure", data / "own", "--run", difference, "--answers", tmp_path / "answers", *exact)
    shown = capsys.readouterr().out.splitlines()
    measured = {line.split()[1]: float(line.split()[2]) for line in shown if line.startswith("own ")}
    assert measured.keys() == {"untuned-int8", "difference-int8", "untuned-float", "difference-float"}
    assert min(measured.values()) > 0.5
    assert max(measured.values()) - min(measured.values()) < 0.1, "a few steps change little"
