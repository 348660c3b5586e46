"""The models that come along, packed without torch, give what sentence-transformers makes of the same weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from minilm import pack
from registry.cards.card import read_card
from registry.cards.sources import read_sources
from registry.embedding.encoder import Encoder
from registry.embedding.local import LocalModel
from registry.embedding.models import DEFAULT_MODEL, PACKED, UNTUNED_MODEL, ModelFiles, find_model, fingerprinted
from registry.embedding.texts import card_texts
from registry.embedding.worker import FLOAT32, MODEL, OnnxModel, SentenceTransformersModel, load
from registry.evaluation import read_cases, read_catalog
from tests.acceptance.registry.sets import CARDS, OWN, REQUESTS
from tests.harness.models import change, copy_model, reference_folder, wants_models

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


DIFFERENCES = {DEFAULT_MODEL: Path(pack.__file__).parents[1] / pack.DIFFERENCE, UNTUNED_MODEL: None}


@pytest.fixture(scope="module", params=list(PACKED))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def packed(name: str) -> OnnxModel:
    return OnnxModel(PACKED[name])


@pytest.fixture(scope="module")
def reference(name: str, tmp_path_factory: pytest.TempPathFactory) -> SentenceTransformersModel:
    folder = reference_folder()
    if (difference := DIFFERENCES[name]) is not None:
        folder = change(copy_model(tmp_path_factory.mktemp("tuned") / "model"), difference)
    return SentenceTransformersModel(folder)


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


def test_packing_again_gives_the_same_files(name: str, tmp_path: Path) -> None:
    pack.pack_model(reference_folder(), tmp_path, DIFFERENCES[name])
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == sorted(path.name for path in PACKED[name].iterdir())
    for file in files:
        assert (tmp_path / file).read_bytes() == (PACKED[name] / file).read_bytes(), file


def test_padding_changes_no_vector(name: str) -> None:
    import onnxruntime

    ids = np.random.default_rng(1).integers(1000, 2000, (2, 9))
    session = onnxruntime.InferenceSession(str(PACKED[name] / MODEL), providers=["CPUExecutionProvider"])

    def run(length: int) -> NDArray[np.float32]:
        mask = np.zeros_like(ids[:, :9])
        mask[:, :length] = 1
        (vectors,) = session.run(None, {"ids": ids, "mask": mask})
        return vectors

    (alone,) = session.run(None, {"ids": ids[:, :5], "mask": np.ones_like(ids[:, :5])})
    # Not exactly, since padding takes part in the scale of a quantized batch.
    assert (run(5) * alone).sum(axis=1).min() > MIN_COSINE
    assert (run(9) * alone).sum(axis=1).max() < MIN_COSINE


def test_no_processor_overflows_on_it(name: str) -> None:
    """Without VNNI, two neighbouring products of an unsigned and a signed byte are added in a saturating int16."""
    graph = onnx.load(PACKED[name] / MODEL).graph
    matrices = {matrix.name: onnx.numpy_helper.to_array(matrix) for matrix in graph.initializer}
    multiplied = [matrices[node.input[1]] for node in graph.node if node.op_type == "MatMulInteger"]
    assert len(multiplied) == 30
    for weights in multiplied:
        pairs = weights.astype(int).reshape(-1, 2, weights.shape[1])
        assert 255 * pairs.clip(min=0).sum(axis=1).max() < 2**15
        assert 255 * pairs.clip(max=0).sum(axis=1).min() >= -(2**15)


def test_the_untuned_one_has_the_fingerprint_of_its_weights() -> None:
    """So a service of an older version finds its vectors again."""
    fingerprints = {name: find_model(name).fingerprint for name in PACKED}
    assert fingerprints[UNTUNED_MODEL] == fingerprinted(reference_folder()).fingerprint
    assert fingerprints[DEFAULT_MODEL] != fingerprints[UNTUNED_MODEL]


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
        json.loads((PACKED[DEFAULT_MODEL] / "about.json").read_bytes())["precision"],
        384,
        "test",
    )
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("file", ["model.onnx", "tokenizer.json"])
def test_damaged_files_are_named_as_the_reason(file: str, tmp_path: Path) -> None:
    copy = ModelFiles(tmp_path / "copy", "0" * 16)
    shutil.copytree(PACKED[DEFAULT_MODEL], copy.folder)
    with (copy.folder / file).open("ab") as damaged:
        damaged.write(b"\0")
    with pytest.raises(LookupError, match="damaged, install the package again: ValueError: a file differs"):
        load(copy, tmp_path / "cache")


def test_it_comes_in_no_other_precision(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="another precision"):
        load(find_model(DEFAULT_MODEL), tmp_path, FLOAT32)
