"""The use cases of the registry, which every door calls: they change the store and search the index."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from mediator.broker import Broker
from mediator.errors import BadRequestError, BusyError, NoSuchAgentError
from mediator.mailboxes.address import NUMBERED
from mediator.store.base import Transaction
from registry import rules
from registry.cards.card import MAX_CARD, Card, read_card
from registry.embedding.switching import EmbeddingModels
from registry.index.keywords import IndexDocument
from registry.index.updater import IndexUpdater
from registry.index.vectors import unpack_rows
from registry.records import (
    NO_MEMORY,
    SIGN,
    USEFUL,
    USELESS,
    Agent,
    CardVectors,
    Liveness,
    MemoryPolicy,
    RecentSearch,
    Registration,
    State,
    voter_of,
    voter_of_request,
)
from registry.requests import (
    AgentRecord,
    AgentReference,
    EmbeddingState,
    FeedbackRequest,
    RegisterResult,
)
from registry.rules import find_by_send_only, find_own, shown_to_others
from registry.search.feedback import Sign
from registry.search.searcher import Searcher
from registry.tables import RegistryTables

T = TypeVar("T")
SMALL_CARD = 4096
"""Bytes up to which a card is parsed on the event loop: handing it to a thread takes longer."""
FORGOTTEN = 500
"""Votes or requests that one transaction forgets."""
OPERATOR = "operator"
"""Stands for who registers agents in bulk, and votes on none."""
MAX_READING = 64 * 1024 * 1024
"""Bytes of cards that may wait to be parsed on a thread; more are refused with :class:`BusyError`."""


class Directory:
    """Registers, removes and finds agents. Created and used on the event loop."""

    def __init__(
        self,
        broker: Broker,
        liveness: Liveness,
        max_agents: int,
        updater: IndexUpdater,
        searcher: Searcher,
        models: EmbeddingModels | None,
        policy: MemoryPolicy = NO_MEMORY,
    ) -> None:
        """``max_agents`` limits each tenant, 0 is no limit; without ``models`` cards get no vectors."""
        self._policy = policy
        self._broker = broker
        self._liveness = liveness
        self._max_agents = max_agents
        self._updater = updater
        self.searcher = searcher
        """Answers DISCOVER."""
        self._models = models
        # One thread of our own: slow cards would delay each other, and everybody else who needs a thread.
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="registry-cards")
        self._parsing = 0

    def close(self) -> None:
        """Stop the thread."""
        self._parser.shutdown(wait=True)

    async def register(self, tenant: str, data: bytes, credential: str = "") -> RegisterResult:
        """Keep a card under its mailbox, in place of the former one (G1); searches here find it from now on.

        ``credential`` is that of the caller, as in :data:`mediator.request_context.caller`.

        Raises :class:`BadRequestError` for an invalid card, :class:`QuotaExceededError`, :class:`BusyError`.
        """
        if SMALL_CARD < len(data) <= MAX_CARD:
            card, new = await self._on_thread(len(data), partial(_parse, tenant, data))
        else:
            card, new = _parse(tenant, data)
        new = replace(new, owner=voter_of(credential))
        agent, created = await self._broker.write(
            lambda tx, now: rules.register(tx.table(RegistryTables), self._liveness, self._max_agents, new, now)
        )
        # An unchanged card, registered again as a sign of life, has its vectors or is queued already.
        if self._models is not None and agent.card_revision == agent.revision:
            self._models.embedder.enqueue(tenant, agent.id)
        await self._updater.wait_for(agent.revision)
        return RegisterResult(agent, card, created)

    async def register_many(
        self, tenant: str, space: str, cards: Sequence[bytes], packed: Callable[[int, Card], bytes]
    ) -> rules.BulkOutcome:
        """Keep many cards with vectors that a model made elsewhere, all or none (G1).

        ``packed`` returns the vectors of the card at a position, in the form of :mod:`registry.index.vectors`. Cards
        that are registered already stay as they are. The write goes behind all requests, since such cards come by
        thousands. Raises as :meth:`register`.
        """

        def parse() -> list[rules.EmbeddedRegistration]:
            parsed = []
            for at, data in enumerate(cards):
                card, new = _parse(tenant, data)
                new = replace(new, owner=voter_of(OPERATOR))
                parsed.append(rules.EmbeddedRegistration(new, packed(at, card)))
            return parsed

        ready = await self._on_thread(sum(map(len, cards)), parse)
        outcome = await self._broker.write_background(
            lambda tx, now: rules.register_many(
                tx.table(RegistryTables), self._liveness, self._max_agents, tenant, space, ready, now
            )
        )
        await self._updater.wait_for(outcome.revision)
        return outcome

    async def unregister(self, tenant: str, reference: AgentReference) -> Agent:
        """Remove an agent and return it (G2), as others see it if they named it by its name (G4).

        Raises :class:`NoSuchAgentError`, :class:`SendOnlyError`.
        """

        def unregister(tx: Transaction, now: int) -> Agent:
            tables = tx.table(RegistryTables)
            agent = rules.unregister(tables, tenant, reference.address, reference.name, now)
            return _answered(tables, reference, agent, now)

        agent = await self._broker.write(unregister, even_when_full=True)
        await self._updater.wait_for(agent.revision)
        return agent

    async def report(self, tenant: str, reference: AgentReference, status: bytes) -> Agent:
        """Keep the status report of an agent, which is a sign of life (G2); answers as :meth:`unregister`."""

        def report(tx: Transaction, now: int) -> Agent:
            tables = tx.table(RegistryTables)
            agent = rules.report(tables, tenant, reference.address, reference.name, status, now)
            return _answered(tables, reference, agent, now)

        agent = await self._broker.write(report)
        await self._updater.wait_for(agent.revision)
        return agent

    async def get(self, tenant: str, address: str) -> tuple[Agent, State]:
        """Return an agent and its state, as others see it for its send-only address (G4); :class:`NoSuchAgentError`."""

        def find(tx: Transaction, now: int) -> Agent | None:
            tables = tx.table(RegistryTables)
            return find_by_send_only(tables, tenant, address, now) or tables.agents.find(tenant, address)

        agent = await self._broker.read_inline(find)
        if agent is None:
            raise NoSuchAgentError(address)
        return agent, self._liveness.state(agent.ttl, agent.seen_at, self._broker.clock())

    async def inspect(self, tenant: str, named: str | int) -> AgentRecord:
        """Return what operators see of an agent, by its mailbox's own or send-only address, or by its number.

        Raises :class:`NoSuchAgentError`.
        """
        space = self._updater.space

        def find(tx: Transaction, now: int) -> tuple[Agent, str | None, int | None, CardVectors | None] | None:
            tables = tx.table(RegistryTables)
            if isinstance(named, str):
                agent = find_own(tables, tenant, named, now)
            else:
                agent = tables.agents.pick([named]).get(named)
            if agent is None or agent.tenant != tenant:
                return None
            send_only = tables.mailboxes.send_only_of(tenant, [agent.address], now).get(agent.address)
            mailbox = None if send_only is None else tables.mailboxes.find(tenant, agent.address)
            number = None if mailbox is None else mailbox.id
            return agent, send_only, number, tables.vectors.read(space, [agent.id]).get(agent.id) if space else None

        found = await self._broker.read(find)
        if found is None:
            raise NoSuchAgentError(named if isinstance(named, str) else f"{NUMBERED}{named}")
        agent, send_address, mailbox_id, vectors = found
        embedding = EmbeddingState.WAITING
        if self._models is None:
            embedding = EmbeddingState.OFF
        elif vectors is not None and vectors.card_revision == agent.card_revision:
            embedding = EmbeddingState.EMBEDDED
        state = self._liveness.state(agent.ttl, agent.seen_at, self._broker.clock())
        rows = 0 if vectors is None else len(unpack_rows(vectors.vectors))
        return AgentRecord(agent, state, send_address, mailbox_id, embedding, rows)

    async def feedback(self, tenant: str, request: FeedbackRequest, credential: str) -> bool:
        """Remember whether an agent served a search (G5); return whether the caller's word counts (G6).

        Raises :class:`BadRequestError` for an unknown search or an agent that it did not find,
        :class:`NoSuchAgentError`.
        """
        query = self._find_search(tenant, request.query_id)
        return await self._vote(query, request.address, USEFUL if request.useful else USELESS, credential)

    async def record_sign(self, sign: Sign) -> None:
        """Remember a message to an agent as a weak sign that it served (G8); raises as :meth:`feedback`."""
        await self._vote(self._find_search(sign.tenant, sign.query_id), sign.address, SIGN, sign.credential)

    async def forget_use(self, tenant: str, address: str | None) -> int:
        """Forget what is remembered of an agent, or of all of a tenant (G7); return how many votes, or requests.

        Raises :class:`NoSuchAgentError`.
        """

        def forget(tx: Transaction, now: int) -> tuple[int, int]:
            tables = tx.table(RegistryTables)
            if address is None:
                return rules.forget_all(tables, tenant, FORGOTTEN, now), tables.agents.revision()
            agent = find_own(tables, tenant, address, now)
            if agent is None:
                raise NoSuchAgentError(address)
            return tables.memory.forget_agent(agent.id, now, FORGOTTEN), tables.agents.revision()

        forgotten, more = 0, True
        while more:
            some, revision = await self._broker.write(forget, even_when_full=True)
            forgotten, more = forgotten + some, some > 0
        await self._updater.wait_for(revision, remembered=True)
        return forgotten

    def _find_search(self, tenant: str, query_id: str) -> RecentSearch:
        query = self.searcher.recent.get(tenant, query_id)
        if query is None or not self._policy.applies_to(tenant):
            raise BadRequestError("query_id", "not known, or older than an hour; ask again with DISCOVER")
        return query

    async def _vote(self, query: RecentSearch, address: str, value: int, credential: str) -> bool:
        tenant, alone = query.tenant, self._policy.is_only_party(query.tenant, credential)
        voter = voter_of_request(query.text) if alone else voter_of(credential)
        owner = None if alone else voter
        over = (await self._updater.index(tenant)).remembered + 1 - self._policy.max_requests
        revision = await self._broker.write(
            lambda tx, now: rules.vote(tx.table(RegistryTables), query, address, value, voter, owner, over, now)
        )
        if revision is not None:
            await self._updater.wait_for(revision, remembered=True)
        return revision is not None

    async def _on_thread(self, size: int, parse: Callable[[], T]) -> T:
        """Parse cards, of so many bytes, on the thread for that."""
        if self._parsing > MAX_READING:
            raise BusyError("too many cards are being read")
        self._parsing += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._parser, parse)
        finally:
            self._parsing -= size


def _answered(tx: RegistryTables, reference: AgentReference, agent: Agent, now: int) -> Agent:
    return agent if reference.address else shown_to_others(tx, agent.tenant, [agent], now)[0]


def _parse(tenant: str, data: bytes) -> tuple[Card, Registration]:
    card = read_card(data)
    document = IndexDocument.of(card).pack()
    return card, Registration(tenant, card.address, card.name, data, document, card.ttl)
