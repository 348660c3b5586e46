"""The command group ``mediator pipeline``."""

import asyncio
import csv
import io
import time
import webbrowser
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import date
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli.client import NatsOptions
from mediator.cli.options import CommandError, CommandGroup, CommandOptions, earlier, seconds, timed
from mediator.cli.output import moment, print_hint, print_json, print_line
from mediator.errors import BadRequestError, SetupError, UnavailableError
from mediator.mailboxes.address import parse_address
from mediator.operate.runs import KEPT
from mediator.operate.units import format_duration
from mediator.system.extras import install_command
from pipeline.jobs import (
    Lake,
    SparkOptions,
    is_small,
    job,
    print_result,
    progress_of,
    recorded_run,
    require_spark,
)
from pipeline.lake import ARCHIVE, EVENTS, JOURNAL, REPORT, ObjectPlace, Place

if TYPE_CHECKING:
    from mediator.settings.settings import Settings
    from pipeline.lake.sealing import Key

app = CommandGroup(
    help="Keep what passed through the mediator in a lake, and report on it; runs on Spark.", no_args_is_help=True
)
MAX_DAYS = 36_500
KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keys that seal payloads and headers in the archive, each a line of base64; the first seals, all open.",
        show_default="pipeline.archive_key_file",
    ),
]
MAX_VALUES = 1000
"""Of an option that may be repeated."""
_DAY = "YYYY-MM-DD"


class EngineName(StrEnum):
    """What reads events for a report."""

    DUCKDB = "duckdb"
    SPARK = "spark"


class Grain(StrEnum):
    """Steps of a report's charts."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"


_COLUMNS = ("run#", "command", "started", "took#", "outcome", "numbers", "error")


@app.command(epilog="Example: mediator pipeline ingest --data-dir ./mediator-data")
def ingest(options: SparkOptions) -> None:
    """Load new journal events into the lake, each once."""
    with job("ingest", options, creates=True, short=_is_small_journal) as work:
        from mediator.journal import FOLDER
        from pipeline.lake import ingest as lake_ingest

        _rotate_journal(work.settings.data_dir)
        folder = work.settings.data_dir / FOLDER
        journal: Place = folder
        if isinstance(work.lake, ObjectPlace):
            # So that tasks find them, whichever disks they see; others may have been copied by other machines.
            if folder.is_dir():
                lake_ingest.upload(folder, work.lake, work.settings.instance, work.on_progress)
            journal = work.lake / JOURNAL
        summary = lake_ingest.ingest(work.spark, journal, work.lake, work.on_progress)
        work.numbers.update(asdict(summary))
    print_result(summary.lines(), work.numbers, options.as_json)


@app.command(epilog="Example: mediator pipeline upload --lake s3://company-mail/lake")
def upload(lake: Lake = None, *, options: CommandOptions) -> None:
    """Copy new closed files of the journal to a lake in an object store, for an ingest elsewhere; needs no Spark."""
    require_spark()
    from pipeline.settings import lake_of

    settings = options.load()
    place = lake_of(settings, lake)
    if not isinstance(place, ObjectPlace):
        raise typer.BadParameter(f"expected a place in an object store, got {place}", param_hint="--lake")
    with recorded_run(settings, "upload") as numbers, progress_of("upload") as on_progress:
        from mediator.journal import FOLDER
        from pipeline.lake import ingest as lake_ingest

        _rotate_journal(settings.data_dir)
        done = lake_ingest.upload(settings.data_dir / FOLDER, place, settings.instance, on_progress)
        numbers.update(asdict(done))
    print_result(done.lines(), numbers, options.as_json)


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
    """Merge the lake's small files, and delete files that no table has used for a week; needs no Spark."""
    require_spark()
    settings = options.load()
    with recorded_run(settings, "compact") as numbers, progress_of("compact") as on_progress:
        from pipeline.lake import compaction
        from pipeline.settings import lake_of

        folder = lake_of(settings, lake)
        done = compaction.compact(
            folder, keep_days=keep_days, keep_archive_days=keep_archive_days, on_progress=on_progress
        )
        numbers.update(asdict(done))
    print_result(done.lines(), numbers, options.as_json)


@app.command(epilog="Example: mediator pipeline publish --iceberg prod --namespace mail")
def publish(
    iceberg: Annotated[
        str,
        typer.Option(metavar="CATALOG", help="The catalog, by its name in the configuration of pyiceberg."),
    ],
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Where the tables go in the catalog.")] = "mediator",
    lake: Lake = None,
    *,
    options: CommandOptions,
) -> None:
    """Publish the lake's tables in an Iceberg catalog, as the files that they are; needs no Spark."""
    require_spark()
    if not find_spec("pyiceberg"):
        raise SetupError(f"pyiceberg is not installed: {install_command('iceberg')}")
    from pipeline.settings import lake_of

    settings = options.load()
    folder = lake_of(settings, lake)
    if not isinstance(folder, Path):
        raise typer.BadParameter(f"expected a folder, got {folder}", param_hint="--lake")
    with recorded_run(settings, "publish") as numbers:
        from pipeline.lake import iceberg as lake_iceberg

        done = lake_iceberg.publish(folder, iceberg, namespace)
        numbers.update(asdict(done))
    print_result(done.lines(), numbers, options.as_json)


@app.command(epilog="Example: mediator pipeline archive --key-file /etc/mediator/archive.keys")
def archive(key_file: KeyFile = None, *, options: SparkOptions) -> None:
    """Copy messages marked for the archive into the lake, each once, and free their space in the database."""
    require_spark()
    settings = options.load()
    from pipeline.lake import archive as lake_archive
    from pipeline.outbox import OutboxClient
    from pipeline.source.options import database_options

    keys = keys_of(settings, key_file)
    source = database_options(settings)
    until = lake_archive.newest_seq(source)
    if until is None:
        # Spark would take longer to start than all the rest.
        with recorded_run(settings, "archive") as numbers:
            nothing = lake_archive.ArchiveResult()
            numbers.update(asdict(nothing))
        print_result(nothing.lines(), numbers, options.as_json)
        return

    def is_short(_settings: "Settings", _lake: Place) -> bool:
        return len(lake_archive.split_outbox(source, until)) <= 1

    with job("archive", options, creates=True, short=is_short) as work:
        key = keys[0] if keys else None
        summary = lake_archive.archive(
            work.spark, source, work.lake, key, OutboxClient(settings).remove, work.on_progress
        )
        work.numbers.update(asdict(summary))
    print_result(summary.lines(), work.numbers, options.as_json)


@app.command(epilog="Example: mediator pipeline replay orders.again --from-mailbox orders --since 2026-03-01")
def replay(
    into: Annotated[str, typer.Argument(metavar="INTO", help="Mailbox that they are sent into.", parser=parse_address)],
    from_mailbox: Annotated[
        list[str], typer.Option(metavar="ADDRESS", help="Mailbox whose messages are sent; give several.")
    ],
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose archived messages.")] = "default",
    since: Annotated[int | None, timed(earlier, "Only messages visible since then.")] = None,
    until: Annotated[int | None, timed(earlier, "Only messages visible before.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only messages with this tag; give several.")] = None,
    ids: Annotated[
        list[int] | None, typer.Option("--id", metavar="MSG_ID", help="Only this message; give several.", min=0)
    ] = None,
    ttl: Annotated[int | None, timed(seconds, "Gone after this time.", show_default="they do not expire")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many would be sent.")] = False,
    key_file: KeyFile = None,
    *,
    nats: NatsOptions,
    options: SparkOptions,
) -> None:
    """Send archived messages again, lane by lane in their old order, each once; a killed run is resumed.

    Of several messages with one key only the newest is sent. When each became visible first is in mq9-original-time.
    """
    require_spark()
    for name, values in (("from-mailbox", from_mailbox), ("tag", tag), ("id", ids)):
        if values is not None and len(values) > MAX_VALUES:
            raise typer.BadParameter(f"expected at most {MAX_VALUES}, got {len(values)}", param_hint=f"--{name}")
    keys = keys_of(options.load(), key_file)
    with job("replay", options, short=_is_small_table(ARCHIVE)) as work:
        from pipeline.lake import replay as lake_replay

        selection = lake_replay.ReplaySelection(
            tenant,
            tuple(sorted(set(from_mailbox))),
            since=None if since is None else since * 1000,
            until=None if until is None else until * 1000,
            tags=tuple(sorted(set(tag or ()))),
            ids=tuple(sorted(set(ids or ()))),
        )
        if dry_run:
            planned = lake_replay.preview(work.spark, work.lake, selection)
            lines, numbers = planned.lines(), {**planned.lanes, "replaced": planned.replaced}
        else:
            from pipeline.source.options import LOGIN

            login = nats.login(options)
            login_options = tuple((name, value) for name, field in LOGIN.items() if (value := getattr(login, field)))
            target = lake_replay.ReplayTarget(into, login_options, ttl)
            done = lake_replay.replay(work.spark, work.lake, selection, target, keys, work.on_progress)
            lines, numbers = done.lines(), done.numbers
        work.numbers.update(numbers)
    print_result(lines, work.numbers, options.as_json)


def _day(text: str | date) -> date:
    if isinstance(text, date):
        return text
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f'expected a day as {_DAY}, got "{text[:40]}"') from None


@app.command(epilog="Example: mediator pipeline report --from 2026-03-01 --csv tenants.csv --open")
def report(
    first: Annotated[
        date | None,
        typer.Option(
            "--from", metavar=_DAY, help="First day, in UTC.", parser=_day, show_default="30 days before the end"
        ),
    ] = None,
    last: Annotated[
        date | None, typer.Option("--to", metavar=_DAY, help="Last day.", parser=_day, show_default="the newest")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this tenant's mail.", show_default="all tenants")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the page goes.",
            show_default=f"{REPORT}, in the lake",
        ),
    ] = None,
    addresses: Annotated[
        bool,
        typer.Option(
            "--addresses",
            help="Name mailboxes by their addresses, from the service's database; whoever knows an address may "
            "read its mail.",
        ),
    ] = False,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write each tenant's totals to a CSV file too.", show_default=False),
    ] = None,
    by: Annotated[
        Grain | None,
        typer.Option(help="Steps of the charts; days and weeks are of UTC.", show_default="as the time needs"),
    ] = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(
            help="What reads the new events: DuckDB on this machine, or Spark.",
            show_default="spark with --master, --remote or --conf, else duckdb",
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
    *,
    options: SparkOptions,
) -> None:
    """Update the lake's usage tables, and write a report with charts as one HTML file."""
    asks_spark = options.master is not None or options.remote is not None or bool(options.conf)
    if engine is EngineName.DUCKDB and asks_spark:
        raise typer.BadParameter("expected spark beside --master, --remote and --conf", param_hint="--engine")
    on_spark = asks_spark if engine is None else engine is EngineName.SPARK
    with job("report", options, on_spark=on_spark, short=_is_small_table(EVENTS)) as work:
        from pipeline.reports import usage
        from pipeline.reports.engines import duck_engine, spark_engine
        from pipeline.reports.page import LocalClock, page
        from pipeline.reports.summary import PER_TENANT, missing, span_of, summarize
        from pipeline.settings import PipelineSettings, report_file

        with spark_engine(work.spark) if on_spark else duck_engine() as events_engine:
            updated = usage.update(events_engine, work.lake, work.on_progress)
        work.on_progress("page", 0, None)
        span = span_of(usage.hours(work.lake), first, last)
        clock = LocalClock.of_this_machine(span.end)
        gaps, quarantined = missing(work.lake, span)
        goal = work.settings.section(PipelineSettings).delivery_goal_seconds * 1000
        # The tables are a small part of the events.
        with duck_engine() as tables_engine:
            usage.define_tables(tables_engine, work.lake)
            summary = summarize(
                tables_engine,
                span,
                tenant=tenant,
                grain=None if by is None else by.value,
                goal=goal,
                offset=clock.offset(span.end),
                gaps=gaps,
                quarantined=quarantined,
            )
        path = (output if output is not None else report_file(work.settings, work.lake)).absolute()
        named = _find_addresses(work.settings, summary.listed()) if addresses else {}
        _write(path, page(summary, clock, named), private=addresses)
        if csv_file is not None:
            _write(csv_file.absolute(), _csv(("tenant", *PER_TENANT), summary.by_tenant))
        work.numbers.update(summary.totals, days=len(updated.days), files=updated.files)
    if options.as_json:
        print_json(
            {
                **asdict(updated),
                "days": [str(day) for day in updated.days],
                "totals": summary.totals,
                "tenants": summary.by_tenant,
            }
        )
    else:
        print_line(f"{len(updated.days):,} days calculated anew; the page is {path}")
    if open_page and not webbrowser.open(path.as_uri()):
        print_hint(f"found no browser; open {path.as_uri()}")


@app.command(epilog="Example: mediator pipeline embed 'catalog/*.parquet' --tenant acme")
def embed(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="A card a line (.jsonl, .ndjson), or Parquet with cards in a column `card` or as its rows; files, "
            "folders of them, and patterns such as 'cards-*.jsonl'.",
        ),
    ] = None,
    registered: Annotated[
        bool, typer.Option("--registered", help="Instead of a catalog, embed what is registered, of all tenants.")
    ] = False,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose agents a catalog's are.", show_default="default")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="With --registered, the model that the service is to have, as in its settings.",
            show_default="registry.model",
        ),
    ] = None,
    *,
    options: SparkOptions,
) -> None:
    """Register many cards with vectors computed here in parallel, which saves the service that work.

    Vectors are kept in the lake: a run that was interrupted is simply made once more. A service has to run here.
    """
    require_spark()
    from pipeline.embedding.cards import files_of

    if bool(sources) == registered:
        raise typer.BadParameter("expected either a SOURCE or --registered", param_hint="SOURCE")
    if registered and tenant is not None:
        raise typer.BadParameter("expected none with --registered, which is about all tenants", param_hint="--tenant")
    if model is not None and not registered:
        raise typer.BadParameter(
            "expected --registered: a catalog is read by the service's model", param_hint="--model"
        )
    whose = "default" if tenant is None else tenant
    if whose not in {"default", *options.load().tenants}:
        raise typer.BadParameter(f'no tenant "{whose[:100]}" in the settings', param_hint="--tenant")
    try:
        files = files_of(sources or [])
    except BadRequestError as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from None
    small = not registered and is_small(files)
    with job("embed", options, creates=True, short=lambda _settings, _lake: small) as work:
        from pipeline.embedding.model import find_model
        from pipeline.embedding.run import RegistryClient, embed_catalog, embed_registered
        from pipeline.source.options import database_options
        from registry.service import MODELS
        from registry.settings import RegistrySettings

        settings, service = work.settings, RegistryClient(work.settings.data_dir)
        service.status()
        chosen = find_model(
            model or settings.section(RegistrySettings).embedding_model, settings.data_dir / MODELS, work.on_progress
        )
        if registered:
            summary = embed_registered(
                work.spark, work.lake, database_options(settings), chosen, service, work.on_progress
            )
        else:
            summary = embed_catalog(work.spark, work.lake, files, chosen, service, whose, work.on_progress)
        work.numbers.update(asdict(summary))
    print_result(summary.lines(), work.numbers, options.as_json)


@app.command(epilog="Example: mediator pipeline runs --limit 5")
def runs(
    limit: Annotated[int, typer.Option(help="Show so many of the newest.", min=1, max=KEPT)] = 20,
    *,
    options: CommandOptions,
) -> None:
    """Show the newest runs of the pipeline: when, how long, what they counted, and why they failed."""
    settings = options.load()
    from mediator.operate.run_history import RunHistoryClient

    found = RunHistoryClient(settings).newest(limit)
    options.print_rows({"runs": found}, _COLUMNS, [_row(run) for run in found], "the pipeline has not run yet")


def _is_small_table(name: str) -> "Callable[[Settings, Place], bool]":
    return lambda _settings, lake: isinstance(lake, Path) and is_small((lake / name).rglob("*.parquet"))


def _is_small_journal(settings: "Settings", _lake: Place) -> bool:
    from mediator.journal import FOLDER
    from mediator.journal.segments import read_up_to

    folder = settings.data_dir / FOLDER
    done = read_up_to(folder)
    return is_small(path for path in folder.glob("0*") if path.name > done)


def _rotate_journal(data_dir: Path) -> None:
    """Have the service, if one runs, close the journal's open file, so that it can be read to its end."""
    from mediator.operate.control import send_command

    try:
        problem = asyncio.run(send_command(data_dir, "journal-rotate"))["error"]
    except SetupError:
        return
    except UnavailableError as error:
        problem = str(error)
    if problem:
        print_hint(f"the journal's open file is left for the next time: {problem}")


def keys_of(settings: "Settings", key_file: Path | None) -> list["Key"]:
    """Return the keys of the given file, else of the one in the settings; none without either."""
    from pipeline.lake.sealing import read_keys
    from pipeline.settings import PipelineSettings

    path = key_file or settings.section(PipelineSettings).archive_key_file
    return [] if path is None else read_keys(path)


def _find_addresses(settings: "Settings", numbers: Sequence[int]) -> dict[int, str]:
    from pipeline.source.database import open_database
    from pipeline.source.mailboxes import find_addresses
    from pipeline.source.options import database_options

    with closing(open_database(database_options(settings))) as database:
        return find_addresses(database, numbers)


def _csv(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file atomically; a private one can be read only by its owner."""
    new = path.with_name(f"{path.name}.new")
    try:
        # A file left by a crash may have other permissions.
        new.unlink(missing_ok=True)
        new.touch(0o600 if private else 0o666)
        new.write_text(text, "utf-8")
        new.replace(path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    end = time.time() if run["outcome"] == "running" else run["ended_at"]
    return (
        str(run["run"]),
        " ".join([run["command"], *run["arguments"]]),
        moment(run["started_at"]),
        "" if end is None else format_duration(max(0, round((end - run["started_at"]) * 1000))),
        run["outcome"],
        "\n".join(f"{name} {_format_number(value)}" for name, value in run["numbers"].items()),
        run["error"],
    )


def _format_number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
