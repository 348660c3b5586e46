"""The command ``mediator pipeline runs``: what the pipeline did, and what came of it."""

import time
from typing import Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.options import CommandGroup, CommandOptions
from mediator.ops.runs.records import KEPT
from mediator.ops.units import format_duration

_COLUMNS = ("run#", "command", "started", "took#", "outcome", "numbers", "error")


app = CommandGroup()


@app.command(epilog="Example: mediator pipeline runs --limit 5")
def runs(
    limit: Annotated[int, typer.Option(help="Show so many of the newest.", min=1, max=KEPT)] = 20,
    *,
    options: CommandOptions,
) -> None:
    """Show the newest runs of the pipeline: when, how long, what they counted, and why they failed."""
    settings = options.load()
    from mediator.ops.runs.client import RunHistoryClient

    found = RunHistoryClient(settings).newest(limit)
    options.print_rows({"runs": found}, _COLUMNS, [_row(run) for run in found], "the pipeline has not run yet")


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    end = time.time() if run["outcome"] == "running" else run["ended_at"]
    return (
        str(run["run"]),
        " ".join([run["command"], *run["arguments"]]),
        output.moment(run["started_at"]),
        "" if end is None else format_duration(max(0, round((end - run["started_at"]) * 1000))),
        run["outcome"],
        "\n".join(f"{name} {_number(value)}" for name, value in run["numbers"].items()),
        run["error"],
    )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
