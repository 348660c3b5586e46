"""A registry for a trial: a catalog in memory, asked as the service would be, and gone afterwards."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from mediator.agents.records import Agent, Liveness
from mediator.broker import Broker
from mediator.errors import UnavailableError
from mediator.mailboxes.bounds import Bounds
from mediator.store.memory import MemoryStore
from registry.assembly import assembled
from registry.cases import Catalog
from registry.directory import Directory
from registry.evaluation import DEPTH
from registry.following import Following
from registry.index import Question, Wanted
from registry.meanings import Meanings
from registry.meters import Meters
from registry.requests import Discover
from registry.splitting import pieces

TENANT = "trial"
IN_FLIGHT = 64
LOOK_SECONDS = 0.1
ENCODE_SECONDS = 30.0
"""How long a request may wait for its vectors: a trial is not in a hurry."""
_ALL = 1 << 40
"""Bytes an answer may have."""

Told = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """A catalog that can be asked; answers are keys of cards, best first, at most ``DEPTH`` of them."""

    _broker: Broker
    _directory: Directory
    _following: Following
    _meanings: Meanings | None
    _keys: dict[str, str]
    """By mailbox."""

    async def by_text(self, query: str) -> list[str]:
        """Ask as DISCOVER does with ``text``."""
        found = await self._directory.discover(TENANT, Discover(text=query, limit=DEPTH), _ALL)
        return self._named(found.agents)

    async def by_meaning(self, query: str) -> list[str]:
        """Ask as DISCOVER does with ``semantic``; :class:`UnavailableError` where keywords would answer alone."""
        found = await self._directory.discover(TENANT, Discover(semantic=query, limit=DEPTH), _ALL)
        if found.note:
            raise UnavailableError(found.note)
        return self._named(found.agents)

    async def by_vectors(self, query: str) -> list[str]:
        """Ask by vectors alone, which no door offers: it shows what the model itself is good for."""
        assert self._meanings is not None
        texts = pieces(query)
        vectors, problem = await self._meanings.read(texts, ENCODE_SECONDS)
        if vectors is None:
            raise UnavailableError(problem)
        index = await self._following.index(TENANT)
        ranked, _ = index.search(Question([[] for _ in texts], vectors), Wanted(), self._broker.clock())
        numbers = ranked.numbers[:DEPTH].tolist()
        agents = await self._broker.read(lambda tx, _now: tx.agents.pick(numbers))
        return self._named([agents[no] for no in numbers])

    def _named(self, agents: list[Agent]) -> list[str]:
        return [self._keys[agent.address] for agent in agents]


@asynccontextmanager
async def trial(catalog: Catalog, model: str | None, data_dir: Path, told: Told) -> AsyncIterator[Trial]:
    """Register a catalog and wait until it can be asked.

    ``model`` is one of sentence-transformers, None for keywords alone; what is made of it is kept in ``data_dir``, as
    the service does. ``told`` hears how many cards are ``registered`` and ``embedded``. Raises
    :class:`UnavailableError` when the model cannot be had.
    """
    async with AsyncExitStack() as stack:
        broker = Broker(MemoryStore(), Bounds())
        stack.push_async_callback(broker.close)
        meters = Meters(CollectorRegistry())
        made = await stack.enter_async_context(assembled(broker, Liveness(), 0, model, data_dir, meters))
        following, meanings, directory = made.following, made.meanings, made.directory
        if meanings is not None:
            await meanings.encoder.wait_ready()
        keys = await _register(directory, catalog, told)
        if meanings is not None:
            await _embedded(following, meanings, len(keys), told)
        yield Trial(broker, directory, following, meanings, keys)


async def _register(directory: Directory, catalog: Catalog, told: Told) -> dict[str, str]:
    """Return the key of each card by its mailbox."""
    keys: dict[str, str] = {}
    waiting = iter(catalog.cards)

    async def worker() -> None:
        for card in waiting:
            address = (await directory.register(TENANT, card)).agent.address
            keys[address] = catalog.keys[address]
            told("registered", len(keys))

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return keys


async def _embedded(following: Following, meanings: Meanings, count: int, told: Told) -> None:
    while following.embedded < count:
        # Says so when the model is lost on the way.
        await meanings.encoder.wait_ready()
        told("embedded", following.embedded)
        await asyncio.sleep(LOOK_SECONDS)
    told("embedded", count)
