"""Turns texts into vectors without holding up the event loop: what callers ask goes to a worker process."""

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
from registry.embedding import models
from registry.embedding.fast import folder_of, precision_of
from registry.embedding.jobs import Jobs, batches
from registry.embedding.process import Worker, start_worker
from registry.embedding.spaces import Space

DEFAULT_MODEL: Final = models.DEFAULT_MODEL
MAX_TEXT: Final = 32_768
"""Characters of a text that are looked at; models cut far earlier."""
MAX_QUERY_TEXTS: Final = 32

_REMEMBERED: Final = 1024  # vectors of queries
_BACK_OFF: Final = (0.5, 300.0)  # seconds, first and longest
_CALM: Final = 60.0  # seconds a worker lives before its death counts as the first
_LIBRARIES_LACK: Final = "the libraries for search by meaning are not installed: pip install 'agent-mediator[search]'"

log = structlog.get_logger("encoder")


class Encoder:
    """A model in a process of its own, which lives no longer than this one and is brought back when it dies.

    All methods belong to the event loop that ``start`` was called on.
    """

    def __init__(self, model: str, cache_dir: Path, template: str) -> None:
        """Take the name of the model or its folder, where files made of it are kept, and the version of the texts."""
        self._name = model
        self._cache_dir = cache_dir
        self._template = template
        self._place: models.Place | None = None
        self._space: Space | None = None
        self._problem: str | None = "the model is being loaded"
        self._hopeless = False  # whether waiting helps
        self._worker: Worker | None = None
        self._jobs = Jobs()
        self._remembered: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        """Whether queries are answered."""
        return self._problem is None

    @property
    def problem(self) -> str | None:
        """Why queries are not answered, as one sentence; None when they are."""
        return self._problem

    @property
    def failed(self) -> bool:
        """Whether waiting is not enough: the model is absent or cannot be loaded. It is tried again all the same."""
        return self._problem is not None and self._hopeless

    @property
    def model(self) -> str:
        """What runs: ``reference`` (sentence-transformers) or ``onnx``; empty while nothing does."""
        return self._worker.runs if self._worker is not None else ""

    @property
    def pid(self) -> int | None:
        """The process id of the worker that answers; None while none does."""
        return self._worker.pid if self._worker is not None else None

    @property
    def space(self) -> Space | None:
        """What all vectors belong to that are made here, also by later workers: it does not change once it is known.

        That is after ``start`` for most local models that were exported before, else when the model is ready.
        """
        return self._space

    async def start(self) -> None:
        """Look for the model and start the worker, without waiting until it is ready; raises nothing.

        That takes a second, or the first time, when the model is exported, ten and more.

        Call it from a thread that lasts as long as the service: the kernel ties the child to that thread.
        """
        if models.lacking(self._name):
            self._lose(_LIBRARIES_LACK, hopeless=True)
            return
        # What cannot be read is tried again, and told, by the task.
        with contextlib.suppress(OSError, LookupError):
            await self._look()
        self._tasks = [
            asyncio.create_task(self._keep(), name="encoder"),
            asyncio.create_task(self._pump(), name="encoder queue"),
        ]

    async def stop(self) -> None:
        """End the worker; who still waits is told that the encoder has stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._lose("the encoder has stopped", hopeless=True)

    async def wait_ready(self) -> None:
        """Wait until queries are answered; raises UnavailableError when the model is absent or cannot be loaded."""
        while self._problem is not None:
            if self._hopeless:
                raise UnavailableError(self._problem)
            await self._change()

    async def query(self, texts: list[str], seconds: float) -> NDArray[np.float32] | None:
        """Give normalised vectors, (texts, dims), in ``seconds``; None when not ready, in time, or too many wait.

        Goes before all cards, so it waits for one small batch of them at most. At most ``MAX_QUERY_TEXTS`` texts.
        """
        if self._worker is None or self._space is None or len(texts) > MAX_QUERY_TEXTS:
            return None
        texts = [proper(text) for text in texts]
        keys = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]
        known = {key: self._remembered[key] for key in keys if key in self._remembered}
        wanted = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        if wanted:
            try:
                job = self._jobs.add_query(list(wanted.values()))
                self._tell()
                async with asyncio.timeout(seconds):
                    known |= zip(wanted, await job.vectors, strict=True)
            except (TimeoutError, UnavailableError):
                return None
        vectors = np.empty((len(keys), self._space.dims), np.float32)
        for at, key in enumerate(keys):
            # Copied, so that one row does not keep the whole answer in memory.
            vectors[at] = self._remembered[key] = known[key].copy()
            self._remembered.move_to_end(key)
        while len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)
        return vectors

    async def cards(self, texts: list[str]) -> NDArray[np.float32]:
        """Give normalised vectors, (texts, dims), however long it takes.

        Raises UnavailableError when the model is absent or cannot be loaded, or refuses them, or when the worker dies
        over them; BusyError when too many texts wait.
        """
        await self.wait_ready()
        assert self._space is not None
        texts = [proper(text) for text in texts]
        groups = list(batches(texts))
        jobs = self._jobs.add_cards([[texts[at] for at in group] for group in groups])
        self._tell()
        vectors = np.empty((len(texts), self._space.dims), np.float32)
        try:
            for group, job in zip(groups, jobs, strict=True):
                vectors[group] = await job.vectors
        finally:
            for job in jobs:
                job.vectors.cancel()
        return vectors

    async def _look(self) -> None:
        """Find the model, if it is a local one, and with it the space; raises as ``models.find`` does."""
        self._place = await asyncio.to_thread(models.find, self._name)
        if self._place is not None and (dims := models.dims_of(self._place)) is not None:
            exported = folder_of(self._cache_dir, self._place.fingerprint)
            if precision := self._precision or precision_of(exported):
                self._settle(self._place.fingerprint, precision, dims)

    @property
    def _precision(self) -> str:
        return "" if self._space is None else self._space.precision

    def _settle(self, fingerprint: str, precision: str, dims: int) -> None:
        space = Space(self._name, fingerprint, precision, dims, self._template)
        if self._space is not None and self._space != space:
            raise ValueError(f"the model has changed on disk: it was {self._space}, now it is {space}")
        self._space = space

    async def _keep(self) -> None:
        shortest, longest = _BACK_OFF
        delay = shortest
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                why = f"the encoder ended ({await self._run()}) and is being started again"
                self._lose(why, hopeless=False)
            except (OSError, LookupError, ValueError) as error:
                why = str(error)
                self._lose(why, hopeless=True)
            except Exception as error:
                # Nobody else would start it again.
                log.exception("the encoder failed")
                why = f"the encoder failed: {type(error).__name__}"
                self._lose(why, hopeless=False)
            if loop.time() - began > _CALM:
                delay = shortest
            log.warning("search by meaning has to wait", why=why, retry_in=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, longest)

    async def _run(self) -> str:
        """Have a worker serve until it dies; return how it did.

        Raises ChildProcessError when it cannot be started, and as ``models.find`` does.
        """
        if self._place is None:
            await self._look()
        try:
            worker = await self._launch()
            try:
                self._use(worker)
                return await worker.gone()
            finally:
                self._worker = None
                await worker.stop()
        finally:
            # It may have changed by the time the next worker loads it.
            self._place = None

    async def _launch(self) -> Worker:
        worker = await start_worker(self._place, self._name, self._cache_dir, self._precision)
        try:
            self._settle(worker.fingerprint, worker.precision, worker.dims)
        except ValueError:
            await worker.stop()
            raise
        return worker

    def _use(self, worker: Worker) -> None:
        if worker.lack:
            log.warning("the model is not exported, the slower reference runs", model=self._name, why=worker.lack)
        log.info("search by meaning is ready", model=self._name, runs=worker.runs, pid=worker.pid)
        self._worker = worker
        self._problem, self._hopeless = None, False
        self._tell()

    def _lose(self, problem: str, *, hopeless: bool) -> None:
        self._worker = None
        self._problem, self._hopeless = problem, hopeless
        self._jobs.fail(UnavailableError(problem), cards=hopeless)
        self._tell()

    async def _pump(self) -> None:
        while True:
            while (worker := self._worker) is None or (job := self._jobs.take()) is None:
                await self._change()
            try:
                job.done(await worker.encode(job.texts))
            except ValueError as error:
                log.warning("texts are not encoded", why=str(error))
                job.fail(UnavailableError(str(error)))
            except ChildProcessError as error:
                # The others wait for the next worker.
                if self._worker is worker:
                    self._worker = None
                job.fail(UnavailableError(str(error)))
            except Exception as error:
                log.exception("the encoder failed")
                job.fail(UnavailableError(f"the encoder failed: {type(error).__name__}"))
            except BaseException:
                job.fail(UnavailableError("the encoder has stopped"))
                raise

    def _tell(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def proper(text: str) -> str:
    """Return a text as models are given it: cut, and without what is no Unicode, as half a surrogate pair in JSON."""
    return text[:MAX_TEXT].encode(errors="replace").decode()
