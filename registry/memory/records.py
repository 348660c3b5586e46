"""The records of the memory of use. Times are milliseconds since the epoch."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

USEFUL = 100
"""Value of a vote that an agent served a request."""
USELESS = -100
SIGN = 25
"""Value of a weak sign: a message to an agent that was found a moment ago."""
MAX_TEXT = 2048
"""Characters of a request that are kept; a model reads about a thousand."""


class Vote(NamedTuple):
    """One voter's word on how an agent served a request."""

    request_no: int
    agent_no: int
    voter: int
    value: int
    """From :data:`USELESS` to :data:`USEFUL`."""
    voted_at: int


class RequestChange(NamedTuple):
    """A remembered request that was voted on, or forgotten."""

    revision: int
    no: int
    tenant: str
    vector: bytes
    """In the form of :mod:`registry.index.packing`; empty where it was forgotten, or is of another space."""


@dataclass(frozen=True, slots=True)
class AskedQuery:
    """A search that was answered, and waits for a word on who served it."""

    id: str
    tenant: str
    text: str
    space: str
    vector: bytes
    numbers: bytes
    """The numbers of the agents that were found first, 8 bytes each."""

    @property
    def size(self) -> int:
        """Approximate bytes in memory."""
        return 4 * len(self.text) + len(self.vector) + len(self.numbers) + 1024

    def found(self, agent_no: int) -> bool:
        """Return whether an agent is among them."""
        return agent_no in memoryview(self.numbers).cast("q")


def voter_of(credential: str) -> int:
    """Return the number that stands for a credential; 0 for anonymous callers, who count as one."""
    return _number(credential) if credential else 0


def digest_of(text: str) -> bytes:
    """Return the same for requests that differ in case and white space only."""
    return _hash(" ".join(text.lower().split()))


def voter_of_request(text: str) -> int:
    """Return the number that stands for a request, where one party makes them all (G6)."""
    return _number(" ".join(text.lower().split()))


def _hash(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _number(text: str) -> int:
    return int.from_bytes(_hash(text)[:8], "little") >> 1 | 1
