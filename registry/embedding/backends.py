"""The two ways to run a model: exported to ONNX, or by sentence-transformers.

An exported model loads in a second, without torch, in a third of the memory. Its folder holds ``model.onnx``,
``tokenizer.json`` and ``about.json``, which has the checksums of both and the precision.
"""

import json
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from registry.embedding.models import ABOUT, ModelFiles, digest_file

MODEL: Final = "model.onnx"
TOKENIZER: Final = "tokenizer.json"

_EXPORT_VERSION: Final = 2  # raise it when the export writes other files for the same model
FLOAT32: Final = "float32"
"""Precision of a model that is exported without quantization."""
MIXED: Final = f"int8.{_EXPORT_VERSION}"
"""Precision of a model with most matrices quantized to 8 bits."""


def export_folder(cache_dir: Path, fingerprint: str) -> Path:
    """Return the folder of an exported model."""
    return cache_dir / f"{fingerprint}-{_EXPORT_VERSION}"


def runnable_folder(place: ModelFiles, cache_dir: Path) -> Path:
    """Return the folder that a model is run from: its own, or that of its export."""
    return place.folder if place.packed else export_folder(cache_dir, place.fingerprint)


def describe(folder: Path, max_tokens: int, precision: str, **more: str | int) -> None:
    """Write ``about.json``: checksums of ``folder``'s files, the most tokens of a text, the precision, and ``more``."""
    digests = {name: digest_file(folder / name) for name in (MODEL, TOKENIZER)}
    about = {"max_tokens": max_tokens, "precision": precision, "sha256": digests, **more}
    (folder / ABOUT).write_text(json.dumps(about))


def precision_of(folder: Path) -> str:
    """Return the precision of an exported model without loading it; "" when there is none."""
    try:
        return str(json.loads((folder / ABOUT).read_bytes())["precision"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


class OnnxModel:
    """An exported model; texts are truncated where sentence-transformers truncates them."""

    kind = "onnx"

    def __init__(self, folder: Path) -> None:
        """Check the files and load them. Raises FileNotFoundError without an export, ValueError when it is damaged."""
        import onnxruntime
        from tokenizers import Tokenizer

        about = json.loads((folder / ABOUT).read_bytes())
        try:
            max_tokens, digests = int(about["max_tokens"]), about["sha256"]
            self.precision = str(about["precision"])
            if any(digest_file(folder / name) != digests[name] for name in (MODEL, TOKENIZER)):
                raise ValueError("a file differs from what was exported")
        except (LookupError, TypeError) as error:
            raise ValueError(f"{ABOUT} is damaged") from error
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._tokenizer.enable_truncation(max_tokens)
        self._tokenizer.no_padding()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # The arena keeps as much memory as the longest batch took: 120 MB more, and no faster here.
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 3
        self._session: Any = onnxruntime.InferenceSession(
            str(folder / MODEL), options, providers=["CPUExecutionProvider"]
        )

    def encode(self, texts: list[str]) -> NDArray[np.float32]:
        """Return normalised vectors, (texts, dims), of at least one text.

        Texts run one by one: on one thread that is as fast as batches, and since a quantized batch shares its scales,
        a text would otherwise get another vector depending on its neighbours.
        """
        vectors = []
        for encoding in self._tokenizer.encode_batch_fast(texts):
            ids = np.array([encoding.ids], np.int64)
            vectors.append(self._session.run(None, {"ids": ids, "mask": np.ones_like(ids)})[0][0])
        return np.stack(vectors)


class SentenceTransformersModel:
    """A model as sentence-transformers runs it: any model, exactly, at the price of torch's memory and start."""

    kind = "reference"
    precision = FLOAT32

    def __init__(self, folder: Path) -> None:
        """Load the model, which takes seconds; raises what sentence-transformers raises."""
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        self.model: Any = SentenceTransformer(str(folder), device="cpu")

    def encode(self, texts: list[str]) -> NDArray[np.float32]:
        """Return normalised vectors, (texts, dims), of at least one text."""
        vectors = self.model.encode(texts, batch_size=8, normalize_embeddings=True, show_progress_bar=False)
        return cast(NDArray[np.float32], vectors)
