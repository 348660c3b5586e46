"""The group ``mediator pipeline``: what passed through the mediator, kept and reported by Spark; commands by module.

A module ``pipeline_*.py`` beside this one has ``register(app)`` and is added to the tuple below.
"""

from collections.abc import Callable

import typer

from mediator.cli.pipeline_archive import register as register_archive
from mediator.cli.pipeline_embed import register as register_embed
from mediator.cli.pipeline_ingest import register as register_ingest
from mediator.cli.pipeline_replay import register as register_replay
from mediator.cli.pipeline_report import register as register_report
from mediator.cli.pipeline_runs import register as register_runs

app = typer.Typer(
    help="Keep what passed through the mediator in a lake, and report on it; runs on Spark.", no_args_is_help=True
)
_COMMANDS: tuple[Callable[[typer.Typer], None], ...] = (
    register_ingest,
    register_archive,
    register_replay,
    register_report,
    register_embed,
    register_runs,
)
for register in _COMMANDS:
    register(app)
