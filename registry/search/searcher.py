"""Answers DISCOVER: ranks agents for a request, cuts the ranking into pages, and says why agents stand there (G3)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mediator.announcer import Announcer
from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.mailboxes.address import is_send_only
from mediator.store.base import Transaction
from registry.cards.card import read_shown
from registry.embedding.switching import EmbeddingModels
from registry.embedding.texts import MAX_TEXT, card_texts
from registry.index.analysis import analyze, search_texts, spell
from registry.index.keywords import IndexDocument
from registry.index.ranking import KEYWORDS, MEMORY, VECTORS
from registry.index.tenant import DEFAULT_STATES, IndexMatch, IndexQuery, SearchFilter, TenantIndex, TopAgents
from registry.index.updater import IndexUpdater
from registry.metrics import RegistryMetrics
from registry.records import NO_MEMORY, Agent, Liveness, MemoryPolicy
from registry.requests import (
    BY_KEYWORDS,
    DiscoverRequest,
    DiscoverResult,
    Explanation,
    KeywordMatch,
    RerankMatch,
    VectorMatch,
)
from registry.rules import shown_to_others
from registry.search.feedback import RecentSearches
from registry.search.reranking import Reranker
from registry.search.snapshots import ExplainedRequest, SearchResult, SearchSnapshot, SnapshotCache
from registry.tables import RegistryTables

T = TypeVar("T")
ENCODE_SECONDS = 1.0
"""How long a request waits for its vectors before keywords answer it."""
THREADS = 2
SHORT_REQUEST = 512
"""Characters up to which a request is split on the event loop: handing it to a thread takes longer."""
READ_AHEAD = 64
"""Agents read in one transaction for a page."""
STEP = 16
"""Agents read before the byte budget is checked, since cards may be large."""
OVERHEAD = 160
"""Bytes of an agent in an answer beside its card and report, at most: score, state, commas."""
RERANKED_BYTES = 4 * 1024 * 1024
"""Bytes of the cards that are read to be re-ranked."""
EXPLAINED = 4096
"""Bytes of its explanation, at most."""
LISTED, BY_TEXT, BY_MEANING = "list", "text", "semantic"


class Searcher:
    """Searches the indexes. Created and used on the event loop; the searches run on threads."""

    def __init__(
        self,
        broker: Broker,
        liveness: Liveness,
        updater: IndexUpdater,
        models: EmbeddingModels | None,
        metrics: RegistryMetrics,
        announcer: Announcer | None = None,
        policy: MemoryPolicy = NO_MEMORY,
        recent: RecentSearches | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        """Without ``models`` keywords answer every request; ``announcer`` reaches the other instances."""
        self._policy = policy
        self.recent = recent or RecentSearches()
        """The searches that callers can say a word on."""
        self._reranker = reranker
        self._broker = broker
        self._liveness = liveness
        self._updater = updater
        self._models = models
        self._metrics = metrics
        self._snapshots = SnapshotCache(announcer)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="registry-search")

    async def open(self) -> None:
        """Start to receive the snapshots of other instances, and what was asked there."""
        await self.recent.open()
        await self._snapshots.open()

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=True)

    async def discover(self, tenant: str, query: DiscoverRequest, budget: int) -> DiscoverResult:
        """Find agents (G3): a page of at most ``budget`` bytes of cards and reports, but of one agent at least.

        Raises :class:`BadRequestError` for an unknown cursor, :class:`BusyError` while the index is being loaded.
        """
        if query.cursor is not None:
            snapshot, start = self._resume(tenant, query.cursor)
            if query.explain and snapshot.result.explained is None and snapshot.result.mode != LISTED:
                raise BadRequestError("explain", "the first page was asked for without it; ask again without cursor")
        else:
            key, start = _key(query), (query.page - 1) * query.limit
            kept = self._snapshots.find(tenant, key) if query.page > 1 else None
            snapshot = kept or self._snapshots.save(tenant, key, await self._search(tenant, query))
        result = snapshot.result
        overhead = OVERHEAD + EXPLAINED if query.explain else OVERHEAD
        page, end = await self._page(tenant, result, start, query.limit, budget, overhead)
        more = end < len(result.numbers)
        if more and query.cursor is None:
            await self._snapshots.publish(snapshot)
        states = []
        if query.with_state:
            now = self._broker.clock()
            states = [self._liveness.state(agent.ttl, agent.seen_at, now) for _, agent in page]
        found = DiscoverResult(
            agents=[agent for _, agent in page],
            scores=[float(result.scores[place]) if len(result.scores) else 1.0 for place, _ in page],
            states=states,
            total=result.total,
            next=f"{snapshot.id}.{end}" if more else None,
            mode=result.mode,
            note=result.note,
            explanations=await self._explain(tenant, result, page) if query.explain else None,
            query_id=result.query_id,
        )
        self._metrics.count_search(found)
        return found

    def _resume(self, tenant: str, cursor: str) -> tuple[SearchSnapshot, int]:
        id, _, start = cursor.partition(".")
        snapshot = self._snapshots.get(tenant, id)
        if snapshot is None or not start.isdecimal() or not start.isascii() or len(start) > 10:
            raise BadRequestError("cursor", "not known, or older than a minute; ask again without it")
        return snapshot, int(start)

    async def _search(self, tenant: str, query: DiscoverRequest) -> SearchResult:
        index = await self._updater.index(tenant)
        now = self._broker.clock()
        filter_ = SearchFilter(
            tags=query.tags,
            skills=query.skills,
            states=DEFAULT_STATES if query.states is None else query.states,
            min_score=query.min_score or 0.0,
        )
        if query.semantic is None and query.text is None:
            numbers = await self._run(index.list_agents, filter_, now)
            return SearchResult(numbers, np.empty(0, np.float32), len(numbers), LISTED)
        request = query.semantic or query.text or ""
        short = len(request) <= SHORT_REQUEST
        texts = search_texts(request) if short else await self._run(search_texts, request)
        mode, vectors, note = BY_TEXT, None, ""
        if query.semantic is not None:
            mode = BY_MEANING
            vectors, note = await self._vectors(index, texts)
        remember = vectors is not None and self._policy.applies_to(tenant)
        space = self._updater.space
        # Analyzed on the thread too, since some requests take many milliseconds.
        ranked, total = await self._run(
            lambda: index.search(IndexQuery([analyze(text) for text in texts], vectors, remember), filter_, now)
        )
        if self._reranker is not None and mode == BY_MEANING and len(ranked.agent_ids) > 1:
            ranked, late = await self._rerank(self._reranker, tenant, texts[0], ranked)
            note = "; ".join(filter(None, (note, late)))
        query_id = ""
        if remember and vectors is not None:
            query_id = (await self.recent.add(tenant, texts[0], space, vectors[0], ranked.agent_ids)).id
        explained = ExplainedRequest(request, ranked.shares) if query.explain else None
        return SearchResult(ranked.agent_ids, ranked.scores, total, mode, note, explained, query_id)

    async def _rerank(self, reranker: Reranker, tenant: str, request: str, ranked: TopAgents) -> tuple[TopAgents, str]:
        """Return the first agents in the order of their relevance, with the scores of their places; or a note."""
        problem = reranker.problem
        if problem is None:
            numbers = ranked.agent_ids[: reranker.depth].tolist()
            agents = await self._broker.read(partial(_pick, tenant, numbers, RERANKED_BYTES))
            texts = await self._run(_documents, agents)
            relevance, problem = await reranker.rate(request, texts)
            if relevance is not None:
                return _reordered(ranked, relevance), ""
        return ranked, f"not re-ranked: {problem}"

    async def _explain(self, tenant: str, result: SearchResult, page: Sequence[tuple[int, Agent]]) -> list[Explanation]:
        if result.explained is None:
            return [Explanation()] * len(page)
        index = await self._updater.index(tenant)
        texts = await self._run(search_texts, result.explained.text)
        # The encoder remembers the texts of a moment ago.
        vectors = (await self._vectors(index, texts))[0] if VECTORS in result.explained.shares else None
        return await self._run(explain, index, result.explained, texts, vectors, page)

    async def _vectors(self, index: TenantIndex, texts: list[str]) -> tuple[NDArray[np.float32] | None, str]:
        """Return the vectors of a request and its parts, or None and a note why there are none."""
        if self._models is None:
            vectors, note = None, "search by meaning is turned off"
        elif len(index) and not index.embedded:
            vectors, note = None, self._models.encoder.problem or "the cards have no vectors yet"
        else:
            vectors, note = await self._models.encode_query(texts, ENCODE_SECONDS)
        return vectors, f"{BY_KEYWORDS}{note}" if note else ""

    async def _page(
        self, tenant: str, result: SearchResult, start: int, limit: int, budget: int, overhead: int
    ) -> tuple[list[tuple[int, Agent]], int]:
        """Read a page: agents with their places in the ranking, and the place where the next page begins.

        Agents that were unregistered meanwhile are left out. Each takes ``overhead`` bytes besides its card and report.
        """
        page: list[tuple[int, Agent]] = []
        end = start
        while end < len(result.numbers) and len(page) < limit:
            numbers = result.numbers[end : end + min(READ_AHEAD, limit - len(page))].tolist()
            for agent in await self._broker.read(partial(_pick, tenant, numbers, budget)):
                if agent is not None:
                    budget -= len(agent.card) + len(agent.status or b"") + overhead
                    if budget < 0 and page:
                        return page, end
                    page.append((end, agent))
                end += 1
        return page, end

    def _run(self, search: Callable[..., T], *arguments: object) -> Awaitable[T]:
        """Run on a thread of the searcher's own."""
        return asyncio.get_running_loop().run_in_executor(self._threads, partial(search, *arguments))


def _pick(tenant: str, numbers: list[int], budget: int, tx: Transaction, now: int) -> list[Agent | None]:
    """Return the agents with these numbers in order, None for removed ones, until they exceed ``budget`` bytes.

    They are as others may see them (G4).
    Agents of other tenants count as removed: the numbers may come from another instance, over NATS.
    """
    picked: list[Agent | None] = []
    tables = tx.table(RegistryTables)
    for start in range(0, len(numbers), STEP):
        some = numbers[start : start + STEP]
        picked_here = [agent for agent in tables.agents.pick(some).values() if agent.tenant == tenant]
        there = {agent.id: agent for agent in shown_to_others(tables, tenant, picked_here, now)}
        picked += map(there.get, some)
        budget -= sum(len(agent.card) + len(agent.status or b"") for agent in there.values())
        if budget < 0:
            break
    return picked


def _documents(agents: Sequence[Agent | None]) -> list[str]:
    """Return what is said of each agent to be compared with a request: "" of one that was removed."""
    cards = [None if agent is None else read_shown(agent.card) for agent in agents]
    return ["" if card is None else "\n".join(card_texts(card))[:MAX_TEXT] for card in cards]


def _reordered(ranked: TopAgents, relevance: NDArray[np.float32]) -> TopAgents:
    """Order the first agents by relevance. A place keeps its score, so that scores still descend (G3)."""
    order = np.arange(len(ranked.agent_ids))
    order[: len(relevance)] = np.argsort(-relevance, kind="stable")
    rated = np.full(len(order), np.nan, np.float32)
    rated[: len(relevance)] = relevance
    shares = {name: share[order] for name, share in ranked.shares.items()}
    shares[RERANKED] = ranked.scores - ranked.scores[order]
    shares[RELEVANCE], shares[FIRST_PLACE] = rated[order], (order + 1).astype(np.float32)
    return ranked._replace(agent_ids=ranked.agent_ids[order], shares=shares)


def _key(query: DiscoverRequest) -> bytes:
    """Return a hash of a request, the same for all pages of its answer."""
    words = query.semantic or query.text
    states = None if query.states is None else sorted(query.states)
    fields = (words, query.semantic is None, query.tags, query.skills, states, query.min_score, query.explain)
    return blake2b(repr(fields).encode(), digest_size=16).digest()


RERANKED, RELEVANCE, FIRST_PLACE = "reranked", "relevance", "place"
"""Names of what re-ranking adds to the shares; relevance is NaN where it changed nothing."""
MAX_WORDS = 10
"""Words of a request that are named for one agent."""
_NOTHING = IndexMatch({}, np.empty(0, np.float32))


def explain(
    index: TenantIndex,
    request: ExplainedRequest,
    texts: Sequence[str],
    vectors: NDArray[np.float32] | None,
    page: Sequence[tuple[int, Agent]],
) -> list[Explanation]:
    """Return why each agent of a page, which stands at a place of the ranking, is found there.

    ``texts`` are the request and its parts, ``vectors`` theirs. The agents are as others see them, and nothing is said
    of a card but what it shows (G4).
    """
    matches = index.match(IndexQuery([analyze(text) for text in texts], vectors), [agent.id for _, agent in page])
    words = spell(request.text)
    explanations = []
    for place, agent in page:
        shares = {name: float(share[place]) for name, share in request.shares.items()}
        match = matches.get(agent.id, _NOTHING)
        keywords = KeywordMatch(shares[KEYWORDS], _words(words, match, agent)) if shares[KEYWORDS] else None
        by_meaning = _vectors(shares[VECTORS], match.cosines, agent) if shares.get(VECTORS) else None
        memory = shares.get(MEMORY) or None
        explanations.append(Explanation(keywords, by_meaning, memory, _reranked(shares)))
    return explanations


def _reranked(shares: dict[str, float]) -> RerankMatch | None:
    if not np.isfinite(shares.get(RELEVANCE, np.nan)):
        return None
    return RerankMatch(shares[RERANKED], shares[RELEVANCE], int(shares[FIRST_PLACE]))


def _words(words: dict[str, str], match: IndexMatch, agent: Agent) -> tuple[str, ...]:
    """Return the words of a request that a card has, as far as it shows them."""
    matched = match.terms
    # A card whose text names its mailbox is found by the address itself, which others are not to learn (G4).
    if is_send_only(agent.address) and agent.card.count(agent.address.encode()) > 1:
        card = read_shown(agent.card)
        shown = {} if card is None else IndexDocument.of(card).terms
        matched = {word: term for word, term in matched.items() if term in shown}
    return tuple(words[word] for word in matched if word in words)[:MAX_WORDS]


def _vectors(score: float, cosines: NDArray[np.float32], agent: Agent) -> VectorMatch:
    if not len(cosines):
        return VectorMatch(score)
    whole, skills = float(cosines[0]), cosines[1:]
    nearest = int(skills.argmax()) if len(skills) else 0
    card = read_shown(agent.card) if len(skills) else None
    named = () if card is None else card.skills
    # Another card may have been registered since the page was read.
    if nearest >= len(named):
        return VectorMatch(score, whole)
    return VectorMatch(score, whole, named[nearest], float(skills[nearest]))
