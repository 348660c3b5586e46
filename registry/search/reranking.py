"""Re-ranks the first agents of a search with a server that speaks ``/rerank``: Cohere, Jina, vLLM, infinity, TEI.

A DISCOVER waits for it within a budget, and not at all while it is known to be away: then the first order stands.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from registry.outside import OutsideError, OutsideLateError, OutsideRefusedError, OutsideService

PROBE_SECONDS = 30.0
"""For the first answer: a server may load its model on demand."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds between two attempts to reach a server that is away."""
IN_A_ROW: Final = 3
"""Requests that were late, one after the other, until the server counts as away."""
MAX_RUNNING: Final = 8
"""Requests at the same time; a search beyond them keeps its first order."""
_STABLE: Final = 60.0  # seconds after which a failure resets the pause

log = structlog.get_logger("registry")


class Reranker:
    """A server that says how relevant texts are for a request. Used on the event loop."""

    def __init__(self, service: OutsideService, model: str, depth: int, seconds: float) -> None:
        """``model`` may be empty, ``depth`` agents are re-ranked, a search waits for ``seconds``."""
        self.depth = depth
        self.problem: str | None = "the re-ranking server was not reached yet"
        """Why nothing is re-ranked; None when it is."""
        self.detail = ""
        """The same in the server's words; only for the operator."""
        self.tried = asyncio.Event()
        """Set when the server was reached for the first time, or could not be."""
        self._service = service
        self._model = model
        self._seconds = seconds
        self._field = "documents"
        """Of the request, that has the texts; ``texts`` for text-embeddings-inference."""
        self._running = self._failures = 0
        self._broken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def host(self) -> str:
        """Where texts are sent."""
        return self._service.host

    async def start(self) -> None:
        """Start to reach the server, without waiting for it."""
        self._task = asyncio.create_task(self._supervise(), name="registry-reranker")

    async def stop(self) -> None:
        """Stop trying."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def rate(self, request: str, texts: Sequence[str]) -> tuple[NDArray[np.float32] | None, str]:
        """Return how relevant each text is for a request; or None and why not, in time."""
        if self.problem is not None:
            return None, self.problem
        if self._running >= MAX_RUNNING:
            return None, f"{MAX_RUNNING} requests wait for the re-ranking server"
        self._running += 1
        try:
            relevance = await self._ask(request, texts, self._seconds)
        except OutsideRefusedError as error:
            # Of these texts alone, perhaps, which is no reason to keep others from being re-ranked: the probe decides.
            self._broken.set()
            return None, str(error)
        except OutsideError as error:
            self._failures += 1
            if not isinstance(error, OutsideLateError) or self._failures >= IN_A_ROW:
                self._record_problem(error)
                self._broken.set()
            return None, str(error)
        finally:
            self._running -= 1
        self._failures = 0
        return relevance, ""

    async def _supervise(self) -> None:
        loop, pause = asyncio.get_running_loop(), SHORTEST_PAUSE
        while True:
            reached = loop.time()
            try:
                await self._probe()
                if self.problem is not None:
                    log.info("the re-ranking server answers", url=self.host, field=self._field)
                self.problem, self.detail, self._failures = None, "", 0
                self.tried.set()
                await self._broken.wait()
            except OutsideError as error:
                self._record_problem(error)
                self.tried.set()
                await asyncio.sleep(error.retry_after)
            self._broken.clear()
            if loop.time() - reached > _STABLE:
                pause = SHORTEST_PAUSE
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _probe(self) -> None:
        """Find out which of the two forms of the request the server takes."""
        self._field = "documents"
        with contextlib.suppress(OutsideRefusedError):
            await self._ask("ready", ["ready"], PROBE_SECONDS)
            return
        self._field = "texts"
        await self._ask("ready", ["ready"], PROBE_SECONDS)

    async def _ask(self, request: str, texts: Sequence[str], seconds: float) -> NDArray[np.float32]:
        body: dict[str, Any] = {"query": request, self._field: texts}
        if self._field == "documents":
            body |= {"top_n": len(texts)} | ({"model": self._model} if self._model else {})
        relevance = _relevance(await self._service.post(body, seconds), len(texts))
        if relevance is None:
            raise self._service.invalid(f"expected a finite score for each of {len(texts)} texts")
        return relevance

    def _record_problem(self, error: OutsideError) -> None:
        if error.detail != self.detail:
            log.warning("the re-ranking server failed", url=self.host, why=error.detail)
        self.problem, self.detail = str(error), error.detail


def _relevance(answer: Any, count: int) -> NDArray[np.float32] | None:
    """Return the scores of an answer in the order of the texts, unless it has another form."""
    try:
        results = answer if isinstance(answer, list) else answer["results"]
        scores = {item["index"]: item["relevance_score" if "relevance_score" in item else "score"] for item in results}
        relevance = np.array([scores[index] for index in range(count)], np.float32)
        whole = len(results) == count and relevance.ndim == 1 and bool(np.isfinite(relevance).all())
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    return relevance if whole else None
