"""A model is told from another by what is in its folder."""

import importlib.util
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mediator.system.extras import install_command
from registry.embedding.encoder import Encoder
from registry.embedding.local import LocalModel
from registry.embedding.models import (
    DEFAULT_MODEL,
    UNTUNED_MODEL,
    ModelShare,
    dims_of,
    find_model,
    join_models,
    missing_extra,
    split_model,
)
from registry.settings import RegistrySettings

MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
]
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "modules.json").write_text(json.dumps(MODULES))
    pooling = {"word_embedding_dimension": 12, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return tmp_path


def fingerprint(folder: Path) -> str:
    return find_model(str(folder)).fingerprint


@pytest.mark.parametrize("name", ["model.safetensors", "modules.json", "1_Pooling/config.json", "new/config.json"])
def test_weights_and_description_make_the_fingerprint(folder: Path, name: str) -> None:
    before = fingerprint(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"other")
    assert fingerprint(folder) != before


@pytest.mark.parametrize("name", ["README.md", "pytorch_model.bin", "onnx/config.json", "openvino/model.bin"])
def test_unused_files_do_not_change_the_fingerprint(folder: Path, name: str) -> None:
    before = fingerprint(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"other")
    assert fingerprint(folder) == before


def test_the_same_model_elsewhere_has_the_same(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other") / "model"
    other.symlink_to(folder)
    assert fingerprint(other) == fingerprint(folder)


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LookupError, match="holds no model"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder"])
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(LookupError, match=f"{name} does not exist"):
        find_model(name)


def test_other_names_are_looked_for_elsewhere() -> None:
    assert find_model("somebody/some-model") is None


def test_dims_are_known_where_nothing_follows_the_pooling(folder: Path) -> None:
    place = find_model(str(folder))
    assert place is not None
    assert dims_of(place) == 12
    (folder / "modules.json").write_text(json.dumps([*MODULES[:2], DENSE]))
    assert dims_of(place) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"type": 1}]', "null", '{"a": [{}]}'])
def test_a_description_in_disorder_says_nothing_of_dims(folder: Path, text: str) -> None:
    place = find_model(str(folder))
    assert place is not None
    (folder / "modules.json").write_text(text)
    assert dims_of(place) is None
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling" / "config.json").write_text(text)
    assert dims_of(place) is None


@pytest.mark.parametrize(
    ("lacks", "model", "extra"),
    [
        ("onnxruntime", DEFAULT_MODEL, "search"),
        ("torch", "somebody/some-model", "models"),
        ("tokenizers", "somebody/some-model", "models"),
    ],
)
async def test_what_a_model_lacks_is_logged_with_its_command(
    lacks: str, model: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == lacks else find_spec(name))
    encoder = Encoder(LocalModel(model, tmp_path), "test")
    with capture_logs() as lines:
        await encoder.start()
    assert encoder.problem == f"agent-mediator[{extra}] is not installed"
    assert [line["install"] for line in lines] == [install_command(extra)]
    await encoder.stop()


@pytest.mark.parametrize(
    ("models", "joined", "shares"),
    [
        (["A"], "A", [("A", 1)]),
        (["A=.5"], "A", [("A", 1)]),
        (["A", "/b=c+d"], "A=0.5+/b=c+d=0.5", [("A", 0.5), ("/b=c+d", 0.5)]),
        (["A=3", "/b=0.5/m=7"], "A=0.3+/b=0.5/m=0.7", [("A", 0.3), ("/b=0.5/m", 0.7)]),
        (["A=1", "B=1", "C=2"], "A=0.25+B=0.25+C=0.5", [("A", 0.25), ("B", 0.25), ("C", 0.5)]),
    ],
)
def test_models_have_one_name_together(models: list[str], joined: str, shares: list[tuple[str, float]]) -> None:
    assert join_models(models) == joined
    assert split_model(joined) == shares


@pytest.mark.parametrize("name", ["A", "A+B", "A=0.3", "A=0.3+B", "c++=1", "a/b@c"])
def test_other_names_are_those_of_one_model(name: str) -> None:
    assert split_model(name) == [ModelShare(name, 1)]


def test_one_of_several_models_may_need_more_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    assert missing_extra(DEFAULT_MODEL) == missing_extra(f"{DEFAULT_MODEL}=0.3+{UNTUNED_MODEL}=0.7") == ""
    assert missing_extra(f"{DEFAULT_MODEL}=0.3+other=0.7") == "models"


def test_a_server_is_asked_for_the_untuned_model_by_default():
    url = "http://127.0.0.1:7997/v1/embeddings"
    assert RegistrySettings().embedding_model == DEFAULT_MODEL
    assert RegistrySettings(embeddings_url=url).embedding_model == UNTUNED_MODEL
    assert RegistrySettings(embeddings_url=url, model=DEFAULT_MODEL).embedding_model == DEFAULT_MODEL
    assert RegistrySettings(embeddings_url=url, models=["A=1", "B=3"]).embedding_model == "A=0.25+B=0.75"
