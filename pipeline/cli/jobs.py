"""What the pipeline's commands share: options, the Spark session, the run history and the progress bar."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.errors import CommandError
from mediator.cli.options import CommandOptions
from mediator.errors import BadRequestError, SetupError
from mediator.system.extras import install_command

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mediator.config.settings import Settings
    from pipeline.progress import ProgressCallback

MAX_CONF = 200
LITTLE_BYTES = 8 << 20
"""Input size up to which Java should not optimise its code: that took longer than the work itself."""
NEEDED = ("pyspark", "pyarrow", "deltalake", "plotly")


def _setting(text: str | tuple[str, str]) -> tuple[str, str]:
    if not isinstance(text, str):
        return text
    key, equals, value = text.partition("=")
    if not equals or not key.startswith("spark.") or key == "spark.":
        raise typer.BadParameter(f'expected spark.SOMETHING=VALUE, got "{text[:80]}"')
    return key, value


def _folder(text: str | Path) -> Path:
    if "://" in str(text):
        raise typer.BadParameter(f'expected a folder of this machine, got "{text}"; object stores are not supported')
    return Path(text)


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
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of the lake, on this machine's file system.",
        parser=_folder,
        show_default="lake, in the data directory",
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
    lake: Path
    """The folder of the lake, which need not be there yet."""
    spark: "SparkSession"
    on_progress: "ProgressCallback"
    """Shows how far it has come; see :mod:`pipeline.progress`."""
    numbers: dict[str, int | float]
    """What it counted, by a word, for `mediator pipeline runs`: rows, files, …"""


def lake_of(settings: "Settings", lake: Path | None) -> Path:
    """Return the folder of the lake: the one that was named, else ``lake`` in the data directory."""
    return (lake if lake is not None else settings.data_dir / "lake").absolute()


@contextmanager
def job(
    name: str,
    options: SparkOptions,
    *,
    creates: bool = False,
    short: "Callable[[Settings, Path], bool] | None" = None,
) -> Iterator[Job]:
    """Read the settings, start Spark, and stop it at the end; all of it is recorded as a run.

    The lake must be there; with ``creates`` an empty folder, or none, is as good.
    ``short`` tells from the settings and the lake whether it is a short job, for which Spark is set up differently.

    What Spark cannot do becomes a :class:`CommandError` of one line (exit code 1); a missing extra, a missing Java and
    wrong settings and a folder that is no lake are a :class:`SetupError` or wrong usage (2), before anything was begun.
    """
    require_spark()
    conf = options.conf or ()
    if len(conf) > MAX_CONF:
        raise typer.BadParameter(f"expected at most {MAX_CONF}, got {len(conf)}", param_hint="--conf")
    settings = options.load()
    folder = lake_of(settings, options.lake)
    began = False
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from pipeline.lake.folder import check_usable
    from pipeline.session import error_reason, session_scope

    check_usable(folder, create=creates)

    with recorded_run(settings, name) as numbers, progress_of(name) as on_progress:
        on_progress("starting Spark", 0, None)
        try:
            short_job = short is not None and short(settings, folder)
            started = session_scope(
                master=options.master, conf=conf, remote=options.remote, name=f"mediator {name}", short_job=short_job
            )
            with started as spark:
                began = True
                yield Job(settings, folder, spark, on_progress, numbers)
        except BadRequestError as error:
            if began:
                raise
            raise typer.BadParameter(str(error), param_hint=f"--{error.field}") from None
        except (PySparkException, Py4JError) as error:
            raise CommandError(f"{name}: {error_reason(error)}") from error


def is_small(files: Iterable[Path]) -> bool:
    """Whether files are so small in total that reading them takes seconds."""
    size = 0
    for path in files:
        # The service drops the journal's oldest files, and an upkeep the lake's.
        with suppress(FileNotFoundError):
            size += path.stat().st_size
        if size > LITTLE_BYTES:
            return False
    return True


@contextmanager
def recorded_run(settings: "Settings", command: str) -> Iterator[dict[str, int | float]]:
    """Keep the run in the history; what happens inside puts its numbers into the table. :func:`job` does it itself."""
    from mediator.ops.runs.client import RunHistoryClient
    from pipeline.runs import record_run

    arguments = sys.argv[sys.argv.index(command) + 1 :] if command in sys.argv else []
    with record_run(RunHistoryClient(settings), command, arguments, output.print_hint) as numbers:
        yield numbers


def require_spark() -> None:
    """Raise a :class:`SetupError` with the remedy if the extra is not installed, or is too old."""
    if not all(find_spec(name) for name in NEEDED):
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
    """Show the steps of a command; the callback tells them."""
    with output.progress("{task.fields[count]}") as progress:
        bar = progress.add_task(name, total=None, count="")

        def on_progress(step: str, done: int, of: int | None) -> None:
            count = "" if of is None and not done else f"{done:,}" + ("" if of is None else f" of {of:,}")
            progress.update(bar, description=f"{name}: {output.escape(step)}", completed=done, total=of, count=count)

        yield on_progress
