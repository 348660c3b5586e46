"""The command ``mediator verify``: checks database and journal against each other."""

import typer

from mediator.cli import output
from mediator.cli.options import CommandGroup, CommandOptions
from mediator.ops.units import format_count

app = CommandGroup()


@app.command(epilog="Example: mediator verify --data-dir /var/lib/mediator")
def verify(options: CommandOptions) -> None:
    """Check database, counters, index and journal against each other; exit code 1 when there is damage.

    It only reads, beside a running service or without one.
    """
    settings = options.load()
    from mediator.parts import verify_checks
    from mediator.verify.report import verify as run

    with output.progress("{task.percentage:>3.0f} %") as progress:
        bar = progress.add_task("verify", total=1.0)
        report = run(
            settings,
            verify_checks(settings),
            lambda title, part: progress.update(bar, description=title, completed=part),
        )
    if options.as_json:
        output.print_json(report.as_dict())
    else:
        for found in report.damage:
            output.print_line(f"!!  {found.kind.code}, {format_count(found.count, 'time')}: {found.kind.text}")
            for example in found.examples:
                output.print_line(f"      {example}")
            output.print_line(f"    {found.kind.advice}")
        for title, reason in report.skipped:
            output.print_line(f" *  not checked: {title}: {reason}")
        kinds = format_count(len(report.damage), "kind") + " of damage" if report.damage else "nothing is damaged"
        output.print_line(f"{format_count(report.checks, 'check')} in {report.seconds:.1f} s: {kinds}")
    if report.damage:
        raise typer.Exit(1)
