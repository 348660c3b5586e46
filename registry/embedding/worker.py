"""The process that holds the model: `python -m registry.embedding.worker FOLDER FINGERPRINT MODEL CACHE_DIR PRECISION`.

FOLDER and FINGERPRINT are empty for a model that is to be looked for by name, PRECISION where none has been used yet.
First it says what it has loaded, or why it could not; then it answers one frame of texts after the other with one of
vectors. It ends with its standard input.
"""

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import mediator.leash
from registry.embedding.fast import FLOAT32, Fast, folder_of
from registry.embedding.frames import PREFIX, Frame, lengths, pack, unpack
from registry.embedding.models import Place, fetch

EXPORTS_WITHIN: Final = 1200.0
"""Seconds; 10 are usual, more on a busy machine."""


class Model(Protocol):
    """What turns texts into vectors."""

    kind: str
    """``onnx`` or ``reference``."""
    precision: str
    """As of :attr:`registry.embedding.spaces.Space.precision`."""

    def encode(self, texts: list[str]) -> NDArray[np.float32]: ...  # noqa: D102


class Loaded(NamedTuple):
    """A model, and why it is not an exported one; empty when it is."""

    model: Model
    lack: str = ""


def main() -> int:
    """Serve until the pipe is closed; return 1 when the model cannot be loaded."""
    # Libraries print what they like: from here on it goes to standard error, and they find nothing to read.
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    folder, fingerprint, name, cache_dir, precision = sys.argv[1:]
    try:
        place = Place(Path(folder), fingerprint) if folder else fetch(name)
        model, lack = load(place, Path(cache_dir), precision)
        dims = model.encode(["ready"]).shape[1]
    except Exception as error:
        traceback.print_exc()
        why = str(error) if isinstance(error, LookupError) else f"{type(error).__name__}: {error}"
        _send(sink, pack({"failed": " ".join(why.split())[:300]}))
        return 1
    about = {"runs": model.kind, "precision": model.precision, "width": dims, "fingerprint": place.fingerprint}
    _send(sink, pack(about | {"lack": lack}))
    while (frame := _receive(source)) is not None:
        _send(sink, _answer(model, frame))
    return 0


def load(place: Place, cache_dir: Path, precision: str = "") -> Loaded:
    """Load the exported files of a model from ``cache_dir``, made first where they are not there or of no use.

    A model that cannot be exported runs as the reference. ``precision`` is the one that is wanted, if any: LookupError
    where it cannot be had, since vectors of two are not to be mixed.
    """
    folder = folder_of(cache_dir, place.fingerprint)
    exported, lack = _exported(folder)
    if exported is None and precision != FLOAT32:
        lack = export(place.folder, folder)
        if not lack:
            exported, lack = _exported(folder)
    if exported is not None and precision in ("", exported.precision):
        return Loaded(exported)
    if precision in ("", FLOAT32):
        from registry.embedding.reference import Reference

        return Loaded(Reference(place.folder), lack)
    raise LookupError(f"its export in {precision} cannot be made again: {lack or 'it comes out in another precision'}")


def export(folder: Path, target: Path) -> str:
    """Have the model in ``folder`` exported to ``target``, by a child that takes its memory with it.

    Return why that failed, "" when the files are there.
    """
    command = [sys.executable, "-P", "-m", "registry.embedding.export", str(folder), str(target)]
    leash = [sys.executable, "-I", "-S", mediator.leash.__file__, str(os.getpid())]
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


def _exported(folder: Path) -> tuple[Fast | None, str]:
    try:
        return Fast(folder), ""
    except Exception as error:  # whatever onnxruntime makes of it: it is made anew
        return None, f"{type(error).__name__}: {error}"


def _answer(model: Model, frame: Frame) -> bytes:
    try:
        vectors = model.encode(frame.header["texts"])
        if not np.isfinite(vectors).all():
            raise ValueError("the model gives vectors that are not finite")
        return pack({}, vectors)
    except Exception as error:  # one request that fails is not the end of the others
        traceback.print_exc()
        return pack({"failed": f"{type(error).__name__}: {error}"[:300]})


def _receive(source: BinaryIO) -> Frame | None:
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
