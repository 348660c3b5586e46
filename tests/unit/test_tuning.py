"""How the default model is tuned: what is drawn for a step, what is mined before, and the difference that is kept."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the extra models")

from minilm import pack
from minilm.bert import add_difference, quantize_difference
from minilm.tune import BATCH, Mined, draw_batch, mine, rank_set, read_set
from registry.embedding.models import DEFAULT_MODEL, UNTUNED_MODEL

TOPICS = ["tides", "bread", "trains", "invoices", "weather", "music"]


def encode(texts: list[str]) -> np.ndarray:
    """Return the topics of texts as vectors."""
    rows = np.array([[text.count(topic) + 0.01 for topic in TOPICS] for text in texts], np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a set with a card for each topic and a request for each two."""
    made = tmp_path / "sets" / "topics"
    made.mkdir(parents=True)
    cards = [
        {"id": topic, "name": f"{topic} agent", "description": f"All about {topic}.", "mailbox": f"test.{topic}"}
        | {"skills": [{"id": name, "name": name, "description": f"{name} {topic}"} for name in ("weigh", "list")]}
        for topic in TOPICS
    ]
    pairs = list(pairwise(TOPICS))
    requests = [
        {
            "qid": one,
            "query": f"Please tell me about {one} of today. Then list all {two} there are.",
            "relevant": [one, two],
        }
        for one, two in pairs
    ]
    for name, lines in (("catalog", cards), ("queries", requests)):
        (made / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return made


def test_cards_are_ranked_as_discover_does(folder: Path):
    chosen = read_set(folder)
    found = rank_set(chosen, encode, 2, "test")
    assert [set(ranked) for ranked in found.ranked] == [set(right) for right in chosen.right]


def test_wrong_cards_nearest_parts_and_skills_are_mined(folder: Path):
    chosen = read_set(folder)
    mined = Mined.of(chosen, encode)
    for right, wrong, part, skill in zip(chosen.right, mined.wrong, mined.part, mined.skill, strict=True):
        assert sorted([*right, *wrong]) == list(range(len(TOPICS)))
        assert part == [1, 2]
        assert skill.keys() == {*right, *wrong}


def test_a_set_is_mined_once_for_a_model(folder: Path, tmp_path: Path):
    chosen, asked = read_set(folder), []

    def counted(texts: list[str]) -> np.ndarray:
        asked.append(len(texts))
        return encode(texts)

    first = mine(chosen, counted, tmp_path, "model")
    before = len(asked)
    assert mine(chosen, counted, tmp_path, "model") == first
    assert len(asked) == before
    mine(chosen, counted, tmp_path, "another")
    assert len(asked) == 2 * before


def test_a_step_has_requests_of_one_catalog_and_its_right_cards(folder: Path):
    chosen = read_set(folder)
    sets = [(chosen, Mined.of(chosen, encode))]
    batch = draw_batch(np.random.default_rng([1, 0]), sets)
    assert len(batch.requests) == min(BATCH, len(chosen.cases))
    assert batch.right.shape == (len(batch.requests), len(batch.documents))
    assert batch.right.any(axis=1).all()
    assert len(set(batch.documents)) == len(batch.documents)
    known = {text for texts in chosen.texts for text in texts}
    assert known >= set(batch.documents)
    owners = {text: no for no, texts in enumerate(chosen.texts) for text in texts}
    for request, row in zip(batch.requests, batch.right, strict=True):
        case = next(at for at, texts in enumerate(chosen.requests) if request in texts)
        wanted = [owners[document] in chosen.right[case] for document in batch.documents]
        assert row.tolist() == wanted


def test_the_same_seed_and_step_draw_the_same(folder: Path):
    chosen = read_set(folder)
    sets = [(chosen, Mined.of(chosen, encode))]
    one, same, other = (draw_batch(np.random.default_rng(seed), sets) for seed in ([1, 7], [1, 7], [2, 7]))
    assert (one.requests, one.documents) == (same.requests, same.documents)
    assert (one.requests, one.documents) != (other.requests, other.documents)


def test_a_difference_in_8_bits_is_exact_to_half_a_step():
    random = np.random.default_rng(1)
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in (("a", (5, 7)), ("b", (9,)))}
    change = {name: values * np.float32(0.01) for name, values in weights.items()}
    change["a"][2] = 0
    kept = quantize_difference(change)
    assert {name: values.dtype.name for name, values in kept.items() if "." not in name} == {"a": "int8", "b": "int8"}
    tuned = add_difference(weights, kept)
    for name, values in change.items():
        step = np.abs(values).max(axis=-1, keepdims=True) / 127
        assert (np.abs(tuned[name] - weights[name] - values) <= step * 0.51 + 1e-6).all()
    exact = add_difference(weights, change)
    assert exact["a"] == pytest.approx(weights["a"] + change["a"])


@pytest.mark.parametrize("difference", [{"c": np.zeros(3)}, {"a": np.zeros((7, 5))}])
def test_the_difference_of_another_model_is_refused(difference: dict[str, np.ndarray]):
    with pytest.raises(ValueError, match="another model"):
        add_difference({"a": np.zeros((5, 7), np.float32)}, difference)


def test_models_are_packed_again_for_another_difference(tmp_path: Path):
    difference = tmp_path / pack.DIFFERENCE
    difference.parent.mkdir(parents=True)
    difference.write_bytes(b"one")
    for name in (DEFAULT_MODEL, UNTUNED_MODEL):
        assert not pack.is_packed(tmp_path)
        folder = tmp_path / pack.FOLDER / name
        folder.mkdir(parents=True)
        digest = pack.models.digest_file(difference) if name == DEFAULT_MODEL else ""
        (folder / "about.json").write_text(json.dumps({"precision": pack.PRECISION, "difference": digest}))
    assert pack.is_packed(tmp_path)
    difference.write_bytes(b"two")
    assert not pack.is_packed(tmp_path)
