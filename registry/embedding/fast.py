"""A model as an ONNX file that was exported before: loaded in a second, without torch, a third of the memory.

Its folder holds ``model.onnx``, ``tokenizer.json`` and ``about.json`` with the checksums of both and the precision.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

KIND: Final = "onnx"
MODEL: Final = "model.onnx"
TOKENIZER: Final = "tokenizer.json"
ABOUT: Final = "about.json"

_RECIPE: Final = 2  # raise it when the export makes other files of the same model
FLOAT32: Final = "float32"
"""The precision of a model that is exported as it is."""
MIXED: Final = f"int8.{_RECIPE}"
"""The precision of one of whose matrices most are in whole numbers."""


def folder_of(cache_dir: Path, fingerprint: str) -> Path:
    """Return where the files of a model are."""
    return cache_dir / f"{fingerprint}-{_RECIPE}"


def describe(folder: Path, max_tokens: int, precision: str) -> None:
    """Write the checksums of the files in ``folder``, how long texts may be, and what the model is computed in."""
    digests = {name: _digest(folder / name) for name in (MODEL, TOKENIZER)}
    (folder / ABOUT).write_text(json.dumps({"max_tokens": max_tokens, "precision": precision, "sha256": digests}))


def precision_of(folder: Path) -> str:
    """Return the precision of an exported model without loading it; "" when there is none."""
    try:
        return str(json.loads((folder / ABOUT).read_bytes())["precision"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


class Fast:
    """A loaded model; the longest texts are cut where sentence-transformers cuts them."""

    kind = KIND

    def __init__(self, folder: Path) -> None:
        """Check and load it. Raises FileNotFoundError when it was not exported, ValueError when it is damaged."""
        import onnxruntime
        from tokenizers import Tokenizer

        about = json.loads((folder / ABOUT).read_bytes())
        try:
            max_tokens, digests = int(about["max_tokens"]), about["sha256"]
            self.precision = str(about["precision"])
            if any(_digest(folder / name) != digests[name] for name in (MODEL, TOKENIZER)):
                raise ValueError("a file is not what was exported")
        except (LookupError, TypeError) as error:
            raise ValueError(f"{ABOUT} is damaged") from error
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._tokenizer.enable_truncation(max_tokens)
        self._tokenizer.no_padding()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # The arena keeps what the longest batch took: 120 MB more, and no faster here.
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 3
        self._session: Any = onnxruntime.InferenceSession(
            str(folder / MODEL), options, providers=["CPUExecutionProvider"]
        )

    def encode(self, texts: list[str]) -> NDArray[np.float32]:
        """Give normalised vectors, (texts, dims); at least one text is wanted.

        One by one: on one thread that is as fast as in batches, and in whole numbers, where what is computed together
        shares its scales, a text has the same vector whatever it came with.
        """
        vectors = []
        for encoding in self._tokenizer.encode_batch_fast(texts):
            ids = np.array([encoding.ids], np.int64)
            vectors.append(self._session.run(None, {"ids": ids, "mask": np.ones_like(ids)})[0][0])
        return np.stack(vectors)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
