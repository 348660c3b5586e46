"""What waits for the encoder: queries before cards, both bounded."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mediator.errors import BusyError, UnavailableError

MAX_QUERIES: Final = 64
"""Queries that may wait."""
MAX_CARD_TEXTS: Final = 16_384
"""Texts of cards that may wait."""
BATCH_TEXTS: Final = 8
"""Texts of cards that a query may have to wait for."""
BATCH_CHARACTERS: Final = 4000
"""The same, in characters: three long texts."""
LONG: Final = 1200
"""Characters; what is longer is cut by the model and takes no more time."""

_IN_A_ROW: Final = 32  # queries, before cards get a turn


class Job:
    """Texts to encode together, and who waits for them."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.vectors: asyncio.Future[NDArray[np.float32]] = asyncio.get_running_loop().create_future()

    def done(self, vectors: NDArray[np.float32]) -> None:
        """Give the vectors to who waits, if they still do."""
        if not self.vectors.done():
            self.vectors.set_result(vectors)

    def fail(self, error: UnavailableError) -> None:
        """Tell who waits that there will be none."""
        if not self.vectors.done():
            self.vectors.set_exception(error)
            self.vectors.exception()  # not a complaint if they have gone


class Jobs:
    """The two queues of an encoder."""

    def __init__(self) -> None:
        self._queries: deque[Job] = deque()
        self._cards: deque[Job] = deque()
        self._card_texts = 0
        self._row = 0

    def __len__(self) -> int:
        return len(self._queries) + len(self._cards)

    def add_query(self, texts: list[str]) -> Job:
        """Queue a query; raises BusyError when too many wait."""
        if len(self._queries) >= MAX_QUERIES:
            self._queries = deque(job for job in self._queries if not job.vectors.done())
            if len(self._queries) >= MAX_QUERIES:
                raise BusyError(f"{MAX_QUERIES} queries wait for the encoder")
        job = Job(texts)
        self._queries.append(job)
        return job

    def add_cards(self, batches: list[list[str]]) -> list[Job]:
        """Queue batches of cards' texts; raises BusyError when too many texts wait, and queues none of them."""
        texts = sum(map(len, batches))
        if self._card_texts and self._card_texts + texts > MAX_CARD_TEXTS:
            raise BusyError(f"{self._card_texts} texts of cards wait for the encoder")
        jobs = [Job(batch) for batch in batches]
        self._cards += jobs
        self._card_texts += texts
        return jobs

    def take(self) -> Job | None:
        """Take what is next; None when nobody waits any more."""
        while self._queries or self._cards:
            # Under a flood of queries cards still get through, one small batch at a time.
            if self._queries and not (self._cards and self._row >= _IN_A_ROW):
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
        """Tell all whose queries wait, and with ``cards`` those whose cards do."""
        while self._queries:
            self._queries.popleft().fail(error)
        while cards and self._cards:
            self._cards.popleft().fail(error)
        if cards:
            self._card_texts = 0


def batches(texts: list[str]) -> Iterator[list[int]]:
    """Group texts of about the same length, as places in ``texts``; each group is small enough to wait for."""
    group: list[int] = []
    size = 0
    for at in sorted(range(len(texts)), key=lambda at: len(texts[at])):
        length = min(len(texts[at]), LONG)
        if group and (len(group) == BATCH_TEXTS or size + length > BATCH_CHARACTERS):
            yield group
            group, size = [], 0
        group.append(at)
        size += length
    if group:
        yield group
