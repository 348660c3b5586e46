"""The process that holds the model: `python -m registry.embedding.worker FOLDER FINGERPRINT MODEL CACHE_DIR PRECISION`.

FOLDER and FINGERPRINT are empty for a model to find by name, PRECISION if none has been used yet. The first frame it
sends says what it has loaded, or why it could not; then it answers each frame of texts with one of vectors. It ends
when its standard input is closed.
"""

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import mediator.system.leash
from registry.embedding.backends import FLOAT32, OnnxModel, runnable_folder
from registry.embedding.frames import PREFIX, PipeFrame, lengths, pack, unpack
from registry.embedding.models import ModelFiles, download_model

EXPORTS_WITHIN: Final = 1200.0
"""Seconds; 10 are usual, more on a busy machine."""


class EmbeddingModel(Protocol):
    """A model that encodes texts."""

    kind: str
    """``onnx`` or ``reference``."""
    precision: str
    """As of :attr:`registry.embedding.space.EmbeddingSpace.precision`."""

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
        place = ModelFiles(Path(folder), fingerprint) if folder else download_model(name)
        model, problem = load(place, Path(cache_dir), precision)
        dims = model.encode(["ready"]).shape[1]
    except Exception as error:
        traceback.print_exc()
        why = str(error) if isinstance(error, LookupError) else f"{type(error).__name__}: {error}"
        _send(sink, pack({"failed": " ".join(why.split())[:300]}))
        return 1
    about = {"runs": model.kind, "precision": model.precision, "width": dims, "fingerprint": place.fingerprint}
    _send(sink, pack(about | {"lack": problem}))
    while (frame := _receive(source)) is not None:
        _send(sink, _answer(model, frame))
    return 0


def load(place: ModelFiles, cache_dir: Path, precision: str = "") -> LoadedModel:
    """Load a packed model, or the export of another from ``cache_dir``, made first if it is missing or damaged.

    A model that cannot be exported runs as the reference. If ``precision`` is not empty, raises LookupError when it
    cannot be provided, since vectors of two precisions must not be mixed.
    """
    folder = runnable_folder(place, cache_dir)
    exported, problem = _load_export(folder)
    if place.packed and exported is None:
        raise LookupError(f"its files are damaged, install the package again: {problem}")
    if exported is None and precision != FLOAT32:
        problem = export(place.folder, folder)
        if not problem:
            exported, problem = _load_export(folder)
    if exported is not None and precision in ("", exported.precision):
        return LoadedModel(exported)
    if precision in ("", FLOAT32) and not place.packed:
        from registry.embedding.backends import SentenceTransformersModel

        return LoadedModel(SentenceTransformersModel(place.folder), problem)
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
