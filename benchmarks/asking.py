"""Asks for agents: DISCOVER over NATS, and beside it what it is compared with, on the same requests."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from nats.aio.client import Client

from benchmarks.loads import API
from benchmarks.plain import Plain
from registry.embedding.encoder import Encoder
from registry.splitting import parts

LIMIT = 10
"""Agents an answer has."""
SECONDS = 30.0
"""For one answer."""


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of each request, in the same order in each list."""

    ours: list[float] = field(default_factory=list)
    encoding: list[float] = field(default_factory=list)
    """0 where nothing is encoded."""
    words: list[float] = field(default_factory=list)
    vectors: list[float] = field(default_factory=list)

    @property
    def added(self) -> list[float]:
        """What ours takes beyond encoding."""
        return [ours - encoding for ours, encoding in zip(self.ours, self.encoding, strict=True)]

    @property
    def bare(self) -> list[float]:
        """Both searches of the peer."""
        return [words + vectors for words, vectors in zip(self.words, self.vectors, strict=True)]


async def by_meaning(client: Client, encoder: Encoder, plain: Plain, requests: Sequence[str]) -> Times:
    """Ask for each request once: all of ours, then all encodings, then all of the peer's."""
    times = Times()
    for request in requests:
        times.ours.append(await _timed(client, {"semantic": request}))
    vectors = []
    for request in requests:
        started = time.perf_counter()
        found = await encoder.query([request, *parts(request)], SECONDS)
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


async def by_text(client: Client, plain: Plain, requests: Sequence[str]) -> Times:
    """Ask for each request once by keywords: all of ours, then all of the peer's."""
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
    """Return the answer to DISCOVER, and after how many milliseconds it was there."""
    body = orjson.dumps(query)
    started = time.perf_counter()
    reply = await client.request(f"{API}AGENT.DISCOVER", body, timeout=SECONDS)
    spent = _since(started)
    answer = orjson.loads(reply.data)
    # Only what was found as it was asked for says anything about speed.
    if told := answer["error"] or answer.get("note", ""):
        raise RuntimeError(f"DISCOVER: {told}")
    return answer, spent


async def _timed(client: Client, query: Mapping[str, Any]) -> float:
    answer, spent = await discover(client, {**query, "limit": LIMIT})
    if len(answer["agents"]) != LIMIT:
        raise RuntimeError(f"DISCOVER found {len(answer['agents'])} agents for {query}")
    return spent


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
