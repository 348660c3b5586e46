"""Which model reads cards and requests; the former one serves until a newly configured one has read all cards."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.store.base import Transaction
from registry.embedder import Embedder
from registry.embedding.encoder import Encoder
from registry.embedding.spaces import Space
from registry.following import Following
from registry.texts import TEMPLATE

T = TypeVar("T")
RETRY_SECONDS = 30.0
STORE_SECONDS = 1.0
"""How long a store that fails is left alone."""
TELL_SECONDS = 10.0
"""How often the log says how many cards a new model has read."""
DROP = 200
"""Rows of a former model's vectors removed at once."""

log = structlog.get_logger("registry")


class Meanings:
    """The models of one instance. Used on the event loop."""

    def __init__(self, broker: Broker, following: Following, model: str, cache_dir: Path, *, shared: bool) -> None:
        """``cache_dir`` keeps files made from models; ``shared``: other instances work on the same database."""
        self._broker = broker
        self._following = following
        self.model = model
        self._cache_dir = cache_dir
        self.encoder = Encoder(model, cache_dir, TEMPLATE)
        self.embedder = Embedder(broker, self.encoder, lambda: following.agents > following.embedded, shared=shared)
        self._former: Encoder | None = None
        self._done = 0
        """How many cards the configured model was seen to have read, while another one serves."""
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str | None:
        """Why requests are answered by keywords; None when they are not."""
        if self._reader is not None:
            return None
        return self.encoder.problem or "the cards are being read by another model"

    @property
    def lacking(self) -> int:
        """How many agents the configured model has yet to read; while another one serves, as of some seconds ago."""
        following = self._following
        done = following.embedded if following.space == str(self.encoder.space) else self._done
        return max(0, following.agents - done)

    @property
    def _reader(self) -> Encoder | None:
        """Who reads requests so that they can be compared with the vectors in the index."""
        space = self._following.space
        return next((one for one in (self.encoder, self._former) if one is not None and _reads(one, space)), None)

    async def start(self) -> None:
        """Begin: the model is loaded, cards are read, and the index follows, all behind this call."""
        self._task = asyncio.create_task(self._run(), name="registry-model")
        self._task.add_done_callback(_tell)

    async def read(self, texts: list[str], seconds: float) -> tuple[NDArray[np.float32] | None, str]:
        """Return the vectors of a request, (texts, dims), to compare with those in the index; or why there are none."""
        reader = self._reader
        if reader is None:
            return None, self.problem or ""
        vectors = await reader.query(texts, seconds)
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
        space = str(self.encoder.space or "")
        return await self._broker.read(lambda tx, _now: tx.vectors.count(space)) if space else 0

    async def _run(self) -> None:
        await self.encoder.start()
        present = await _surely(self._best)
        await self._following.start(present)
        await self._start_former(present)
        await self._ready()
        wanted = str(self.encoder.space)
        await self.embedder.start()
        if present != wanted:
            if present:
                log.info("cards are read anew by another model", former=present, model=wanted)
                await self._all_read()
            await _surely(partial(self._following.use, wanted))
            former, self._former = self._former, None
            if former is not None:
                await former.stop()
            log.info("requests are read by the new model", model=wanted)
        await _surely(partial(self._drop_others, wanted))

    async def _best(self) -> str:
        """Return the space that most agents have vectors in, the configured model's where it is as good."""
        counts = await self._broker.read(
            lambda tx, _now: {space: tx.vectors.count(space) for space in tx.vectors.spaces()}
        )
        return max([str(self.encoder.space or ""), *sorted(counts)], key=lambda space: counts.get(space, 0))

    async def _start_former(self, space: str) -> None:
        """Start the model that can be asked about the vectors that are there, where it is another."""
        former = _parsed(space)
        # The same one, if it has changed since, cannot be started as it was.
        if former is not None and former.model != self.model:
            self._former = Encoder(former.model, self._cache_dir, former.template)
            await self._former.start()

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

    async def _all_read(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TELL_SECONDS):
                    await self.embedder.idle()
            except TimeoutError:
                self._done = await _surely(self.embedded)
                log.info("cards are being read anew", done=self._done, agents=self._following.agents)
            else:
                return

    async def _drop_others(self, kept: str) -> None:
        for space in await self._broker.read(_spaces):
            while space != kept and await self._broker.chore(partial(_drop, space), when_full=True) > 0:
                pass


def _reads(encoder: Encoder, space: str) -> bool:
    """Say whether requests that this model reads can be compared with the vectors of a space."""
    own, other = encoder.space, _parsed(space)
    return encoder.ready and own is not None and other is not None and own.is_comparable(other)


def _parsed(space: str) -> Space | None:
    try:
        return Space.parse(space)
    except ValueError:
        return None


async def _surely(work: Callable[[], Awaitable[T]]) -> T:
    """Do what needs the store, as soon as that can be used."""
    said = None
    while True:
        try:
            return await work()
        except MediatorError as error:
            if str(error) != said:
                log.warning("the models wait for the store", why=str(error))
            said = str(error)
            await asyncio.sleep(STORE_SECONDS)


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("models are not looked after any more", exc_info=error)


def _spaces(tx: Transaction, _now: int) -> Sequence[str]:
    return tx.vectors.spaces()


def _drop(space: str, tx: Transaction, _now: int) -> int:
    return tx.vectors.drop(space, DROP)
