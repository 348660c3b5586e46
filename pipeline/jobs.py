"""What the pipeline's commands share: options, the Spark session, the history of runs and the progress bar."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.options import CommandError, CommandOptions
from mediator.errors import BadRequestError, SetupError
from mediator.operate.runs import RUN_VARIABLE, Outcome
from mediator.system.extras import install_command
from pipeline.lake import SCHEMES, Place, is_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mediator.operate.run_history import RunHistoryClient
    from mediator.settings.settings import Settings
    from pipeline.lake import ProgressCallback

MAX_CONF = 200
SMALL_BYTES = 8 << 20
"""Input size up to which Java should not optimise its code: that would take longer than the work itself."""
_MISSING = re.compile(r"PATH_NOT_FOUND|FileNotFoundException|FileNotFoundError|No such file or directory")
REQUIRED = ("pyspark", "pyarrow", "deltalake", "duckdb")


def _setting(text: str | tuple[str, str]) -> tuple[str, str]:
    if not isinstance(text, str):
        return text
    key, equals, value = text.partition("=")
    if not equals or not key.startswith("spark.") or key == "spark.":
        raise typer.BadParameter(f'expected spark.SOMETHING=VALUE, got "{text[:80]}"')
    return key, value


def _place(text: str) -> str:
    if "://" in text and not is_url(text):
        raise typer.BadParameter(f'expected a folder or {", ".join(f"{name}://…" for name in SCHEMES)}, got "{text}"')
    return text


Master = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Spark cluster to run on.", envvar="MEDIATOR_SPARK_MASTER", show_default="this machine"
    ),
]
Conf = Annotated[
    list[Any] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark; may be repeated.", parser=_setting),
]
Remote = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Spark Connect server to run on, as sc://HOST:PORT; instead of --master."),
]
Lake = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="Folder of the lake, or its URL in an object store.",
        parser=_place,
        show_default="pipeline.lake, else lake in the data directory",
    ),
]


@dataclass(frozen=True)
class _SparkOptions:
    master: Master = None
    conf: Conf = None
    remote: Remote = None
    lake: Lake = None


@dataclass(frozen=True)
class SparkOptions(CommandOptions, _SparkOptions):
    """Options of a command that runs on Spark."""


@dataclass(frozen=True, slots=True)
class Job:
    """The context of a running command."""

    settings: "Settings"
    lake: Place
    """Where the lake is, which may not exist yet."""
    session: "SparkSession | None"
    on_progress: "ProgressCallback"
    """Shows its progress; see :data:`pipeline.lake.ProgressCallback`."""
    numbers: dict[str, int | float]
    """Its figures by name, for `mediator pipeline runs`: rows, files, …"""

    @property
    def spark(self) -> "SparkSession":
        """The session of a job that runs on Spark."""
        assert self.session is not None
        return self.session


@contextmanager
def job(
    name: str,
    options: SparkOptions,
    *,
    creates: bool = False,
    on_spark: bool = True,
    short: "Callable[[Settings, Place], bool] | None" = None,
) -> Iterator[Job]:
    """Read the settings, start Spark, and stop it at the end; all of it is recorded as a run.

    Without ``on_spark``, Spark is not started. The lake must exist; with ``creates`` it may also be an empty folder, or
    none. ``short`` returns from the settings and the lake whether it is a short job, for which Spark is set up
    differently.

    An error of Spark or DuckDB becomes a :class:`CommandError` of one line (exit code 1). A missing extra, a missing
    Java, wrong settings and a folder that is not a lake are a :class:`SetupError` or wrong usage (2), before anything
    has begun.
    """
    require_spark()
    conf = options.conf or ()
    if len(conf) > MAX_CONF:
        raise typer.BadParameter(f"expected at most {MAX_CONF}, got {len(conf)}", param_hint="--conf")
    settings = options.load()
    started = False
    import duckdb
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from pipeline.lake.delta import check_usable
    from pipeline.session import error_reason, session_scope
    from pipeline.settings import lake_of

    folder = lake_of(settings, options.lake)
    check_usable(folder, create=creates)

    with recorded_run(settings, name) as numbers, progress_of(name) as on_progress:
        try:
            if not on_spark:
                started = True
                yield Job(settings, folder, None, on_progress, numbers)
                return
            on_progress("starting Spark", 0, None)
            short_job = short is not None and short(settings, folder)
            scope = session_scope(
                master=options.master, conf=conf, remote=options.remote, name=f"mediator {name}", short_job=short_job
            )
            with scope as spark:
                started = True
                yield Job(settings, folder, spark, on_progress, numbers)
        except BadRequestError as error:
            if started:
                raise
            raise typer.BadParameter(str(error), param_hint=f"--{error.field}") from None
        except (PySparkException, Py4JError) as error:
            looked = _who_looked(str(error), options.remote or options.master)
            raise CommandError(f"{name}: {error_reason(error)}{looked}") from error
        except duckdb.Error as error:
            raise CommandError(f"{name}: {str(error).splitlines()[0][:500]}") from error


def _who_looked(error: str, spark: str | None) -> str:
    """Return the end of an error about a path that Spark does not find, if that may be because it runs elsewhere."""
    if spark is None or spark.startswith("local") or not _MISSING.search(error):
        return ""
    return f"; {spark} looked, which has to see the same folders, under the same paths, as this machine"


@contextmanager
def recorded_run(settings: "Settings", command: str) -> Iterator[dict[str, int | float]]:
    """Record a run of this installation; yields the dictionary for its figures. :func:`job` does it itself."""
    from mediator.operate.run_history import RunHistoryClient

    arguments = sys.argv[sys.argv.index(command) + 1 :] if command in sys.argv else []
    with record_run(RunHistoryClient(settings), command, arguments, output.print_hint) as numbers:
        yield numbers


@contextmanager
def record_run(
    history: "RunHistoryClient", command: str, arguments: Sequence[str], say: Callable[[str], None]
) -> Iterator[dict[str, int | float]]:
    """Record the body as a run in the history; yields a dictionary for its figures (rows, files, …).

    An exception is recorded as the run's error and raised again. A child of the service ends the run that the service
    began for it. If the run cannot be recorded, it goes on, and ``say`` gets one line with the reason.
    """
    numbers: dict[str, int | float] = {}
    run = 0
    try:
        # The service begins the run of a command that it starts.
        begun = os.environ.get(RUN_VARIABLE, "")
        run = int(begun) if begun.isascii() and begun.isdigit() else 0
        run = run or history.begin(command, arguments)
    except Exception as error:
        say(f"this run is not recorded: {error}")
    outcome, why = Outcome.FAILED, ""
    try:
        yield numbers
        outcome = Outcome.SUCCEEDED
    except KeyboardInterrupt:
        outcome, why = Outcome.KILLED, "interrupted"
        raise
    except BaseException as error:
        why = str(error) or type(error).__name__
        raise
    finally:
        if run:
            try:
                try:
                    history.end(run, outcome, numbers, why)
                except BadRequestError as error:
                    say(f"the numbers of this run are not recorded: {error}")
                    history.end(run, outcome, {}, why)
            except Exception as error:
                say(f"the end of this run is not recorded: {error}")


def is_small(files: Iterable[Path]) -> bool:
    """Whether files are so small in total that reading them takes seconds."""
    size = 0
    for path in files:
        # The service drops the journal's oldest files, and compaction those of the lake.
        with suppress(FileNotFoundError):
            size += path.stat().st_size
        if size > SMALL_BYTES:
            return False
    return True


def require_spark() -> None:
    """Raise a :class:`SetupError` with the remedy if the extra is not installed, or is too old."""
    if not all(find_spec(name) for name in REQUIRED):
        raise SetupError(f"Spark is not installed: {install_command('pipeline')}")
    from pipeline.requirements import check_installed

    check_installed()


def print_result(lines: Iterable[str], numbers: dict[str, int | float], as_json: bool) -> None:
    """Print the result, as text or as JSON."""
    if as_json:
        output.print_json(numbers)
        return
    for line in lines:
        output.print_line(line)


@contextmanager
def progress_of(name: str) -> Iterator["ProgressCallback"]:
    """Show a progress bar; yields the callback that updates it."""
    with output.progress("{task.fields[count]}") as progress:
        bar = progress.add_task(name, total=None, count="")

        def on_progress(step: str, done: int, of: int | None) -> None:
            count = "" if of is None and not done else f"{done:,}" + ("" if of is None else f" of {of:,}")
            progress.update(bar, description=f"{name}: {output.escape(step)}", completed=done, total=of, count=count)

        yield on_progress
