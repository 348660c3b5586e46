"""DISCOVER: turns a request into a ranked list, and the list into pages (G3)."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mediator.agents.records import Agent, Liveness, State
from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.store.base import Transaction
from registry.digest import folded
from registry.following import Following
from registry.index import FOUND, Index, Question, Ranked, Wanted
from registry.meanings import Meanings
from registry.requests import Discover, Found
from registry.sharing import Announcer, Sharing
from registry.snapshots import Result, Snapshot, Snapshots
from registry.splitting import pieces
from registry.words import words

T = TypeVar("T")
ENCODE_SECONDS = 1.0
"""How long a request waits for its vectors; then keywords answer it."""
THREADS = 2
LOOK = 64
"""Agents read at once for a page."""
STEP = 16
"""Agents read until it is asked whether the page is full: cards may be large, and pages many."""
OVERHEAD = 160
"""Bytes an agent takes in an answer beside its card and its report, at most: score, state, commas."""
LISTED, BY_TEXT, BY_MEANING = "list", "text", "semantic"


class _Page(NamedTuple):
    agents: list[Agent]
    states: list[State]
    scores: list[float]
    end: int
    """Where in the list the next page begins."""


class Searching:
    """Searches the indexes. Made and used on the event loop; the searches themselves run on threads."""

    def __init__(
        self,
        broker: Broker,
        liveness: Liveness,
        following: Following,
        meanings: Meanings | None,
        announcer: Announcer | None = None,
    ) -> None:
        """Without ``meanings`` requests are answered by keywords; ``announcer`` reaches instances beside this one."""
        self._broker = broker
        self._liveness = liveness
        self._following = following
        self._meanings = meanings
        self._snapshots = Snapshots()
        self._sharing = None if announcer is None else Sharing(announcer, self._snapshots)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="registry-search")

    async def open(self) -> None:
        """Begin to hear of the results of other instances."""
        if self._sharing is not None:
            await self._sharing.open()

    def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown(wait=True)

    async def discover(self, tenant: str, query: Discover, budget: int) -> Found:
        """See :meth:`registry.directory.Directory.discover`."""
        if query.cursor is not None:
            snapshot, start = self._continued(tenant, query.cursor)
        else:
            snapshot, start = await self._snapshot(tenant, query), (query.page - 1) * query.limit
        page = await self._page(tenant, snapshot.result, start, query.limit, budget)
        result = snapshot.result
        more = page.end < len(result.numbers)
        if more and query.cursor is None and self._sharing is not None:
            await self._sharing.tell(snapshot)
        return Found(
            agents=page.agents,
            scores=page.scores,
            states=page.states,
            total=result.total,
            next=f"{snapshot.id}.{page.end}" if more else None,
            mode=result.mode,
            note=result.note,
        )

    def _continued(self, tenant: str, cursor: str) -> tuple[Snapshot, int]:
        id, _, start = cursor.partition(".")
        snapshot = self._snapshots.get(tenant, id)
        if snapshot is None or not start.isdecimal() or not start.isascii() or len(start) > 10:
            raise BadRequestError("cursor", "not known, or older than a minute; ask again without it")
        return snapshot, int(start)

    async def _snapshot(self, tenant: str, query: Discover) -> Snapshot:
        key = _key(query)
        kept = self._snapshots.asked(tenant, key) if query.page > 1 else None
        return kept or self._snapshots.keep(tenant, key, await self._search(tenant, query))

    async def _search(self, tenant: str, query: Discover) -> Result:
        index = await self._following.index(tenant)
        now = self._broker.clock()
        wanted = Wanted(
            tags=folded(query.tags),
            skills=folded(query.skills),
            states=FOUND if query.states is None else query.states,
            min_score=query.min_score or 0.0,
        )
        if query.semantic is None and query.text is None:
            numbers = await self._run(index.all, wanted, now)
            return Result(numbers, np.empty(0, np.float32), len(numbers), LISTED)
        texts = await self._run(pieces, query.semantic or query.text)
        mode, vectors, note = BY_TEXT, None, ""
        if query.semantic is not None:
            mode = BY_MEANING
            vectors, note = await self._vectors(index, texts)
        ranked, total = await self._run(_found, index, texts, vectors, wanted, now)
        return Result(ranked.numbers, ranked.scores, total, mode, note)

    async def _vectors(self, index: Index, texts: list[str]) -> tuple[NDArray[np.float32] | None, str]:
        """Return the vectors of a request and its parts; with why there are none, where that is so."""
        if self._meanings is None:
            vectors, note = None, "search by meaning is turned off"
        elif len(index) and not index.embedded:
            vectors, note = None, self._meanings.encoder.problem or "the cards have no vectors yet"
        else:
            vectors, note = await self._meanings.read(texts, ENCODE_SECONDS)
        return vectors, f"answered by keywords: {note}" if note else ""

    async def _page(self, tenant: str, result: Result, start: int, limit: int, budget: int) -> _Page:
        """Read a page; who was unregistered since is left out."""
        now = self._broker.clock()
        page = _Page([], [], [], start)
        end = start
        while end < len(result.numbers) and len(page.agents) < limit:
            numbers = result.numbers[end : end + min(LOOK, limit - len(page.agents))].tolist()
            for agent in await self._broker.read(partial(_picked, tenant, numbers, budget)):
                if agent is not None:
                    budget -= _size(agent)
                    if budget < 0 and page.agents:
                        return page._replace(end=end)
                    page.agents.append(agent)
                    page.states.append(self._liveness.state(agent.ttl, agent.seen_at, now))
                    page.scores.append(float(result.scores[end]) if len(result.scores) else 1.0)
                end += 1
        return page._replace(end=end)

    async def _run(self, search: Callable[..., T], *arguments: object) -> T:
        """Search on a thread; requests are read there too, since some take many milliseconds."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(search, *arguments))


def _found(
    index: Index, texts: list[str], vectors: NDArray[np.float32] | None, wanted: Wanted, now: int
) -> tuple[Ranked, int]:
    return index.search(Question([words(text) for text in texts], vectors), wanted, now)


def _picked(tenant: str, numbers: list[int], budget: int, tx: Transaction, _now: int) -> list[Agent | None]:
    """Return the agents that are there, in order, until they are more than ``budget`` bytes.

    Only the tenant's own: the numbers may have come from elsewhere, over NATS.
    """
    picked: list[Agent | None] = []
    for start in range(0, len(numbers), STEP):
        some = numbers[start : start + STEP]
        there = {no: agent for no, agent in tx.agents.pick(some).items() if agent.tenant == tenant}
        picked += map(there.get, some)
        budget -= sum(map(_size, there.values()))
        if budget < 0:
            break
    return picked


def _size(agent: Agent) -> int:
    return len(agent.card) + len(agent.status or b"") + OVERHEAD


def _key(query: Discover) -> bytes:
    """Name a question, whatever page of its answer is asked for."""
    words = query.semantic or query.text
    states = None if query.states is None else sorted(query.states)
    asked = (words, query.semantic is None, query.tags, query.skills, states, query.min_score)
    return blake2b(repr(asked).encode(), digest_size=16).digest()
