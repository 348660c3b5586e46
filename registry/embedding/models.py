"""Which models there are: two that come along, those in a folder, and those in the cache of Hugging Face.

And which vectors can be compared with each other: those of one embedding space.
"""

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

DEFAULT_MODEL: Final = "all-MiniLM-L6-v2-agents"
"""Tuned for agents and tools."""
UNTUNED_MODEL: Final = "all-MiniLM-L6-v2"
PACKED: Final = {name: Path(__file__).parent / "packed" / name for name in (DEFAULT_MODEL, UNTUNED_MODEL)}
"""Folders of the models that come along, by name; ``minilm/`` makes them when the package is built."""
ABOUT: Final = "about.json"
"""File of a model that need not be exported: in ``PACKED`` it also has ``fingerprint`` and ``dims``."""

_SEARCH: Final = ("onnxruntime", "tokenizers")
_MODELS: Final = ("onnx", "sentence_transformers", "torch")
_CONFIGURATION: Final = (".json", ".txt", ".model")  # suffixes
_SHARE: Final = re.compile(r"(.+)=(\d{1,9}(?:\.\d{1,9})?|\.\d{1,9})", re.DOTALL)
_JOINT: Final = re.compile(r"(?<=\d)\+")


class ModelFiles(NamedTuple):
    """A model on disk."""

    folder: Path
    fingerprint: str
    """16 hexadecimal digits that change with the weights and the configuration."""

    @property
    def packed(self) -> bool:
        """Whether it can be run as it is, and is not exported."""
        return (self.folder / ABOUT).exists()


class ModelShare(NamedTuple):
    """A model that is used together with others, and the weight of its cosines."""

    name: str
    weight: float


def join_models(models: Sequence[str]) -> str:
    """Return one name for several models, each ``NAME`` or ``NAME=WEIGHT``: ``A=0.3+B=0.7``; of a single one its own.

    Raises ValueError for a weight of 0, and for a model that is named twice.
    """
    shares = [_share(model) or ModelShare(model, 1) for model in models]
    if any(not share.name or not share.weight for share in shares) or len({name for name, _ in shares}) < len(shares):
        raise ValueError("expected different models, each NAME or NAME=WEIGHT with a weight above 0")
    total = sum(share.weight for share in shares)
    joined = "+".join(f"{name}={weight / total:.3g}" for name, weight in shares)
    return joined if len(shares) > 1 else shares[0].name


def split_model(model: str) -> list[ModelShare]:
    """Return what :func:`join_models` joined; a single model for any other name."""
    shares = [_share(part) for part in _JOINT.split(model)]
    found = [share for share in shares if share is not None]
    return found if 1 < len(found) == len(shares) else [ModelShare(model, 1)]


def _share(text: str) -> ModelShare | None:
    found = _SHARE.fullmatch(text)
    return None if found is None else ModelShare(found[1], float(found[2]))


def missing_extra(model: str) -> str:
    """Return the extra of this distribution that a model needs and that is not installed: search, models or ""."""
    if any(share.name not in PACKED for share in split_model(model)) and _lacks(_SEARCH + _MODELS):
        return "models"
    return "search" if _lacks(_SEARCH) else ""


def _lacks(libraries: tuple[str, ...]) -> bool:
    return any(importlib.util.find_spec(name) is None for name in libraries)


def find_model(model: str) -> ModelFiles | None:
    """Find a model that comes along, or one in a folder; None for other names.

    Reads all files of a folder, which takes seconds if the model is large. Raises OSError when it cannot be
    read, LookupError when the folder does not exist or has no model.
    """
    if (packed := PACKED.get(model)) is not None:
        if not (packed / ABOUT).exists():
            raise LookupError(f"the checkout was not built, {packed} does not exist: pip install -e .")
        return ModelFiles(packed, str(_about(packed)["fingerprint"]))
    folder = Path(model)
    if folder.is_dir():
        return fingerprinted(folder.resolve())
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
            return fingerprinted(Path(snapshot_download(name)))
        except Exception as error:  # of many types: no network, no such name, no access
            why = type(error).__name__
    hint = "HF_HUB_OFFLINE=0 lets it be downloaded" if os.environ.get("HF_HUB_OFFLINE") == "1" else why
    raise LookupError(f"it is no folder here, and was not downloaded before ({hint})")


def dims_of(files: ModelFiles) -> int | None:
    """Return how many dimensions the vectors have, if the model's configuration says so; does not load the model."""
    if files.packed:
        return int(_about(files.folder)["dims"])
    try:
        modules = json.loads((files.folder / "modules.json").read_bytes())
        kinds = [module["type"].rpartition(".")[2] for module in modules]
        if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
            return None
        pooling = json.loads((files.folder / modules[1]["path"] / "config.json").read_bytes())
        if sum(value is True for key, value in pooling.items() if key.startswith("pooling_mode_")) != 1:
            return None
        dims = pooling["word_embedding_dimension"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return dims if isinstance(dims, int) and dims > 0 else None


def fingerprinted(folder: Path) -> ModelFiles:
    """Fingerprint the files that sentence-transformers reads, without READMEs and exports for other libraries.

    Raises LookupError when there is no model.
    """
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


def _about(folder: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((folder / ABOUT).read_bytes()))


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


REMOTE: Final = "remote"
"""Precision of vectors that a server gives."""


class EmbeddingSpace(NamedTuple):
    """Vectors of one space are made the same way, down to the precision of the arithmetic, and never mixed with others.

    Written as ``MODEL@FINGERPRINT/PRECISION/DIMS/TEMPLATE``.
    """

    model: str
    """As in ``registry.model``: a name, or a folder."""
    fingerprint: str
    precision: str
    """``float32``, the name of a quantized export, or ``remote``; empty for vectors of older versions, which mixed."""
    dims: int
    template: str
    """The version of the texts that are composed of a card."""

    def __str__(self) -> str:
        """Return it in the form that is stored with vectors."""
        precision = f"/{self.precision}" if self.precision else ""
        return f"{self.model}@{self.fingerprint}{precision}/{self.dims}/{self.template}"

    @classmethod
    def parse(cls, text: str) -> "EmbeddingSpace":
        """Parse what ``str`` wrote; ValueError for anything else."""
        model, at, rest = text.rpartition("@")
        fingerprint, *precision, dims, template = rest.split("/") if rest.count("/") in (2, 3) else ("", "", "")
        if not (at and fingerprint and template and dims.isascii() and dims.isdecimal() and len(dims) <= 5):
            raise ValueError(f'expected MODEL@FINGERPRINT/PRECISION/DIMS/TEMPLATE, got "{text[:1024]}"')
        return cls(model, fingerprint, "".join(precision), int(dims), template)

    @property
    def remote(self) -> bool:
        """Whether a server makes the vectors."""
        return REMOTE in self.precision.split("+")

    def is_comparable(self, other: "EmbeddingSpace") -> bool:
        """Return whether requests of one space can be compared with the cards of the other.

        They can if the model is the same: precision and template change a vector far less than another card would. But
        the cards themselves must all be of one space, or their ranks would depend on when they were embedded.
        """
        return (self.model, self.fingerprint, self.dims) == (other.model, other.fingerprint, other.dims)
