"""Puts the agents that keywords and vectors found into one order: the semantic search of DISCOVER (G3).

Each text of a request, the whole and its parts, has a column of keyword scores and one of cosines. They are made
comparable column by column, then whole and best part are mixed, then keywords and vectors. The constants are round
numbers tuned on halves of four public benchmarks and kept where the other halves did not lose; around them the
quality is flat.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from registry.vectors import Similar

Hits = tuple[NDArray[np.int32], NDArray[np.float32]]
"""What ``Keywords.scores`` returns for one text: slots, each once, and their scores above nought."""
_Scores = NDArray[np.float32]

_KEYWORDS = 0.8
"""What keywords weigh where vectors weigh 1."""
_DISTINCT = 1.5
"""The best keyword score that makes keywords half of what they could: below it the words are common, or few meet.

Times the logarithm of the number of agents, which is what a word that only one of them has scores by.
"""
_STEEPNESS = 1.5
"""Power of a keyword score relative to the best: having half of the words says less than half as much."""
_EVENNESS = 0.5
"""How far the best cosine of a text is levelled to ``_USUAL``, for one that is near to nothing to tell agents apart."""
_USUAL = 0.55
"""A usual best cosine, of a text and the agent it means."""
_PARTS_OF_VECTORS = 0.7
"""Of the best part in the vectors, the whole request being the rest: a vector of several wishes is near to neither."""
_PARTS_OF_KEYWORDS = 0.5
"""The same in the keywords."""


class Ranked(NamedTuple):
    """Agents, best first; ``scores`` from 0 to 1 go along with ``slots``."""

    slots: NDArray[np.int32]
    scores: NDArray[np.float32]


def rank(keywords: Sequence[Hits], similar: Similar | None, agents: int) -> Ranked:
    """Rank all that either found among so many agents; ``keywords`` has an entry for the whole request, then its parts.

    ``similar``, when there is one, has a column for each of them, in the same order. An agent without vectors, such as
    one registered a moment ago, is taken to be as near as its keywords say. Without any vectors keywords decide alone,
    and scores are relative to the best, which has 1. Equal scores are in order of slots.
    """
    found = [slots for slots, _ in keywords]
    if similar is not None:
        found.append(similar.slots)
    slots = np.unique(np.concatenate(found)).astype(np.int32)
    relative, strength = _relative(slots, keywords, np.float32(_DISTINCT * math.log1p(agents)))
    by_words = _mixed(strength * relative**_STEEPNESS, _PARTS_OF_KEYWORDS)
    if similar is None or not len(similar.slots):
        return _ordered(slots, by_words / max(by_words.max(initial=0), _TINY))
    cosines = np.maximum(np.float32(0.5) * (similar.card + similar.skill), 0)
    best = np.maximum(cosines.max(axis=0), _TINY)
    near = relative * best
    near[np.searchsorted(slots, similar.slots)] = cosines
    level = np.float32(1 - _EVENNESS) + np.float32(_EVENNESS * _USUAL) / best
    total = _mixed(near * level, _PARTS_OF_VECTORS) + np.float32(_KEYWORDS) * by_words
    # Levelling is for the order alone: a request that is near to nothing has low scores.
    return _ordered(slots, total / (level[0] * np.float32(1 + _KEYWORDS)))


_TINY = np.float32(1e-6)


def _relative(slots: NDArray[np.int32], keywords: Sequence[Hits], distinct: np.float32) -> tuple[_Scores, _Scores]:
    """Return by agent and text the keyword score relative to the text's best, and by text how much that best says."""
    relative = np.zeros((len(slots), len(keywords)), np.float32)
    strength = np.zeros(len(keywords), np.float32)
    for column, (hits, scores) in enumerate(keywords):
        if len(hits):
            best = scores.max()
            relative[np.searchsorted(slots, hits), column] = scores / best
            strength[column] = best / (best + distinct)
    return relative, strength


def _mixed(scores: _Scores, parts: float) -> _Scores:
    """Return one score an agent: the whole request's in the first column, and the best of the parts'."""
    whole: _Scores = scores[:, 0]
    if scores.shape[1] == 1:
        return whole
    mixed: _Scores = np.float32(1 - parts) * whole + np.float32(parts) * scores[:, 1:].max(axis=1)
    return mixed


def _ordered(slots: NDArray[np.int32], scores: _Scores) -> Ranked:
    # Slots ascend, and a stable sort keeps them so where scores are equal.
    order = np.argsort(-scores, kind="stable")
    return Ranked(slots[order], np.clip(scores[order], 0, 1))
