"""Embeds with a server that speaks OpenAI's ``/v1/embeddings``: Ollama, vLLM, text-embeddings-inference, infinity.

Texts go out in batches, of as many as the server manages in a second. A text that the server refuses as too long is cut
in half until it takes it; models that run here cut texts too. Every answer is checked before a vector is used.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from registry.embedding.encoder import ModelBackend, TemporarilyUnavailableError
from registry.embedding.models import REMOTE
from registry.outside import OutsideError, OutsideLateError, OutsideRefusedError, OutsideService, OutsideSettingsError

Vectors = NDArray[np.float32]

START_SECONDS: Final = 30.0
"""For the first answer: a server may load its model on demand."""
QUERY_SECONDS = 5.0
"""For a query's vectors. DISCOVER has stopped waiting by then; a server that gives no answer meanwhile is away."""
CARDS_SECONDS: Final = 60.0
PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds before cards are sent again that were not answered; a longer Retry-After counts."""
MAX_DIMS: Final = 16_384

_MAX_BATCH, _MIN_BATCH = 32, 4  # texts of a batch; text-embeddings-inference takes no more than 32 by default
_SLOW, _FAST = 1.0, 0.25  # seconds of a batch after which the next ones are smaller, or larger
_MIN_TEXT: Final = 128
"""Characters that every model takes: a shorter text is not refused for its length."""
_SAMPLE: Final = "Agent that answers questions about trains: departures, fares, and where to change"
"""The text whose vector identifies the model."""
_MAX_DIFFERENT_BITS: Final = 6
"""Bits of 64 in which fingerprints of the same model may differ, as those of two precisions do; of others, 32 do."""

log = structlog.get_logger("encoder")


class _NoVectorError(OutsideRefusedError):
    """The model has no vector for a text, whatever its length."""


class RemoteModel(ModelBackend):
    """A model behind a URL; it counts as running from the first answer of the server until a request fails."""

    workers = ("any", "any", "queries", "queries")
    attempts = 3
    runs = "remote"
    precision = REMOTE

    def __init__(self, service: OutsideService, name: str, known: Callable[[], Awaitable[Sequence[str]]]) -> None:
        """``name`` is that of the model on the server; ``known`` returns the fingerprints of its stored vectors."""
        super().__init__(name)
        self.detail = ""
        """What is wrong, in the server's words too; only for the operator."""
        self.shortened = 0
        """Texts that were longer than the model reads, since the start."""
        self._service = service
        self._known = known
        self._not_before = 0.0
        """Loop time until which the server wants to be left alone."""
        self._ended = asyncio.Event()
        self._why = ""
        """Why it has ended."""
        self._requests: set[asyncio.Timeout] = set()
        self._answered_at = 0.0

    @property
    def host(self) -> str:
        """Where texts are sent."""
        return self._service.host

    async def start(self, precision: str) -> None:
        """Ask for the vector of a sample, which tells dimensions and fingerprint.

        Raises LookupError when URL, model or key are wrong, :class:`TemporarilyUnavailableError` for other failures.
        """
        await asyncio.sleep(self._not_before - asyncio.get_running_loop().time())
        try:
            [sample] = await self._ask([_SAMPLE], START_SECONDS)
            self.fingerprint = await self._identify(fingerprint_of(sample))
        except OutsideError as error:
            self._keep_problem(error)
            wrong = isinstance(error, OutsideSettingsError | OutsideRefusedError)
            raise (LookupError if wrong else TemporarilyUnavailableError)(str(error)) from error
        self.detail, self.dims, self.batch_texts = "", len(sample), _MAX_BATCH
        self._ended.clear()

    async def encode(self, texts: list[str], *, urgent: bool) -> Vectors:
        """Return normalised vectors, (texts, dims); cards are tried again, queries are not.

        Raises ValueError when the server refuses one of the texts, OSError when it is away or answers nonsense.
        """
        try:
            async with asyncio.timeout(None) as limit:
                self._requests.add(limit)
                try:
                    return await self._encode(texts, urgent)
                finally:
                    self._requests.discard(limit)
        except TimeoutError:
            raise ConnectionError("the embedding server is not asked any more") from None

    async def wait_ended(self) -> str:
        """Wait until a request fails, and end the others; return why."""
        await self._ended.wait()
        await self.stop()
        return self._why

    async def stop(self) -> None:
        """End all requests."""
        for limit in self._requests:
            limit.reschedule(0)

    async def _encode(self, texts: list[str], urgent: bool) -> Vectors:
        began = asyncio.get_running_loop().time()
        pauses = iter(() if urgent else PAUSES)
        why: OutsideError
        while True:
            try:
                return await self._split(texts, urgent)
            except OutsideRefusedError as error:
                why = error
                break
            except OutsideError as error:
                why = error
                if isinstance(error, OutsideSettingsError):
                    break
                if isinstance(error, OutsideLateError) and urgent and self._answered_at > began:
                    # It is busy with cards, and not away.
                    raise ValueError(str(error)) from error
                if urgent:
                    self._end(error)
                    raise ConnectionError(str(error)) from error
                pause = next(pauses, None)
                if pause is None or isinstance(error, OutsideLateError):
                    break
                await asyncio.sleep(max(pause, error.retry_after))
        # Before the texts are given up as the cause: the server may answer nothing by now.
        try:
            await self._check()
        except OutsideError as error:
            self._end(error)
            raise ConnectionError(str(error)) from error
        raise ValueError(why.detail) from why

    def _end(self, error: OutsideError) -> None:
        if not self._ended.is_set():
            self._keep_problem(error)
            self._why = str(error)
            self._ended.set()

    async def _split(self, texts: list[str], urgent: bool, *, cut: bool = False) -> Vectors:
        """Encode texts; those of a refused batch by halves, and a refused text without its second half."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            vectors = await self._ask(texts, QUERY_SECONDS if urgent else CARDS_SECONDS, self.dims)
        except OutsideRefusedError as error:
            middle = len(texts) // 2
            if middle:
                return np.concatenate([await self._split(half, urgent) for half in (texts[:middle], texts[middle:])])
            [text] = texts
            if isinstance(error, _NoVectorError) or len(text) <= _MIN_TEXT:
                raise
            if not cut:
                if not self.shortened:
                    log.warning(
                        "a text is longer than the model takes and is cut", model=self.name, characters=len(text)
                    )
                self.shortened += 1
            return await self._split([text[: max(_MIN_TEXT, len(text) // 2)]], urgent, cut=True)
        self._answered_at = loop.time()
        if not urgent:
            self._adapt(len(texts), self._answered_at - began)
        return vectors

    async def _check(self) -> None:
        """Raise :class:`OutsideError` unless the server still has the same vector for the sample."""
        [sample] = await self._ask([_SAMPLE], CARDS_SECONDS, self.dims)
        if _distance(fingerprint_of(sample), self.fingerprint) > _MAX_DIFFERENT_BITS:
            raise OutsideError("the model of the embedding server has changed")

    def _adapt(self, texts: int, seconds: float) -> None:
        """Choose the size of batches, since a query may have to wait for one."""
        if seconds > _SLOW and texts <= self.batch_texts:
            self.batch_texts = max(_MIN_BATCH, texts // 2)
        elif seconds < _FAST and texts == self.batch_texts:
            self.batch_texts = min(_MAX_BATCH, texts * 2)

    async def _ask(self, texts: list[str], seconds: float, dims: int | None = None) -> Vectors:
        """Return normalised vectors, (texts, dims), of texts that the model takes; raises as ``OutsideService.post``.

        Texts that it does not take, or has no vector of numbers for, are an :class:`OutsideRefusedError`.
        """
        request = {"model": self.name, "input": texts, "encoding_format": "float"}
        answer = await self._service.post(request, seconds)
        few = len(texts) <= _MIN_BATCH
        rows = _rows(answer, len(texts)) if few else await asyncio.to_thread(_rows, answer, len(texts))
        if rows is None:
            raise self._service.invalid(f"expected a vector for each of {len(texts)} texts")
        if dims is not None and rows.shape[1] != dims:
            raise self._service.invalid(f"expected vectors of {dims} numbers, got {rows.shape[1]}")
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        if not (np.isfinite(lengths) & (lengths > 0)).all():
            raise _NoVectorError(f"{self._service.what} gives vectors that are zero or not finite")
        vectors: Vectors = (rows / lengths).astype(np.float32)
        return vectors

    def _keep_problem(self, error: OutsideError) -> None:
        """Keep what went wrong for the operator, and when the server may be asked again."""
        self.detail = error.detail
        self._not_before = asyncio.get_running_loop().time() + error.retry_after
        log.warning("the embedding server failed", url=self._service.host, why=error.detail)

    async def _identify(self, fingerprint: str) -> str:
        """Return the fingerprint under which there are vectors of this model, or the given one if there are none.

        The same model gives slightly different vectors on other hardware, and need not embed all cards again for it.
        """
        known = [self.fingerprint] if self.fingerprint else await self._known()
        return min((each for each in known if _distance(each, fingerprint) <= _MAX_DIFFERENT_BITS), default=fingerprint)


def fingerprint_of(vector: Vectors) -> str:
    """Return 64 bits of a vector: on which sides of 64 random planes it lies, in hexadecimal."""
    # The only generator of numpy whose numbers are promised to stay the same.
    planes = np.random.RandomState(0).standard_normal((64, len(vector)))
    return f"{int(''.join('1' if side else '0' for side in planes @ vector > 0), 2):016x}"


def _distance(one: str, other: str) -> int:
    return (int(one, 16) ^ int(other, 16)).bit_count()


def _rows(answer: Any, count: int) -> NDArray[np.float64] | None:
    """Return the vectors of an answer in the order of the texts, (texts, dims), unless it has another form."""
    try:
        items = {item["index"]: item["embedding"] for item in answer["data"]}
        rows = np.array([items[index] for index in range(count)], np.float64)
        whole = len(answer["data"]) == count and rows.ndim == 2 and 1 <= rows.shape[1] <= MAX_DIMS
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    return rows if whole else None
