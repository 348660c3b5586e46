"""The pipeline in the service: due runs as child processes, the operations that show and start them, and the pages.

The service itself never loads Spark.
"""

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import web

from mediator.broker import Broker
from mediator.console.console import Console
from mediator.console.pages import Page, PageContent, PageRequest
from mediator.console.tables import MAX_ROWS, next_step
from mediator.errors import AlreadyRunningError, BadRequestError, MediatorError, NotAllowedError, UnavailableError
from mediator.operate.operations import (
    COUNT,
    FLAG,
    TEXT,
    TIME,
    Answer,
    OperationRequest,
    Right,
    about,
    object_schema,
    operation,
    or_null,
)
from mediator.operate.records import Column, Kind
from mediator.operate.run_history import SCHEDULED, RunHistory, RunView
from mediator.operate.runs import RUN_VARIABLE, Outcome, next_due, process_name
from mediator.operate.scheduler import CoalescingTask
from mediator.settings.settings import Settings
from mediator.settings.sources import CONFIG_VARIABLE, ENV_PREFIX, variable_name
from mediator.system.child_process import ChildEnd, run_child
from pipeline.reports import ADDRESSES
from pipeline.settings import PipelineSettings

CHECK_SECONDS = 60
"""Between two checks of what is due."""
RECORD_SECONDS = 5
"""Between two tries to record the end of a run while the store is away."""

_PROGRAM = (sys.executable, "-P", "-m", "mediator")
_HOUR = 3600 * 1000
_MINUTE = 60.0
_ERROR = "mediator: "
MAX_LINES: Final = 200
"""Lines of one child that reach the log."""
MAX_LINE: Final = 500
"""Bytes of one line."""
LAST_LINES: Final = 20
"""Lines of one child that are kept in the history."""
MAX_REPORT: Final = 64 << 20
"""Maximum bytes of a report that is shown."""
_HEADERS: Final = {
    # The report gets an origin of its own, runs no scripts and cannot make requests.
    "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}

_log = structlog.get_logger("pipeline")


@dataclass(frozen=True, slots=True)
class RunningCommand:
    """A command that runs as a child of this process."""

    run: int
    """The number of its run."""
    command: str
    child: asyncio.Task[ChildEnd]


class PipelineScheduler:
    """Runs the due commands in order, one at a time. Used on the event loop."""

    def __init__(
        self, history: RunHistory, broker: Broker, settings: Settings, program: Sequence[str] = _PROGRAM
    ) -> None:
        """``program`` is what runs ``pipeline COMMAND``: a path and arguments."""
        self._history = history
        self._broker = broker
        self._settings = settings
        self._pipeline_settings = settings.section(PipelineSettings)
        self._program = program
        self.task = CoalescingTask("pipeline", self._run_due)
        self.running: RunningCommand | None = None
        """The command that runs now."""
        self._start_lock = asyncio.Lock()
        """Held from the check of what runs until a run has begun."""
        self._requested: asyncio.Task[None] | None = None
        self._stopped = False

    async def start_due(self) -> None:
        """Start what is due, without waiting for it; called every :data:`CHECK_SECONDS`."""
        if not self.task.running:
            self.task.call()

    async def stop(self) -> None:
        """Stop the command that runs. Its run stays open, counts as killed once this process ended, and is repeated."""
        self._stopped = True
        await self.task.stop()
        if self._requested is not None:
            self._requested.cancel()
            await asyncio.gather(self._requested, return_exceptions=True)

    async def start(self, command: str) -> int:
        """Run a command now, without waiting for it, and return the number of its run.

        Raises :class:`BadRequestError` for a command that is not scheduled, and :class:`AlreadyRunningError` while one
        of them runs, whoever started it; :class:`UnavailableError` once the service stops.
        """
        if self._stopped:
            raise UnavailableError("the service stops")
        if command not in SCHEDULED:
            raise BadRequestError("name", f"expected one of {', '.join(SCHEDULED)}")
        async with self._start_lock:
            for run in await self._history.newest():
                if (
                    run.instance == self._history.instance
                    and run.outcome is Outcome.RUNNING
                    and run.command in SCHEDULED
                ):
                    raise AlreadyRunningError(f"pipeline {run.command}, run {run.id}")
            number = await self._begin(command)
        self._requested = asyncio.create_task(self._finish(command, number), name="requested pipeline run")
        return number

    async def cancel(self) -> bool:
        """End the command that runs; False if none does."""
        if self.running is None:
            return False
        self.running.child.cancel()
        await asyncio.wait({self.running.child})
        return True

    async def _record(self, run: int, outcome: Outcome, why: str, last_lines: Sequence[str]) -> None:
        """Record how a run ended, and retry until the store accepts it; until then it counts as running."""
        while True:
            try:
                # The child records its figures itself, if it gets that far.
                await self._history.end(run, outcome, {}, why)
                if outcome is not Outcome.SUCCEEDED:
                    await self._history.keep_log(run, last_lines)
                return
            except MediatorError as error:
                _log.warning("cannot record the end of a pipeline run yet", run=run, reason=str(error))
                await asyncio.sleep(RECORD_SECONDS)

    async def _run_due(self) -> None:
        every, instance = self._pipeline_settings.every * _HOUR, self._history.instance
        for _ in SCHEDULED:
            async with self._start_lock:
                command = next_due(await self._history.newest(), instance, SCHEDULED, every, self._broker.clock())
                if command is None:
                    return
                number = await self._begin(command)
            await self._finish(command, number)

    @property
    def _arguments(self) -> list[str]:
        return ["--data-dir", str(self._settings.data_dir)]

    async def _begin(self, command: str) -> int:
        # The run belongs to the service's process, with which the child ends.
        return await self._history.begin(command, self._arguments, process_name())

    async def _finish(self, command: str, run: int) -> None:
        """Run the command of a run that has begun, and record how it ended."""
        environment = child_environment(self._settings) | {RUN_VARIABLE: str(run)}
        minutes = self._pipeline_settings.max_minutes
        output, program = ChildLog(), [*self._program, "pipeline", command, *self._arguments]
        child = asyncio.create_task(run_child(program, environment, minutes * _MINUTE, output.read), name="pipeline")
        self.running = RunningCommand(run, command, child)
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
        await self._record(run, outcome, why, output.last_lines)
        if outcome is Outcome.SUCCEEDED:
            _log.info("pipeline run succeeded", command=command, run=run)
        else:
            _log.warning("pipeline run failed", command=command, run=run, outcome=outcome.value, reason=why)


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


def child_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of a child: of the service's settings only those that it needs, whatever their source."""
    environment = {name: value for name, value in os.environ.items() if not _is_setting(name.upper(), settings)}
    environment[variable_name(("instance",))] = settings.instance
    if settings.database_url is not None:
        environment[variable_name(("database_url",))] = settings.database_url.get_secret_value()
    chosen = settings.section(PipelineSettings)
    environment[variable_name(("pipeline", "delivery_goal_seconds"))] = str(chosen.delivery_goal_seconds)
    if chosen.lake:
        environment[variable_name(("pipeline", "lake"))] = chosen.lake
    for name, value in chosen.storage.items():
        environment[variable_name(("pipeline", "storage", name))] = value.get_secret_value()
    key_file = chosen.archive_key_file
    if key_file is not None:
        environment[variable_name(("pipeline", "archive_key_file"))] = str(key_file.absolute())
    return environment


def _is_setting(name: str, settings: Settings) -> bool:
    option = name.removeprefix(ENV_PREFIX).partition("__")[0].lower()
    return name == CONFIG_VARIABLE or (name.startswith(ENV_PREFIX) and option in type(settings).model_fields)


class ChildLog:
    """Reads the output of one child: the first lines go to the log, the last ones are kept."""

    def __init__(self) -> None:
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read until the output ends."""
        rest, count = b"", 0
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[:MAX_LINE]
            for line in lines:
                count += self._add_line(line, quiet=count >= MAX_LINES)
        count += self._add_line(rest, quiet=count >= MAX_LINES)
        if count > MAX_LINES:
            _log.info("more output of the pipeline", lines=count - MAX_LINES)

    def _add_line(self, line: bytes, *, quiet: bool) -> int:
        text = line[:MAX_LINE].decode(errors="replace").strip()
        if text:
            self.last_lines.append(text)
            if not quiet:
                with contextlib.suppress(Exception):
                    _log.info("pipeline output", text=text)
        return 1 if text else 0


class PipelineOperations:
    """The operations ``run-start``, ``run-cancel`` and ``pipeline-state``."""

    def __init__(self, scheduler: PipelineScheduler, report: Path, every: int) -> None:
        """``report``: where the page of a report is; ``every``: hours between scheduled runs; 0: none."""
        self._scheduler = scheduler
        self._report = report
        self._every = every

    @operation(
        "run-start",
        Right.OPERATE,
        "Start a pipeline run now, as a child process of this instance",
        object_schema(run=COUNT),
        fields={"name": about(TEXT, "The command of the pipeline.", enum=list(SCHEDULED))},
        required=("name",),
        method="POST",
        path="/runs",
    )
    async def _start(self, request: OperationRequest) -> Answer:
        return {"run": await self._scheduler.start(request.get("name", ""))}

    @operation(
        "run-cancel",
        Right.OPERATE,
        "Cancel the pipeline run of this instance",
        object_schema(cancelled=FLAG),
        method="POST",
        path="/pipeline/cancel",
    )
    async def _cancel(self, _request: OperationRequest) -> Answer:
        return {"cancelled": await self._scheduler.cancel()}

    @operation(
        "pipeline-state",
        Right.READ,
        "The pipeline run in progress on this instance, and the newest report",
        object_schema(
            every=about(COUNT, "Hours between runs that the service begins; 0: it begins none."),
            running=or_null(object_schema(run=COUNT, command=TEXT)),
            report=or_null(object_schema(at=TIME, bytes=COUNT)),
        ),
        path="/pipeline",
    )
    async def _show(self, _request: OperationRequest) -> Answer:
        running = self._scheduler.running
        shown = None if running is None else {"run": running.run, "command": running.command}
        return {
            "every": self._every,
            "running": shown,
            "report": await asyncio.to_thread(_describe_report, self._report),
        }


def _describe_report(file: Path) -> dict[str, Any] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return {"at": status.st_mtime, "bytes": status.st_size}


def add_pages(console: Console, file: Path) -> None:
    """Add the pages; ``file`` is where the page of a report is."""

    async def show_report(page_request: PageRequest) -> PageContent:
        size = await asyncio.to_thread(lambda: file.stat().st_size if file.is_file() and not file.is_symlink() else 0)
        if not 0 < size <= MAX_REPORT:
            raise web.HTTPNotFound
        if not page_request.may(Right.READ_PAYLOAD) and ADDRESSES.encode() in await asyncio.to_thread(file.read_bytes):
            raise NotAllowedError(Right.READ_PAYLOAD)
        return web.FileResponse(file, headers={**_HEADERS, "Content-Type": "text/html; charset=utf-8"})

    console.add_pages(
        "pipeline",
        Path(__file__).with_name("templates"),
        Page("/pipeline", "Pipeline", _show_runs, "Service", guide="pipeline"),
        Page("/pipeline/runs/{run}", "Run of the pipeline", _show_run, template="run.html", guide="pipeline"),
        Page("/pipeline/report", "", show_report),
    )


async def _show_runs(page_request: PageRequest) -> PageContent:
    request = page_request.table_request("runs")
    runs = (await page_request.run("run-list", limit=MAX_ROWS))["runs"]
    rows = [run | {"took": run["ended_at"] and run["ended_at"] - run["started_at"]} for run in runs]
    table = page_request.table(
        request,
        "Runs of all instances, newest first",
        _RUNS,
        rows,
        empty=next_step("It has not run yet. Run it above, or:", "mediator pipeline ingest"),
    )
    return {"runs": table, "commands": list(SCHEDULED), **await page_request.run("pipeline-state")}


_TOOK: Final = Column("took", field="took", kind=Kind.SECONDS)
_RUNS: Final = [
    *RunView.columns("run", "command", "outcome", "started_at"),
    _TOOK,
    *RunView.columns("numbers", "error", "instance"),
]


async def _show_run(page_request: PageRequest) -> PageContent:
    run = await page_request.run("run-show", run=page_request.number("run", 0, 1, 2**53))
    counted = [{"what": name.replace("_", " "), "count": count} for name, count in sorted(run["numbers"].items())]
    return {"run": run, "counted": page_request.table("counted", "Counted", _COUNTED, counted)}


_COUNTED: Final = [Column("what", field="what"), Column("count", field="count", kind=Kind.NUMBER)]
