"""What changed in the store, read in one go and brought into the indexes in another."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from mediator.agents.ports import ChangePlace, Reread
from mediator.agents.records import Change, Embedded, Liveness
from mediator.errors import BadRequestError
from mediator.store.base import Transaction
from registry.cards import read_card
from registry.digest import Digest
from registry.index import Index
from registry.packing import HalfFloats, unpack_rows

CHUNK = 500
"""Changes read at once."""
PART = 50
"""Changes of which digests and vectors are read until it is asked whether they are too many."""
CHUNK_BYTES = 8 * 1024 * 1024
"""Of digests and vectors read at once: of digests ten times as much is in memory then."""

_START = ChangePlace(0, 0)
_LAST = (1 << 63) - 1

log = structlog.get_logger("registry")


@dataclass(slots=True)
class _Known:
    tenant: str
    card_revision: int = 0
    embedded: int = 0


@dataclass(slots=True)
class View:
    """The indexes as of a place in the order of changes."""

    space: str
    indexes: dict[str, Index] = field(default_factory=dict)
    known: dict[int, _Known] = field(default_factory=dict)
    place: ChangePlace = _START

    def has(self, revision: int) -> bool:
        """Whether all changes up to a revision are in the indexes."""
        return self.place >= ChangePlace(revision, _LAST)


@dataclass(slots=True)
class News:
    """Changes behind a view, with what it does not know of them."""

    revision: int
    """All changes up to it are here, or in chunks before, unless there are ``more``."""
    changes: list[Change]
    digests: dict[int, Digest]
    vectors: dict[int, Embedded]
    reread: list[Reread]
    """Digests of a former version, as they should be kept now."""
    more: bool


def look(tx: Transaction, view: View) -> News:
    """Read what changed behind a view, some of it."""
    # First the revision: what is committed after it was read is in the next look.
    revision = tx.agents.revision()
    changes = tx.agents.changes(view.place, view.space, CHUNK)
    news = News(revision, [], {}, {}, [], len(changes) == CHUNK)
    size = 0
    for start in range(0, len(changes), PART):
        if size > CHUNK_BYTES:
            news.more = True
            break
        size += _read(tx, view, changes[start : start + PART], news)
    return news


def _read(tx: Transaction, view: View, changes: Sequence[Change], news: News) -> int:
    """Add changes to the news, with what of them is not known yet, and return how many bytes that was."""
    unknown = _Known("")
    wanted, embedded = [], []
    for change in changes:
        if change.removed:
            continue
        known = view.known.get(change.no, unknown)
        if change.card_revision != known.card_revision:
            wanted.append(change.no)
        if change.embedded == change.card_revision != known.embedded:
            embedded.append(change.no)
    packed = tx.agents.terms(wanted) if wanted else {}
    vectors = tx.vectors.read(view.space, embedded) if embedded else {}
    digests, reread = _digests(tx, packed)
    news.changes += changes
    news.digests |= digests
    news.vectors |= vectors
    news.reread += reread
    return sum(map(len, packed.values())) + sum(len(one.vectors) for one in vectors.values())


def _digests(tx: Transaction, kept: Mapping[int, bytes]) -> tuple[dict[int, Digest], list[Reread]]:
    """Return digests, and those that a former version of this program had kept as they are to be kept."""
    digests: dict[int, Digest] = {}
    old = []
    for no, packed in kept.items():
        try:
            digests[no] = Digest.unpack(packed)
        except ValueError:
            old.append(no)
    reread = []
    for no, agent in tx.agents.pick(old).items() if old else ():
        try:
            digests[no] = Digest.of(read_card(agent.card))
        except BadRequestError as error:
            log.warning("a card is not read any more", agent=no, field=error.field)
            continue
        reread.append(Reread(no, agent.card_revision, digests[no].pack()))
    return digests, reread


def apply(view: View, news: News, liveness: Liveness) -> None:
    """Bring the indexes of a view up to date; others may search in them meanwhile."""
    cards: defaultdict[str, list[tuple[int, Digest]]] = defaultdict(list)
    signs: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    vectors: defaultdict[str, list[tuple[int, HalfFloats]]] = defaultdict(list)
    gone: defaultdict[str, list[int]] = defaultdict(list)
    for change in news.changes:
        no = change.no
        if change.removed:
            known = view.known.pop(no, None)
            if known is not None:
                gone[known.tenant].append(no)
            continue
        known = view.known.get(no)
        digest = news.digests.get(no)
        if known is None:
            if digest is None:
                continue
            known = view.known[no] = _Known(change.tenant)
        if digest is not None:
            cards[change.tenant].append((no, digest))
            known.card_revision, known.embedded = change.card_revision, 0
        signs[change.tenant].append((no, change.ttl, change.seen_at))
        embedded = news.vectors.get(no)
        if embedded is not None and embedded.card_revision == known.card_revision:
            rows = _rows(embedded)
            if rows is not None:
                vectors[change.tenant].append((no, rows))
                known.embedded = embedded.card_revision
    for tenant, numbers in gone.items():
        view.indexes[tenant].remove(numbers)
    for tenant in signs:
        index = view.indexes.setdefault(tenant, Index(liveness))
        index.put(cards[tenant])
        index.see(signs[tenant])
        index.embed(vectors[tenant])
    if news.more:
        view.place = ChangePlace(news.changes[-1].revision, news.changes[-1].no)
    else:
        # Changes of later transactions may be among them, and come again.
        view.place = ChangePlace(news.revision, _LAST)


def _rows(embedded: Embedded) -> HalfFloats | None:
    """Return an agent's vectors; None for damaged ones, without which it is found by keywords."""
    try:
        return unpack_rows(embedded.vectors)
    except ValueError as error:
        log.warning("vectors are damaged", agent=embedded.no, why=str(error))
        return None
