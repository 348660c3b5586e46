"""Embeds cards that have no vectors: after each registration, and all of them after a change of model."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from mediator.broker import Broker
from mediator.errors import BadRequestError, MediatorError, UnavailableError
from mediator.store.base import Transaction
from registry.cards.card import read_card
from registry.embedding.encoder import Encoder
from registry.embedding.texts import card_texts
from registry.index.vectors import pack_rows
from registry.records import CardVectors, UnembeddedCard
from registry.tables import RegistryTables

BATCH = 16
"""Cards encoded and written together: what a registration may have to wait for."""
MAX_QUEUED = 100_000
"""Registrations in the queue; beyond it the store is searched for cards without vectors."""
MAX_REFUSED = 1000
"""Cards remembered that the model refuses; beyond it they are tried again."""
SWEEP_SECONDS = 30.0
"""How often it checks whether there are cards without vectors that are not in the queue."""
GRACE_MS = 30_000
"""How long after its registration a card is left to the instance that registered it."""

log = structlog.get_logger("registry")


@dataclass(frozen=True, slots=True)
class _Batch:
    cards: Sequence[UnembeddedCard]
    texts: list[str]
    counts: list[int]
    """How many of the texts belong to each card."""

    def halves(self) -> "tuple[_Batch, _Batch]":
        """Split it between two cards."""
        middle = len(self.cards) // 2
        there = sum(self.counts[:middle])
        return (
            _Batch(self.cards[:middle], self.texts[:there], self.counts[:middle]),
            _Batch(self.cards[middle:], self.texts[there:], self.counts[middle:]),
        )


class CardEmbedder:
    """Embeds cards in the background. Used on the event loop."""

    def __init__(self, broker: Broker, encoder: Encoder, incomplete: Callable[[], bool], *, shared: bool) -> None:
        """``incomplete``: whether some cards have no vectors; ``shared``: whether other instances use the database."""
        self._broker = broker
        self._encoder = encoder
        self._incomplete = incomplete
        self._grace = GRACE_MS if shared else -1
        self._queue = TenantQueues(MAX_QUEUED)
        self._refused: dict[int, int] = {}
        """Cards that the model refuses: the revision of the card by the agent's number."""
        self._embedded: dict[int, int] = {}
        """Cards of the last batch, by agent: one that is queued late need not be embedded twice."""
        self._sweep = True
        """Whether to search the store for cards without vectors."""
        self._problem: str | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start; it waits for the encoder to be ready."""
        self._task = asyncio.create_task(self._run(), name="registry-embedder")

    async def stop(self) -> None:
        """Stop; cards that are left are found at the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def enqueue(self, tenant: str, agent_id: int) -> None:
        """Add an agent that was registered here."""
        if not self._queue.add(tenant, agent_id):
            self._sweep = True
        self._idle.clear()
        self._wake.set()

    async def wait_idle(self) -> None:
        """Wait until the queue is empty and no card is known to lack vectors."""
        await self._idle.wait()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._encoder.wait_ready()
                await self._embed_all()
                if not self._queue:
                    self._idle.set()
                self._problem = None
            except MediatorError as error:
                self._report(str(error))
            except Exception as error:
                # Nothing else would restart this task.
                self._report(f"failed: {type(error).__name__}", unexpected=True)
            try:
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                self._sweep = self._sweep or self._incomplete()

    def _report(self, problem: str, *, unexpected: bool = False) -> None:
        """Log a failure once, and search the store for what was not embedded."""
        if problem != self._problem:
            log.warning("cards cannot be embedded", why=problem, exc_info=unexpected)
        self._problem, self._sweep = problem, True

    async def _embed_all(self) -> None:
        space = str(self._encoder.space)
        after: int | None = 0 if self._sweep else None
        self._sweep = False
        self._embedded = {}
        while True:
            # Chosen when the encoder is free, so that a new card waits for one batch only.
            batch, after = await self._next(space, after)
            if batch is None:
                return
            await self._embed(space, batch)

    async def _next(self, space: str, after: int | None) -> tuple[_Batch | None, int | None]:
        """Return the next cards to embed: from the queue, else from a search of the store if ``after`` is not None.

        The search continues after that agent; also returns where the next one continues.
        """
        while self._queue or after is not None:
            if queued := self._queue.pop(BATCH):
                cards = await self._broker.read(partial(_pick, queued))
            else:
                assert after is not None
                cards, after = await self._broker.read(partial(_missing, space, after, self._grace))
                cards = [card for card in cards if self._refused.get(card.agent_id) != card.card_revision]
            cards = [card for card in cards if self._embedded.get(card.agent_id) != card.card_revision]
            if cards:
                self._embedded = {card.agent_id: card.card_revision for card in cards}
                return await asyncio.to_thread(_compose, cards), after
        return None, None

    async def _embed(self, space: str, batch: _Batch, *, again: bool = False) -> None:
        try:
            vectors = await self._encoder.cards(batch.texts)
        except UnavailableError as error:
            # Without a model it is no card's fault. With one a single card may be, which must not stop the others.
            await self._encoder.wait_ready()
            if len(batch.cards) > 1:
                for half in batch.halves():
                    await self._embed(space, half)
            elif not again:
                await self._embed(space, batch, again=True)
            else:
                self._refuse(batch.cards[0], str(error))
            return
        made, start = [], 0
        for card, count in zip(batch.cards, batch.counts, strict=True):
            made.append(CardVectors(card.agent_id, card.card_revision, pack_rows(vectors[start : start + count])))
            start += count
        await self._broker.write(lambda tx, _now: tx.table(RegistryTables).vectors.save(space, made))

    def _refuse(self, card: UnembeddedCard, why: str) -> None:
        log.warning("a card cannot be embedded", agent=card.agent_id, why=why)
        if len(self._refused) >= MAX_REFUSED:
            self._refused.clear()
        self._refused[card.agent_id] = card.card_revision


def _pick(agent_ids: Sequence[int], tx: Transaction, _now: int) -> list[UnembeddedCard]:
    return [
        UnembeddedCard(agent.id, agent.card_revision, agent.card)
        for agent in tx.table(RegistryTables).agents.pick(agent_ids).values()
    ]


def _missing(space: str, after: int, grace: int, tx: Transaction, now: int) -> tuple[list[UnembeddedCard], int | None]:
    return tx.table(RegistryTables).vectors.missing(space, after, BATCH, now - grace)


def _compose(cards: Sequence[UnembeddedCard]) -> _Batch:
    all_texts, counts, kept = [], [], []
    for card in cards:
        try:
            lines = card_texts(read_card(card.card))
        except BadRequestError as error:
            log.warning("a stored card is not valid any more", agent=card.agent_id, field=error.field)
            continue
        kept.append(card)
        all_texts += lines
        counts.append(len(lines))
    return _Batch(kept, all_texts, counts)


class TenantQueues:
    """A queue of numbers for each tenant, served round robin: no tenant delays another by more than a turn."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queues: OrderedDict[str, dict[int, None]] = OrderedDict()
        """The tenant whose turn is next comes first; no queue is empty."""
        self._size = 0

    def __len__(self) -> int:
        """Return how many numbers are queued."""
        return self._size

    def add(self, tenant: str, number: int) -> bool:
        """Queue a number once; False when the last number of the longest queue was dropped, for lack of room."""
        queue = self._queues.setdefault(tenant, {})
        if number in queue:
            return True
        queue[number] = None
        self._size += 1
        if self._size <= self._capacity:
            return True
        longest = max(self._queues, key=lambda each: len(self._queues[each]))
        self._queues[longest].popitem()
        self._size -= 1
        if not self._queues[longest]:
            del self._queues[longest]
        return False

    def pop(self, count: int) -> list[int]:
        """Remove and return at most ``count`` numbers, one from each queue in turn."""
        taken: list[int] = []
        while self._queues and len(taken) < count:
            tenant, queue = self._queues.popitem(last=False)
            number = next(iter(queue))
            del queue[number]
            taken.append(number)
            if queue:
                self._queues[tenant] = queue
        self._size -= len(taken)
        return taken
