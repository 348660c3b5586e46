"""The remembered requests of one tenant in memory: which agents they lift for a request alike, and how much (G5, G6).

A request's nearest neighbours vote for the agents that served them, each voter once for each agent, by how near the
neighbour is and how long ago it was. An agent gets its share of all that was said nearby, so a voter alone moves
little, and less the more others have said. The constants are round numbers, tuned on one half of the requests of four
public benchmarks, leaving each request out of what is remembered.
"""

from collections import Counter
from collections.abc import Iterable
from threading import Lock
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mediator.mailboxes.bounds import DAY
from registry.index.vectors import Halves, VectorIndex
from registry.records import USEFUL, Vote

NEIGHBOURS: Final = 64
"""Remembered requests that are listened to."""
MAX_PER_VOTER: Final = 4
"""Requests in which a voter is heard, the nearest ones; further ones take no other voter's place."""
MAX_COMPARED: Final = 1024
"""Requests that are looked at where one voter's crowd out those of others."""
MIN_COSINE: Final = 0.3
"""Cosine from which on a request says something about another one."""
MAX_LIFT: Final = 0.3
"""The greatest lift; scores go to 1."""
DOUBT: Final = 1.0
"""Voters who would have to agree on the very same request for half of the greatest lift."""
HALF_LIFE: Final = 28 * DAY
"""Milliseconds after which a vote counts half."""
LARGE: Final = 20_000
"""Requests from which on only some are compared."""
PROBES: Final = 8
"""Clusters whose requests are compared with a query: of a million, their neighbours weigh .99 of the nearest ones."""

_VOTE = np.dtype([("agent", "<i8"), ("voter", "<i8"), ("value", "<i8"), ("at", "<i8")])
_NOBODY = np.zeros(0, np.int32)


class RememberedRequest(NamedTuple):
    """A request with its votes."""

    id: int
    vector: Halves
    """(1, dims), of length one."""
    votes: list[Vote]


class RequestMemory:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._vectors: VectorIndex | None = None
        self._slots: dict[int, int] = {}
        self._votes: list[bytes] = []
        """By slot."""
        self._free: list[int] = []
        self._praised: Counter[int] = Counter()
        """How many votes there are for an agent."""

    def __len__(self) -> int:
        """Return how many requests are remembered."""
        return len(self._slots)

    def put(self, requests: Iterable[RememberedRequest]) -> None:
        """Add requests, or replace them."""
        for request in requests:
            self.remove([request.id])
            if self._vectors is None:
                self._vectors = VectorIndex(request.vector.shape[1], LARGE, PROBES)
            if request.vector.shape != (1, self._vectors.dims):
                continue
            if self._free:
                slot = self._free.pop()
            else:
                slot = len(self._votes)
                self._votes.append(b"")
            self._slots[request.id] = slot
            self._votes[slot] = np.array([vote[1:] for vote in request.votes], _VOTE).tobytes()
            self._praised.update(vote.agent_id for vote in request.votes if vote.value > 0)
            self._vectors.add(slot, request.vector)

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove requests; unknown ones are ignored."""
        for request_id in numbers:
            slot = self._slots.pop(request_id, None)
            if slot is not None and self._vectors is not None:
                votes = np.frombuffer(self._votes[slot], _VOTE)
                for agent_id in votes["agent"][votes["value"] > 0].tolist():
                    self._praised[agent_id] -= 1
                    if not self._praised[agent_id]:
                        del self._praised[agent_id]
                self._votes[slot] = b""
                self._vectors.remove(slot)
                self._free.append(slot)

    def optimize(self, lock: Lock) -> bool:
        """See :meth:`registry.index.vectors.VectorIndex.optimize`."""
        return self._vectors is not None and self._vectors.optimize(lock)

    def has_praise_for(self, agent_id: int) -> bool:
        """Return whether anybody has said a word for an agent; one against it is none that it is known by (G7)."""
        return agent_id in self._praised

    def lifts(self, vector: NDArray[np.float32], now: int) -> dict[int, float]:
        """Return by how much agents are lifted for a request, (dims,), by their numbers; from 0 to :data:`MAX_LIFT`."""
        if self._vectors is None or not self._slots or len(vector) != self._vectors.dims:
            return {}
        near, votes, request = self._nearest(self._vectors, vector, NEIGHBOURS)
        heard = _heard(votes["voter"], request)
        if len(heard) < len(near) == NEIGHBOURS:
            near, votes, request = self._nearest(self._vectors, vector, MAX_COMPARED)
            heard = _heard(votes["voter"], request)[:NEIGHBOURS]
        if len(heard) < len(near):
            kept = np.isin(request, heard)
            votes, request = votes[kept], request[kept]
        faded = 0.5 ** (np.maximum(now - votes["at"], 0) / HALF_LIFE)
        return _shares(votes["agent"], votes["voter"], near[request] * faded * votes["value"] / USEFUL)

    def _nearest(
        self, vectors: VectorIndex, vector: NDArray[np.float32], limit: int
    ) -> tuple[NDArray[np.float64], NDArray[np.void], NDArray[np.intp]]:
        """Return how near the nearest requests are, nearest first; all votes on them, and which request each is on."""
        found = vectors.search(vector[None], limit, _NOBODY)
        nearness = (found.card[:, 0].astype(np.float64) - MIN_COSINE) / (1 - MIN_COSINE)
        order = np.argsort(-nearness, kind="stable")[: np.count_nonzero(nearness > 0)]
        packed = [self._votes[slot] for slot in found.slots[order].tolist()]
        votes = np.frombuffer(b"".join(packed), _VOTE)
        return (
            nearness[order],
            votes,
            np.repeat(np.arange(len(order)), [len(each) // _VOTE.itemsize for each in packed]),
        )


def _heard(voters: NDArray[np.int64], requests: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the requests, by nearness, that have a voter who is not heard in :data:`MAX_PER_VOTER` nearer ones."""
    _, first = np.unique(voters, return_inverse=True)
    if np.bincount(first).max(initial=0) <= MAX_PER_VOTER:
        return np.unique(requests)
    who, request = np.divmod(np.unique(first * (requests[-1] + 1) + requests), requests[-1] + 1)
    nth = np.arange(len(who)) - np.searchsorted(who, who)
    return np.unique(request[nth < MAX_PER_VOTER])


def _shares(agents: NDArray[np.int64], voters: NDArray[np.int64], weights: NDArray[np.float64]) -> dict[int, float]:
    """Return the lifts of agents: the sum over voters of the strongest word for each, less that against it."""
    numbers, agent = np.unique(agents, return_inverse=True)
    who, voter = np.unique(voters, return_inverse=True)
    pairs, pair = np.unique(voter * len(numbers) + agent, return_inverse=True)
    praise, blame, said = np.zeros(len(pairs)), np.zeros(len(pairs)), np.zeros(len(who))
    np.maximum.at(praise, pair, weights)
    np.maximum.at(blame, pair, -weights)
    np.maximum.at(said, voter, weights)
    support = np.bincount(pairs % len(numbers), praise - blame, len(numbers))
    # A word against an agent undoes a word for it: there is less to share, too.
    against = np.bincount(pairs % len(numbers), blame, len(numbers))
    lifts = MAX_LIFT * np.maximum(support, 0) / (np.maximum(said.sum() - against, 0) + DOUBT)
    return dict(zip(numbers.tolist(), lifts.tolist(), strict=True))
