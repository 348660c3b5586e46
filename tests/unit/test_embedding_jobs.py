"""Queries go before cards, cards get their turn, and nobody waits in a queue without end."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import BusyError, UnavailableError
from registry.embedding.jobs import (
    BATCH_CHARACTERS,
    BATCH_TEXTS,
    LONG,
    MAX_CARD_TEXTS,
    MAX_QUERIES,
    Job,
    Jobs,
    batches,
)


@given(lengths=st.lists(st.integers(0, 5000), max_size=60))
def test_every_text_is_in_one_small_batch_and_shorter_ones_come_first(lengths: list[int]) -> None:
    texts = ["x" * length for length in lengths]
    groups = list(batches(texts))
    assert sorted(at for group in groups for at in group) == list(range(len(texts)))
    assert [lengths[at] for group in groups for at in group] == sorted(lengths)
    assert all(1 <= len(group) <= BATCH_TEXTS for group in groups)
    assert all(sum(min(lengths[at], LONG) for at in group) <= BATCH_CHARACTERS for group in groups)


async def test_queries_go_before_cards_and_each_in_order() -> None:
    jobs = Jobs()
    cards = jobs.add_cards([["a"], ["b"]])
    queries = [jobs.add_query(["c"]), jobs.add_query(["d"])]
    assert [jobs.take() for _ in range(5)] == [*queries, *cards, None]


async def test_a_flood_of_queries_lets_cards_through() -> None:
    jobs = Jobs()
    (card,) = jobs.add_cards([["card"]])
    taken: list[Job | None] = []
    while card not in taken and len(taken) < 1000:
        jobs.add_query(["query"])
        taken.append(jobs.take())
    assert card in taken
    assert len(taken) > 8


async def test_what_nobody_waits_for_any_more_is_left_out_and_makes_room() -> None:
    jobs = Jobs()
    queries = [jobs.add_query(["x"]) for _ in range(MAX_QUERIES)]
    with pytest.raises(BusyError):
        jobs.add_query(["x"])
    for job in queries[1:]:
        job.vectors.cancel()
    last = jobs.add_query(["x"])
    assert [jobs.take() for _ in range(3)] == [queries[0], last, None]


async def test_cards_are_bounded_by_their_texts_and_refused_as_a_whole() -> None:
    jobs = Jobs()
    jobs.add_cards([["x"] * 8] * (MAX_CARD_TEXTS // 8))
    with pytest.raises(BusyError):
        jobs.add_cards([["x"]])
    assert jobs.take() is not None
    with pytest.raises(BusyError):
        jobs.add_cards([["x"] * 8, ["x"]])
    assert len(jobs.add_cards([["x"] * 8])) == 1


async def test_whoever_waits_is_told_that_it_is_over() -> None:
    jobs = Jobs()
    (card,), query = jobs.add_cards([["a"]]), jobs.add_query(["b"])
    jobs.fail(UnavailableError("gone"), cards=False)
    with pytest.raises(UnavailableError, match="gone"):
        await query.vectors
    assert not card.vectors.done()
    jobs.fail(UnavailableError("gone"), cards=True)
    with pytest.raises(UnavailableError, match="gone"):
        await card.vectors
    assert jobs.take() is None
    assert len(jobs.add_cards([["x"]] * MAX_CARD_TEXTS)) == MAX_CARD_TEXTS


async def test_an_answer_for_somebody_who_has_gone_is_no_error() -> None:
    for end in (lambda job: job.done(np.zeros((1, 2), np.float32)), lambda job: job.fail(UnavailableError("gone"))):
        job = Job(["x"])
        job.vectors.cancel()
        end(job)
        with pytest.raises(asyncio.CancelledError):
            await job.vectors
