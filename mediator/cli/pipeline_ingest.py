"""The commands ``mediator pipeline ingest`` and ``compact``: from the journal into the lake, and the lake's upkeep."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mediator.cli import show
from mediator.cli.options import AsJson, Config, DataDir, load
from mediator.cli.pipeline_running import Conf, Lake, Master, Remote, is_little, job, kept, lake_of, require_spark, tell
from mediator.errors import SetupError, UnavailableError

if TYPE_CHECKING:
    from mediator.settings import Settings

MAX_DAYS = 36_500


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: mediator pipeline ingest --data-dir ./mediator-data")(ingest)
    app.command(epilog="Example: mediator pipeline compact --keep-days 400")(compact)


def ingest(
    master: Master = None,
    conf: Conf = None,
    remote: Remote = None,
    lake: Lake = None,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Bring what the journal has told since the last time into the lake, each event once."""
    with job(
        "ingest",
        master=master,
        conf=conf,
        remote=remote,
        lake=lake,
        config=config,
        data_dir=data_dir,
        creates=True,
        little=_little,
    ) as work:
        from mediator.journal import FOLDER
        from pipeline.lake import ingest as lake_ingest

        _rotate(work.settings.data_dir)
        summary = lake_ingest.ingest(work.spark, work.settings.data_dir / FOLDER, work.lake, work.told)
        work.numbers.update(asdict(summary))
    tell(summary.lines(), work.numbers, as_json)


def compact(
    keep_days: Annotated[
        int | None,
        typer.Option(help="Remove events older than so many days.", min=1, max=MAX_DAYS, show_default="keep all"),
    ] = None,
    keep_archive_days: Annotated[
        int | None,
        typer.Option(
            help="Remove archived messages older than so many days.", min=1, max=MAX_DAYS, show_default="keep all"
        ),
    ] = None,
    lake: Lake = None,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Merge the lake's small files, and remove from the disk what no table has had for a week; it needs no Spark."""
    require_spark()
    settings = load(config, data_dir=data_dir)
    with kept(settings, "compact") as numbers:
        from pipeline.lake import upkeep

        done = upkeep.compact(lake_of(settings, lake), keep_days=keep_days, keep_archive_days=keep_archive_days)
        numbers.update(asdict(done))
    tell(done.lines(), numbers, as_json)


def _little(settings: "Settings", _lake: Path) -> bool:
    from mediator.journal import FOLDER
    from mediator.segments import read_up_to

    folder = settings.data_dir / FOLDER
    done = read_up_to(folder)
    return is_little(path for path in folder.glob("0*") if path.name > done)


def _rotate(data_dir: Path) -> None:
    """Have the service, if one runs, close the journal's open file, so that all up to now is there to be read."""
    from mediator.operators.control import ask

    try:
        problem = asyncio.run(ask(data_dir, "journal-rotate"))["error"]
    except SetupError:
        return
    except UnavailableError as error:
        problem = str(error)
    if problem:
        show.hint(f"the journal's open file is left for the next time: {problem}")
