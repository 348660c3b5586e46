"""Encodes texts to vectors in a worker process, which it starts, watches and restarts."""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from mediator.errors import UnavailableError
from mediator.system.extras import install_command
from registry.embedding import models
from registry.embedding.backends import precision_of, runnable_folder
from registry.embedding.jobs import EncodeQueue, batches
from registry.embedding.process import Worker, start_worker
from registry.embedding.space import EmbeddingSpace

DEFAULT_MODEL: Final = models.DEFAULT_MODEL
MAX_TEXT: Final = 32_768
"""Characters of a text that are encoded; models truncate far earlier."""
MAX_QUERY_TEXTS: Final = 32

_CACHED: Final = 1024  # vectors of queries
_BACK_OFF: Final = (0.5, 300.0)  # seconds, first and longest
_STABLE: Final = 60.0  # seconds after which a worker's death resets the back-off

log = structlog.get_logger("encoder")


class Encoder:
    """A model in a process of its own, which ends with this one and is restarted when it dies.

    Use it on the event loop that ``start`` was called on.
    """

    def __init__(self, model: str, cache_dir: Path, template: str) -> None:
        """``model`` is a name or a folder, ``cache_dir`` keeps its export, ``template`` is the version of the texts."""
        self._name = model
        self._cache_dir = cache_dir
        self._template = template
        self._place: models.ModelFiles | None = None
        self.space: EmbeddingSpace | None = None
        """The space of all vectors made here, also by later workers; it does not change once it is known.

        For the default model, and most local ones that were exported before, it is known after ``start``, else when
        the model is ready.
        """
        self.problem: str | None = "the model is being loaded"
        """Why queries are not answered, as one sentence; None when they are."""
        self.failed = False
        """Whether waiting is not enough: the model is absent or cannot be loaded. It is still tried again."""
        self._worker: Worker | None = None
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
        """The backend: ``reference`` (sentence-transformers) or ``onnx``; empty while none runs."""
        return self._worker.runs if self._worker is not None else ""

    @property
    def pid(self) -> int | None:
        """The process id of the worker; None while none runs."""
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
        if extra := models.missing_extra(self._name):
            self._fail(f"agent-mediator[{extra}] is not installed", failed=True)
            # Without any of them it may be meant; who names a model wants it.
            tell = log.info if self._name == DEFAULT_MODEL else log.warning
            tell("no search by meaning", why=self.problem, model=self._name, install=install_command(extra))
            return
        # The task tries again, and logs why.
        with contextlib.suppress(OSError, LookupError):
            await self._find()
        self._tasks = [
            asyncio.create_task(self._supervise(), name="encoder"),
            asyncio.create_task(self._feed(), name="encoder queue"),
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
        """
        if self._worker is None or self.space is None or len(texts) > MAX_QUERY_TEXTS:
            return None
        texts = [well_formed(text) for text in texts]
        keys = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]
        cached = {key: self._cache[key] for key in keys if key in self._cache}
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in cached}
        if missing:
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
        groups = list(batches(texts))
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

    async def _find(self) -> None:
        """Find the model, if it is local, and so its space; raises as ``models.find_model`` does."""
        self._place = await asyncio.to_thread(models.find_model, self._name)
        if self._place is not None and (dims := models.dims_of(self._place)) is not None:
            folder = runnable_folder(self._place, self._cache_dir)
            if precision := self._precision or precision_of(folder):
                self._set_space(self._place.fingerprint, precision, dims)

    @property
    def _precision(self) -> str:
        return "" if self.space is None else self.space.precision

    def _set_space(self, fingerprint: str, precision: str, dims: int) -> None:
        space = EmbeddingSpace(self._name, fingerprint, precision, dims, self._template)
        if self.space is not None and self.space != space:
            raise ValueError(f"the model has changed on disk: it was {self.space}, now it is {space}")
        self.space = space

    async def _supervise(self) -> None:
        shortest, longest = _BACK_OFF
        delay = shortest
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                why = f"the encoder ended ({await self._run()}) and is being started again"
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
                delay = shortest
            log.warning("search by meaning is not available", why=why, retry_in=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, longest)

    async def _run(self) -> str:
        """Run a worker until it dies; return how it did.

        Raises ChildProcessError when it cannot be started, and as ``models.find_model`` does.
        """
        if self._place is None:
            await self._find()
        try:
            worker = await self._launch()
            try:
                self._use(worker)
                return await worker.gone()
            finally:
                self._worker = None
                await worker.stop()
        finally:
            # The model may change before the next worker loads it.
            self._place = None

    async def _launch(self) -> Worker:
        worker = await start_worker(self._place, self._name, self._cache_dir, self._precision)
        try:
            self._set_space(worker.fingerprint, worker.precision, worker.dims)
        except ValueError:
            await worker.stop()
            raise
        return worker

    def _use(self, worker: Worker) -> None:
        if worker.export_problem:
            log.warning(
                "the model cannot be exported, the slower reference runs", model=self._name, why=worker.export_problem
            )
        log.info("search by meaning is ready", model=self._name, runs=worker.runs, pid=worker.pid)
        self._worker = worker
        self.problem, self.failed = None, False
        self._notify()

    def _fail(self, problem: str, *, failed: bool) -> None:
        self._worker = None
        self.problem, self.failed = problem, failed
        self._jobs.fail(UnavailableError(problem), cards=failed)
        self._notify()

    async def _feed(self) -> None:
        while True:
            while (worker := self._worker) is None or (job := self._jobs.take()) is None:
                await self._wait_change()
            try:
                job.done(await worker.encode(job.texts))
            except ValueError as error:
                log.warning("the model refused texts", why=str(error))
                job.fail(UnavailableError(str(error)))
            except ChildProcessError as error:
                # The other jobs wait for the next worker.
                if self._worker is worker:
                    self._worker = None
                job.fail(UnavailableError(str(error)))
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
