"""The process that holds the model: `python -m registry.embedding.worker FOLDER FINGERPRINT MODEL CACHE_DIR`.

FOLDER and FINGERPRINT are empty for a model that is to be looked for by name. First it says what it has loaded, or why
it could not; then it answers one frame of texts after the other with one of vectors. It ends with its standard input.
"""

import os
import sys
import traceback
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from registry.embedding.frames import PREFIX, Frame, lengths, pack, unpack
from registry.embedding.models import Place, fetch


class Model(Protocol):
    """What turns texts into vectors."""

    kind: str

    def encode(self, texts: list[str]) -> NDArray[np.float32]: ...  # noqa: D102


def main() -> int:
    """Serve until the pipe is closed; return 1 when the model cannot be loaded."""
    # Libraries print what they like: from here on it goes to standard error, and they find nothing to read.
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    folder, fingerprint, name, cache_dir = sys.argv[1:]
    try:
        place = Place(Path(folder), fingerprint) if folder else fetch(name)
        model = load(place, Path(cache_dir))
        dims = model.encode(["ready"]).shape[1]
    except Exception as error:
        traceback.print_exc()
        why = str(error) if isinstance(error, LookupError) else f"{type(error).__name__}: {error}"
        _send(sink, pack({"failed": " ".join(why.split())[:300]}))
        return 1
    _send(
        sink,
        pack({"runs": model.kind, "width": dims, "folder": str(place.folder), "fingerprint": place.fingerprint}),
    )
    while (frame := _receive(source)) is not None:
        _send(sink, _answer(model, frame))
    return 0


def load(place: Place, cache_dir: Path) -> Model:
    """Load the exported files of a model from ``cache_dir``, or where they are of no use the model itself."""
    from registry.embedding.fast import Fast, folder_of

    try:
        return Fast(folder_of(cache_dir, place.fingerprint))
    except FileNotFoundError:
        pass
    except Exception as error:  # whatever onnxruntime makes of it: there is the reference
        sys.stderr.write(f"the exported model is of no use: {type(error).__name__}: {error}\n")
    from registry.embedding.reference import Reference

    return Reference(place.folder)


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
