"""Keywords: which agents of one tenant have the words of a request, and how much these say."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from registry.words import Terms


class Keywords:
    """The words of one tenant's agents, by slot. Not thread-safe."""

    def __len__(self) -> int:
        """Return how many agents there are."""
        raise NotImplementedError

    def load(self, items: Iterable[tuple[int, Terms]]) -> None:
        """Take many agents, in less time than one by one."""
        raise NotImplementedError

    def put(self, slot: int, terms: Terms) -> None:
        """Take an agent, new or instead of what was there."""
        raise NotImplementedError

    def remove(self, slot: int) -> None:
        """Forget an agent; nothing happens where there is none."""
        raise NotImplementedError

    def scores(self, words: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the slots that have any of the words, each once and in no order, with their scores above nought."""
        raise NotImplementedError
