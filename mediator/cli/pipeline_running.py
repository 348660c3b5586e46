"""What the pipeline's commands share: their options, the session that runs them, and the bar that shows how far."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli import show
from mediator.cli.failing import CommandError
from mediator.cli.options import load
from mediator.errors import BadRequestError, SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mediator.settings import Settings
    from pipeline.telling import Told

MAX_CONF = 200
LITTLE_BYTES = 8 << 20
"""What is read, for which Java had better not compile as for hours of work: that took more than the work itself."""
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


@dataclass(frozen=True, slots=True)
class Job:
    """What a command works with."""

    settings: "Settings"
    lake: Path
    """The folder of the lake, which need not be there yet."""
    spark: "SparkSession"
    told: "Told"
    """Shows how far it has come; see :mod:`pipeline.telling`."""
    numbers: dict[str, int | float]
    """What it counted, by a word, for `mediator pipeline runs`: rows, files, …"""


def lake_of(settings: "Settings", lake: Path | None) -> Path:
    """Return the folder of the lake: the one that was named, else ``lake`` in the data directory."""
    return (lake if lake is not None else settings.data_dir / "lake").absolute()


@contextmanager
def job(
    name: str,
    *,
    master: str | None,
    conf: list[tuple[str, str]] | None,
    remote: str | None,
    lake: Path | None,
    config: Path | None,
    data_dir: Path | None,
    creates: bool = False,
    little: "Callable[[Settings, Path], bool] | None" = None,
) -> Iterator[Job]:
    """Read the settings, start Spark, and stop it at the end; all of it is recorded as a run.

    The lake must be there; with ``creates`` an empty folder, or none, is as good.
    ``little`` says by the settings and the lake whether there is little to do: for that Spark is set up otherwise.

    What Spark cannot do becomes a :class:`CommandError` of one line (exit code 1); a missing extra, a missing Java and
    wrong settings and a folder that is no lake are a :class:`SetupError` or wrong usage (2), before anything was begun.
    """
    require_spark()
    if conf is not None and len(conf) > MAX_CONF:
        raise typer.BadParameter(f"expected at most {MAX_CONF}, got {len(conf)}", param_hint="--conf")
    settings = load(config, data_dir=data_dir)
    folder = lake_of(settings, lake)
    began = False
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from pipeline.lake.folder import check_usable
    from pipeline.session import reason, running

    check_usable(folder, create=creates)

    with kept(settings, name) as numbers, _progress(name) as told:
        told("starting Spark", 0, None)
        try:
            soon = little is not None and little(settings, folder)
            started = running(master=master, conf=conf or (), remote=remote, name=f"mediator {name}", little=soon)
            with started as spark:
                began = True
                yield Job(settings, folder, spark, told, numbers)
        except BadRequestError as error:
            if began:
                raise
            raise typer.BadParameter(str(error), param_hint=f"--{error.field}") from None
        except (PySparkException, Py4JError) as error:
            raise CommandError(f"{name}: {reason(error)}") from error


def is_little(files: Iterable[Path]) -> bool:
    """Whether files are together so small that reading them takes seconds."""
    size = 0
    for path in files:
        # The service drops the journal's oldest files, and an upkeep the lake's.
        with suppress(FileNotFoundError):
            size += path.stat().st_size
        if size > LITTLE_BYTES:
            return False
    return True


@contextmanager
def kept(settings: "Settings", command: str) -> Iterator[dict[str, int | float]]:
    """Keep the run in the history; what happens inside puts its numbers into the table. :func:`job` does it itself."""
    from mediator.housekeeping.history import History
    from pipeline.runs import recorded

    arguments = sys.argv[sys.argv.index(command) + 1 :] if command in sys.argv else []
    with recorded(History(settings), command, arguments, show.hint) as numbers:
        yield numbers


def require_spark() -> None:
    """Raise a :class:`SetupError` with the remedy if the extra is not installed, or is too old."""
    if not all(find_spec(name) for name in NEEDED):
        raise SetupError("Spark is not installed: pip install 'agent-mediator[pipeline]'")
    from pipeline.requirements import check_installed

    check_installed()


def tell(lines: Iterable[str], numbers: dict[str, int | float], as_json: bool) -> None:
    """Print what was done, in words or as the numbers."""
    if as_json:
        show.as_json(numbers)
        return
    for line in lines:
        show.say(line)


@contextmanager
def _progress(name: str) -> Iterator["Told"]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Progress(*columns, console=show.console(stderr=True)) as progress:
        bar = progress.add_task(name, total=None, count="")

        def told(step: str, done: int, of: int | None) -> None:
            count = "" if of is None and not done else f"{done:,}" + ("" if of is None else f" of {of:,}")
            progress.update(bar, description=f"{name}: {show.harmless(step)}", completed=done, total=of, count=count)

        yield told
