"""Runs several models as one: the cosine of two joined vectors is the weighted mean of the models' own cosines.

So index, store and a change of models see one model with more dimensions. Each model has a worker process of its own.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from registry.embedding.encoder import EmbeddingSource, Encoder
from registry.embedding.models import ModelShare, split_model
from registry.embedding.space import EmbeddingSpace


def join_rows(shares: Sequence[ModelShare], rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Join what several models make of the same texts, (texts, dims) each, to vectors of length one."""
    return np.hstack([np.float32(share.weight**0.5) * part for share, part in zip(shares, rows, strict=True)])


def joint_space(name: str, spaces: Sequence[EmbeddingSpace]) -> EmbeddingSpace:
    """Return the space of joined vectors; ``name`` is of :func:`join_models`, and so has the weights."""
    fingerprint = "+".join(space.fingerprint for space in spaces)
    precision = "+".join(space.precision for space in spaces)
    return EmbeddingSpace(name, fingerprint, precision, sum(space.dims for space in spaces), spaces[0].template)


class EnsembleEncoder:
    """Several encoders that answer together; none of them answers alone."""

    def __init__(self, name: str, shares: list[ModelShare], members: list[Encoder]) -> None:
        """``shares`` are at least two; their weights add up to 1."""
        self._name = name
        self._members = members
        self._shares = shares

    @property
    def space(self) -> EmbeddingSpace | None:
        """The space of the joined vectors, once those of all models are known."""
        spaces = [member.space for member in self._members if member.space is not None]
        return joint_space(self._name, spaces) if len(spaces) == len(self._members) else None

    @property
    def problem(self) -> str | None:
        """Why queries are not answered: the first model's problem; None when they are."""
        return next((member.problem for member in self._members if member.problem is not None), None)

    @property
    def failed(self) -> bool:
        """Whether waiting for one of the models is not enough."""
        return any(member.failed for member in self._members)

    @property
    def ready(self) -> bool:
        """Whether queries are answered."""
        return self.problem is None

    @property
    def model(self) -> str:
        """The slowest backend of them: ``reference``, ``onnx``, or empty while one does not run."""
        kinds = {member.model for member in self._members}
        return "" if "" in kinds else max(kinds)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return [pid for member in self._members for pid in member.pids]

    async def start(self) -> None:
        """Find the models and start their workers, as :meth:`Encoder.start` does."""
        for member in self._members:
            await member.start()

    async def stop(self) -> None:
        """Stop the workers; pending calls fail."""
        for member in self._members:
            await member.stop()

    async def wait_ready(self) -> None:
        """Wait until queries are answered; raises UnavailableError when a model is absent or cannot be loaded."""
        while self.problem is not None:
            for member in self._members:
                await member.wait_ready()

    async def query(self, texts: list[str], seconds: float) -> NDArray[np.float32] | None:
        """Return joined vectors as :meth:`Encoder.query` does; None when one of the models does not answer in time."""
        found = await asyncio.gather(*(member.query(texts, seconds) for member in self._members))
        vectors = [rows for rows in found if rows is not None]
        return join_rows(self._shares, vectors) if len(vectors) == len(self._members) else None

    async def cards(self, texts: list[str]) -> NDArray[np.float32]:
        """Return joined vectors; raises as :meth:`Encoder.cards` does."""
        # One after the other: they share the processors anyway, and no job is left behind when one fails.
        return join_rows(self._shares, [await member.cards(texts) for member in self._members])


TextEncoder = Encoder | EnsembleEncoder


def make_encoder(model: str, source: Callable[[str], EmbeddingSource], template: str) -> TextEncoder:
    """Return the encoder of a model, or of several whose names :func:`join_models` joined.

    ``source`` says where a model runs, by its name; ``template`` is the version of the texts.
    """
    shares = split_model(model)
    members = [Encoder(source(share.name), template) for share in shares]
    return members[0] if len(members) == 1 else EnsembleEncoder(model, shares, members)
