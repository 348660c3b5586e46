"""The queues of an encoder: queries before cards, both bounded."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mediator.errors import BusyError, UnavailableError

MAX_QUERIES: Final = 64
"""Queries in the queue."""
MAX_CARD_TEXTS: Final = 16_384
"""Texts of cards in the queue."""
BATCH_TEXTS: Final = 8
"""Texts of cards in a job, for which a query may have to wait."""
BATCH_CHARACTERS: Final = 4000
"""The same, in characters: three long texts."""
LONG: Final = 1200
"""Characters from which the model truncates a text, so that it takes no more time."""

_MAX_IN_A_ROW: Final = 32  # queries, before cards get a turn


class EncodeJob:
    """Texts to encode together, with a future for their vectors."""

    def __init__(self, texts: list[str], *, urgent: bool) -> None:
        """``urgent``: they are a query's."""
        self.texts = texts
        self.urgent = urgent
        self.attempts = 0
        """How many workers have died over it."""
        self.vectors: asyncio.Future[NDArray[np.float32]] = asyncio.get_running_loop().create_future()

    def done(self, vectors: NDArray[np.float32]) -> None:
        """Set the vectors, unless the waiting call was cancelled."""
        if not self.vectors.done():
            self.vectors.set_result(vectors)

    def fail(self, error: UnavailableError) -> None:
        """Set the error, unless the waiting call was cancelled."""
        if not self.vectors.done():
            self.vectors.set_exception(error)
            self.vectors.exception()  # mark it as retrieved, in case nobody awaits it any more


class EncodeQueue:
    """Two queues of jobs, of queries and of cards."""

    def __init__(self) -> None:
        self._queries: deque[EncodeJob] = deque()
        self._cards: deque[EncodeJob] = deque()
        self._card_texts = 0
        self._row = 0

    def add_query(self, texts: list[str]) -> EncodeJob:
        """Add a query; raises BusyError when too many wait."""
        if len(self._queries) >= MAX_QUERIES:
            self._queries = deque(job for job in self._queries if not job.vectors.done())
            if len(self._queries) >= MAX_QUERIES:
                raise BusyError(f"{MAX_QUERIES} queries wait for the encoder")
        job = EncodeJob(texts, urgent=True)
        self._queries.append(job)
        return job

    def add_cards(self, batches: list[list[str]]) -> list[EncodeJob]:
        """Add batches of cards' texts, all or none; raises BusyError when too many texts wait."""
        texts = sum(map(len, batches))
        if self._card_texts and self._card_texts + texts > MAX_CARD_TEXTS:
            raise BusyError(f"{self._card_texts} texts of cards wait for the encoder")
        jobs = [EncodeJob(batch, urgent=False) for batch in batches]
        self._cards += jobs
        self._card_texts += texts
        return jobs

    def put_back(self, job: EncodeJob) -> None:
        """Let texts of cards be the next ones of their kind."""
        self._cards.appendleft(job)
        self._card_texts += len(job.texts)

    def take(self, *, only_queries: bool = False) -> EncodeJob | None:
        """Take the next job that is still awaited, of queries alone if asked so; None if there is none."""
        while self._queries or (self._cards and not only_queries):
            # Even under a flood of queries cards get a turn, one small batch at a time.
            if self._queries and (only_queries or not (self._cards and self._row >= _MAX_IN_A_ROW)):
                job = self._queries.popleft()
                self._row += 1
            else:
                job = self._cards.popleft()
                self._card_texts -= len(job.texts)
                self._row = 0
            if not job.vectors.done():
                return job
        return None

    def fail(self, error: UnavailableError, *, cards: bool) -> None:
        """Fail all queries, and with ``cards`` all cards."""
        while self._queries:
            self._queries.popleft().fail(error)
        while cards and self._cards:
            self._cards.popleft().fail(error)
        if cards:
            self._card_texts = 0


def batches(texts: list[str], most: int = BATCH_TEXTS) -> Iterator[list[int]]:
    """Group texts of similar length, as positions in ``texts``; each group is small enough for a query to wait for.

    ``most``: texts of a group; the characters of :data:`BATCH_CHARACTERS` are for :data:`BATCH_TEXTS` of them.
    """
    group: list[int] = []
    size = 0
    for at in sorted(range(len(texts)), key=lambda at: len(texts[at])):
        length = min(len(texts[at]), LONG)
        if group and (len(group) >= most or size + length > BATCH_CHARACTERS * most // BATCH_TEXTS):
            yield group
            group, size = [], 0
        group.append(at)
        size += length
    if group:
        yield group
