"""The default model, which is packed without torch, gives what sentence-transformers makes of the same weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from minilm.pack import pack_model
from registry.cards.card import read_card
from registry.cards.sources import read_sources
from registry.embedding.encoder import Encoder
from registry.embedding.local import LocalModel
from registry.embedding.models import DEFAULT_MODEL, PACKED, ModelFiles, find_model, fingerprinted
from registry.embedding.texts import card_texts
from registry.embedding.worker import FLOAT32, MODEL, OnnxModel, SentenceTransformersModel, load
from registry.evaluation import read_cases, read_catalog
from tests.acceptance.registry.sets import CARDS, OWN, REQUESTS
from tests.harness.models import reference_folder, wants_models

pytestmark = [wants_models, pytest.mark.timeout(300)]

TEXTS = [
    "Translates letters.",
    "tide_table: high and low water for harbours\nSkills: next tide; spring tides; warn of storm surges",
    "Wandelt Rechnungen in Buchungssätze um.",
    "把会议录音整理成纪要。",
    "Checks long contracts, clause by clause, for what changed since the last edition. " * 40,
    "",
]
MIN_COSINE = 0.98
"""Of each vector to the reference's: the tolerance that docs/registry.md states."""


@pytest.fixture(scope="module")
def packed() -> OnnxModel:
    return OnnxModel(PACKED)


@pytest.fixture(scope="module")
def reference() -> SentenceTransformersModel:
    return SentenceTransformersModel(reference_folder())


def test_its_vectors_are_those_of_the_reference(packed: OnnxModel, reference: SentenceTransformersModel) -> None:
    vectors = packed.encode(TEXTS)
    assert (vectors * reference.encode(TEXTS)).sum(axis=1).min() > MIN_COSINE
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-3)


def test_it_finds_what_the_reference_finds(packed: OnnxModel, reference: SentenceTransformersModel) -> None:
    catalog = read_catalog(read_sources([str(OWN / CARDS)]))
    cards = [card_texts(read_card(card))[0] for card in catalog.cards]
    requests = [case.query for case in read_cases(OWN / REQUESTS, catalog)]
    assert len(requests) == 20

    def best(model: OnnxModel | SentenceTransformersModel) -> NDArray[np.intp]:
        return np.argmax(model.encode(requests) @ model.encode(cards).T, axis=1)

    assert best(packed).tolist() == best(reference).tolist()


def test_packing_again_gives_the_same_files(tmp_path: Path) -> None:
    pack_model(reference_folder(), tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in PACKED.iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (PACKED / name).read_bytes(), name


def test_padding_changes_no_vector(packed: OnnxModel) -> None:
    import onnxruntime

    ids = np.random.default_rng(1).integers(1000, 2000, (2, 9))
    session = onnxruntime.InferenceSession(str(PACKED / MODEL), providers=["CPUExecutionProvider"])

    def run(length: int) -> NDArray[np.float32]:
        mask = np.zeros_like(ids[:, :9])
        mask[:, :length] = 1
        (vectors,) = session.run(None, {"ids": ids, "mask": mask})
        return vectors

    (alone,) = session.run(None, {"ids": ids[:, :5], "mask": np.ones_like(ids[:, :5])})
    # Not exactly, since padding takes part in the scale of a quantized batch.
    assert (run(5) * alone).sum(axis=1).min() > MIN_COSINE
    assert (run(9) * alone).sum(axis=1).max() < MIN_COSINE


def test_no_processor_overflows_on_it() -> None:
    """Without VNNI, two neighbouring products of an unsigned and a signed byte are added in a saturating int16."""
    graph = onnx.load(PACKED / MODEL).graph
    matrices = {matrix.name: onnx.numpy_helper.to_array(matrix) for matrix in graph.initializer}
    multiplied = [matrices[node.input[1]] for node in graph.node if node.op_type == "MatMulInteger"]
    assert len(multiplied) == 30
    for weights in multiplied:
        pairs = weights.astype(int).reshape(-1, 2, weights.shape[1])
        assert 255 * pairs.clip(min=0).sum(axis=1).max() < 2**15
        assert 255 * pairs.clip(max=0).sum(axis=1).min() >= -(2**15)


def test_it_has_the_fingerprint_of_its_weights() -> None:
    assert find_model(DEFAULT_MODEL).fingerprint == fingerprinted(reference_folder()).fingerprint


async def test_it_is_not_exported_and_known_at_once(tmp_path: Path) -> None:
    encoder = Encoder(LocalModel(DEFAULT_MODEL, tmp_path / "models"), "test")
    await encoder.start()
    try:
        space = encoder.space
        await encoder.wait_ready()
        assert encoder.space == space
        assert encoder.model == "onnx"
        assert (await encoder.cards(TEXTS)).shape == (len(TEXTS), 384)
    finally:
        await encoder.stop()
    assert space._replace(fingerprint="") == (
        DEFAULT_MODEL,
        "",
        json.loads((PACKED / "about.json").read_bytes())["precision"],
        384,
        "test",
    )
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json"])
def test_damaged_files_are_named_as_the_reason(name: str, tmp_path: Path) -> None:
    copy = ModelFiles(tmp_path / "copy", "0" * 16)
    shutil.copytree(PACKED, copy.folder)
    with (copy.folder / name).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(LookupError, match="damaged, install the package again: ValueError: a file differs"):
        load(copy, tmp_path / "cache")


def test_it_comes_in_no_other_precision(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="another precision"):
        load(find_model(DEFAULT_MODEL), tmp_path, FLOAT32)
