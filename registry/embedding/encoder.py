"""Turns texts into vectors without holding up the event loop: what callers ask goes to a worker process."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mediator.errors import UnavailableError

DEFAULT_MODEL = "all-MiniLM-L6-v2"


class Encoder:
    """A model in a process of its own, which lives no longer than this one and is brought back when it dies.

    All methods belong to the event loop that ``start`` was called on.
    """

    def __init__(self, model: str, cache_dir: Path, template: str) -> None:
        """Take the name of the model or its folder, where files made of it are kept, and the version of the texts."""
        self._template = template
        self._space: str | None = None
        self._problem: str | None = "the model is being loaded"

    @property
    def ready(self) -> bool:
        """Whether queries are answered."""
        return self._problem is None

    @property
    def problem(self) -> str | None:
        """Why queries are not answered, as one sentence; None when they are."""
        return self._problem

    @property
    def model(self) -> str:
        """What runs: ``reference`` (sentence-transformers) or ``onnx``; empty while nothing does."""
        return ""

    @property
    def space(self) -> str | None:
        """Names what vectors can be compared with: model, dimensions and version of the texts, at most 128 characters.

        Known after ``start`` for the packaged model and for most folders, for others when the model is ready; None
        until then. It does not change afterwards.
        """
        return self._space

    @property
    def dims(self) -> int | None:
        """Numbers in a vector; known with ``space``."""
        return None

    async def start(self) -> None:
        """Look for the model and start the worker, without waiting until it is ready (seconds); raises nothing.

        Call it from a thread that lasts as long as the service: the kernel ties the child to that thread.
        """

    async def stop(self) -> None:
        """End the worker; who still waits is told that the encoder has stopped."""

    async def wait_ready(self) -> None:
        """Wait until queries are answered; raises UnavailableError when the model is absent or cannot be loaded."""
        raise UnavailableError("not yet")

    async def query(self, texts: list[str], seconds: float) -> NDArray[np.float32] | None:
        """Give normalised vectors, (texts, dims), in ``seconds``; None when not ready, in time, or too many wait.

        Goes before all cards, so it waits for one small batch of them at most.
        """
        return None

    async def cards(self, texts: list[str]) -> NDArray[np.float32]:
        """Give normalised vectors, (texts, dims), however long it takes.

        Raises UnavailableError when the model is absent or cannot be loaded or the worker dies over it, BusyError when
        too many texts wait.
        """
        raise UnavailableError("not yet")
