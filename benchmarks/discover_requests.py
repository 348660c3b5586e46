"""Sends the same DISCOVER requests to the service and to the peer it is compared with."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from nats.aio.client import Client

from benchmarks.bare_search import SearchPeer
from benchmarks.nats_clients import API
from registry.embedding.encoder import Encoder
from registry.index.analysis import split_request

LIMIT = 10
"""Agents in an answer."""
SECONDS = 30.0
"""Timeout of one answer."""


@dataclass(frozen=True, slots=True)
class Times:
    """Latencies in milliseconds; every list has the requests in the same order."""

    ours: list[float] = field(default_factory=list)
    encoding: list[float] = field(default_factory=list)
    """0 where nothing is encoded."""
    words: list[float] = field(default_factory=list)
    vectors: list[float] = field(default_factory=list)

    @property
    def added(self) -> list[float]:
        """Our latency minus the encoder's."""
        return [ours - encoding for ours, encoding in zip(self.ours, self.encoding, strict=True)]

    @property
    def bare(self) -> list[float]:
        """Latency of both searches of the peer."""
        return [words + vectors for words, vectors in zip(self.words, self.vectors, strict=True)]


async def by_meaning(client: Client, encoder: Encoder, plain: SearchPeer, requests: Sequence[str]) -> Times:
    """Send each semantic request once: first to the service, then to the encoder alone, then to the peer."""
    times = Times()
    for request in requests:
        times.ours.append(await _timed(client, {"semantic": request}))
    vectors = []
    for request in requests:
        started = time.perf_counter()
        found = await encoder.query([request, *split_request(request)], SECONDS)
        times.encoding.append(_since(started))
        if found is None:
            raise RuntimeError("the encoder did not answer")
        vectors.append(found[0])
    for request, vector in zip(requests, vectors, strict=True):
        started = time.perf_counter()
        plain.by_words(request)
        times.words.append(_since(started))
        started = time.perf_counter()
        plain.by_vector(vector)
        times.vectors.append(_since(started))
    return times


async def by_text(client: Client, plain: SearchPeer, requests: Sequence[str]) -> Times:
    """Send each keyword request once: first to the service, then to the peer."""
    times = Times()
    for request in requests:
        times.ours.append(await _timed(client, {"text": request}))
        times.encoding.append(0.0)
        times.vectors.append(0.0)
    for request in requests:
        started = time.perf_counter()
        plain.by_words(request)
        times.words.append(_since(started))
    return times


async def discover(client: Client, query: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the answer to DISCOVER and its latency in milliseconds."""
    body = orjson.dumps(query)
    started = time.perf_counter()
    reply = await client.request(f"{API}AGENT.DISCOVER", body, timeout=SECONDS)
    spent = _since(started)
    answer = orjson.loads(reply.data)
    # A failed or degraded answer must not count as a fast one.
    if problem := answer["error"] or answer.get("note", ""):
        raise RuntimeError(f"DISCOVER: {problem}")
    return answer, spent


async def _timed(client: Client, query: Mapping[str, Any]) -> float:
    answer, spent = await discover(client, {**query, "limit": LIMIT})
    if len(answer["agents"]) != LIMIT:
        raise RuntimeError(f"DISCOVER found {len(answer['agents'])} agents for {query}")
    return spent


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
