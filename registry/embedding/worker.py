"""The process that holds the model: `python -m registry.embedding.worker FOLDER FINGERPRINT MODEL CACHE_DIR PRECISION`.

FOLDER and FINGERPRINT are empty for a model to find by name, PRECISION if none has been used yet. The first frame it
sends says what it has loaded, or why it could not; then it answers each frame of texts with one of vectors. It ends
when its standard input is closed.

A model runs exported to ONNX, or by sentence-transformers. An exported one loads in a second, without torch, in a third
of the memory. Its folder holds ``model.onnx``, ``tokenizer.json`` and ``about.json``, which has the checksums of both
and the precision.
"""

import json
import os
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

import mediator.system.leash
from registry.embedding.models import ABOUT, ModelFiles, digest_file, download_model

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


def runnable_folder(files: ModelFiles, cache_dir: Path) -> Path:
    """Return the folder that a model is run from: its own, or that of its export."""
    return files.folder if files.packed else export_folder(cache_dir, files.fingerprint)


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


# Frames on the pipes between the service and its worker: a JSON object followed by rows of float32. A prefix has the
# lengths of both parts, four bytes each; ``rows`` and ``dims`` of the object give the shape of the rows.


PREFIX: Final = struct.Struct("!II")
MAX_PART: Final = 8 * 1024 * 1024
"""Bytes of one part of a frame."""
MAX_NUMBER: Final = 1 << 20
"""Of rows, and of numbers in a row."""


class Lengths(NamedTuple):
    """Bytes that follow the prefix of a frame."""

    header: int
    rows: int


class PipeFrame(NamedTuple):
    """A message; ``rows`` has the shape (0, 0) if there are none."""

    header: dict[str, Any]
    rows: NDArray[np.float32]


def pack(header: Mapping[str, Any], rows: NDArray[np.float32] | None = None) -> bytes:
    """Write a frame; strings must be valid Unicode, ``rows`` have two dimensions. ValueError when it is too large."""
    tail = b""
    if rows is not None:
        header = {**header, "rows": rows.shape[0], "dims": rows.shape[1]}
        tail = np.ascontiguousarray(rows, "<f4").tobytes()
    head = json.dumps(header, ensure_ascii=False).encode()
    lengths = Lengths(len(head), len(tail))
    _check(lengths)
    return PREFIX.pack(*lengths) + head + tail


def lengths(prefix: bytes) -> Lengths:
    """Parse the prefix; ValueError when a part is longer than :data:`MAX_PART`."""
    found = Lengths(*PREFIX.unpack(prefix))
    _check(found)
    return found


def unpack(head: bytes, tail: bytes) -> PipeFrame:
    """Parse the two parts; ValueError when they are invalid."""
    try:
        header = json.loads(head)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(header, dict):
        raise ValueError("expected an object")
    shape = (header.get("rows", 0), header.get("dims", 0))
    if any(type(number) is not int or not 0 <= number <= MAX_NUMBER for number in shape):
        raise ValueError("expected numbers of rows and dims")
    if not (tail or shape[0]):
        return PipeFrame(header, np.empty((0, 0), np.float32))
    if shape[0] * shape[1] * 4 != len(tail):
        raise ValueError(f"expected {shape[0]} rows of {shape[1]} numbers, got {len(tail)} bytes")
    return PipeFrame(header, np.frombuffer(tail, "<f4").reshape(shape))


def _check(found: Lengths) -> None:
    if max(found) > MAX_PART:
        raise ValueError(f"a part of {max(found)} bytes is above the limit of {MAX_PART}")


# The process.


EXPORTS_WITHIN: Final = 1200.0
"""Seconds; 10 are usual, more on a busy machine."""


class EmbeddingModel(Protocol):
    """A model that encodes texts."""

    kind: str
    """``onnx`` or ``reference``."""
    precision: str
    """As of :attr:`registry.embedding.models.EmbeddingSpace.precision`."""

    def encode(self, texts: list[str]) -> NDArray[np.float32]: ...  # noqa: D102


class LoadedModel(NamedTuple):
    """A model, and why it could not be exported; empty if it is exported."""

    model: EmbeddingModel
    export_problem: str = ""


def main() -> int:
    """Answer until the pipe is closed; return 1 when the model cannot be loaded."""
    # Libraries may print to standard output and read standard input: give them standard error and an empty input.
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    folder, fingerprint, name, cache_dir, precision = sys.argv[1:]
    try:
        files = ModelFiles(Path(folder), fingerprint) if folder else download_model(name)
        model, problem = load(files, Path(cache_dir), precision)
        dims = model.encode(["ready"]).shape[1]
    except Exception as error:
        traceback.print_exc()
        why = str(error) if isinstance(error, LookupError) else f"{type(error).__name__}: {error}"
        _send(sink, pack({"failed": " ".join(why.split())[:300]}))
        return 1
    header = {"runs": model.kind, "precision": model.precision, "width": dims, "fingerprint": files.fingerprint}
    _send(sink, pack(header | {"export_problem": problem}))
    while (frame := _receive(source)) is not None:
        _send(sink, _answer(model, frame))
    return 0


def load(files: ModelFiles, cache_dir: Path, precision: str = "") -> LoadedModel:
    """Load a packed model, or the export of another from ``cache_dir``, made first if it is missing or damaged.

    A model that cannot be exported runs as the reference. If ``precision`` is not empty, raises LookupError when it
    cannot be provided, since vectors of two precisions must not be mixed.
    """
    folder = runnable_folder(files, cache_dir)
    exported, problem = _load_export(folder)
    if files.packed and exported is None:
        raise LookupError(f"its files are damaged, install the package again: {problem}")
    if exported is None and precision != FLOAT32:
        problem = export(files.folder, folder)
        if not problem:
            exported, problem = _load_export(folder)
    if exported is not None and precision in ("", exported.precision):
        return LoadedModel(exported)
    if precision in ("", FLOAT32) and not files.packed:
        return LoadedModel(SentenceTransformersModel(files.folder), problem)
    raise LookupError(
        f"its export in {precision} cannot be made again: {problem or 'it comes out in another precision'}"
    )


def export(folder: Path, target: Path) -> str:
    """Export the model in ``folder`` to ``target``, in a child process, which frees its memory at its end.

    Return why that failed, "" when it succeeded.
    """
    command = [sys.executable, "-P", "-m", "registry.embedding.export", str(folder), str(target)]
    leash = [sys.executable, "-I", "-S", mediator.system.leash.__file__, str(os.getpid())]
    try:
        ended = subprocess.run(
            leash + command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            errors="replace",
            timeout=EXPORTS_WITHIN,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    sys.stderr.write(ended.stderr)
    if ended.returncode == 0:
        return ""
    lines = ended.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {ended.returncode}"


def _load_export(folder: Path) -> tuple[OnnxModel | None, str]:
    try:
        return OnnxModel(folder), ""
    except Exception as error:  # of any type that onnxruntime raises: it is exported again
        return None, f"{type(error).__name__}: {error}"


def _answer(model: EmbeddingModel, frame: PipeFrame) -> bytes:
    try:
        vectors = model.encode(frame.header["texts"])
        if not np.isfinite(vectors).all():
            raise ValueError("the model gives vectors that are not finite")
        return pack({}, vectors)
    except Exception as error:  # a request that fails must not end the others
        traceback.print_exc()
        return pack({"failed": f"{type(error).__name__}: {error}"[:300]})


def _receive(source: BinaryIO) -> PipeFrame | None:
    prefix = source.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    found = lengths(prefix)
    return unpack(source.read(found.header), source.read(found.rows))


def _send(sink: BinaryIO, frame: bytes) -> None:
    sink.write(frame)
    sink.flush()


if __name__ == "__main__":
    sys.exit(main())
