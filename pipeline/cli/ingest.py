"""The commands ``mediator pipeline ingest`` and ``compact``: from the journal into the lake, and the lake's upkeep."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mediator.cli import output
from mediator.cli.options import CommandGroup, CommandOptions
from mediator.errors import SetupError, UnavailableError
from pipeline.cli.jobs import (
    Lake,
    SparkOptions,
    is_small,
    job,
    lake_of,
    print_result,
    progress_of,
    recorded_run,
    require_spark,
)

if TYPE_CHECKING:
    from mediator.config.settings import Settings

MAX_DAYS = 36_500


app = CommandGroup()


@app.command(epilog="Example: mediator pipeline ingest --data-dir ./mediator-data")
def ingest(options: SparkOptions) -> None:
    """Bring what the journal has told since the last time into the lake, each event once."""
    with job("ingest", options, creates=True, short=_is_short) as work:
        from mediator.ops.journal import FOLDER
        from pipeline.lake import ingest as lake_ingest

        _rotate(work.settings.data_dir)
        summary = lake_ingest.ingest(work.spark, work.settings.data_dir / FOLDER, work.lake, work.on_progress)
        work.numbers.update(asdict(summary))
    print_result(summary.lines(), work.numbers, options.as_json)


@app.command(epilog="Example: mediator pipeline compact --keep-days 400")
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
    *,
    options: CommandOptions,
) -> None:
    """Merge the lake's small files, and remove from the disk what no table has had for a week; it needs no Spark."""
    require_spark()
    settings = options.load()
    with recorded_run(settings, "compact") as numbers, progress_of("compact") as on_progress:
        from pipeline.lake import compaction as upkeep

        folder = lake_of(settings, lake)
        done = upkeep.compact(folder, keep_days=keep_days, keep_archive_days=keep_archive_days, on_progress=on_progress)
        numbers.update(asdict(done))
    print_result(done.lines(), numbers, options.as_json)


def _is_short(settings: "Settings", _lake: Path) -> bool:
    from mediator.ops.journal import FOLDER
    from mediator.ops.journal.segments import read_up_to

    folder = settings.data_dir / FOLDER
    done = read_up_to(folder)
    return is_small(path for path in folder.glob("0*") if path.name > done)


def _rotate(data_dir: Path) -> None:
    """Have the service, if one runs, close the journal's open file, so that all up to now is there to be read."""
    from mediator.ops.control import send_command

    try:
        problem = asyncio.run(send_command(data_dir, "journal-rotate"))["error"]
    except SetupError:
        return
    except UnavailableError as error:
        problem = str(error)
    if problem:
        output.print_hint(f"the journal's open file is left for the next time: {problem}")
