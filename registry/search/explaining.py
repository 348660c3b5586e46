"""Explains why agents stand where they do in the answer to a request (G3)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mediator.mailboxes.send_only import is_send_only
from registry.agents.records import Agent
from registry.cards.card import read_shown
from registry.index.analysis import analyze, spell
from registry.index.document import IndexDocument
from registry.index.ranking import KEYWORDS, MEMORY, VECTORS
from registry.index.tenant import IndexMatch, IndexQuery, TenantIndex
from registry.requests import Explanation, KeywordMatch, RerankMatch, VectorMatch
from registry.search.snapshots import ExplainedRequest

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
    matches = index.match(IndexQuery([analyze(text) for text in texts], vectors), [agent.no for _, agent in page])
    words = spell(request.text)
    explanations = []
    for place, agent in page:
        shares = {name: float(share[place]) for name, share in request.shares.items()}
        match = matches.get(agent.no, _NOTHING)
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
