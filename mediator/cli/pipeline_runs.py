"""The command ``mediator pipeline runs``: what the pipeline did, and what came of it."""

import time
from typing import Annotated, Any

import typer

from mediator.cli import show
from mediator.cli.options import AsJson, Config, DataDir, load
from mediator.operators.spans import show_span
from mediator.runs.records import KEPT

_COLUMNS = ("run#", "command", "started", "took#", "outcome", "numbers", "error")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: mediator pipeline runs --limit 5")(runs)


def runs(
    limit: Annotated[int, typer.Option(help="Show so many of the newest.", min=1, max=KEPT)] = 20,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest runs of the pipeline: when, how long, what they counted, and why they failed."""
    settings = load(config, data_dir=data_dir)
    from mediator.housekeeping.history import History

    found = History(settings).newest(limit)
    if as_json:
        show.as_json({"runs": found})
    elif found:
        show.table(_COLUMNS, map(_row, found))
    else:
        show.say("the pipeline has not run yet")


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    end = time.time() if run["outcome"] == "running" else run["ended_at"]
    return (
        str(run["run"]),
        " ".join([run["command"], *run["arguments"]]),
        show.moment(run["started_at"]),
        "" if end is None else show_span(max(0, round((end - run["started_at"]) * 1000))),
        run["outcome"],
        "\n".join(f"{name} {_number(value)}" for name, value in run["numbers"].items()),
        run["error"],
    )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
