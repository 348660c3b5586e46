"""The command ``mediator pipeline archive``: what is marked for the archive, from the outbox into the lake."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mediator.cli.options import CommandGroup
from pipeline.cli.jobs import SparkOptions, job, print_result, recorded_run, require_spark

if TYPE_CHECKING:
    from mediator.config.settings import Settings
    from pipeline.lake.sealing import Key

KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keys that seal payloads and headers in the archive, each a line of base64; the first seals, all open.",
        show_default="pipeline.archive_key_file",
    ),
]


app = CommandGroup()


@app.command(epilog="Example: mediator pipeline archive --key-file /etc/mediator/archive.keys")
def archive(key_file: KeyFile = None, *, options: SparkOptions) -> None:
    """Bring the messages that are marked for the archive into the lake, each once, and let go of them here."""
    require_spark()
    settings = options.load()
    from pipeline.lake import archive as lake_archive
    from pipeline.lake.outbox import newest_seq, split_outbox
    from pipeline.service.outbox import OutboxClient
    from pipeline.source.options import database_options

    keys = keys_of(settings, key_file)
    place = database_options(settings)
    until = newest_seq(place)
    if until is None:
        # Spark would take longer to start than all the rest.
        with recorded_run(settings, "archive") as numbers:
            nothing = lake_archive.ArchiveResult()
            numbers.update(asdict(nothing))
        print_result(nothing.lines(), numbers, options.as_json)
        return

    def is_short(_settings: "Settings", _lake: Path) -> bool:
        return len(split_outbox(place, until)) <= 1

    with job("archive", options, creates=True, short=is_short) as work:
        key = keys[0] if keys else None
        summary = lake_archive.archive(
            work.spark, place, work.lake, key, OutboxClient(settings).remove, work.on_progress
        )
        work.numbers.update(asdict(summary))
    print_result(summary.lines(), work.numbers, options.as_json)


def keys_of(settings: "Settings", key_file: Path | None) -> list["Key"]:
    """Return the keys of a file that was named, or that the settings name; without either there are none."""
    from pipeline.lake.sealing import read_keys
    from pipeline.settings import PipelineSettings

    path = key_file or settings.section(PipelineSettings).archive_key_file
    return [] if path is None else read_keys(path)
