"""Measures search quality on an operator's own cards and requests, in a temporary registry."""

import asyncio
import math
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.errors import BadRequestError, UnavailableError
from mediator.mailboxes.bounds import Bounds
from mediator.store.sqlite import SqliteStore
from registry.cards.card import mailbox_address, read_card
from registry.cards.sources import AddressAssigner, CardSource
from registry.directory import Directory
from registry.embedding.switching import EmbeddingModels
from registry.index.analysis import analyze, search_texts
from registry.index.memory import RememberedRequest
from registry.index.tenant import IndexQuery, SearchFilter, TenantIndex
from registry.index.updater import IndexUpdater
from registry.metrics import RegistryMetrics
from registry.records import USEFUL, Agent, Liveness, Vote
from registry.requests import BY_KEYWORDS, DiscoverRequest
from registry.search.searcher import Searcher
from registry.service import MODELS, RegistryServices, outside_services, run_registry
from registry.settings import RegistrySettings
from registry.tables import RegistryTables

MAX_LINE = 1024 * 1024
"""Bytes of one request with its relevant cards."""
_PREFIX = "card"
"""Prefix of the addresses of cards without a mailbox."""


@dataclass(frozen=True, slots=True)
class CardCatalog:
    """Cards with a mailbox each; the *key* of a card is its ``id`` or, without one, its mailbox."""

    cards: Sequence[bytes]
    keys: Mapping[str, str]
    """The key of each card, by its id and by its mailbox."""


@dataclass(frozen=True, slots=True)
class EvaluationCase:
    """A request, and the keys of the relevant cards."""

    qid: str
    query: str
    relevant: frozenset[str]


def read_catalog(pieces: Iterable[CardSource]) -> CardCatalog:
    """Read cards, and assign an address to those without a mailbox.

    Raises :class:`BadRequestError` naming file and line of an invalid or duplicate card.
    """
    addresses = AddressAssigner(_PREFIX)
    cards: list[bytes] = []
    keys: dict[str, str] = {}
    for piece in pieces:
        if piece.problem or piece.url:
            raise BadRequestError(piece.where, piece.problem or "expected a card")
        try:
            card = addresses.assign(piece.data)
            address = read_card(card).address
        except BadRequestError as error:
            raise BadRequestError(piece.where, str(error)) from None
        key = orjson.loads(card).get("id")
        key = key if isinstance(key, str) and key else address
        for name in {key, address}:
            if name in keys:
                raise BadRequestError(piece.where, f'"{name[:80]}" is the id or the mailbox of another card')
            keys[name] = key
        cards.append(card)
    return CardCatalog(cards, keys)


def read_cases(path: Path, catalog: CardCatalog) -> Iterator[EvaluationCase]:
    """Read requests, JSON lines of ``{"qid", "query", "relevant": [id or mailbox, …]}``.

    Raises :class:`BadRequestError` naming file and line of an invalid request, or of one with a card that is not in the
    catalog.
    """
    seen: set[str] = set()
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if not line.strip():
                continue
            try:
                case = _case(line, catalog.keys)
                if case.qid in seen:
                    raise BadRequestError("qid", f'"{case.qid[:80]}" was there before')
            except BadRequestError as error:
                raise BadRequestError(f"{path}:{number}", str(error)) from None
            seen.add(case.qid)
            yield case


def _case(line: bytes, keys: Mapping[str, str]) -> EvaluationCase:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise BadRequestError("request", "expected a JSON object")
    relevant = fields.get("relevant")
    if not isinstance(relevant, list) or not relevant:
        raise BadRequestError("relevant", "expected a list of ids or mailboxes of cards, at least one")
    return EvaluationCase(
        _text(fields, "qid"),
        _text(fields, "query"),
        frozenset(_key(name, keys) for name in relevant),
    )


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadRequestError(name, "expected a text")
    return value


def _key(name: Any, keys: Mapping[str, str]) -> str:
    if isinstance(name, str):
        if name in keys:
            return keys[name]
        try:
            return keys[mailbox_address(name)]
        except (BadRequestError, KeyError):
            pass
    raise BadRequestError("relevant", f"no card of the catalog is called {str(name)[:80]!r}")


# Measures: nDCG@10, Recall@1, 5 and 10 and hit@1, each with a confidence interval.


MEASURES = ("nDCG@10", "Recall@1", "Recall@5", "Recall@10", "hit@1")
DEPTH = 10
"""Ranks of an answer that count."""
SAMPLES = 1000
_SEED = 0
_GAINS = tuple(1 / math.log2(place + 2) for place in range(DEPTH))


class ConfidenceInterval(NamedTuple):
    """A mean with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def rate(relevant: Collection[str], ranked: Sequence[str]) -> tuple[float, ...]:
    """Return the :data:`MEASURES` of one ranking; a duplicate counts at its first rank."""
    wanted = set(relevant)
    right = [key in wanted for key in list(dict.fromkeys(ranked))[:DEPTH]]
    gained = sum(gain for gain, hit in zip(_GAINS, right, strict=False) if hit)
    recalls = (sum(right[:depth]) / len(wanted) for depth in (1, 5, 10))
    return (gained / sum(_GAINS[: len(wanted)]), *recalls, float(any(right[:1])))


def rate_all(cases: Sequence[EvaluationCase], run: Mapping[str, Sequence[str]]) -> NDArray[np.float64]:
    """Return a row of :data:`MEASURES` for each case; zeros if the run has no answer."""
    return np.array([rate(case.relevant, run.get(case.qid, ())) for case in cases])


def perfect_order(cases: Sequence[EvaluationCase], run: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the first ``DEPTH`` of each answer with the relevant ones first: what a perfect re-ranking would make."""
    return {case.qid: sorted(run.get(case.qid, ())[:DEPTH], key=lambda key: key not in case.relevant) for case in cases}


def intervals(rows: NDArray[np.float64]) -> list[ConfidenceInterval]:
    """Return the mean and bootstrap interval of each column, always the same for the same rows.

    For the difference of two runs' rows this is a paired bootstrap: an interval without 0 is a significant difference.
    """
    random = np.random.default_rng(_SEED)
    means = np.array([rows[random.integers(len(rows), size=len(rows))].mean(axis=0) for _ in range(SAMPLES)])
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    return [ConfidenceInterval(*map(float, column)) for column in zip(rows.mean(axis=0), low, high, strict=True)]


# The memory of use: each request is searched with all others remembered (G5).


class Remembered(NamedTuple):
    """What is found with the memory of use."""

    ranked: dict[str, list[int]]
    """The first agents, by qid."""
    cpu_seconds: float
    """How much longer all these searches took than without the memory."""


def rank_leaving_one_out(
    index: TenantIndex,
    cases: Sequence[EvaluationCase],
    vectors: Sequence[NDArray[np.float32]],
    numbers: Mapping[str, int],
) -> Remembered:
    """Return what each case finds when all others were served by their relevant cards.

    ``vectors`` are those of each case's texts, ``numbers`` the agents' by the keys of their cards. Each case counts as
    a voter of its own, as for a tenant that is one party (G6). Leaves the index without what it remembered.
    """
    remembered = [
        RememberedRequest(
            at,
            rows[:1].astype(np.float16),
            [Vote(at, numbers[key], at, USEFUL, 0) for key in sorted(case.relevant)],
        )
        for at, (case, rows) in enumerate(zip(cases, vectors, strict=True))
    ]
    index.remember(remembered)
    ranked, cpu = {}, 0.0
    for request, case, rows in zip(remembered, cases, vectors, strict=True):
        index.remember([], [request.id])
        words = [analyze(text) for text in search_texts(case.query)]
        began = time.thread_time()
        found, _ = index.search(IndexQuery(words, rows, remember=True), SearchFilter(), 0)
        searched = time.thread_time()
        index.search(IndexQuery(words, rows), SearchFilter(), 0)
        cpu += 2 * searched - began - time.thread_time()
        ranked[case.qid] = found.agent_ids[:DEPTH].tolist()
        index.remember([request])
    index.remember([], [request.id for request in remembered])
    return Remembered(ranked, cpu)


# A temporary registry with a catalog in memory, to search it as the service would.


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
        found = await self._registry.directory.searcher.discover(TENANT, DiscoverRequest(text=query, limit=DEPTH), _ALL)
        return self._keys_of(found.agents)

    async def by_meaning(self, query: str) -> list[str]:
        """Search as DISCOVER does with ``semantic``; :class:`UnavailableError` if keywords alone would answer."""
        # The encoder remembers them: the service would not wait as long for a slow model.
        await self._encode(query)
        found = await self._registry.directory.searcher.discover(
            TENANT, DiscoverRequest(semantic=query, limit=DEPTH), _ALL
        )
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
        numbers = ranked.agent_ids[:DEPTH].tolist()
        agents = await self._broker.read(lambda tx, _now: tx.table(RegistryTables).agents.pick(numbers))
        return self._keys_of([agents[agent_id] for agent_id in numbers])

    async def with_memory(self, cases: Sequence[EvaluationCase]) -> tuple[dict[str, list[str]], float]:
        """Search by meaning for each case while all others are remembered as served.

        Returns the answers by qid, and the CPU seconds that the memory added to all searches.
        """
        vectors = [await self._encode(case.query) for case in cases]
        index = await self._registry.updater.index(TENANT)
        stored = await self._broker.read(
            lambda tx, _now: tx.table(RegistryTables).agents.pick(index.list_agents(SearchFilter(), 0).tolist())
        )
        numbers = {self._keys[agent.address]: agent_id for agent_id, agent in stored.items()}
        found = await asyncio.to_thread(rank_leaving_one_out, index, cases, vectors, numbers)
        answers = {
            qid: self._keys_of([stored[agent_id] for agent_id in ranked]) for qid, ranked in found.ranked.items()
        }
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
