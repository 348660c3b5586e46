"""The command ``mediator pipeline report``: what passed through the mediator, as tables in the lake and as a page."""

import csv
import io
import webbrowser
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mediator.cli.errors import CommandError
from mediator.cli.options import CommandGroup
from mediator.cli.output import print_hint, print_json, print_line
from pipeline.cli.jobs import SparkOptions, is_small, job

if TYPE_CHECKING:
    from mediator.config.settings import Settings

PAGE = "report.html"
_DAY = "YYYY-MM-DD"


app = CommandGroup()


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
        Path | None, typer.Option(metavar="FILE", help="Where the page goes.", show_default=f"{PAGE}, in the lake")
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
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
    *,
    options: SparkOptions,
) -> None:
    """Report on usage: bring the lake's tables of it up to date, and make a page of one file with plots."""
    with job("report", options, short=_is_short) as work:
        from pipeline.reports import tables
        from pipeline.reports.local_clock import LocalClock
        from pipeline.reports.page import page
        from pipeline.reports.summary import PER_TENANT, span_of, summarize

        updated = tables.update(work.spark, work.lake, work.on_progress)
        work.on_progress("page", 0, None)
        hourly, waits, groups = (tables.read(work.spark, work.lake, name) for name in tables.TABLES)
        span = span_of(tables.hours(work.lake), first, last)
        gaps, quarantined = tables.missing(work.spark, work.lake, span)
        summary = summarize(hourly, waits, groups, span, tenant=tenant, gaps=gaps, quarantined=quarantined)
        path = (output if output is not None else work.lake / PAGE).absolute()
        named = _addresses(work.settings, summary.listed()) if addresses else {}
        _write(path, page(summary, LocalClock.of_this_machine(span.end), named), private=addresses)
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


def _is_short(_settings: "Settings", lake: Path) -> bool:
    from pipeline.lake import EVENTS, table_path

    return is_small(table_path(lake, EVENTS).rglob("*.parquet"))


def _addresses(settings: "Settings", numbers: Sequence[int]) -> dict[int, str]:
    from pipeline.source.mailbox_batch import open_database
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
    """Write a file whole or not at all; a private one for its owner alone."""
    new = path.with_name(f"{path.name}.new")
    try:
        # One that a crash left is open to whom it was.
        new.unlink(missing_ok=True)
        new.touch(0o600 if private else 0o666)
        new.write_text(text, "utf-8")
        new.replace(path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
