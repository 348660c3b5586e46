"""The command ``mediator pipeline replay``: archived messages, sent again into a mailbox."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mediator.cli.client import NatsOptions
from mediator.cli.options import CommandGroup, earlier, seconds, timed
from mediator.mailboxes.address import parse_address
from pipeline.cli.archive import KeyFile, keys_of
from pipeline.cli.jobs import SparkOptions, is_small, job, print_result, require_spark

if TYPE_CHECKING:
    from mediator.config.settings import Settings

MAX_VALUES = 1000
"""Of an option that may be repeated."""


app = CommandGroup()


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
    """Send archived messages again, lane by lane in their old order, each once; a killed run is gone on with.

    Of several messages with one key only the newest is sent. When each became visible first is in mq9-original-time.
    """
    require_spark()
    for name, values in (("from-mailbox", from_mailbox), ("tag", tag), ("id", ids)):
        if values is not None and len(values) > MAX_VALUES:
            raise typer.BadParameter(f"expected at most {MAX_VALUES}, got {len(values)}", param_hint=f"--{name}")
    keys = keys_of(options.load(), key_file)
    with job("replay", options, short=_is_short) as work:
        from pipeline import replay as again

        wanted = again.ReplaySelection(
            tenant,
            tuple(sorted(set(from_mailbox))),
            since=None if since is None else since * 1000,
            until=None if until is None else until * 1000,
            tags=tuple(sorted(set(tag or ()))),
            ids=tuple(sorted(set(ids or ()))),
        )
        if dry_run:
            planned = again.preview(work.spark, work.lake, wanted)
            lines, numbers = planned.lines(), {**planned.lanes, "replaced": planned.replaced}
        else:
            from pipeline.source.options import LOGIN

            login = nats.login(options)
            given = tuple((name, value) for name, field in LOGIN.items() if (value := getattr(login, field)))
            target = again.ReplayTarget(into, given, ttl)
            done = again.replay(work.spark, work.lake, wanted, target, keys, work.on_progress)
            lines, numbers = done.lines(), done.numbers
        work.numbers.update(numbers)
    print_result(lines, work.numbers, options.as_json)


def _is_short(_settings: "Settings", lake: Path) -> bool:
    from pipeline.lake import ARCHIVE, table_path

    return is_small(table_path(lake, ARCHIVE).rglob("*.parquet"))
