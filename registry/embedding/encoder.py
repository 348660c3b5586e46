"""Encodes texts to vectors with a worker, a process here or a server elsewhere, which it starts, watches, restarts."""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from mediator.errors import BusyError, UnavailableError
from mediator.system.extras import install_command
from registry.embedding.models import DEFAULT_MODEL, EmbeddingSpace, ModelShare, split_model

MAX_TEXT: Final = 32_768
"""Characters of a text that are encoded; models truncate far earlier."""
MAX_QUERY_TEXTS: Final = 32

_CACHED: Final = 1024  # vectors of queries
SHORTEST_PAUSE: Final = 0.5  # seconds until a worker that died is started again
_STABLE: Final = 60.0  # seconds after which a worker's death resets the back-off

log = structlog.get_logger("encoder")


class AwayError(Exception):
    """A worker cannot be started for now, and nothing is known to be wrong here."""


class EmbeddingWorker(Protocol):
    """What encodes: a process with a model, or a server."""

    @property
    def runs(self) -> str:
        """``onnx`` and ``reference`` are run here, ``remote`` elsewhere."""

    @property
    def pid(self) -> int | None:
        """The process id; None for a server."""

    @property
    def fingerprint(self) -> str:
        """As of :class:`EmbeddingSpace`, like the next two."""

    @property
    def precision(self) -> str: ...  # noqa: D102

    @property
    def dims(self) -> int: ...  # noqa: D102

    @property
    def batch_texts(self) -> int:
        """Texts of cards to encode together, for which a query may have to wait."""

    @property
    def attempts(self) -> int:
        """How many workers texts of cards are given to, each after the death of the former, until they are blamed."""

    async def encode(self, texts: list[str], *, urgent: bool) -> NDArray[np.float32]:
        """Return normalised vectors, (texts, dims); ``urgent``: a query waits for them.

        Raises ValueError when the model refuses the texts, OSError when the worker is gone.
        """

    async def gone(self) -> str:
        """Wait until it answers no more; return why, as a sentence."""

    async def stop(self) -> None:
        """Stop it; its calls fail."""


class EmbeddingSource(Protocol):
    """Where a model runs, and how a worker for it is started."""

    name: str
    """As in ``registry.model``."""

    @property
    def feeders(self) -> Sequence[bool]:
        """An entry for each request that the worker takes at the same time: whether only queries may take it."""

    @property
    def longest_pause(self) -> float:
        """Seconds between two attempts to start a worker."""

    def missing_extra(self) -> str:
        """Return the extra of this distribution that is needed and not installed; "" for none."""

    async def find_space(self, template: str) -> EmbeddingSpace | None:
        """Return the space of its vectors if it can be told before the worker runs; raises OSError, LookupError."""

    async def start_worker(self, precision: str) -> EmbeddingWorker:
        """Start a worker whose vectors have this precision, of any if it is empty.

        Raises OSError, LookupError or ValueError when the settings or files are at fault, :class:`AwayError` when
        waiting may be enough.
        """


class Encoder:
    """A model that is run by one worker at a time, which is started again when it dies.

    Use it on the event loop that ``start`` was called on.
    """

    def __init__(self, source: EmbeddingSource, template: str) -> None:
        """``template`` is the version of the texts."""
        self.source = source
        self._template = template
        self.space: EmbeddingSpace | None = None
        """The space of all vectors made here, also by later workers; it does not change once it is known.

        For the default model, and most local ones that were exported before, it is known after ``start``, else when
        the model is ready.
        """
        self.problem: str | None = "the model is being loaded"
        """Why queries are not answered, as one sentence; None when they are."""
        self.failed = False
        """Whether waiting is not enough: the model is absent or cannot be loaded. It is still tried again."""
        self._worker: EmbeddingWorker | None = None
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
        return self._worker.runs if self._worker is not None else ""

    @property
    def pid(self) -> int | None:
        """The process id of the worker; None while none runs, and for a server."""
        return self._worker.pid if self._worker is not None else None

    @property
    def pids(self) -> list[int]:
        """The process ids of its workers: one, or none while none runs."""
        return [] if self.pid is None else [self.pid]

    async def start(self) -> None:
        """Find the model and start the worker, without waiting until it is ready; raises nothing.

        It is ready in a second; a model that is not the default one is exported the first time, which takes ten or
        more. Call this from a thread that lives as long as the service: the kernel ties the worker to that thread.
        """
        name = self.source.name
        if extra := self.source.missing_extra():
            self._fail(f"agent-mediator[{extra}] is not installed", failed=True)
            # Without any of them it may be meant; who names a model wants it.
            tell = log.info if name == DEFAULT_MODEL else log.warning
            tell("no search by meaning", why=self.problem, model=name, install=install_command(extra))
            return
        # The task tries again, and logs why.
        with contextlib.suppress(OSError, LookupError):
            self.space = await self.source.find_space(self._template)
        self._tasks = [
            asyncio.create_task(self._supervise(), name="encoder"),
            *(asyncio.create_task(self._feed(only), name="encoder queue") for only in self.source.feeders),
        ]

    async def stop(self) -> None:
        """Stop the worker; pending calls fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
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
        What was asked before is remembered, also while no worker runs.
        """
        if self.space is None or len(texts) > MAX_QUERY_TEXTS:
            return None
        texts = [well_formed(text) for text in texts]
        keys = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]
        cached = {key: self._cache[key] for key in keys if key in self._cache}
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in cached}
        if missing:
            if self._worker is None:
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

        Raises UnavailableError when the model is absent, cannot be loaded or refuses them, or when the worker dies
        while encoding them; BusyError when too many texts wait.
        """
        await self.wait_ready()
        assert self.space is not None
        texts = [well_formed(text) for text in texts]
        groups = list(batches(texts, self._batch_texts))
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

    @property
    def _batch_texts(self) -> int:
        return BATCH_TEXTS if self._worker is None else self._worker.batch_texts

    async def _supervise(self) -> None:
        delay = SHORTEST_PAUSE
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                why = await self._run()
                self._fail(why, failed=False)
            except AwayError as error:
                why = str(error)
                self._fail(why, failed=False)
            except (OSError, LookupError, ValueError) as error:
                why = str(error)
                self._fail(why, failed=True)
            except Exception as error:
                # Nothing else would restart it.
                log.exception("the encoder failed")
                why = f"the encoder failed: {type(error).__name__}"
                self._fail(why, failed=False)
            if loop.time() - began > _STABLE:
                delay = SHORTEST_PAUSE
            log.warning("search by meaning is not available", why=why, retry_in=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, self.source.longest_pause)

    async def _run(self) -> str:
        """Run a worker until it dies; return how it did. Raises as ``EmbeddingSource.start_worker`` does."""
        worker = await self.source.start_worker("" if self.space is None else self.space.precision)
        try:
            self._use(worker)
            return await worker.gone()
        finally:
            self._worker = None
            await worker.stop()

    def _use(self, worker: EmbeddingWorker) -> None:
        space = EmbeddingSpace(self.source.name, worker.fingerprint, worker.precision, worker.dims, self._template)
        if self.space is not None and self.space != space:
            raise ValueError(f"the model has changed: it was {self.space}, now it is {space}")
        self.space, self._worker = space, worker
        log.info("search by meaning is ready", model=space.model, runs=worker.runs, pid=worker.pid)
        self.problem, self.failed = None, False
        self._notify()

    def _fail(self, problem: str, *, failed: bool) -> None:
        self._worker = None
        self.problem, self.failed = problem, failed
        self._jobs.fail(UnavailableError(problem), cards=failed)
        self._notify()

    async def _feed(self, only_queries: bool) -> None:
        while True:
            while (worker := self._worker) is None or (job := self._jobs.take(only_queries=only_queries)) is None:
                await self._wait_change()
            try:
                job.done(await worker.encode(job.texts, urgent=job.urgent))
            except ValueError as error:
                log.warning("the model refused texts", why=str(error))
                job.fail(UnavailableError(str(error)))
            except OSError as error:
                # The other jobs wait for the next worker.
                if self._worker is worker:
                    self._worker = None
                job.attempts += 1
                if job.urgent or job.attempts >= worker.attempts:
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


def join_rows(shares: Sequence[ModelShare], rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Join what several models make of the same texts, (texts, dims) each, to vectors of length one."""
    return np.hstack([np.float32(share.weight**0.5) * part for share, part in zip(shares, rows, strict=True)])


def joint_space(name: str, spaces: Sequence[EmbeddingSpace]) -> EmbeddingSpace:
    """Return the space of joined vectors; ``name`` is of :func:`join_models`, and so has the weights."""
    fingerprint = "+".join(space.fingerprint for space in spaces)
    precision = "+".join(space.precision for space in spaces)
    return EmbeddingSpace(name, fingerprint, precision, sum(space.dims for space in spaces), spaces[0].template)


class EnsembleEncoder:
    """Several encoders that answer together; none of them answers alone."""

    def __init__(self, name: str, shares: list[ModelShare], members: list[Encoder]) -> None:
        """``shares`` are at least two; their weights add up to 1."""
        self._name = name
        self._members = members
        self._shares = shares

    @property
    def space(self) -> EmbeddingSpace | None:
        """The space of the joined vectors, once those of all models are known."""
        spaces = [member.space for member in self._members if member.space is not None]
        return joint_space(self._name, spaces) if len(spaces) == len(self._members) else None

    @property
    def problem(self) -> str | None:
        """Why queries are not answered: the first model's problem; None when they are."""
        return next((member.problem for member in self._members if member.problem is not None), None)

    @property
    def failed(self) -> bool:
        """Whether waiting for one of the models is not enough."""
        return any(member.failed for member in self._members)

    @property
    def ready(self) -> bool:
        """Whether queries are answered."""
        return self.problem is None

    @property
    def model(self) -> str:
        """The slowest backend of them: ``reference``, ``onnx``, or empty while one does not run."""
        kinds = {member.model for member in self._members}
        return "" if "" in kinds else max(kinds)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return [pid for member in self._members for pid in member.pids]

    async def start(self) -> None:
        """Find the models and start their workers, as :meth:`Encoder.start` does."""
        for member in self._members:
            await member.start()

    async def stop(self) -> None:
        """Stop the workers; pending calls fail."""
        for member in self._members:
            await member.stop()

    async def wait_ready(self) -> None:
        """Wait until queries are answered; raises UnavailableError when a model is absent or cannot be loaded."""
        while self.problem is not None:
            for member in self._members:
                await member.wait_ready()

    async def query(self, texts: list[str], seconds: float) -> NDArray[np.float32] | None:
        """Return joined vectors as :meth:`Encoder.query` does; None when one of the models does not answer in time."""
        found = await asyncio.gather(*(member.query(texts, seconds) for member in self._members))
        vectors = [rows for rows in found if rows is not None]
        return join_rows(self._shares, vectors) if len(vectors) == len(self._members) else None

    async def cards(self, texts: list[str]) -> NDArray[np.float32]:
        """Return joined vectors; raises as :meth:`Encoder.cards` does."""
        # One after the other: they share the processors anyway, and no job is left behind when one fails.
        return join_rows(self._shares, [await member.cards(texts) for member in self._members])


TextEncoder = Encoder | EnsembleEncoder


def make_encoder(model: str, source: Callable[[str], EmbeddingSource], template: str) -> TextEncoder:
    """Return the encoder of a model, or of several whose names :func:`join_models` joined.

    ``source`` says where a model runs, by its name; ``template`` is the version of the texts.
    """
    shares = split_model(model)
    members = [Encoder(source(share.name), template) for share in shares]
    return members[0] if len(members) == 1 else EnsembleEncoder(model, shares, members)


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


class EncodeJob:
    """Texts to encode together, with a future for their vectors."""

    def __init__(self, texts: list[str], *, urgent: bool) -> None:
        """``urgent``: they are a query's."""
        self.texts = texts
        self.urgent = urgent
        self.attempts = 0
        """How many workers have died over it."""
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
        self._row = 0

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

    def take(self, *, only_queries: bool = False) -> EncodeJob | None:
        """Take the next job that is still awaited, of queries alone if asked so; None if there is none."""
        while self._queries or (self._cards and not only_queries):
            # Even under a flood of queries cards get a turn, one small batch at a time.
            if self._queries and (only_queries or not (self._cards and self._row >= _MAX_IN_A_ROW)):
                job = self._queries.popleft()
                self._row += 1
            else:
                job = self._cards.popleft()
                self._card_texts -= len(job.texts)
                self._row = 0
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


def batches(texts: list[str], most: int = BATCH_TEXTS) -> Iterator[list[int]]:
    """Group texts of similar length, as positions in ``texts``; each group is small enough for a query to wait for.

    ``most``: texts of a group; the characters of :data:`BATCH_CHARACTERS` are for :data:`BATCH_TEXTS` of them.
    """
    group: list[int] = []
    size = 0
    for at in sorted(range(len(texts)), key=lambda at: len(texts[at])):
        length = min(len(texts[at]), LONG)
        if group and (len(group) >= most or size + length > BATCH_CHARACTERS * most // BATCH_TEXTS):
            yield group
            group, size = [], 0
        group.append(at)
        size += length
    if group:
        yield group
