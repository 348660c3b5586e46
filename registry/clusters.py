"""Clusters: where in a large index to look first. Agents are listed under the centres their vectors are nearest to."""

from array import array
from collections.abc import Iterable

import numpy as np

from registry.shelves import Halves, Slots, products

PER_CENTRE = 32
"""Vectors for each centre that centres are found from."""

LOOKED_AT = 64
"""Centres whose agents are compared with a query."""

_ROUNDS = 3
_BLOCK = 4096
"""Vectors that are compared with all centres at a time."""


class Clusters:
    """Agents by the centres their vectors are nearest to. Not thread-safe.

    It only says whom to compare: an agent that is listed although it has gone, or has other vectors now, costs time and
    changes nothing, so nobody is ever taken off the lists.
    """

    def __init__(self, centres: Halves) -> None:
        """``centres`` are (n, dims)."""
        self._products = products(centres)
        self._lists = [array("i") for _ in centres]
        self.entries = 0
        """How many lists the agents are on, together."""

    def put(self, parts: Iterable[tuple[Slots, Halves]]) -> None:
        """List agents with their vectors, (n,) with (n, height, dims)."""
        for slots, rows in parts:
            nearest = self._products(rows.reshape(-1, rows.shape[2])).argmax(axis=1).reshape(rows.shape[:2])
            # Each agent once on a list; in order of the lists.
            pairs = np.unique(nearest << 32 | slots[:, None])
            centres, first = np.unique(pairs >> 32, return_index=True)
            for centre, agents in zip(centres.tolist(), np.split(pairs.astype(np.int32), first[1:]), strict=True):
                self._lists[centre].frombytes(agents.tobytes())
            self.entries += len(pairs)

    def near(self, queries: Halves) -> Slots:
        """Return who is listed under the centres nearest to any of the queries, some more than once."""
        cosines = self._products(queries)
        looked_at = min(LOOKED_AT, len(self._lists))
        wanted = np.unique(np.argpartition(-cosines, looked_at - 1, axis=1)[:, :looked_at])
        return np.concatenate([np.frombuffer(self._lists[centre], np.int32) for centre in wanted.tolist()])


def find_centres(sample: Halves, count: int) -> Halves:
    """Return (count, dims) centres of a sample of vectors, which may be all the same: spherical k-means.

    Takes seconds, mostly outside the GIL. The same sample has the same centres.
    """
    rng = np.random.default_rng(0)
    centres = sample[rng.choice(len(sample), count, replace=len(sample) < count)]
    for _ in range(_ROUNDS):
        nearest = products(centres)
        of = np.concatenate(
            [nearest(sample[low : low + _BLOCK]).argmax(axis=1) for low in range(0, len(sample), _BLOCK)]
        )
        order = np.argsort(of, kind="stable")
        found, first = np.unique(of[order], return_index=True)
        sums = np.add.reduceat(sample[order], first, axis=0, dtype=np.float32)
        # A centre that nothing is nearest to begins again somewhere else.
        centres = sample[rng.choice(len(sample), count)]
        centres[found] = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-6)
    return centres
