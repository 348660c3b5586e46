"""Clusters: where in a large index to look first. Agents are listed under the centres they are nearest to."""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from registry.shelves import Floats, Halves, Slots, products

PER_CENTRE = 32
"""Vectors for each centre that centres are found from."""

LOOKED_AT = 128
"""Centres whose agents are compared with a query."""

_ROUNDS = 3
_BLOCK = 4096
"""Vectors that are compared with all centres at a time."""


class Clusters:
    """Agents by centres: on a list for each of their skills, or fewer. Not thread-safe.

    It only says whom to compare: an agent that is listed although it has gone, or has other vectors now, costs time and
    changes nothing, so nobody is ever taken off the lists.
    """

    def __init__(self, centres: Halves) -> None:
        """``centres`` are (n, dims)."""
        self._products = products(centres)
        self._lists = [array("i") for _ in centres]
        self.put_in = 0
        """How many vectors were listed since these centres were found, also such as have gone."""

    def put(self, parts: Iterable[tuple[Slots, Halves]]) -> None:
        """List agents with their vectors, (n,) with (n, height, dims)."""
        for slots, rows in parts:
            both = _both(rows)
            nearest = self._products(both.reshape(-1, both.shape[2])).argmax(axis=1).reshape(both.shape[:2])
            # Each agent once on a list; in order of the lists.
            pairs = np.unique(nearest << 32 | slots[:, None])
            centres, first = np.unique(pairs >> 32, return_index=True)
            for centre, agents in zip(centres.tolist(), np.split(pairs.astype(np.int32), first[1:]), strict=True):
                self._lists[centre].frombytes(agents.tobytes())
            self.put_in += rows.shape[0] * rows.shape[1]

    def near(self, queries: Halves) -> Slots:
        """Return who is listed under the centres nearest to any of the queries, some more than once."""
        cosines = self._products(queries)
        looked_at = min(LOOKED_AT, len(self._lists))
        wanted = np.unique(np.argpartition(-cosines, looked_at - 1, axis=1)[:, :looked_at])
        return np.concatenate([np.frombuffer(self._lists[centre], np.int32) for centre in wanted.tolist()])


def find_centres(sample: Sequence[Halves], count: int) -> Halves:
    """Return (count, dims) centres of vectors of some agents, (n, height, dims) each: spherical k-means.

    Takes seconds, mostly outside the GIL. The same sample has the same centres.
    """
    rng = np.random.default_rng(0)
    points = np.concatenate([_unit(_both(rows).reshape(-1, rows.shape[2])) for rows in sample])
    centres = points[rng.choice(len(points), count)]
    for _ in range(_ROUNDS):
        nearest = products(centres)
        of = np.concatenate([nearest(points[at : at + _BLOCK]).argmax(axis=1) for at in range(0, len(points), _BLOCK)])
        order = np.argsort(of, kind="stable")
        found, first = np.unique(of[order], return_index=True)
        sums = np.add.reduceat(points[order], first, axis=0, dtype=np.float32)
        # A centre that nothing is nearest to begins again somewhere else.
        centres = points[rng.choice(len(points), count)]
        centres[found] = _unit(sums)
    return centres


def _both(rows: Halves) -> Halves:
    """Return the card and each skill in one vector, as near to a request as the two together."""
    return rows[:, :1] + rows[:, 1:] if rows.shape[1] > 1 else rows


def _unit(rows: Floats | Halves) -> Halves:
    lengths = np.linalg.norm(rows.astype(np.float32, copy=False), axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-6), np.float16)
