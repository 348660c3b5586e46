"""Reads changes of agents from the store, and applies them to the indexes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from mediator.errors import BadRequestError
from registry.agents.ports import ChangeCursor, RegistryTables, UpdatedTerms
from registry.agents.records import AgentChange, CardVectors, Liveness
from registry.cards.card import read_card
from registry.index.document import IndexDocument
from registry.index.memory import RememberedRequest
from registry.index.packing import HalfFloats, unpack_rows
from registry.index.tenant import TenantIndex
from registry.memory.ports import MemoryTables
from registry.memory.records import RequestChange, Vote

CHUNK = 500
"""Changes read at once."""
PART = 50
"""Changes whose documents and vectors are read before their size is checked."""
CHUNK_BYTES = 8 * 1024 * 1024
"""Bytes of documents and vectors read at once; parsed, documents take ten times as much memory."""

_START = ChangeCursor(0, 0)
_LAST = (1 << 63) - 1

log = structlog.get_logger("registry")


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

    def has(self, revision: int) -> bool:
        """Return whether all changes of agents up to a revision are in the indexes."""
        return self.cursor >= ChangeCursor(revision, _LAST)

    def remembers(self, revision: int) -> bool:
        """Return the same of remembered requests."""
        return self.requests >= ChangeCursor(revision, _LAST)

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


def read_changes(tables: MemoryTables, indexes: IndexSet) -> ChangeBatch:
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
        batch.votes = tables.memory.votes([change.no for change in batch.requests if change.vector])
    batch.more_requests = batch.more or len(batch.requests) == CHUNK
    return batch


def _read(tables: RegistryTables, indexes: IndexSet, changes: Sequence[AgentChange], batch: ChangeBatch) -> int:
    """Add changes to a batch, with the documents and vectors they need, and return how many bytes those have."""
    unknown = _IndexedAgent("")
    new_cards, new_vectors = [], []
    for change in changes:
        if change.removed:
            continue
        indexed = indexes.agents.get(change.no, unknown)
        if change.card_revision != indexed.card_revision:
            new_cards.append(change.no)
        if change.embedded == change.card_revision != indexed.embedded:
            new_vectors.append(change.no)
    packed = tables.agents.terms(new_cards) if new_cards else {}
    vectors = tables.vectors.read(indexes.space, new_vectors) if new_vectors else {}
    documents, updated = _unpack(tables, packed)
    batch.changes += changes
    batch.documents |= documents
    batch.vectors |= vectors
    batch.updated += updated
    return sum(map(len, packed.values())) + sum(len(one.vectors) for one in vectors.values())


def _unpack(tables: RegistryTables, packed: Mapping[int, bytes]) -> tuple[dict[int, IndexDocument], list[UpdatedTerms]]:
    """Unpack documents; those of an older version of the program are made anew from their cards, and returned twice."""
    documents: dict[int, IndexDocument] = {}
    old = []
    for no, data in packed.items():
        try:
            documents[no] = IndexDocument.unpack(data)
        except ValueError:
            old.append(no)
    updated = []
    for no, agent in tables.agents.pick(old).items() if old else ():
        try:
            documents[no] = IndexDocument.of(read_card(agent.card))
        except BadRequestError as error:
            log.warning("a stored card is not valid any more", agent=no, field=error.field)
            continue
        updated.append(UpdatedTerms(no, agent.card_revision, documents[no].pack()))
    return documents, updated


def apply_changes(indexes: IndexSet, batch: ChangeBatch, liveness: Liveness) -> None:
    """Apply a batch to the indexes, which may be searched meanwhile."""
    documents: defaultdict[str, list[tuple[int, IndexDocument]]] = defaultdict(list)
    seen: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    vectors: defaultdict[str, list[tuple[int, HalfFloats]]] = defaultdict(list)
    removed: defaultdict[str, list[int]] = defaultdict(list)
    for change in batch.changes:
        no = change.no
        if change.removed:
            indexed = indexes.agents.pop(no, None)
            if indexed is not None:
                removed[indexed.tenant].append(no)
            continue
        indexed = indexes.agents.get(no)
        document = batch.documents.get(no)
        if indexed is None:
            if document is None:
                continue
            indexed = indexes.agents[no] = _IndexedAgent(change.tenant)
        if document is not None:
            documents[change.tenant].append((no, document))
            indexed.card_revision, indexed.embedded = change.card_revision, 0
        seen[change.tenant].append((no, change.ttl, change.seen_at))
        embedded = batch.vectors.get(no)
        if embedded is not None and embedded.card_revision == indexed.card_revision:
            rows = _unpack_vectors(embedded)
            if rows is not None:
                vectors[change.tenant].append((no, rows))
                indexed.embedded = embedded.card_revision
    for tenant, numbers in removed.items():
        indexes.by_tenant[tenant].remove(numbers)
    for tenant in seen:
        index = indexes.by_tenant.setdefault(tenant, TenantIndex(liveness))
        index.add(documents[tenant])
        index.mark_seen(seen[tenant])
        index.add_vectors(vectors[tenant])
    _apply_requests(indexes, batch, liveness)
    if batch.more:
        indexes.cursor = ChangeCursor(batch.changes[-1].revision, batch.changes[-1].no)
    else:
        # Changes of later transactions may be in the batch; they will come again.
        indexes.cursor = ChangeCursor(batch.revision, _LAST)


def _apply_requests(indexes: IndexSet, batch: ChangeBatch, liveness: Liveness) -> None:
    votes: defaultdict[int, list[Vote]] = defaultdict(list)
    for vote in batch.votes:
        votes[vote.request_no].append(vote)
    kept: defaultdict[str, list[RememberedRequest]] = defaultdict(list)
    forgotten: defaultdict[str, list[int]] = defaultdict(list)
    for change in batch.requests:
        vector = _unpack_request(change)
        if vector is None:
            forgotten[change.tenant].append(change.no)
        else:
            kept[change.tenant].append(RememberedRequest(change.no, vector, votes[change.no]))
    for tenant in {**kept, **forgotten}:
        index = indexes.by_tenant.setdefault(tenant, TenantIndex(liveness))
        index.remember(kept[tenant], forgotten[tenant])
    if not batch.more_requests:
        indexes.requests = ChangeCursor(batch.revision, _LAST)
    elif batch.requests:
        indexes.requests = ChangeCursor(batch.requests[-1].revision, batch.requests[-1].no)


def _unpack_request(change: RequestChange) -> HalfFloats | None:
    try:
        return unpack_rows(change.vector) if change.vector else None
    except (ValueError, IndexError):
        log.warning("the vector of a remembered request is damaged", request=change.no)
        return None


def _unpack_vectors(embedded: CardVectors) -> HalfFloats | None:
    """Return an agent's vectors; None when they are damaged: it is then found by keywords alone."""
    try:
        return unpack_rows(embedded.vectors)
    except ValueError as error:
        log.warning("vectors are damaged", agent=embedded.no, why=str(error))
        return None
