"""The command group ``mediator pipeline``."""

from mediator.cli.options import CommandGroup
from pipeline.cli import archive, embed, ingest, replay, report, runs

app = CommandGroup(
    help="Keep what passed through the mediator in a lake, and report on it; runs on Spark.", no_args_is_help=True
)
for module in (ingest, archive, replay, report, embed, runs):
    app.add_typer(module.app)
