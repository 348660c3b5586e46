"""Runs the configured model; after a change the former one answers until the new one has embedded all cards."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.store.base import Transaction
from registry.embedding.embedder import CardEmbedder
from registry.embedding.encoder import Encoder, JointModel, ModelBackend
from registry.embedding.local import LocalModel
from registry.embedding.models import EmbeddingSpace, split_model
from registry.embedding.remote import RemoteModel
from registry.embedding.texts import TEMPLATE
from registry.index.updater import IndexUpdater
from registry.outside import OutsideService
from registry.tables import RegistryTables

T = TypeVar("T")
RETRY_SECONDS = 30.0
STORE_SECONDS = 1.0
"""Pause between two attempts while the store fails."""
PROGRESS_SECONDS = 10.0
"""How often the progress of a new model is logged."""
DROP = 200
"""Rows of a former model's vectors deleted in one transaction."""

log = structlog.get_logger("registry")


class EmbeddingModels:
    """The models of one instance. Used on the event loop."""

    def __init__(
        self,
        broker: Broker,
        updater: IndexUpdater,
        model: str,
        cache_dir: Path,
        *,
        shared: bool,
        server: OutsideService | None = None,
    ) -> None:
        """``cache_dir`` keeps exported models; ``shared``: whether other instances use the database.

        With ``server`` the model is one that it has; without, it runs here.
        """
        self._broker = broker
        self._updater = updater
        self.model = model
        self._cache_dir = cache_dir
        self._server = server
        self.servers: list[RemoteModel] = []
        """The models that a server has."""
        self.encoder = self._make_encoder(model, TEMPLATE, remote=server is not None)
        self.embedder = CardEmbedder(broker, self.encoder, lambda: updater.agents > updater.embedded, shared=shared)
        self._former: Encoder | None = None
        self._done = 0
        """How many cards the configured model had embedded at the last count, while the former one answers."""
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str | None:
        """Why keywords answer requests; None when a model does."""
        if any(reader.ready for reader in self._readers):
            return None
        return self.encoder.problem or "the cards are being embedded by another model"

    @property
    def unembedded(self) -> int:
        """How many agents the configured model has yet to embed; some seconds old while the former one answers."""
        updater = self._updater
        done = updater.embedded if updater.space == str(self.encoder.space) else self._done
        return max(0, updater.agents - done)

    @property
    def _readers(self) -> list[Encoder]:
        """The encoders whose vectors can be compared with those in the index."""
        space = self._updater.space
        return [one for one in (self.encoder, self._former) if one is not None and _matches(one, space)]

    async def start(self) -> None:
        """Start to load the model, embed cards and load the index, without waiting for any of it."""
        self._task = asyncio.create_task(self._run(), name="registry-model")
        self._task.add_done_callback(_log_end)

    async def encode_query(self, texts: list[str], seconds: float) -> tuple[NDArray[np.float32] | None, str]:
        """Return the vectors of a request, (texts, dims), comparable with the index; or None and the reason."""
        for reader in self._readers:
            # An encoder that does not run answers from its cache.
            if (vectors := await reader.query(texts, seconds)) is not None:
                return vectors, ""
        return None, self.problem or "the model did not answer in time"

    async def stop(self) -> None:
        """Stop the models."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.embedder.stop()
        for encoder in (self.encoder, self._former):
            if encoder is not None:
                await encoder.stop()

    async def count_embedded(self) -> int:
        """Return how many agents have vectors of the configured model."""
        space = str(self.encoder.space or "")
        return await self._broker.read(lambda tx, _now: tx.table(RegistryTables).vectors.count(space)) if space else 0

    async def _run(self) -> None:
        await self.encoder.start()
        present = await _retry(self._best_space)
        await self._updater.start(present)
        await self._start_former(present)
        await _retry(self.encoder.wait_ready, RETRY_SECONDS, "no search by meaning")
        wanted = str(self.encoder.space)
        await self.embedder.start()
        if present != wanted:
            if present:
                log.info("embedding all cards with another model", former=present, model=wanted)
                await self._wait_embedded()
            await _retry(partial(self._updater.switch_space, wanted))
            former, self._former = self._former, None
            if former is not None:
                await former.stop()
            log.info("the new model answers requests", model=wanted)
        await _retry(partial(self._drop_others, wanted))

    async def _best_space(self) -> str:
        """Return the space that most agents have vectors in; of equals, the configured model's."""
        counts = await self._broker.read(_count_by_space)
        return max([str(self.encoder.space or ""), *sorted(counts)], key=lambda space: counts.get(space, 0))

    async def _start_former(self, space: str) -> None:
        """Start the model of the stored vectors, if it is another than the configured one."""
        former = _parsed(space)
        if former is None:
            return
        # A model of the same name that has changed since cannot be started in its former state.
        if (former.model, former.remote) == (self.model, self._server is not None):
            return
        if former.remote and self._server is None:
            log.info("previous remote model disabled", former=space)
            return
        self._former = self._make_encoder(former.model, former.template, remote=former.remote)
        await self._former.start()

    def _make_encoder(self, model: str, template: str, *, remote: bool) -> Encoder:
        """Return the encoder of a model, or of several whose names :func:`join_models` joined."""
        shares = split_model(model)
        backends: list[ModelBackend] = [
            self._remote(share.name) if remote else LocalModel(share.name, self._cache_dir) for share in shares
        ]
        return Encoder(backends[0] if len(backends) == 1 else JointModel(model, shares, backends), template)

    def _remote(self, model: str) -> RemoteModel:
        assert self._server is not None
        made = RemoteModel(self._server, model, partial(self._fingerprints, model))
        if all(server.name != model for server in self.servers):
            self.servers.append(made)
        return made

    async def _fingerprints(self, model: str) -> list[str]:
        """Return the fingerprints under which there are vectors of a model on a server."""
        spaces = map(_parsed, await _retry(partial(self._broker.read, _count_by_space)))
        return [
            fingerprint
            for space in spaces
            if space is not None and space.remote
            for share, fingerprint in zip(split_model(space.model), space.fingerprint.split("+"), strict=False)
            if share.name == model
        ]

    async def _wait_embedded(self) -> None:
        while True:
            try:
                async with asyncio.timeout(PROGRESS_SECONDS):
                    await self.embedder.wait_idle()
            except TimeoutError:
                self._done = await _retry(self.count_embedded)
                log.info("cards are being embedded again", done=self._done, agents=self._updater.agents)
            else:
                return

    async def _drop_others(self, kept: str) -> None:
        for space in await self._broker.read(_count_by_space):
            while space != kept and await self._broker.write_background(partial(_drop, space), even_when_full=True) > 0:
                pass


def _matches(encoder: Encoder, space: str) -> bool:
    """Return whether requests that this model encodes can be compared with the vectors of a space."""
    own, other = encoder.space, _parsed(space)
    return own is not None and other is not None and own.is_comparable(other)


def _parsed(space: str) -> EmbeddingSpace | None:
    try:
        return EmbeddingSpace.parse(space)
    except ValueError:
        return None


async def _retry(
    work: Callable[[], Awaitable[T]], pause: float = STORE_SECONDS, warning: str = "store not available for the models"
) -> T:
    """Run ``work``, again and again while the store or the model fails; each new reason is logged once."""
    logged = None
    while True:
        try:
            return await work()
        except MediatorError as error:
            if str(error) != logged:
                log.warning(warning, why=str(error))
            logged = str(error)
            await asyncio.sleep(pause)


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("model task failed", exc_info=error)


def _count_by_space(tx: Transaction, _now: int) -> dict[str, int]:
    vectors = tx.table(RegistryTables).vectors
    return {space: vectors.count(space) for space in vectors.spaces()}


def _drop(space: str, tx: Transaction, _now: int) -> int:
    return tx.table(RegistryTables).vectors.drop(space, DROP)
