"""Runs a model on this machine, in a process of its own that it starts and talks to from the event loop."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from pathlib import Path
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

import mediator.system.leash
from registry.embedding import models
from registry.embedding.encoder import BATCH_TEXTS
from registry.embedding.models import EmbeddingSpace, ModelFiles
from registry.embedding.worker import PREFIX, PipeFrame, lengths, pack, precision_of, runnable_folder, unpack

_LEASH: Final = Path(mediator.system.leash.__file__)
_LOADS_WITHIN: Final = 1800.0  # seconds; 1 is usual, 10 for the first time, a download takes longer
_ANSWERS_WITHIN: Final = 60.0  # seconds; .1 is usual
_MAX_LINE: Final = 1000  # bytes of one log line
ENVIRONMENT: Final = {
    # One thread is as fast for single texts, and leaves the other processors to the service.
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}

log = structlog.get_logger("encoder")


class Worker:
    """A process with a loaded model; :func:`start_worker` creates it."""

    batch_texts = BATCH_TEXTS
    attempts = 1

    def __init__(self, process: Process, listening: asyncio.Task[None], about: PipeFrame) -> None:
        """``about`` is the first frame of the process; ValueError or LookupError when it is not as expected."""
        self._process = process
        self._listening = listening
        self._lock = asyncio.Lock()
        self.runs = str(about.header["runs"])
        """``onnx`` or ``reference``."""
        self.precision = str(about.header["precision"])
        self.dims = int(about.header["width"])
        self.fingerprint = str(about.header["fingerprint"])
        self.export_problem = str(about.header["lack"])
        """Why it runs the reference; empty if it does not, or if that was known before."""

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    async def encode(self, texts: list[str], *, urgent: bool = False) -> NDArray[np.float32]:
        """Return normalised vectors, (texts, dims); calls wait for each other.

        Raises ValueError when the model refuses, ChildProcessError when the worker dies or is stuck; it is then killed.
        """
        async with self._lock:
            try:
                async with asyncio.timeout(_ANSWERS_WITHIN):
                    assert self._process.stdin is not None
                    self._process.stdin.write(pack({"texts": texts}))
                    await self._process.stdin.drain()
                    answer = await _receive(self._process)
                if "failed" not in answer.header and answer.rows.shape != (len(texts), self.dims):
                    raise ValueError(f"{answer.rows.shape} vectors for {len(texts)} texts")
            except BaseException as error:
                # Otherwise its next answer would be the one to this request.
                _kill(self._process)
                if isinstance(error, TimeoutError):
                    raise ChildProcessError("the encoder does not answer") from error
                if isinstance(error, OSError | EOFError):
                    raise ChildProcessError("the encoder ended") from error
                if isinstance(error, ValueError):
                    raise ChildProcessError(f"the encoder sent an invalid answer: {error}") from error
                raise
        if why := answer.header.get("failed"):
            raise ValueError(f"the model refuses: {why}")
        return answer.rows

    async def gone(self) -> str:
        """Wait until the process has ended; return how."""
        code = await self._process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"the encoder ended ({how}) and is being started again"

    async def stop(self) -> None:
        """Kill the process; it has nothing to save."""
        await _end(self._process, self._listening)


async def start_worker(place: ModelFiles | None, model: str, cache_dir: Path, precision: str) -> Worker:
    """Start a worker and wait until it has loaded the model, and exported it if that was not done before.

    ``place`` has the files of a local model; only ``precision`` is accepted, if not empty. Raises ChildProcessError
    with the reason as a sentence.
    """
    process, listening, last = await _spawn(place, model, cache_dir, precision)
    try:
        try:
            async with asyncio.timeout(_LOADS_WITHIN):
                about = await _receive(process)
            if "failed" in about.header:
                raise ChildProcessError(f"the model {model} cannot be loaded: {about.header['failed']}")
            return Worker(process, listening, about)
        except (TimeoutError, EOFError, ConnectionError, ValueError, LookupError, TypeError) as error:
            _kill(process)
            await asyncio.wait({listening})
            said = last[-1] if last else type(error).__name__
            raise ChildProcessError(
                f"the model {model} cannot be loaded, the worker did not come up: {said}"
            ) from error
    except BaseException:
        await _end(process, listening)
        raise


async def _spawn(
    place: ModelFiles | None, model: str, cache_dir: Path, precision: str
) -> tuple[Process, asyncio.Task[None], deque[str]]:
    environment = os.environ | ENVIRONMENT
    folder, fingerprint = place or ("", "")
    if place is not None:
        environment["HF_HUB_OFFLINE"] = "1"
    else:
        environment.setdefault("HF_HUB_OFFLINE", "1")
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _LEASH, str(os.getpid())),
            *(sys.executable, "-P", "-m", "registry.embedding.worker"),
            *(folder, fingerprint, model, cache_dir, precision),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=environment,
            # Ctrl-C in the terminal must stop only the service, which may still have requests to answer.
            start_new_session=True,
        )
    except OSError as error:
        raise ChildProcessError(f"the encoder cannot be started: {error}") from error
    last: deque[str] = deque(maxlen=1)
    assert process.stderr is not None
    return process, asyncio.create_task(_listen(process.stderr, last), name="encoder log"), last


async def _receive(process: Process) -> PipeFrame:
    assert process.stdout is not None
    found = lengths(await process.stdout.readexactly(PREFIX.size))
    head = await process.stdout.readexactly(found.header)
    return unpack(head, await process.stdout.readexactly(found.rows))


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _end(process: Process, listening: asyncio.Task[None]) -> None:
    """Kill the child, and wait until it has ended and its log is read."""
    _kill(process)
    if process.stdin is not None:
        process.stdin.close()
    await process.wait()
    await asyncio.wait({listening})


async def _listen(stream: asyncio.StreamReader, last: deque[str]) -> None:
    """Log what libraries print until the child ends, even if logging fails: a full pipe would block the child."""
    rest = b""
    while chunk := await stream.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[:_MAX_LINE]
        for line in lines:
            _note(line, last)
    _note(rest, last)


def _note(line: bytes, last: deque[str]) -> None:
    if text := line[:_MAX_LINE].decode(errors="replace").strip():
        last.append(text)
        with contextlib.suppress(Exception):
            log.debug("the encoder printed", text=text)


class LocalModel:
    """A model in a process of its own; see :class:`registry.embedding.encoder.EmbeddingSource`."""

    feeders = (False,)
    longest_pause = 300.0

    def __init__(self, name: str, cache_dir: Path) -> None:
        """``name`` may be a folder, ``cache_dir`` keeps its export."""
        self.name = name
        self._cache_dir = cache_dir
        self._place: ModelFiles | None = None
        self._fingerprint = ""
        """Of the first worker."""

    def missing_extra(self) -> str:
        """Return the extra that the model needs and that is not installed; "" for none."""
        return models.missing_extra(self.name)

    async def find_space(self, template: str) -> EmbeddingSpace | None:
        """Find the model, if it is local, and so its space; raises as ``models.find_model`` does."""
        self._place = await asyncio.to_thread(models.find_model, self.name)
        if self._place is None or (dims := models.dims_of(self._place)) is None:
            return None
        precision = precision_of(runnable_folder(self._place, self._cache_dir))
        return EmbeddingSpace(self.name, self._place.fingerprint, precision, dims, template) if precision else None

    async def start_worker(self, precision: str) -> Worker:
        """Start the process.

        It is ready in a second; a model that is not the default one is exported the first time, which takes ten or
        more. Call this from a thread that lives as long as the service: the kernel ties the process to that thread.

        Raises ChildProcessError when it cannot be started, ValueError when the model has changed since the first one,
        and as ``models.find_model`` does.
        """
        # The model may have changed since the last worker loaded it.
        place, self._place = self._place or await asyncio.to_thread(models.find_model, self.name), None
        if place is not None and self._fingerprint not in ("", place.fingerprint):
            raise ValueError(f"the model has changed on disk: {self.name} was {self._fingerprint}")
        worker = await start_worker(place, self.name, self._cache_dir, precision)
        self._fingerprint = worker.fingerprint
        if worker.export_problem:
            log.warning(
                "the model cannot be exported, the slower reference runs", model=self.name, why=worker.export_problem
            )
        return worker
