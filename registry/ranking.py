"""Puts the agents that keywords and vectors found into one order: the semantic search of DISCOVER (G3)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from registry.vectors import Similar

Hits = tuple[NDArray[np.int32], NDArray[np.float32]]
"""What ``Keywords.scores`` returns for one text: slots, each once, and their scores above nought."""


class Ranked(NamedTuple):
    """Agents, best first; ``scores`` from 0 to 1 go along with ``slots``."""

    slots: NDArray[np.int32]
    scores: NDArray[np.float32]


def rank(keywords: Sequence[Hits], similar: Similar | None) -> Ranked:
    """Rank all agents that either found; ``keywords`` has an entry for the whole request, then one for each part.

    ``similar``, when there is one, has a column for each of them, in the same order. An agent without vectors, such as
    one registered a moment ago, is ranked by its keywords. Equal scores are in order of slots.
    """
    found = [slots for slots, _ in keywords]
    if similar is not None:
        found.append(similar.slots)
    slots = np.unique(np.concatenate(found)).astype(np.int32)
    by_words = np.zeros((len(slots), len(keywords)), np.float32)
    for column, (hits, scores) in enumerate(keywords):
        if len(hits):
            by_words[np.searchsorted(slots, hits), column] = scores / scores.max()
    total = _KEYWORDS * _mixed(by_words, _PARTS_OF_KEYWORDS)
    if similar is not None and len(similar.slots):
        by_meaning = np.float32(0.5) * (similar.card + similar.skill)
        total[np.searchsorted(slots, similar.slots)] += _mixed(by_meaning, _PARTS_OF_VECTORS)
    scores = np.clip(total / (1 + _KEYWORDS), 0, 1).astype(np.float32)
    order = np.lexsort((slots, -scores))
    return Ranked(slots[order], scores[order])


_KEYWORDS = 0.4
"""Of the keywords, where the vectors weigh 1."""
_PARTS_OF_KEYWORDS = 0.3
"""Of the best part in the keywords, the whole request being the rest."""
_PARTS_OF_VECTORS = 0.5


def _mixed(scores: NDArray[np.float32], parts: float) -> NDArray[np.float32]:
    """Return one score an agent: the whole request's in the first column, and the best of the parts'."""
    if scores.shape[1] == 1:
        return scores[:, 0]
    mixed: NDArray[np.float32] = (1 - parts) * scores[:, 0] + parts * scores[:, 1:].max(axis=1)
    return mixed
