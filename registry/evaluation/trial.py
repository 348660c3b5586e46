"""Runs a temporary registry with a catalog in memory, to search it as the service would."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.errors import UnavailableError
from mediator.mailboxes.bounds import Bounds
from mediator.store.sqlite import SqliteStore
from registry.agents.records import Agent, Liveness
from registry.directory import Directory
from registry.embedding.switching import EmbeddingModels
from registry.evaluation.cases import CardCatalog, EvaluationCase
from registry.evaluation.measures import DEPTH
from registry.evaluation.memory import rank_leaving_one_out
from registry.index.tenant import IndexQuery, SearchFilter
from registry.index.updater import IndexUpdater
from registry.metrics import RegistryMetrics
from registry.requests import BY_KEYWORDS, DiscoverRequest
from registry.search.searcher import Searcher
from registry.search.splitting import search_texts
from registry.service import MODELS, RegistryServices, outside_services, run_registry
from registry.settings import RegistrySettings
from registry.tables import RegistryTables

TENANT = "trial"
IN_FLIGHT = 64
LOOK_SECONDS = 0.1
ENCODE_SECONDS = 30.0
"""How long a request may wait for its vectors; much longer than in the service."""
_ALL = 1 << 40
"""Byte budget of an answer: no limit."""

Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """A catalog to search; answers are at most ``DEPTH`` keys of cards, best first."""

    _broker: Broker
    _registry: RegistryServices
    _keys: dict[str, str]
    """By mailbox."""
    _reranking: Searcher | None
    """Beside the registry's, which asks no server to re-rank."""
    not_reranked: Counter[str] = field(default_factory=Counter)
    """Why requests of :meth:`by_reranking` kept their first order, and how many."""

    @property
    def encoder_pids(self) -> list[int]:
        """The processes that hold models."""
        return [] if self._registry.models is None else self._registry.models.encoder.pids

    async def by_text(self, query: str) -> list[str]:
        """Search as DISCOVER does with ``text``."""
        found = await self._registry.directory.discover(TENANT, DiscoverRequest(text=query, limit=DEPTH), _ALL)
        return self._keys_of(found.agents)

    async def by_meaning(self, query: str) -> list[str]:
        """Search as DISCOVER does with ``semantic``; :class:`UnavailableError` if keywords alone would answer."""
        # The encoder remembers them: the service would not wait as long for a slow model.
        await self._encode(query)
        found = await self._registry.directory.discover(TENANT, DiscoverRequest(semantic=query, limit=DEPTH), _ALL)
        if found.note:
            raise UnavailableError(found.note)
        return self._keys_of(found.agents)

    async def by_reranking(self, query: str) -> list[str]:
        """Search as DISCOVER does with ``semantic`` where ``registry.rerank_url`` is set, which it must be."""
        assert self._reranking is not None
        await self._encode(query)
        found = await self._reranking.discover(TENANT, DiscoverRequest(semantic=query, limit=DEPTH), _ALL)
        if found.note.startswith(BY_KEYWORDS):
            raise UnavailableError(found.note)
        if found.note:
            self.not_reranked[found.note] += 1
        return self._keys_of(found.agents)

    async def by_vectors(self, query: str) -> list[str]:
        """Search by vectors alone, which no door offers: it measures the model itself."""
        vectors = await self._encode(query)
        index = await self._registry.updater.index(TENANT)
        ranked, _ = index.search(IndexQuery([[] for _ in vectors], vectors), SearchFilter(), self._broker.clock())
        numbers = ranked.numbers[:DEPTH].tolist()
        agents = await self._broker.read(lambda tx, _now: tx.table(RegistryTables).agents.pick(numbers))
        return self._keys_of([agents[no] for no in numbers])

    async def with_memory(self, cases: Sequence[EvaluationCase]) -> tuple[dict[str, list[str]], float]:
        """Search by meaning for each case while all others are remembered as served.

        Returns the answers by qid, and the CPU seconds that the memory added to all searches.
        """
        vectors = [await self._encode(case.query) for case in cases]
        index = await self._registry.updater.index(TENANT)
        stored = await self._broker.read(
            lambda tx, _now: tx.table(RegistryTables).agents.pick(index.list_agents(SearchFilter(), 0).tolist())
        )
        numbers = {self._keys[agent.address]: no for no, agent in stored.items()}
        found = await asyncio.to_thread(rank_leaving_one_out, index, cases, vectors, numbers)
        answers = {qid: self._keys_of([stored[no] for no in ranked]) for qid, ranked in found.ranked.items()}
        return answers, found.cpu_seconds

    async def _encode(self, query: str) -> NDArray[np.float32]:
        models = self._registry.models
        assert models is not None
        vectors, problem = await models.encode_query(search_texts(query), ENCODE_SECONDS)
        if vectors is None:
            raise UnavailableError(problem)
        return vectors

    def _keys_of(self, agents: list[Agent]) -> list[str]:
        return [self._keys[agent.address] for agent in agents]


@asynccontextmanager
async def run_trial(
    catalog: CardCatalog, chosen: RegistrySettings | None, data_dir: Path, progress: Progress
) -> AsyncIterator[Trial]:
    """Register a catalog and wait until it can be searched.

    ``chosen`` says which models, and which server has them; None is for keywords alone. Exports are kept in
    ``data_dir``, as in the service. ``progress`` is called with how many cards are ``registered`` and ``embedded``.
    Raises :class:`UnavailableError` when the model, or the server that re-ranks, is not available.
    """
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="mediator-trial-"))
        store = stack.enter_context(closing(SqliteStore(Path(folder) / "mediator.db")))
        broker = Broker(store, Bounds())
        stack.push_async_callback(broker.close)
        meters = RegistryMetrics(CollectorRegistry())
        outside = await stack.enter_async_context(outside_services(chosen or RegistrySettings(semantic=False), meters))
        if outside.reranker is not None:
            await outside.reranker.start()
            stack.push_async_callback(outside.reranker.stop)
            await outside.reranker.tried.wait()
            if outside.reranker.problem is not None:
                raise UnavailableError(outside.reranker.detail)
        model = None if chosen is None else chosen.embedding_model
        models_dir = data_dir / MODELS
        running = run_registry(broker, Liveness(), 0, model, models_dir, meters, embeddings=outside.embeddings)
        registry = await stack.enter_async_context(running)
        if registry.models is not None:
            await registry.models.encoder.wait_ready()
        keys = await _register(registry.directory, catalog, progress)
        if registry.models is not None:
            await _embedded(registry.updater, registry.models, len(keys), progress)
        reranking = None
        if outside.reranker is not None:
            reranking = Searcher(
                broker, Liveness(), registry.updater, registry.models, meters, reranker=outside.reranker
            )
            stack.callback(reranking.close)
        yield Trial(broker, registry, keys, reranking)


async def _register(directory: Directory, catalog: CardCatalog, progress: Progress) -> dict[str, str]:
    """Return the key of each card by its mailbox."""
    keys: dict[str, str] = {}
    waiting = iter(catalog.cards)

    async def worker() -> None:
        for card in waiting:
            address = (await directory.register(TENANT, card)).agent.address
            keys[address] = catalog.keys[address]
            progress("registered", len(keys))

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return keys


async def _embedded(updater: IndexUpdater, models: EmbeddingModels, count: int, progress: Progress) -> None:
    while updater.embedded < count:
        # Raises if the model fails meanwhile.
        await models.encoder.wait_ready()
        progress("embedded", updater.embedded)
        await asyncio.sleep(LOOK_SECONDS)
    progress("embedded", count)
