"""The command ``mediator pipeline archive``: what is marked for the archive, from the outbox into the lake."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mediator.cli.options import AsJson, Config, DataDir, load
from mediator.cli.pipeline_running import Conf, Lake, Master, Remote, job, kept, require_spark, tell

if TYPE_CHECKING:
    from mediator.settings import Settings
    from pipeline.lake.sealing import Key

KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keys that seal payloads and headers in the archive, each a line of base64; the first seals, all open.",
        show_default="pipeline.archive_key_file",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: mediator pipeline archive --key-file /etc/mediator/archive.keys")(archive)


def archive(
    key_file: KeyFile = None,
    master: Master = None,
    conf: Conf = None,
    remote: Remote = None,
    lake: Lake = None,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Bring the messages that are marked for the archive into the lake, each once, and let go of them here."""
    require_spark()
    settings = load(config, data_dir=data_dir)
    from mediator.housekeeping.archived import Outbox
    from pipeline.lake import archive as lake_archive
    from pipeline.lake.outbox import newest, pieces
    from pipeline.source.options import place_of

    keys = keys_of(settings, key_file)
    place = place_of(settings)
    until = newest(place)
    if until is None:
        # Spark would take longer to start than all the rest.
        with kept(settings, "archive") as numbers:
            nothing = lake_archive.Summary()
            numbers.update(asdict(nothing))
        tell(nothing.lines(), numbers, as_json)
        return
    with job(
        "archive",
        master=master,
        conf=conf,
        remote=remote,
        lake=lake,
        config=config,
        data_dir=data_dir,
        creates=True,
        little=lambda _settings, _lake: len(pieces(place, until)) <= 1,
    ) as work:
        key = keys[0] if keys else None
        summary = lake_archive.archive(work.spark, place, work.lake, key, Outbox(settings).remove, work.told)
        work.numbers.update(asdict(summary))
    tell(summary.lines(), work.numbers, as_json)


def keys_of(settings: "Settings", key_file: Path | None) -> list["Key"]:
    """Return the keys of a file that was named, or that the settings name; without either there are none."""
    from pipeline.lake.sealing import read_keys

    path = key_file or settings.pipeline.archive_key_file
    return [] if path is None else read_keys(path)
