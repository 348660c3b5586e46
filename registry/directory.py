"""The directory: what every door of the registry asks; it changes the store and searches the index."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mediator.agents import registering
from mediator.agents.records import Agent, Liveness, Registration, State
from mediator.broker import Broker
from mediator.errors import BusyError, NoSuchAgentError
from registry.cards import MAX_CARD, Card, read_card
from registry.digest import Digest
from registry.following import Following
from registry.meanings import Meanings
from registry.meters import Meters
from registry.requests import Discover, Found, Registered, Who
from registry.searching import Searching

T = TypeVar("T")
SMALL_CARD = 4096
"""Bytes up to which a card is read where we stand: handing it to a thread takes longer."""
MAX_READING = 64 * 1024 * 1024
"""Bytes of cards that wait to be read on that thread; above it they are refused as busy."""


class Directory:
    """Registers, removes and finds agents. Made and used on the event loop."""

    def __init__(
        self,
        broker: Broker,
        liveness: Liveness,
        max_agents: int,
        following: Following,
        searching: Searching,
        meanings: Meanings | None,
        meters: Meters,
    ) -> None:
        """``max_agents`` a tenant, 0: no bound; without ``meanings`` cards get no vectors."""
        self._broker = broker
        self._liveness = liveness
        self._max_agents = max_agents
        self._following = following
        self._searching = searching
        self._meanings = meanings
        self._meters = meters
        # One thread, and our own: cards that take long would keep each other, and whoever else needs one, waiting.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="registry-cards")
        self._reading = 0

    def close(self) -> None:
        """Let go of the thread."""
        self._reader.shutdown(wait=True)

    async def register(self, tenant: str, data: bytes) -> Registered:
        """Keep a card under its mailbox, in place of the former one (G1); found from now on, by this instance at once.

        Raises :class:`BadRequestError` for what is no card, :class:`QuotaExceededError`, :class:`BusyError`.
        """
        large = SMALL_CARD < len(data) <= MAX_CARD
        card, digest = await self._apart(len(data), lambda: _read(data)) if large else _read(data)
        new = _registration(tenant, data, card, digest)
        agent, created = await self._broker.write(
            lambda tx, now: registering.register(tx, self._liveness, self._max_agents, new, now)
        )
        # The same card once more, as a sign of life, has its vectors or is waited for already.
        if self._meanings is not None and agent.card_revision == agent.revision:
            self._meanings.embedder.call(tenant, agent.no)
        await self._following.reach(agent.revision)
        return Registered(agent, card, created)

    async def take(
        self, tenant: str, space: str, cards: Sequence[bytes], packed: Callable[[int, Card], bytes]
    ) -> registering.Taken:
        """Keep many cards with the vectors that a model made of them elsewhere, all or none (G1).

        ``packed`` gives the vectors of the card at a place, in the form of :mod:`registry.packing`. Cards that are
        there stay as they are. Behind all requests, since they come by thousands. Errors as of :meth:`register`.
        """

        def read() -> list[registering.Read]:
            found = []
            for at, data in enumerate(cards):
                card, digest = _read(data)
                found.append(registering.Read(_registration(tenant, data, card, digest), packed(at, card)))
            return found

        ready = await self._apart(sum(map(len, cards)), read)
        taken = await self._broker.chore(
            lambda tx, now: registering.take(tx, self._liveness, self._max_agents, tenant, space, ready, now)
        )
        await self._following.reach(taken.revision)
        return taken

    async def _apart(self, size: int, read: Callable[[], T]) -> T:
        """Read cards, of so many bytes, on their own thread."""
        if self._reading > MAX_READING:
            raise BusyError("too many cards are being read")
        self._reading += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, read)
        finally:
            self._reading -= size

    async def unregister(self, tenant: str, who: Who) -> Agent:
        """Forget an agent (G2); :class:`NoSuchAgentError`."""
        agent = await self._broker.write(
            lambda tx, now: registering.unregister(tx, tenant, who.address, who.name, now), when_full=True
        )
        await self._following.reach(agent.revision)
        return agent

    async def report(self, tenant: str, who: Who, status: bytes) -> Agent:
        """Keep an agent's report and take it as a sign of life (G2); :class:`NoSuchAgentError`."""
        agent = await self._broker.write(
            lambda tx, now: registering.report(tx, tenant, who.address, who.name, status, now)
        )
        await self._following.reach(agent.revision)
        return agent

    async def get(self, tenant: str, address: str) -> tuple[Agent, State]:
        """Return an agent; :class:`NoSuchAgentError`."""
        agent = await self._broker.glance(lambda tx, _now: tx.agents.find(tenant, address))
        if agent is None:
            raise NoSuchAgentError(address)
        return agent, self._liveness.state(agent.ttl, agent.seen_at, self._broker.clock())

    async def discover(self, tenant: str, query: Discover, budget: int) -> Found:
        """Find agents (G3): a page of them, cut at ``budget`` bytes of cards and reports, but one at least.

        Raises :class:`BadRequestError` for a cursor that leads nowhere, :class:`BusyError` while the index is read.
        """
        found = await self._searching.discover(tenant, query, budget)
        self._meters.searched(found)
        return found


def _registration(tenant: str, data: bytes, card: Card, digest: bytes) -> Registration:
    return Registration(tenant, card.address, card.name, data, digest, card.ttl)


def _read(data: bytes) -> tuple[Card, bytes]:
    card = read_card(data)
    return card, Digest.of(card).pack()
