"""Measures the memory of use on requests whose answers are known: each is searched with all others remembered (G5)."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from registry.evaluation.cases import EvaluationCase
from registry.evaluation.measures import DEPTH
from registry.index.analysis import analyze
from registry.index.memory import RememberedRequest
from registry.index.tenant import IndexQuery, SearchFilter, TenantIndex
from registry.memory.records import USEFUL, Vote
from registry.search.splitting import search_texts


class Remembered(NamedTuple):
    """What is found with the memory of use."""

    ranked: dict[str, list[int]]
    """The first agents, by qid."""
    cpu_seconds: float
    """How much longer all these searches took than without the memory."""


def rank_leaving_one_out(
    index: TenantIndex,
    cases: Sequence[EvaluationCase],
    vectors: Sequence[NDArray[np.float32]],
    numbers: Mapping[str, int],
) -> Remembered:
    """Return what each case finds when all others were served by their relevant cards.

    ``vectors`` are those of each case's texts, ``numbers`` the agents' by the keys of their cards. Each case counts as
    a voter of its own, as for a tenant that is one party (G6). Leaves the index without what it remembered.
    """
    remembered = [
        RememberedRequest(
            at,
            rows[:1].astype(np.float16),
            [Vote(at, numbers[key], at, USEFUL, 0) for key in sorted(case.relevant)],
        )
        for at, (case, rows) in enumerate(zip(cases, vectors, strict=True))
    ]
    index.remember(remembered)
    ranked, cpu = {}, 0.0
    for request, case, rows in zip(remembered, cases, vectors, strict=True):
        index.remember([], [request.no])
        words = [analyze(text) for text in search_texts(case.query)]
        began = time.thread_time()
        found, _ = index.search(IndexQuery(words, rows, remember=True), SearchFilter(), 0)
        searched = time.thread_time()
        index.search(IndexQuery(words, rows), SearchFilter(), 0)
        cpu += 2 * searched - began - time.thread_time()
        ranked[case.qid] = found.numbers[:DEPTH].tolist()
        index.remember([request])
    index.remember([], [request.no for request in remembered])
    return Remembered(ranked, cpu)
