"""A server as those that ``registry.embeddings_url`` names, which a test lets fail in any way."""

import asyncio
import json
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

Handler = Callable[[web.Request, Any], Awaitable[web.StreamResponse]]
WORD = re.compile(r"\w+")
ALIKE = {"loaf": "bread", "loaves": "bread", "harbour": "sea", "tide": "sea"}
"""What it takes for the same, as a model would, and keywords do not."""


def embed(text: str, dims: int = 64) -> list[float]:
    """Return a vector of a text's words: texts that share a meaning are near."""
    vector: NDArray[np.float64] = np.full(dims, 1e-3)
    for word in WORD.findall(text.lower()):
        vector += np.random.RandomState(zlib.crc32(ALIKE.get(word, word).encode())).standard_normal(dims)
    return [float(number) for number in vector]


def answer(vectors: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    return {"data": [{"index": index, "embedding": list(vector)} for index, vector in enumerate(vectors)]}


class OutsideServer:
    """A server on a port of its own; it answers as ``behave`` says, and well without it."""

    def __init__(self) -> None:
        self.behave: Handler | None = None
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.failed = 0
        """Requests that ``behave`` answered."""
        self.running = 0
        self.most = 0
        """Most requests at the same time."""
        self._port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1/embeddings"

    @property
    def rerank_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/rerank"

    @property
    def texts(self) -> list[str]:
        """All texts that were asked for."""
        return [text for request in self.requests for text in request["input"]]

    async def start(self) -> None:
        """Listen, on the former port if there was one."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections, in the midst of what is being answered."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.add(request.headers.get("Authorization", ""))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if (behave := self.behave) is not None:
                self.failed += 1
                return await behave(request, body)
            return await self.well(request, body)
        finally:
            self.running -= 1

    async def well(self, _request: web.Request, body: Any) -> web.StreamResponse:
        return web.json_response(answer([embed(text) for text in body["input"]]))


def relevance(query: str, texts: list[str]) -> list[float]:
    """Score texts honestly: by the cosine of their vectors and the query's."""
    rows = np.array([embed(text) for text in [query, *texts]])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return [float(score) for score in rows[1:] @ rows[0]]


async def rerank(_request: web.Request, body: Any) -> web.StreamResponse:
    """Answer as Cohere, Jina, vLLM and infinity do, best first."""
    if "documents" not in body:
        return web.Response(status=422)
    scores = relevance(body["query"], body["documents"])
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body["top_n"]]
    return web.json_response({"results": [{"index": n, "relevance_score": scores[n]} for n in order]})


async def rerank_texts(_request: web.Request, body: Any) -> web.StreamResponse:
    """Answer as text-embeddings-inference does."""
    if "texts" not in body:
        return web.Response(status=422, text="missing field `texts`")
    scores = relevance(body["query"], body["texts"])
    return web.json_response([{"index": n, "score": score} for n, score in enumerate(scores)])


@asynccontextmanager
async def outside_server() -> AsyncIterator[OutsideServer]:
    server = OutsideServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


# Ways to fail.


def status(code: int, text: str = "", **headers: str) -> Handler:
    async def behave(_request: web.Request, _body: Any) -> web.StreamResponse:
        return web.Response(status=code, text=text, headers=headers)

    return behave


def raw(data: bytes, **headers: str) -> Handler:
    async def behave(_request: web.Request, _body: Any) -> web.StreamResponse:
        return web.Response(body=data, content_type="application/json", headers=headers)

    return behave


def vectors(make: Callable[[list[str]], Any]) -> Handler:
    """Answer what ``make`` returns for the texts."""

    async def behave(_request: web.Request, body: Any) -> web.StreamResponse:
        return web.Response(text=json.dumps(make(body["input"])), content_type="application/json")

    return behave


async def stall(_request: web.Request, _body: Any) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def break_off(request: web.Request, _body: Any) -> web.StreamResponse:
    """Close the connection in the midst of an answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"data": [')
    assert request.transport is not None
    request.transport.abort()
    return response


async def endless(request: web.Request, _body: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" " * 65536)
