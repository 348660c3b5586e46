"""Runs the data pipeline every so often, as a child process: the service itself never loads Spark."""

import os
import signal
import sys
from collections.abc import Sequence

import structlog

from mediator.broker import Broker
from mediator.errors import SetupError
from mediator.housekeeping.child import Ended, run_child
from mediator.housekeeping.errand import Errand
from mediator.housekeeping.processes import process_name
from mediator.housekeeping.runs import SCHEDULED, RunBook
from mediator.runs.recording import next_due
from mediator.runs.records import RUN_VARIABLE, Outcome
from mediator.settings import Settings
from mediator.settings_sources import CONFIG_VARIABLE, ENV_PREFIX, variable_name

LOOK_SECONDS = 60
_PROGRAM = (sys.executable, "-P", "-m", "mediator")
_HOUR = 3600 * 1000
_MINUTE = 60.0
_ERROR = "mediator: "
_log = structlog.get_logger("pipeline")


class Rounds:
    """Runs the commands in their order when they are due, one at a time. Used on the event loop."""

    def __init__(self, book: RunBook, broker: Broker, settings: Settings, program: Sequence[str] = _PROGRAM) -> None:
        """``program`` is what runs ``pipeline COMMAND``: a path and arguments."""
        self._book = book
        self._broker = broker
        self._settings = settings
        self._program = program
        self._errand = Errand("pipeline", self._round)

    async def look(self) -> None:
        """Run what is due, beside the caller; to be called every :data:`LOOK_SECONDS`."""
        if not self._errand.running:
            self._errand.call()

    async def stop(self) -> None:
        """End what runs. It is given no end, shows as killed once this process is gone, and is soon begun again."""
        await self._errand.stop()

    async def _round(self) -> None:
        every, instance = self._settings.pipeline.every * _HOUR, self._book.instance
        for _ in SCHEDULED:
            command = next_due(await self._book.newest(), instance, SCHEDULED, every, self._broker.clock())
            if command is None:
                return
            await self._run(command)

    async def _run(self, command: str) -> None:
        arguments = ["--data-dir", str(self._settings.data_dir)]
        # Named by the service, with which the child ends.
        no = await self._book.begin(command, arguments, process_name())
        environment = _environment(self._settings) | {RUN_VARIABLE: str(no)}
        minutes = self._settings.pipeline.max_minutes
        try:
            ended = await run_child([*self._program, "pipeline", command, *arguments], environment, minutes * _MINUTE)
        except SetupError as error:
            outcome, why = Outcome.FAILED, str(error)
        else:
            outcome, why = _judge(ended, minutes)
        # The child has told its numbers itself, if it came so far.
        await self._book.end(no, outcome, {}, why)
        if outcome is Outcome.SUCCEEDED:
            _log.info("the pipeline ran", command=command, run=no)
        else:
            _log.warning("the pipeline failed", command=command, run=no, outcome=outcome.value, why=why)


def _judge(ended: Ended, minutes: int) -> tuple[Outcome, str]:
    if ended.late:
        return Outcome.KILLED, f"its time was over: pipeline.max_minutes is {minutes}"
    if ended.code < 0:
        return Outcome.KILLED, f"ended by {signal.Signals(-ended.code).name}"
    if ended.code == 0:
        return Outcome.SUCCEEDED, ""
    # Wrong usage is told in a frame.
    words = [text for line in ended.said if (text := line.strip("│╭╮╰╯─ "))]
    errors = [line.removeprefix(_ERROR) for line in words if line.startswith(_ERROR)]
    return Outcome.FAILED, [f"exit code {ended.code}", *words, *errors][-1]


def _environment(settings: Settings) -> dict[str, str]:
    """Return the environment with the settings a child needs, wherever the service has them from, and no others."""
    kept = {name: value for name, value in os.environ.items() if not _sets(name.upper())}
    kept[variable_name(("instance",))] = settings.instance
    if settings.database_url is not None:
        kept[variable_name(("database_url",))] = settings.database_url.get_secret_value()
    if settings.pipeline.archive_key_file is not None:
        kept[variable_name(("pipeline", "archive_key_file"))] = str(settings.pipeline.archive_key_file.absolute())
    return kept


def _sets(name: str) -> bool:
    option = name.removeprefix(ENV_PREFIX).partition("__")[0].lower()
    return name == CONFIG_VARIABLE or (name.startswith(ENV_PREFIX) and option in Settings.model_fields)
