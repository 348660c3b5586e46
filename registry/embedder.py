"""Gives vectors to cards that have none: behind each registration, and to all of them when the model changed."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from mediator.agents.ports import Unembedded
from mediator.agents.records import Embedded
from mediator.broker import Broker
from mediator.errors import BadRequestError, MediatorError, UnavailableError
from mediator.store.base import Transaction
from registry.cards import read_card
from registry.embedding.encoder import Encoder
from registry.packing import pack_rows
from registry.queues import TenantQueues
from registry.texts import texts

BATCH = 16
"""Cards encoded and written together; whoever registers one card waits for so many of another's."""
MAX_FRESH = 100_000
"""Registrations remembered; beyond it the store is asked what is missing."""
MAX_REFUSED = 1000
"""Cards remembered that the model cannot read; beyond it they are tried again."""
REST_SECONDS = 30.0
"""How often it looks for cards that nobody told it of."""
OTHERS_MS = 30_000
"""How long a card that was registered at another instance is left to that one."""

log = structlog.get_logger("registry")


@dataclass(frozen=True, slots=True)
class _Batch:
    cards: Sequence[Unembedded]
    texts: list[str]
    counts: list[int]
    """How many of the texts are of each card."""

    def halves(self) -> "tuple[_Batch, _Batch]":
        """Part it between two cards."""
        middle = len(self.cards) // 2
        there = sum(self.counts[:middle])
        return (
            _Batch(self.cards[:middle], self.texts[:there], self.counts[:middle]),
            _Batch(self.cards[middle:], self.texts[there:], self.counts[middle:]),
        )


class Embedder:
    """Works in the background. Used on the event loop."""

    def __init__(self, broker: Broker, encoder: Encoder, lacking: Callable[[], bool], *, shared: bool) -> None:
        """``lacking``: whether some cards are known to have no vectors; ``shared``: other instances work beside it."""
        self._broker = broker
        self._encoder = encoder
        self._lacking = lacking
        self._others = OTHERS_MS if shared else -1
        self._fresh = TenantQueues(MAX_FRESH)
        self._refused: dict[int, int] = {}
        """Cards that the model cannot read, as they were: the agent's number and the revision."""
        self._embedded: dict[int, int] = {}
        """Cards of the batch before, by revision: a registration that is announced late need not be embedded twice."""
        self._search = True
        """Whether the store is to be asked what is missing."""
        self._problem: str | None = None
        self._bell = asyncio.Event()
        self._idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin, as soon as the encoder is ready."""
        self._task = asyncio.create_task(self._run(), name="registry-embedder")

    async def stop(self) -> None:
        """Stop; what is not done is found at the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def call(self, tenant: str, no: int) -> None:
        """Tell that an agent was registered here."""
        if not self._fresh.add(tenant, no):
            self._search = True
        self._idle.clear()
        self._bell.set()

    async def idle(self) -> None:
        """Wait until all that it was told of has vectors."""
        await self._idle.wait()

    async def _run(self) -> None:
        while True:
            self._bell.clear()
            try:
                await self._encoder.wait_ready()
                await self._embed_all()
                if not self._fresh:
                    self._idle.set()
                self._problem = None
            except MediatorError as error:
                self._say(str(error))
            except Exception as error:
                # Nobody else would take it up again.
                self._say(f"failed: {type(error).__name__}", unexpected=True)
            try:
                async with asyncio.timeout(REST_SECONDS):
                    await self._bell.wait()
            except TimeoutError:
                self._search = self._search or self._lacking()

    def _say(self, problem: str, *, unexpected: bool = False) -> None:
        """Tell of a failure, once; what was not done is looked for."""
        if problem != self._problem:
            log.warning("cards are not embedded", why=problem, exc_info=unexpected)
        self._problem, self._search = problem, True

    async def _embed_all(self) -> None:
        space = str(self._encoder.space)
        after: int | None = 0 if self._search else None
        self._search = False
        self._embedded = {}
        while True:
            # Chosen when the encoder is free, so that a card that came meanwhile waits for one batch only.
            batch, after = await self._next(space, after)
            if batch is None:
                return
            await self._embed(space, batch)

    async def _next(self, space: str, after: int | None) -> tuple[_Batch | None, int | None]:
        """Return what to embed next: what was registered here, by tenants in turn, then what is missing in the store.

        That is behind the agent ``after``, if not None.
        """
        while self._fresh or after is not None:
            if fresh := self._fresh.take(BATCH):
                cards = await self._broker.read(partial(_picked, fresh))
            else:
                assert after is not None
                cards, after = await self._broker.read(partial(_missing, space, after, self._others))
                cards = [card for card in cards if self._refused.get(card.no) != card.card_revision]
            cards = [card for card in cards if self._embedded.get(card.no) != card.card_revision]
            if cards:
                self._embedded = {card.no: card.card_revision for card in cards}
                return await asyncio.to_thread(_written_out, cards), after
        return None, None

    async def _embed(self, space: str, batch: _Batch, *, again: bool = False) -> None:
        try:
            vectors = await self._encoder.cards(batch.texts)
        except UnavailableError as error:
            # Without a model no card is to blame. With one it may be a single card, which is not to stop the others.
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
            made.append(Embedded(card.no, card.card_revision, pack_rows(vectors[start : start + count])))
            start += count
        await self._broker.write(lambda tx, _now: tx.vectors.put(space, made))

    def _refuse(self, card: Unembedded, why: str) -> None:
        log.warning("a card is not embedded", agent=card.no, why=why)
        if len(self._refused) >= MAX_REFUSED:
            self._refused.clear()
        self._refused[card.no] = card.card_revision


def _picked(numbers: Sequence[int], tx: Transaction, _now: int) -> list[Unembedded]:
    return [Unembedded(agent.no, agent.card_revision, agent.card) for agent in tx.agents.pick(numbers).values()]


def _missing(space: str, after: int, others: int, tx: Transaction, now: int) -> tuple[list[Unembedded], int | None]:
    return tx.vectors.missing(space, after, BATCH, now - others)


def _written_out(cards: Sequence[Unembedded]) -> _Batch:
    written, counts, kept = [], [], []
    for card in cards:
        try:
            lines = texts(read_card(card.card))
        except BadRequestError as error:
            log.warning("a card is not read any more", agent=card.no, field=error.field)
            continue
        kept.append(card)
        written += lines
        counts.append(len(lines))
    return _Batch(kept, written, counts)
