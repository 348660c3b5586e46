"""Keeps the indexes of all tenants up to date with the store: loaded at the start, then change by change."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import structlog

from mediator.broker import Broker
from mediator.errors import BadRequestError, BusyError, MediatorError, StorageFullError
from mediator.store.base import Transaction
from registry.cards.card import read_card
from registry.index.keywords import IndexDocument
from registry.index.memory import RememberedRequest
from registry.index.tenant import TenantIndex
from registry.index.vectors import Halves, unpack_rows
from registry.records import AgentChange, CardVectors, ChangeCursor, Liveness, RequestChange, UpdatedTerms, Vote
from registry.tables import RegistryTables

CHUNK = 500
"""Changes read at once."""
PART = 50
"""Changes whose documents and vectors are read before their size is checked."""
CHUNK_BYTES = 8 * 1024 * 1024
"""Bytes of documents and vectors read at once; parsed, documents take ten times as much memory."""

_START = ChangeCursor(0, 0)
_LAST = (1 << 63) - 1


@dataclass(slots=True)
class _IndexedAgent:
    tenant: str
    card_revision: int = 0
    embedded: int = 0


@dataclass(slots=True)
class IndexSet:
    """The indexes of all tenants, as of a cursor in the order of changes."""

    space: str
    by_tenant: dict[str, TenantIndex] = field(default_factory=dict)
    agents: dict[int, _IndexedAgent] = field(default_factory=dict)
    """Which cards and vectors the indexes hold, by the agent's number."""
    cursor: ChangeCursor = _START

    requests: ChangeCursor = _START
    """The same of remembered requests."""

    def of_tenant(self, tenant: str, liveness: Liveness) -> TenantIndex:
        """Return the index of a tenant, made if it is the first time."""
        index = self.by_tenant.get(tenant)
        if index is None:
            index = self.by_tenant[tenant] = TenantIndex(liveness)
        return index

    def has(self, revision: int) -> bool:
        """Return whether all changes of agents up to a revision are in the indexes."""
        return self.cursor >= ChangeCursor(revision, _LAST)

    def is_at(self, revision: int) -> bool:
        """Return whether a revision is the last one in the indexes."""
        return self.cursor == self.requests == ChangeCursor(revision, _LAST)


@dataclass(slots=True)
class ChangeBatch:
    """Changes behind a cursor, with the documents and vectors that the indexes lack."""

    revision: int
    """All changes up to it are in this batch or in earlier ones, unless there are ``more``."""
    changes: list[AgentChange]
    documents: dict[int, IndexDocument]
    vectors: dict[int, CardVectors]
    updated: list[UpdatedTerms]
    """Documents that an older version of the program stored, in the form they should have now."""
    more: bool
    requests: list[RequestChange] = field(default_factory=list)
    votes: list[Vote] = field(default_factory=list)
    more_requests: bool = False


def read_changes(tables: RegistryTables, indexes: IndexSet) -> ChangeBatch:
    """Read the next changes that the indexes lack."""
    # The revision first: what is committed after it was read belongs to the next batch.
    revision = tables.agents.revision()
    changes = tables.agents.changes(indexes.cursor, indexes.space, CHUNK)
    batch = ChangeBatch(revision, [], {}, {}, [], len(changes) == CHUNK)
    size = 0
    for start in range(0, len(changes), PART):
        if size > CHUNK_BYTES:
            batch.more = True
            break
        size += _read(tables, indexes, changes[start : start + PART], batch)
    # Agents first: what is remembered of them is of no use without them.
    if not batch.more:
        batch.requests = tables.memory.changes(indexes.requests, indexes.space, CHUNK)
        if batch.requests:
            batch.votes = tables.memory.votes([change.request_id for change in batch.requests if change.vector])
    batch.more_requests = batch.more or len(batch.requests) == CHUNK
    return batch


def _read(tables: RegistryTables, indexes: IndexSet, changes: Sequence[AgentChange], batch: ChangeBatch) -> int:
    """Add changes to a batch, with the documents and vectors they need, and return how many bytes those have."""
    unknown = _IndexedAgent("")
    new_cards, new_vectors = [], []
    for change in changes:
        if change.removed:
            continue
        indexed = indexes.agents.get(change.agent_id, unknown)
        if change.card_revision != indexed.card_revision:
            new_cards.append(change.agent_id)
        if change.embedded == change.card_revision != indexed.embedded:
            new_vectors.append(change.agent_id)
    packed = tables.agents.terms(new_cards) if new_cards else {}
    vectors = tables.vectors.read(indexes.space, new_vectors) if new_vectors else {}
    _add_documents(tables, packed, batch)
    batch.changes += changes
    batch.vectors |= vectors
    return sum(map(len, packed.values())) + sum(len(one.vectors) for one in vectors.values())


def _add_documents(tables: RegistryTables, packed: Mapping[int, bytes], batch: ChangeBatch) -> None:
    """Add documents to a batch; those of an older version of the program are made anew from their cards."""
    old = []
    for agent_id, data in packed.items():
        try:
            batch.documents[agent_id] = IndexDocument.unpack(data)
        except ValueError:
            old.append(agent_id)
    for agent_id, agent in tables.agents.pick(old).items() if old else ():
        try:
            batch.documents[agent_id] = document = IndexDocument.of(read_card(agent.card))
        except BadRequestError as error:
            log.warning("a stored card is not valid any more", agent=agent_id, field=error.field)
            continue
        batch.updated.append(UpdatedTerms(agent_id, agent.card_revision, document.pack()))


def apply_changes(indexes: IndexSet, batch: ChangeBatch, liveness: Liveness) -> None:
    """Apply a batch to the indexes, which may be searched meanwhile."""
    documents: defaultdict[str, list[tuple[int, IndexDocument]]] = defaultdict(list)
    seen: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    vectors: defaultdict[str, list[tuple[int, Halves]]] = defaultdict(list)
    removed: defaultdict[str, list[int]] = defaultdict(list)
    for change in batch.changes:
        agent_id = change.agent_id
        if change.removed:
            indexed = indexes.agents.pop(agent_id, None)
            if indexed is not None:
                removed[indexed.tenant].append(agent_id)
            continue
        indexed = indexes.agents.get(agent_id)
        document = batch.documents.get(agent_id)
        if indexed is None:
            if document is None:
                continue
            indexed = indexes.agents[agent_id] = _IndexedAgent(change.tenant)
        if document is not None:
            documents[change.tenant].append((agent_id, document))
            indexed.card_revision, indexed.embedded = change.card_revision, 0
        seen[change.tenant].append((agent_id, change.ttl, change.seen_at))
        embedded = batch.vectors.get(agent_id)
        if embedded is not None and embedded.card_revision == indexed.card_revision:
            rows = _unpack_vectors(embedded)
            if rows is not None:
                vectors[change.tenant].append((agent_id, rows))
                indexed.embedded = embedded.card_revision
    for tenant, numbers in removed.items():
        indexes.by_tenant[tenant].remove(numbers)
    for tenant in seen:
        index = indexes.of_tenant(tenant, liveness)
        index.add(documents[tenant])
        index.mark_seen(seen[tenant])
        if tenant in vectors:
            index.add_vectors(vectors[tenant])
    _apply_requests(indexes, batch, liveness)
    if batch.more:
        indexes.cursor = ChangeCursor(batch.changes[-1].revision, batch.changes[-1].agent_id)
    else:
        # Changes of later transactions may be in the batch; they will come again.
        indexes.cursor = ChangeCursor(batch.revision, _LAST)


def _apply_requests(indexes: IndexSet, batch: ChangeBatch, liveness: Liveness) -> None:
    votes: defaultdict[int, list[Vote]] = defaultdict(list)
    for vote in batch.votes:
        votes[vote.request_id].append(vote)
    kept: defaultdict[str, list[RememberedRequest]] = defaultdict(list)
    forgotten: defaultdict[str, list[int]] = defaultdict(list)
    for change in batch.requests:
        vector = _unpack_request(change)
        if vector is None:
            forgotten[change.tenant].append(change.request_id)
        else:
            kept[change.tenant].append(RememberedRequest(change.request_id, vector, votes[change.request_id]))
    for tenant in {**kept, **forgotten}:
        index = indexes.of_tenant(tenant, liveness)
        index.remember(kept[tenant], forgotten[tenant])
    if not batch.more_requests:
        indexes.requests = ChangeCursor(batch.revision, _LAST)
    elif batch.requests:
        indexes.requests = ChangeCursor(batch.requests[-1].revision, batch.requests[-1].request_id)


def _unpack_request(change: RequestChange) -> Halves | None:
    try:
        return unpack_rows(change.vector) if change.vector else None
    except (ValueError, IndexError):
        log.warning("the vector of a remembered request is damaged", request=change.request_id)
        return None


def _unpack_vectors(embedded: CardVectors) -> Halves | None:
    """Return an agent's vectors; None when they are damaged: it is then found by keywords alone."""
    try:
        return unpack_rows(embedded.vectors)
    except ValueError as error:
        log.warning("vectors are damaged", agent=embedded.agent_id, why=str(error))
        return None


# The task.


POLL_SECONDS = 0.5
"""How often it looks for changes by other instances and by the clean-up."""
LOAD_SECONDS = 3.0
"""How long a search waits for the index to be loaded before it is answered with :class:`BusyError`."""
WAIT_SECONDS = 2.0
"""How long a registration waits until the index has it."""
OPTIMIZE_SECONDS = 5.0
"""How often it looks whether an index has become large."""
RELOAD_SECONDS = 12 * 3600.0
"""After so long without a look everything is loaded again: the store remembers removals only for a day."""
LONGEST_PAUSE = 60.0
"""Seconds between two attempts while an unexpected error persists; the first is after :data:`POLL_SECONDS`."""

log = structlog.get_logger("registry")


class IndexUpdater:
    """Reads changes from the store. Used on the event loop; the indexes themselves may be used from any thread."""

    def __init__(self, broker: Broker, liveness: Liveness) -> None:
        self._broker = broker
        self._liveness = liveness
        self._indexes = IndexSet("")
        self._loading = asyncio.Lock()
        """Held while everything is loaded into new indexes, which then replace the former ones."""
        self._loaded = asyncio.Event()
        self._wake = asyncio.Event()
        self._advanced = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._polled_at = 0.0
        """When the last look began that was completed."""
        self._reload = False
        """Whether the indexes may be wrong, so that everything must be loaded again."""
        self._confirmed = 0
        """The highest revision that a caller was told is stored."""
        self._problem: str | None = None

    @property
    def space(self) -> str:
        """The space of the vectors in the indexes; "" for none."""
        return self._indexes.space

    @property
    def agents(self) -> int:
        """How many agents are in all indexes."""
        return len(self._indexes.agents)

    @property
    def embedded(self) -> int:
        """How many of them have vectors."""
        return sum(index.embedded for index in self._indexes.by_tenant.values())

    @property
    def loaded(self) -> bool:
        """Whether the store was read to its end once."""
        return self._loaded.is_set()

    async def start(self, space: str) -> None:
        """Start to load the indexes, with the vectors of a space."""
        self._indexes = IndexSet(space)
        self._tasks = [
            asyncio.create_task(self._run(), name="registry-index"),
            asyncio.create_task(self._optimize(), name="registry-optimizing"),
        ]

    async def stop(self) -> None:
        """Stop the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def check(self) -> str | None:
        """Return why the indexes are not up to date, None when they are; a health check."""
        return self._problem

    async def index(self, tenant: str) -> TenantIndex:
        """Return the index of a tenant; :class:`BusyError` while everything is loaded for the first time."""
        if not self._loaded.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOAD_SECONDS):
                    await self._loaded.wait()
        if not self._loaded.is_set():
            raise BusyError("the registry is being read into memory")
        index = self._indexes.by_tenant.get(tenant)
        return TenantIndex(self._liveness) if index is None else index

    async def wait_for(self, revision: int, *, remembered: bool = False) -> None:
        """Wait until the indexes have a transaction, for :data:`WAIT_SECONDS` at most and not for the first load.

        ``remembered``: with its remembered requests, otherwise with its agents.
        """
        self._wake.set()
        self._confirmed = max(self._confirmed, revision)
        if not self._loaded.is_set():
            return
        wanted = ChangeCursor(revision, _LAST)

        def there() -> bool:
            return (self._indexes.requests if remembered else self._indexes.cursor) >= wanted

        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS), self._advanced:
                await self._advanced.wait_for(there)

    async def switch_space(self, space: str) -> None:
        """Change to the vectors of another space; the former ones are used until these are loaded."""
        await self._loaded.wait()
        async with self._loading:
            self._indexes = await self._load(space)
        self._wake.set()

    async def _run(self) -> None:
        pause = POLL_SECONDS
        while True:
            try:
                await self._poll()
                self._set_problem(None)
                pause = POLL_SECONDS
            except MediatorError as error:
                self._set_problem(str(error))
            except Exception as error:
                # The health check has to show it. Requests continue with the indexes as they are, and since those may
                # have been left half changed, they are loaded again.
                self._set_problem(f"failed: {type(error).__name__}", unexpected=True)
                self._reload = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            async with self._advanced:
                self._advanced.notify_all()
            # wait_for may swallow the cancellation of this task when the event is set at the same time.
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wake.wait()

    async def _poll(self) -> None:
        started = time.monotonic()
        if self._reload or not self._loaded.is_set() or started - self._polled_at > RELOAD_SECONDS:
            self._reload = False
            try:
                async with self._loading:
                    self._indexes = await self._load(self._indexes.space)
            except BaseException:
                self._reload = True
                raise
            self._loaded.set()
            if self.agents:
                log.info("index loaded", agents=self.agents, seconds=round(time.monotonic() - started, 2))
        self._wake.clear()
        await self._catch_up(self._indexes)
        self._polled_at = started

    async def _optimize(self) -> None:
        while True:
            more = False
            try:
                more = await asyncio.to_thread(_optimize_some, list(self._indexes.by_tenant.values()))
            except Exception:
                # Searches work without it, they only take longer.
                log.exception("a large index cannot be optimized")
            if not more:
                await asyncio.sleep(OPTIMIZE_SECONDS)

    def _set_problem(self, problem: str | None, *, unexpected: bool = False) -> None:
        if problem is not None and problem != self._problem:
            log.warning("the index is not up to date", why=problem, exc_info=unexpected)
        self._problem = problem

    async def _load(self, space: str) -> IndexSet:
        # Searches begin with all agents; remembered requests follow.
        indexes = IndexSet(space)
        await self._catch_up(indexes, requests=False)
        # Callers may have been told of commits made meanwhile, and will search for them here.
        while not indexes.has(self._confirmed):
            before = indexes.cursor
            await self._catch_up(indexes, requests=False)
            if indexes.cursor == before:
                # The revision no longer exists: the database was restored from an older state.
                self._confirmed = indexes.cursor.revision
        return indexes

    async def _catch_up(self, indexes: IndexSet, *, requests: bool = True) -> None:
        while True:
            # A caller of wait_for knows that there are changes; otherwise the revision alone is read first.
            if indexes.has(self._confirmed):
                revision = await self._broker.read_inline(lambda tx, _now: tx.table(RegistryTables).agents.revision())
                if indexes.is_at(revision):
                    return
            batch = await self._broker.read(lambda tx, _now: read_changes(tx.table(RegistryTables), indexes))
            if batch.revision < indexes.cursor.revision:
                # The database went back, by a restored backup or a standby that lagged: the indexes may be wrong.
                self._reload, self._confirmed = True, batch.revision
                return
            await asyncio.to_thread(apply_changes, indexes, batch, self._liveness)
            if batch.updated:
                # On a full disk the cards are parsed again at the next start as well.
                with suppress(StorageFullError):
                    await self._broker.write_background(partial(_set_terms, batch.updated))
            async with self._advanced:
                self._advanced.notify_all()
            if not (batch.more_requests if requests else batch.more):
                return


def _set_terms(updated: Sequence[UpdatedTerms], tx: Transaction, _now: int) -> None:
    tx.table(RegistryTables).agents.set_terms(updated)


def _optimize_some(indexes: Sequence[TenantIndex]) -> bool:
    # A step of each, so that none waits until another is done.
    return sum(index.optimize() for index in indexes) > 0
