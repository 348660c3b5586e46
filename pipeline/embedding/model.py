"""The embedding model: found on the driver as the service finds it, loaded once in each worker of Spark."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from mediator.errors import BadRequestError, SetupError
from mediator.system.extras import install_command
from pipeline.lake import ProgressCallback
from registry.cards.card import read_card
from registry.embedding import models
from registry.embedding.encoder import join_rows, joint_space, well_formed
from registry.embedding.local import ENVIRONMENT
from registry.embedding.models import EmbeddingSpace, ModelShare
from registry.embedding.texts import TEMPLATE, card_texts
from registry.embedding.worker import EmbeddingModel as Loaded
from registry.embedding.worker import load, runnable_folder
from registry.index.vectors import pack_rows

TOGETHER = 256
"""Cards encoded at a time in a worker."""
_MADE = "digest binary, vectors binary, problem string"


class ModelPart(NamedTuple):
    """A model on a disk that driver and executors share, with the files made of it; one that comes along needs none."""

    name: str
    folder: Path | None
    """None for a model that is part of the package on every machine."""
    fingerprint: str
    cache_dir: Path
    precision: str


@dataclass(frozen=True, slots=True)
class Model:
    """The model of the service: one, or several that are used together."""

    shares: list[ModelShare]
    parts: list[ModelPart]
    """As many."""
    space: str
    """As of :attr:`registry.embedding.encoder.Encoder.space`."""

    def encode(self, cards: DataFrame) -> DataFrame:
        """Return ``digest``, ``vectors`` and ``problem`` of cards with ``digest`` and ``card``.

        ``vectors`` are in the form of :mod:`registry.index.vectors`, the same that the service makes, or null where the
        model makes nothing of a card: then ``problem`` says what.
        """
        return cards.select("digest", "card").mapInArrow(partial(encode_batches, self), _MADE)


def find_model(name: str, cache_dir: Path, on_progress: ProgressCallback) -> Model:
    """Find the model of a name or folder, and have it exported to ``cache_dir`` where the service has not done so yet.

    The name becomes part of the space, so it has to be as in ``registry.model``; of ``registry.models`` it is that of
    :func:`registry.embedding.models.join_models`. Raises :class:`SetupError` when a model cannot be had.
    """
    if extra := models.missing_extra(name):
        raise SetupError(f"the model {name} needs agent-mediator[{extra}]: {install_command(extra)}")
    shares = models.split_model(name)
    found = [_find_part(share.name, cache_dir.absolute(), on_progress) for share in shares]
    return Model(shares, [part for part, _ in found], str(joint_space(name, [space for _, space in found])))


def _find_part(name: str, cache_dir: Path, on_progress: ProgressCallback) -> tuple[ModelPart, EmbeddingSpace]:
    try:
        place = models.find_model(name) or models.download_model(name)
    except (OSError, LookupError) as error:
        raise SetupError(f"registry.model: {error}") from error
    if not runnable_folder(place, cache_dir).exists():
        on_progress("exporting the model", 0, None)
    # Where that cannot be, workers run sentence-transformers, as the service does.
    folder = None if place.packed else place.folder
    loaded = _loaded(ModelPart(name, folder, place.fingerprint, cache_dir, ""))
    dims = models.dims_of(place) or loaded.encode(["ready"]).shape[1]
    space = EmbeddingSpace(name, place.fingerprint, loaded.precision, dims, TEMPLATE)
    return ModelPart(name, folder, place.fingerprint, cache_dir, loaded.precision), space


@lru_cache(maxsize=4)
def _loaded(part: ModelPart) -> Loaded:
    # There is a worker for each core, so more threads would only compete.
    os.environ.update(ENVIRONMENT)
    place = models.ModelFiles(part.folder or models.PACKED[part.name], part.fingerprint)
    return load(place, part.cache_dir, part.precision).model


def encode_batches(model: Model, batches: Iterator[Any]) -> Iterator[Any]:
    """Return the vectors of Arrow batches of cards, or what is wrong with a card."""
    for batch in batches:
        for start in range(0, batch.num_rows, TOGETHER):
            some = batch.slice(start, TOGETHER)
            made = [_vectors(model, card) for card in some.column("card").to_pylist()]
            vectors, problems = zip(*made, strict=True)
            yield pa.RecordBatch.from_arrays(
                [some.column("digest"), pa.array(vectors, pa.binary()), pa.array(problems, pa.string())],
                names=["digest", "vectors", "problem"],
            )


def _vectors(model: Model, card: bytes) -> tuple[bytes | None, str | None]:
    try:
        lines = card_texts(read_card(card))
    except BadRequestError as error:
        # It was registered under older rules.
        return None, str(error)
    texts = [well_formed(line) for line in lines]
    rows = [_loaded(part).encode(texts) for part in model.parts]
    joined = join_rows(model.shares, rows)
    if not np.isfinite(joined).all():
        return None, "the model gives vectors that are not finite"
    return pack_rows(joined), None
