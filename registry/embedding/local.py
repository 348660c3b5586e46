"""Runs a model on this machine: finds its files, and starts the process that loads them."""

import asyncio
from pathlib import Path

import structlog

from registry.embedding import models
from registry.embedding.backends import precision_of, runnable_folder
from registry.embedding.process import Worker, start_worker
from registry.embedding.space import EmbeddingSpace

log = structlog.get_logger("encoder")


class LocalModel:
    """A model in a process of its own; see :class:`registry.embedding.encoder.EmbeddingSource`."""

    feeders = (False,)
    longest_pause = 300.0

    def __init__(self, name: str, cache_dir: Path) -> None:
        """``name`` may be a folder, ``cache_dir`` keeps its export."""
        self.name = name
        self._cache_dir = cache_dir
        self._place: models.ModelFiles | None = None
        self._fingerprint = ""
        """Of the first worker."""

    def missing_extra(self) -> str:
        """Return the extra that the model needs and that is not installed; "" for none."""
        return models.missing_extra(self.name)

    async def find_space(self, template: str) -> EmbeddingSpace | None:
        """Find the model, if it is local, and so its space; raises as ``models.find_model`` does."""
        self._place = await asyncio.to_thread(models.find_model, self.name)
        if self._place is None or (dims := models.dims_of(self._place)) is None:
            return None
        precision = precision_of(runnable_folder(self._place, self._cache_dir))
        return EmbeddingSpace(self.name, self._place.fingerprint, precision, dims, template) if precision else None

    async def start_worker(self, precision: str) -> Worker:
        """Start the process.

        It is ready in a second; a model that is not the default one is exported the first time, which takes ten or
        more. Call this from a thread that lives as long as the service: the kernel ties the process to that thread.

        Raises ChildProcessError when it cannot be started, ValueError when the model has changed since the first one,
        and as ``models.find_model`` does.
        """
        # The model may have changed since the last worker loaded it.
        place, self._place = self._place or await asyncio.to_thread(models.find_model, self.name), None
        if place is not None and self._fingerprint not in ("", place.fingerprint):
            raise ValueError(f"the model has changed on disk: {self.name} was {self._fingerprint}")
        worker = await start_worker(place, self.name, self._cache_dir, precision)
        self._fingerprint = worker.fingerprint
        if worker.export_problem:
            log.warning(
                "the model cannot be exported, the slower reference runs", model=self.name, why=worker.export_problem
            )
        return worker
