"""Queries go before cards, cards get their turn, and nobody waits in a queue without end."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import BusyError, UnavailableError
from registry.embedding.embedder import TenantQueues
from registry.embedding.encoder import (
    BATCH_CHARACTERS,
    BATCH_TEXTS,
    LONG,
    MAX_CARD_TEXTS,
    MAX_QUERIES,
    EncodeJob,
    EncodeQueue,
    batches,
)


@given(lengths=st.lists(st.integers(0, 5000), max_size=60))
def test_each_text_is_in_one_small_batch_shortest_first(lengths: list[int]) -> None:
    texts = ["x" * length for length in lengths]
    groups = list(batches(texts))
    assert sorted(at for group in groups for at in group) == list(range(len(texts)))
    assert [lengths[at] for group in groups for at in group] == sorted(lengths)
    assert all(1 <= len(group) <= BATCH_TEXTS for group in groups)
    assert all(sum(min(lengths[at], LONG) for at in group) <= BATCH_CHARACTERS for group in groups)


async def test_queries_go_before_cards_and_each_in_order() -> None:
    jobs = EncodeQueue()
    cards = jobs.add_cards([["a"], ["b"]])
    queries = [jobs.add_query(["c"]), jobs.add_query(["d"])]
    assert [jobs.pop() for _ in range(5)] == [*queries, *cards, None]


async def test_a_flood_of_queries_lets_cards_through() -> None:
    jobs = EncodeQueue()
    (card,) = jobs.add_cards([["card"]])
    taken: list[EncodeJob | None] = []
    while card not in taken and len(taken) < 1000:
        jobs.add_query(["query"])
        taken.append(jobs.pop())
    assert card in taken
    assert len(taken) > 8


async def test_cancelled_jobs_are_dropped_and_make_room() -> None:
    jobs = EncodeQueue()
    queries = [jobs.add_query(["x"]) for _ in range(MAX_QUERIES)]
    with pytest.raises(BusyError):
        jobs.add_query(["x"])
    for job in queries[1:]:
        job.vectors.cancel()
    last = jobs.add_query(["x"])
    assert [jobs.pop() for _ in range(3)] == [queries[0], last, None]


async def test_too_many_texts_of_cards_are_refused_as_a_whole() -> None:
    jobs = EncodeQueue()
    jobs.add_cards([["x"] * 8] * (MAX_CARD_TEXTS // 8))
    with pytest.raises(BusyError):
        jobs.add_cards([["x"]])
    assert jobs.pop() is not None
    with pytest.raises(BusyError):
        jobs.add_cards([["x"] * 8, ["x"]])
    assert len(jobs.add_cards([["x"] * 8])) == 1


async def test_failing_a_queue_fails_its_jobs() -> None:
    jobs = EncodeQueue()
    (card,), query = jobs.add_cards([["a"]]), jobs.add_query(["b"])
    jobs.fail(UnavailableError("gone"), cards=False)
    with pytest.raises(UnavailableError, match="gone"):
        await query.vectors
    assert not card.vectors.done()
    jobs.fail(UnavailableError("gone"), cards=True)
    with pytest.raises(UnavailableError, match="gone"):
        await card.vectors
    assert jobs.pop() is None
    assert len(jobs.add_cards([["x"]] * MAX_CARD_TEXTS)) == MAX_CARD_TEXTS


async def test_a_result_for_a_cancelled_job_is_no_error() -> None:
    for end in (lambda job: job.done(np.zeros((1, 2), np.float32)), lambda job: job.fail(UnavailableError("gone"))):
        job = EncodeJob(["x"], urgent=True)
        job.vectors.cancel()
        end(job)
        with pytest.raises(asyncio.CancelledError):
            await job.vectors


def filled(capacity: int, **waiting: range) -> TenantQueues:
    queues = TenantQueues(capacity)
    for tenant, numbers in waiting.items():
        for number in numbers:
            assert queues.add(tenant, number)
    return queues


def test_tenants_are_served_in_turn_and_each_in_its_order() -> None:
    queues = filled(100, acme=range(10), globex=range(20, 21), initech=range(30, 32))
    assert queues.pop(4) == [0, 20, 30, 1]
    assert queues.add("globex", 21)
    assert queues.pop(3) == [31, 2, 21]
    assert queues.pop(100) == [3, 4, 5, 6, 7, 8, 9]
    assert (queues.pop(1), len(queues)) == ([], 0)


def test_a_number_waits_once() -> None:
    queues = filled(2, acme=range(2))
    assert queues.add("acme", 1)
    assert queues.pop(3) == [0, 1]


def test_the_longest_queue_makes_room() -> None:
    queues = filled(4, acme=range(4))
    assert not queues.add("globex", 10)
    assert not queues.add("acme", 4)
    assert len(queues) == 4
    assert queues.pop(9) == [0, 10, 1, 2]
