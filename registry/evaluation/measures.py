"""Rates answers by nDCG@10, Recall@1, 5 and 10 and hit@1, each with a confidence interval."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from registry.evaluation.cases import EvaluationCase

MEASURES = ("nDCG@10", "Recall@1", "Recall@5", "Recall@10", "hit@1")
DEPTH = 10
"""Ranks of an answer that count."""
SAMPLES = 1000
_SEED = 0
_GAINS = tuple(1 / math.log2(place + 2) for place in range(DEPTH))


class ConfidenceInterval(NamedTuple):
    """A mean with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def rate(relevant: Collection[str], ranked: Sequence[str]) -> tuple[float, ...]:
    """Return the :data:`MEASURES` of one ranking; a duplicate counts at its first rank."""
    wanted = set(relevant)
    right = [key in wanted for key in list(dict.fromkeys(ranked))[:DEPTH]]
    gained = sum(gain for gain, hit in zip(_GAINS, right, strict=False) if hit)
    recalls = (sum(right[:depth]) / len(wanted) for depth in (1, 5, 10))
    return (gained / sum(_GAINS[: len(wanted)]), *recalls, float(any(right[:1])))


def rate_all(cases: Sequence[EvaluationCase], run: Mapping[str, Sequence[str]]) -> NDArray[np.float64]:
    """Return a row of :data:`MEASURES` for each case; zeros if the run has no answer."""
    return np.array([rate(case.relevant, run.get(case.qid, ())) for case in cases])


def perfect_order(cases: Sequence[EvaluationCase], run: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the first ``DEPTH`` of each answer with the relevant ones first: what a perfect re-ranking would make."""
    return {case.qid: sorted(run.get(case.qid, ())[:DEPTH], key=lambda key: key not in case.relevant) for case in cases}


def intervals(rows: NDArray[np.float64]) -> list[ConfidenceInterval]:
    """Return the mean and bootstrap interval of each column, always the same for the same rows.

    For the difference of two runs' rows this is a paired bootstrap: an interval without 0 is a significant difference.
    """
    random = np.random.default_rng(_SEED)
    means = np.array([rows[random.integers(len(rows), size=len(rows))].mean(axis=0) for _ in range(SAMPLES)])
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    return [ConfidenceInterval(*map(float, column)) for column in zip(rows.mean(axis=0), low, high, strict=True)]
