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
from registry.embedding.encoder import ModelBackend
from registry.embedding.models import EmbeddingSpace, ModelFiles
from registry.embedding.worker import PREFIX, PipeFrame, lengths, pack, precision_of, runnable_folder, unpack

_RUN_WITH_PARENT: Final = Path(mediator.system.leash.__file__)
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


class LocalModel(ModelBackend):
    """A model in a process of its own."""

    longest_pause = 300.0

    def __init__(self, name: str, cache_dir: Path) -> None:
        """``name`` may be a folder, ``cache_dir`` keeps its export."""
        super().__init__(name)
        self._cache_dir = cache_dir
        self._files: ModelFiles | None = None
        """What was found before the first start."""
        self._process: Process | None = None
        self._log_reader: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    @property
    def pids(self) -> list[int]:
        """The process id; none while it does not run."""
        return [] if self._process is None else [self._process.pid]

    def missing_extra(self) -> str:
        """Return the extra that the model needs and that is not installed; "" for none."""
        return models.missing_extra(self.name)

    async def find_space(self, template: str) -> EmbeddingSpace | None:
        """Find the model, if it is local, and so its space; raises as ``models.find_model`` does."""
        self._files = files = await asyncio.to_thread(models.find_model, self.name)
        if files is None or (dims := models.dims_of(files)) is None:
            return None
        precision = precision_of(runnable_folder(files, self._cache_dir))
        return EmbeddingSpace(self.name, files.fingerprint, precision, dims, template) if precision else None

    async def start(self, precision: str) -> None:
        """Start the process, and wait until it has loaded the model, and exported it if that was not done before.

        It is ready in a second; a model that is not the default one is exported the first time, which takes ten or
        more. Call this from a thread that lives as long as the service: the kernel ties the process to that thread.

        Raises ChildProcessError with the reason as a sentence when it cannot be started, ValueError when the model has
        changed since the first start, and as ``models.find_model`` does.
        """
        # The model may have changed since the last process loaded it.
        files, self._files = self._files or await asyncio.to_thread(models.find_model, self.name), None
        if files is not None and self.fingerprint not in ("", files.fingerprint):
            raise ValueError(f"the model has changed on disk: {self.name} was {self.fingerprint}")
        process, log_reader, last_lines = await _spawn(files, self.name, self._cache_dir, precision)
        try:
            try:
                async with asyncio.timeout(_LOADS_WITHIN):
                    header = (await _receive(process)).header
                if "failed" in header:
                    raise ChildProcessError(f"the model {self.name} cannot be loaded: {header['failed']}")
                self.runs, self.precision = str(header["runs"]), str(header["precision"])
                self.dims, self.fingerprint = int(header["width"]), str(header["fingerprint"])
                export_problem = str(header["export_problem"])
            except (TimeoutError, EOFError, ConnectionError, ValueError, LookupError, TypeError) as error:
                _kill(process)
                await asyncio.wait({log_reader})
                why = last_lines[-1] if last_lines else type(error).__name__
                raise ChildProcessError(
                    f"the model {self.name} cannot be loaded, the worker did not come up: {why}"
                ) from error
        except BaseException:
            await _end(process, log_reader)
            raise
        self._process, self._log_reader = process, log_reader
        if export_problem:
            log.warning(
                "the model cannot be exported, sentence-transformers runs instead, which is slower",
                model=self.name,
                why=export_problem,
            )

    async def encode(self, texts: list[str], *, urgent: bool) -> NDArray[np.float32]:
        """Return normalised vectors, (texts, dims); calls wait for each other.

        Raises ValueError when the model refuses, ChildProcessError when the process dies or is stuck; it is then
        killed.
        """
        async with self._lock:
            process = self._process
            if process is None:
                raise ChildProcessError("the encoder ended")
            try:
                async with asyncio.timeout(_ANSWERS_WITHIN):
                    assert process.stdin is not None
                    process.stdin.write(pack({"texts": texts}))
                    await process.stdin.drain()
                    answer = await _receive(process)
                if "failed" not in answer.header and answer.rows.shape != (len(texts), self.dims):
                    raise ValueError(f"{answer.rows.shape} vectors for {len(texts)} texts")
            except BaseException as error:
                # Otherwise its next answer would be the one to this request.
                _kill(process)
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

    async def wait_ended(self) -> str:
        """Wait until the process has ended; return how."""
        assert self._process is not None
        code = await self._process.wait()
        await self.stop()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"the encoder ended ({how}) and is being started again"

    async def stop(self) -> None:
        """Kill the process; it has nothing to save."""
        if self._process is not None and self._log_reader is not None:
            await _end(self._process, self._log_reader)
            self._process = None


async def _spawn(
    files: ModelFiles | None, model: str, cache_dir: Path, precision: str
) -> tuple[Process, asyncio.Task[None], deque[str]]:
    environment = os.environ | ENVIRONMENT
    folder, fingerprint = files or ("", "")
    if files is not None:
        environment["HF_HUB_OFFLINE"] = "1"
    else:
        environment.setdefault("HF_HUB_OFFLINE", "1")
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _RUN_WITH_PARENT, str(os.getpid())),
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


async def _end(process: Process, log_reader: asyncio.Task[None]) -> None:
    """Kill the child, and wait until it has ended and its log is read."""
    _kill(process)
    if process.stdin is not None:
        process.stdin.close()
    await process.wait()
    await asyncio.wait({log_reader})


async def _listen(stream: asyncio.StreamReader, last: deque[str]) -> None:
    """Log what libraries print until the child ends, even if logging fails: a full pipe would block the child."""
    rest = b""
    while chunk := await stream.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[:_MAX_LINE]
        for line in lines:
            _log_line(line, last)
    _log_line(rest, last)


def _log_line(line: bytes, last: deque[str]) -> None:
    if text := line[:_MAX_LINE].decode(errors="replace").strip():
        last.append(text)
        with contextlib.suppress(Exception):
            log.debug("the encoder printed", text=text)
