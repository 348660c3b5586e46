"""Ranks what keywords and vectors found for a request: hybrid search, the semantic mode of DISCOVER (G3).

Each text of a request, the whole and its parts, has a column of keyword scores and one of cosines. Each column is
normalized, then the whole is mixed with the best part, then keywords with vectors. The constants are round numbers,
tuned on one half of the requests of four public benchmarks and validated on the other; quality is flat around them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from registry.index.vectors import Similarities

KeywordHits = tuple[NDArray[np.int32], NDArray[np.float32]]
"""What ``KeywordIndex.search`` returns for one text: distinct slots and their positive scores."""
_Scores = NDArray[np.float32]

MAX_RANKED = 1000
"""Agents of a search on all of its pages together."""
KEYWORDS, VECTORS, MEMORY = "keywords", "vectors", "memory"
"""Names of the shares of a score."""

_KEYWORDS = 0.8
"""Weight of keywords, relative to vectors."""
_DISTINCT = 1.5
"""Best keyword score of a text at which keywords get half of their weight: below it its words are common, or few match.

Times the logarithm of the number of agents, the factor by which a word that only one of them has scores.
"""
_STEEPNESS = 1.5
"""Power of a keyword score relative to the best: an agent with half of the words gets less than half."""
_EVENNESS = 0.5
"""How far the best cosine of a text is scaled to ``_USUAL``, so that a text near to nothing tells agents apart too."""
_USUAL = 0.55
"""A typical cosine of a text and the agent it asks for."""
_PARTS_OF_VECTORS = 0.7
"""Weight of the best part against the whole request: one vector for several wishes is near to none of them."""
_PARTS_OF_KEYWORDS = 0.5
"""The same for keywords."""

_ALLOWANCE = 0.5
"""Part of the greatest lift of a request that an agent gets of which nothing is known, if it fits as well as any."""
_FIT = 4
"""Power of such an agent's score relative to the best: one that fits half as well gets a sixteenth of that."""


class Lifts(NamedTuple):
    """What the memory of use adds to the scores of agents (G5)."""

    slots: NDArray[np.int32]
    """Distinct."""
    amounts: NDArray[np.float32]
    knows: Callable[[NDArray[np.int32]], NDArray[np.bool_]]
    """Returns of which slots the memory knows anything."""


class RankedSlots(NamedTuple):
    """Agents, best first, with a score from 0 to 1 each."""

    slots: NDArray[np.int32]
    scores: NDArray[np.float32]
    shares: Mapping[str, NDArray[np.float32]]
    """What each way of searching gave to the scores of the best :data:`MAX_RANKED`: they add up to them."""


def rank(
    keywords: Sequence[KeywordHits], similar: Similarities | None, agents: int, lifts: Lifts | None = None
) -> RankedSlots:
    """Rank all agents that keywords or vectors found; ``agents`` is how many there are in all.

    ``keywords`` has an entry for the whole request, then one for each part; ``similar`` has a column for each of them,
    in the same order. An agent without vectors, such as one registered a moment ago, is assumed to be as near as its
    keywords say. Without any vectors keywords decide alone, and the best score is 1. Ties are in order of slots.
    """
    found = [slots for slots, _ in keywords]
    if similar is not None:
        found.append(similar.slots)
    if lifts is not None:
        found.append(lifts.slots)
    slots = np.unique(np.concatenate(found)).astype(np.int32)
    relative, strength = _relative(slots, keywords, np.float32(_DISTINCT * math.log1p(agents)))
    by_words = _mixed(strength * relative**_STEEPNESS, _PARTS_OF_KEYWORDS)
    if similar is None or not len(similar.slots):
        return _ordered(slots, {KEYWORDS: by_words / max(by_words.max(initial=0), _TINY)})
    cosines = np.maximum(np.float32(0.5) * (similar.card + similar.skill), 0)
    best = np.maximum(cosines.max(axis=0), _TINY)
    near = relative * best
    near[np.searchsorted(slots, similar.slots)] = cosines
    level = np.float32(1 - _EVENNESS) + np.float32(_EVENNESS * _USUAL) / best
    # Scaling is for the order alone: a request that is near to nothing keeps low scores.
    scale = level[0] * np.float32(1 + _KEYWORDS)
    shares = {
        KEYWORDS: np.float32(_KEYWORDS) * by_words / scale,
        VECTORS: _mixed(near * level, _PARTS_OF_VECTORS) / scale,
    }
    if lifts is not None:
        shares[MEMORY] = _by_memory(slots, shares[KEYWORDS] + shares[VECTORS], lifts)
    return _ordered(slots, shares)


_TINY = np.float32(1e-6)


def _relative(
    slots: NDArray[np.int32], keywords: Sequence[KeywordHits], distinct: np.float32
) -> tuple[_Scores, _Scores]:
    """Return keyword scores by agent and text, relative to the text's best, and by text how telling that best is."""
    relative = np.zeros((len(slots), len(keywords)), np.float32)
    strength = np.zeros(len(keywords), np.float32)
    for column, (hits, scores) in enumerate(keywords):
        if len(hits):
            best = scores.max()
            relative[np.searchsorted(slots, hits), column] = scores / best
            strength[column] = best / (best + distinct)
    return relative, strength


def _mixed(scores: _Scores, parts: float) -> _Scores:
    """Return one score for each agent, mixed of the whole request's (the first column) and the best part's."""
    whole: _Scores = scores[:, 0]
    if scores.shape[1] == 1:
        return whole
    mixed: _Scores = np.float32(1 - parts) * whole + np.float32(parts) * scores[:, 1:].max(axis=1)
    return mixed


def _by_memory(slots: NDArray[np.int32], scores: _Scores, lifts: Lifts) -> _Scores:
    """Return the lift of each agent: its own, or an allowance where nothing is known of it yet (G7)."""
    own = np.zeros(len(slots), np.float32)
    own[np.searchsorted(slots, lifts.slots)] = lifts.amounts
    fit = (scores / max(scores.max(initial=0), _TINY)) ** _FIT
    allowance = np.float32(_ALLOWANCE) * own.max(initial=0) * fit
    return np.where(lifts.knows(slots), own, allowance).astype(np.float32)


def _ordered(slots: NDArray[np.int32], shares: Mapping[str, _Scores]) -> RankedSlots:
    scores = sum(shares.values(), np.zeros(len(slots), np.float32))
    # Slots are ascending, and a stable sort keeps ties in that order.
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    best = order[:MAX_RANKED]
    # A score above 1 is lowered to 1, and its shares with it.
    over: _Scores = np.maximum(scores[:MAX_RANKED], np.float32(1))
    return RankedSlots(
        slots[order], np.clip(scores, 0, 1), {name: share[best] / over for name, share in shares.items()}
    )
