"""Which model reads cards and requests; the former one serves until a newly configured one has read all cards."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.store.base import Transaction
from registry.embedder import Embedder
from registry.embedding.encoder import Encoder
from registry.following import Following
from registry.texts import TEMPLATE

RETRY_SECONDS = 30.0
DROP = 200
"""Rows of a former model's vectors removed at once."""

log = structlog.get_logger("registry")


class Meanings:
    """The models of one instance. Used on the event loop."""

    def __init__(self, broker: Broker, following: Following, model: str, cache_dir: Path, *, shared: bool) -> None:
        """``cache_dir`` keeps files made from models; ``shared``: other instances work on the same database."""
        self._broker = broker
        self._following = following
        self._cache_dir = cache_dir
        self.encoder = Encoder(model, cache_dir, TEMPLATE)
        self.embedder = Embedder(broker, self.encoder, lambda: following.agents > following.embedded, shared=shared)
        self._former: Encoder | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin: the model is loaded, cards are read, and the index follows, all behind this call."""
        self._task = asyncio.create_task(self._run(), name="registry-model")

    async def read(self, texts: list[str], seconds: float) -> tuple[NDArray[np.float32] | None, str]:
        """Return the vectors of a request, (texts, dims), to compare with those in the index; or why there are none."""
        encoder = self._former or self.encoder
        if encoder.problem is not None:
            return None, encoder.problem
        if encoder.space != self._following.space:
            return None, "the cards are being read by another model"
        vectors = await encoder.query(texts, seconds)
        return vectors, "" if vectors is not None else "the model did not answer in time"

    async def stop(self) -> None:
        """End the models."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.embedder.stop()
        for encoder in (self.encoder, self._former):
            if encoder is not None:
                await encoder.stop()

    async def embedded(self) -> int:
        """Return how many agents have vectors of the configured model."""
        space = self.encoder.space
        return 0 if space is None else await self._broker.read(lambda tx, _now: tx.vectors.count(space))

    async def _best(self, wanted: str) -> str:
        """Return the space that most agents have vectors in, the wanted one where it is as good."""
        try:
            counts = await self._broker.read(
                lambda tx, _now: {space: tx.vectors.count(space) for space in tx.vectors.spaces()}
            )
        except MediatorError:
            return wanted
        return max([wanted, *sorted(counts)], key=lambda space: counts.get(space, 0))

    async def _run(self) -> None:
        await self.encoder.start()
        await self._following.start("" if self.encoder.space is None else await self._best(self.encoder.space))
        await self._ready()
        wanted = self.encoder.space
        assert wanted is not None
        await self.embedder.start()
        former = self._following.space
        if former != wanted:
            if former:
                log.info("cards are read anew by another model", former=former, model=wanted)
                self._former = _encoder_of(former, self._cache_dir)
                await self._former.start()
            await self.embedder.idle()
            await self._following.use(wanted)
            if self._former is not None:
                done, self._former = self._former, None
                await done.stop()
                log.info("all cards are read by the new model")
        await self._drop_others(wanted)

    async def _ready(self) -> None:
        said = None
        while True:
            try:
                await self.encoder.wait_ready()
            except MediatorError as error:
                if str(error) != said:
                    log.warning("no search by meaning", why=str(error))
                said = str(error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _drop_others(self, kept: str) -> None:
        for space in await self._broker.read(_spaces):
            while space != kept and await self._broker.chore(partial(_drop, space)) > 0:
                pass


def _encoder_of(space: str, cache_dir: Path) -> Encoder:
    """Return who reads requests for vectors that are there; if its model has changed since, its space is another."""
    model, _, rest = space.rpartition("@")
    return Encoder(model, cache_dir, rest.rpartition("/")[2])


def _spaces(tx: Transaction, _now: int) -> Sequence[str]:
    return tx.vectors.spaces()


def _drop(space: str, tx: Transaction, _now: int) -> int:
    return tx.vectors.drop(space, DROP)
