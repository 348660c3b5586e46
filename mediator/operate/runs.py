"""A run of a pipeline command: what is recorded of it, bounded and without secrets, in SQL, and what is due."""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import orjson

from mediator.errors import BadRequestError
from mediator.mailboxes.rows import Row
from mediator.mailboxes.session import Table

_PROC = Path("/proc")
KEPT = 1000
"""Number of runs kept; older ones are removed as new ones begin."""

RUN_VARIABLE = "MEDIATOR_RUN"
"""The environment variable with the number of the run that the service began for its child."""

Numbers = Mapping[str, int | float]
"""Counts of a run by name: rows, files, …"""
MAX_ARGUMENTS = 64
MAX_ARGUMENT = 300
"""Characters kept of one argument."""
MAX_NUMBERS = 64
MAX_ERROR = 500
"""Characters kept of an error."""
MAX_PROCESS = 200
MAX_LOG_LINES = 20
HIDDEN = "…"
"""Replaces what is left out."""
GONE = "its process is gone"
AGAIN = 3600 * 1000
"""Milliseconds after which a run that ended with the service is repeated."""

_COMMAND = re.compile(r"[a-z][a-z0-9-]{0,31}")
_NUMBER_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SECRET_NAME = re.compile(r"pass|pwd|secret|token|credential|key|auth", re.IGNORECASE)
# With a scheme, or as NATS servers may be given without one.
_LOGIN = re.compile(r"(?<=://)\S*@|(?<![^=,])[^\s:@/=,]+:\S*@")
_LARGEST = 2**63
_RUN = "no, command, arguments, instance, process, started_at, ended_at, outcome, numbers, error"


def process_name(pid: int | None = None) -> str:
    """Return a process's name (boot, PID namespace, PID, start time), of this one by default; empty if it is gone."""
    return _name(os.getpid() if pid is None else pid)


def is_gone(name: str, *, ours: bool) -> bool:
    """Whether a process with this name is gone.

    ``ours``: it belonged to this installation, so it is gone if the machine or the container was restarted. Processes
    elsewhere cannot be checked and count as running.
    """
    place, here = name.split()[:2], _place()
    if place != here:
        return ours
    try:
        return _name(int(name.split()[2])) != name
    except (ValueError, IndexError):
        return ours


def _name(pid: int) -> str:
    try:
        # The name of the program stands in parentheses and may hold anything.
        state, *fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in ("Z", "X") else " ".join([*_place(), str(pid), fields[18]])


def _place() -> list[str]:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink(_PROC / "self/ns/pid")]
    except OSError:
        return ["unknown", "unknown"]


class Outcome(StrEnum):
    """The state of a run."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """It ended by itself, with an error."""
    KILLED = "killed"
    """It was stopped, or its process disappeared."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that begins; made by ``new_run``, which bounds it and removes secrets."""

    command: str
    arguments: tuple[str, ...]
    instance: str
    """The service whose data it works on."""
    process: str
    """The unique name of the process that it cannot outlive."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended; made by :func:`mediator.operate.runs.new_ending`."""

    outcome: Outcome
    numbers: Numbers
    error: str
    """One line; empty when there was none."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run. Times are milliseconds since the epoch."""

    id: int
    command: str
    arguments: tuple[str, ...]
    instance: str
    process: str
    started_at: int
    ended_at: int | None
    """None while it runs, and if its process disappeared."""
    outcome: Outcome
    numbers: Numbers
    error: str


def new_run(command: str, arguments: Sequence[str], instance: str, process: str) -> NewRun:
    """Describe a run that begins; raises :class:`BadRequestError`."""
    if not _COMMAND.fullmatch(command):
        raise BadRequestError("name", "expected a command of the pipeline")
    if len(process) > MAX_PROCESS:
        raise BadRequestError("process", f"expected at most {MAX_PROCESS} characters")
    # Secrets are removed before arguments are cut, which could cut off the name that marks a secret.
    shown = [_cut(argument, MAX_ARGUMENT) for argument in without_secrets(arguments[:MAX_ARGUMENTS])]
    if len(arguments) > MAX_ARGUMENTS:
        shown.append(HIDDEN)
    return NewRun(command, tuple(shown), instance, _cut(process, MAX_PROCESS))


def new_ending(outcome: Outcome, numbers: Mapping[str, object], error: str) -> Ending:
    """Describe how a run ended; raises :class:`BadRequestError`. Errors are cut to one line."""
    if outcome is Outcome.RUNNING:
        raise BadRequestError("outcome", "expected succeeded, failed or killed")
    if len(numbers) > MAX_NUMBERS:
        raise BadRequestError("numbers", f"expected at most {MAX_NUMBERS}")
    return Ending(outcome, {name: _number(name, value) for name, value in numbers.items()}, _cut(error, MAX_ERROR))


def bounded_log(lines: Iterable[str]) -> str:
    """Return lines of output as they are kept: the last ones, cut, and without passwords, tokens and logins of URLs."""
    return "\n".join(_cut(_shown(line), MAX_ERROR) for line in list(lines)[-MAX_LOG_LINES:])


def without_secrets(arguments: Iterable[str]) -> list[str]:
    """Return a command line without passwords, keys, tokens and logins of URLs."""
    shown: list[str] = []
    secret = False
    for argument in arguments:
        shown.append(HIDDEN if secret else _shown(argument))
        # The value of an option that stands alone is the next argument.
        secret = not secret and argument.startswith("-") and "=" not in argument and _secret(argument)
    return shown


def resolve_outcomes(runs: Iterable[Run], gone: Callable[[Run], bool]) -> list[Run]:
    """Return runs with those marked as killed that are open although their process is gone."""
    return [
        replace(run, outcome=Outcome.KILLED, error=run.error or GONE)
        if run.outcome is Outcome.RUNNING and gone(run)
        else run
        for run in runs
    ]


def find_failed(runs: Iterable[Run], instance: str) -> list[Run]:
    """Return the last finished run of each command of an instance if it did not succeed, newest first.

    ``runs`` come from :func:`resolve_outcomes`, newest first.
    """
    last: dict[str, Run] = {}
    for run in runs:
        if run.instance == instance and run.outcome is not Outcome.RUNNING:
            last.setdefault(run.command, run)
    return [run for run in last.values() if run.outcome is not Outcome.SUCCEEDED]


def next_due(
    runs: Sequence[Run], instance: str, commands: Mapping[str, str | None], every: int, now: int
) -> str | None:
    """Return the command that is due now, if any; each runs ``every`` so many milliseconds, in this order.

    ``commands`` maps each to the command it depends on; it does not run after that one failed. None while one of them
    runs, whoever started it. ``runs`` come from :func:`resolve_outcomes`, newest first.
    """
    mine = [run for run in runs if run.instance == instance and run.command in commands]
    if any(run.outcome is Outcome.RUNNING for run in mine):
        return None
    failed: set[str | None] = set()
    for command, base in commands.items():
        last = next((run for run in mine if run.command == command), None)
        if base not in failed and (last is None or _old(last, every, now)):
            return command
        if last is None or last.outcome is not Outcome.SUCCEEDED:
            failed.add(command)
    return None


def _old(last: Run, every: int, now: int) -> bool:
    cut_off = last.outcome is Outcome.KILLED and last.ended_at is None
    # If the clock was set back, it began in the future: it counts as old, or nothing would run until then.
    return not 0 <= now - last.started_at < (min(every, AGAIN) if cut_off else every)


def _secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _shown(argument: str) -> str:
    """Hide the value in ``name=value``, also within ``--conf=name=value``, and the secrets of a URL."""
    parts = argument.split("=")
    for number, part in enumerate(parts[:-1], 1):
        if "://" in part:
            break
        if _secret(part):
            return "=".join([*parts[:number], HIDDEN])
    return _url(argument) if "://" in argument else _LOGIN.sub(f"{HIDDEN}@", argument)


def _url(argument: str) -> str:
    """Hide the login, the query and the parameters of a URL, which may have secrets."""
    kept = re.split(r"[?;#]", _LOGIN.sub(f"{HIDDEN}@", argument), maxsplit=1)
    return kept[0] + (HIDDEN if len(kept) > 1 else "")


def _number(name: object, value: object) -> int | float:
    if not isinstance(name, str) or not _NUMBER_NAME.fullmatch(name):
        raise BadRequestError("numbers", "expected words as names")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequestError(f"numbers.{name}", "expected a number")
    if not math.isfinite(value) or abs(value) >= _LARGEST:
        raise BadRequestError(f"numbers.{name}", "expected a finite number below 2**63")
    return value


def _cut(text: str, limit: int) -> str:
    """Return the text as one line that every database accepts."""
    line = " ".join(text.replace("\0", " ").split()).encode("utf-8", "replace").decode()
    return line if len(line) <= limit else line[: limit - 1] + HIDDEN


class Runs(Table):
    """The runs of the pipeline, the newest :data:`~mediator.operate.runs.KEPT` of them."""

    def add(self, new: NewRun, now: int) -> Run:
        """Keep a run that begins now, and forget the oldest beyond the bound. Numbers grow and never come again."""
        arguments = orjson.dumps(new.arguments).decode()
        row = self._session.one(
            "INSERT INTO pipeline_run (command, arguments, instance, process, started_at, outcome, numbers, error)"
            f" VALUES (?, ?, ?, ?, ?, ?, '{{}}', '') RETURNING {_RUN}",
            (new.command, arguments, new.instance, new.process, now, Outcome.RUNNING.value),
        )
        self._execute(
            "DELETE FROM pipeline_run WHERE no <= (SELECT no FROM pipeline_run ORDER BY no DESC LIMIT 1 OFFSET ?)",
            (KEPT,),
        )
        return _run(row)

    def end(self, run_id: int, ending: Ending, now: int) -> Run | None:
        """Keep how a run ended; None when it has ended already, or is not there any more."""
        row = self._dialect.first(
            "UPDATE pipeline_run SET ended_at = ?, outcome = ?, numbers = ?, error = ?"
            f" WHERE no = ? AND ended_at IS NULL RETURNING {_RUN}",
            (now, ending.outcome.value, orjson.dumps(dict(ending.numbers)).decode(), ending.error, run_id),
        )
        return None if row is None else _run(row)

    def keep_log(self, run_id: int, log: str) -> None:
        """Keep the end of the output of a run, unless it succeeded."""
        self._execute(
            "UPDATE pipeline_run SET log = ? WHERE no = ? AND outcome <> ?", (log, run_id, Outcome.SUCCEEDED.value)
        )

    def get(self, run_id: int) -> tuple[Run, str] | None:
        """Return a run with the end of its output; None if it is not there any more."""
        row = self._dialect.first(f"SELECT {_RUN}, log FROM pipeline_run WHERE no = ?", (run_id,))
        return None if row is None else (_run(row[:-1]), row[-1])

    def newest(self, limit: int) -> list[Run]:
        """Return the newest runs, the newest first."""
        sql = f"SELECT {_RUN} FROM pipeline_run ORDER BY no DESC LIMIT ?"
        return [_run(row) for row in self._execute(sql, (limit,))]


def _run(row: Row) -> Run:
    run_id, command, arguments, instance, process, started_at, ended_at, outcome, numbers, error = row
    return Run(
        run_id,
        command,
        tuple(orjson.loads(arguments)),
        instance,
        process,
        started_at,
        ended_at,
        Outcome(outcome),
        orjson.loads(numbers),
        error,
    )
