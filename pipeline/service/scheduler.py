"""Runs the data pipeline periodically as a child process; the service itself never loads Spark."""

import asyncio
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog

from mediator.broker import Broker
from mediator.config.settings import Settings
from mediator.config.sources import CONFIG_VARIABLE, ENV_PREFIX, variable_name
from mediator.errors import AlreadyRunningError, BadRequestError, MediatorError, UnavailableError
from mediator.ops.coalescing import CoalescingTask
from mediator.ops.processes import process_name
from mediator.ops.runs.history import SCHEDULED, RunHistory
from mediator.ops.runs.records import RUN_VARIABLE, Outcome
from mediator.ops.runs.rules import next_due
from mediator.system.child_process import ChildEnd, run_child
from pipeline.service.child_log import ChildLog
from pipeline.settings import PipelineSettings

LOOK_SECONDS = 60
RECORD_SECONDS = 5
"""Between two tries to record the end of a run while the store is away."""
_PROGRAM = (sys.executable, "-P", "-m", "mediator")
_HOUR = 3600 * 1000
_MINUTE = 60.0
_ERROR = "mediator: "
_log = structlog.get_logger("pipeline")


@dataclass(frozen=True, slots=True)
class RunningCommand:
    """A command that runs as a child of this process."""

    no: int
    """The number of its run."""
    command: str
    child: asyncio.Task[ChildEnd]


class PipelineScheduler:
    """Runs the due commands in order, one at a time. Used on the event loop."""

    def __init__(self, book: RunHistory, broker: Broker, settings: Settings, program: Sequence[str] = _PROGRAM) -> None:
        """``program`` is what runs ``pipeline COMMAND``: a path and arguments."""
        self._book = book
        self._broker = broker
        self._settings = settings
        self._own = settings.section(PipelineSettings)
        self._program = program
        self.task = CoalescingTask("pipeline", self._round)
        self.running: RunningCommand | None = None
        """What runs now."""
        self._turn = asyncio.Lock()
        """Held from the look at what runs until a run has begun."""
        self._asked: asyncio.Task[None] | None = None
        self._stopped = False

    async def look(self) -> None:
        """Start what is due, without waiting for it; to be called every :data:`LOOK_SECONDS`."""
        if not self.task.running:
            self.task.call()

    async def stop(self) -> None:
        """Stop what runs. Its run stays open, shows as killed once this process is gone, and is repeated soon."""
        self._stopped = True
        await self.task.stop()
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.gather(self._asked, return_exceptions=True)

    async def start(self, command: str) -> int:
        """Run a command now, without waiting for it, and return the number of its run.

        Raises :class:`BadRequestError` for any other than those that are scheduled, and :class:`AlreadyRunningError`
        while one of them runs, whoever started it; :class:`UnavailableError` once the service stops.
        """
        if self._stopped:
            raise UnavailableError("the service stops")
        if command not in SCHEDULED:
            raise BadRequestError("name", f"expected one of {', '.join(SCHEDULED)}")
        async with self._turn:
            for run in await self._book.newest():
                if run.instance == self._book.instance and run.outcome is Outcome.RUNNING and run.command in SCHEDULED:
                    raise AlreadyRunningError(f"pipeline {run.command}, run {run.no}")
            no = await self._begin(command)
        self._asked = asyncio.create_task(self._finish(command, no), name="pipeline asked for")
        return no

    async def cancel(self) -> bool:
        """End the command that runs; False if none does."""
        if self.running is None:
            return False
        self.running.child.cancel()
        await asyncio.wait({self.running.child})
        return True

    async def _record(self, no: int, outcome: Outcome, why: str, last_lines: Sequence[str]) -> None:
        """Record how a run ended, as soon as the store takes it: until then it counts as running."""
        while True:
            try:
                # The child records its figures itself, if it gets that far.
                await self._book.end(no, outcome, {}, why)
                if outcome is not Outcome.SUCCEEDED:
                    await self._book.keep_log(no, last_lines)
                return
            except MediatorError as error:
                _log.warning("the end of a pipeline run cannot be recorded yet", run=no, reason=str(error))
                await asyncio.sleep(RECORD_SECONDS)

    async def _round(self) -> None:
        every, instance = self._own.every * _HOUR, self._book.instance
        for _ in SCHEDULED:
            async with self._turn:
                command = next_due(await self._book.newest(), instance, SCHEDULED, every, self._broker.clock())
                if command is None:
                    return
                no = await self._begin(command)
            await self._finish(command, no)

    @property
    def _arguments(self) -> list[str]:
        return ["--data-dir", str(self._settings.data_dir)]

    async def _begin(self, command: str) -> int:
        # The run belongs to the service's process, with which the child ends.
        return await self._book.begin(command, self._arguments, process_name())

    async def _finish(self, command: str, no: int) -> None:
        """Run the command of a run that has begun, and record how it ended."""
        environment = _environment(self._settings) | {RUN_VARIABLE: str(no)}
        minutes = self._own.max_minutes
        output, program = ChildLog(), [*self._program, "pipeline", command, *self._arguments]
        child = asyncio.create_task(run_child(program, environment, minutes * _MINUTE, output.read), name="pipeline")
        self.running = RunningCommand(no, command, child)
        try:
            ended = await child
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            outcome, why = Outcome.KILLED, "cancelled by an operator"
        except OSError as error:
            outcome, why = Outcome.FAILED, f"no process can be started: {error.strerror or error}"
        else:
            outcome, why = _judge(ended, output.last_lines, minutes)
        finally:
            self.running = None
        await self._record(no, outcome, why, output.last_lines)
        if outcome is Outcome.SUCCEEDED:
            _log.info("pipeline run succeeded", command=command, run=no)
        else:
            _log.warning("pipeline run failed", command=command, run=no, outcome=outcome.value, reason=why)


def _judge(ended: ChildEnd, last_lines: Iterable[str], minutes: int) -> tuple[Outcome, str]:
    if ended.timed_out:
        return Outcome.KILLED, f"time limit exceeded: pipeline.max_minutes is {minutes}"
    if ended.code < 0:
        return Outcome.KILLED, f"ended by {ended.signal_name}"
    if ended.code == 0:
        return Outcome.SUCCEEDED, ""
    # Typer draws a frame around usage errors.
    words = [text for line in last_lines if (text := line.strip("│╭╮╰╯─ "))]
    errors = [line.removeprefix(_ERROR) for line in words if line.startswith(_ERROR)]
    return Outcome.FAILED, [f"exit code {ended.code}", *words, *errors][-1]


def _environment(settings: Settings) -> dict[str, str]:
    """Return the environment with the settings that a child needs, from whatever source, and no others."""
    kept = {name: value for name, value in os.environ.items() if not _sets(name.upper(), settings)}
    kept[variable_name(("instance",))] = settings.instance
    if settings.database_url is not None:
        kept[variable_name(("database_url",))] = settings.database_url.get_secret_value()
    key_file = settings.section(PipelineSettings).archive_key_file
    if key_file is not None:
        kept[variable_name(("pipeline", "archive_key_file"))] = str(key_file.absolute())
    return kept


def _sets(name: str, settings: Settings) -> bool:
    option = name.removeprefix(ENV_PREFIX).partition("__")[0].lower()
    return name == CONFIG_VARIABLE or (name.startswith(ENV_PREFIX) and option in type(settings).model_fields)
