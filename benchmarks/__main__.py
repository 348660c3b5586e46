"""Runs the benchmarks and prints one table: `python -m benchmarks [--quick] [CLAIM …]`."""

import argparse
import importlib
import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import structlog
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.bench import Bench, ResultRow
from benchmarks.disk import fsync_ms
from mediator.nats.server import find_binary

CLAIMS = (
    "send", "fetch", "mailboxes", "flat", "quiet", "kill", "journal", "envelopes", "didcomm", "didcomm_instances",
    "didcomm_scale", "gateway", "push", "encoding", "keywords", "vectors", "discover", "registering", "embed",
    "pipeline_lake", "pipeline_mail",
)  # fmt: skip
MET = {True: "yes", False: "NO", None: "-"}


def main() -> int:
    """Return 1 when a limit is not met."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the claims about speed and size."
    )
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"any of {', '.join(CLAIMS)}; all without")
    parser.add_argument("--quick", action="store_true", help="three short rounds on less data, to see that it runs")
    options = parser.parse_args()
    if unknown := set(options.claims) - set(CLAIMS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(CLAIMS)}")
    # Both sides compute on one thread; numpy reads this when a benchmark first imports it.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Log lines of the registry's code, when it runs in this process, would break the progress bar.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    claims = [claim for claim in CLAIMS if claim in options.claims or not options.claims]
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
    rows: list[ResultRow] = []
    # TMPDIR decides which disk is measured.
    with tempfile.TemporaryDirectory(prefix="mediator-bench-") as folder, progress:
        fsync = [fsync_ms(Path(folder))]
        task = progress.add_task("claims", total=len(claims))
        for claim in claims:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                bench = Bench(options.quick, Path(own), lambda text: progress.update(task, description=text))
                for row in importlib.import_module(f"benchmarks.{claim}").run(bench):
                    rows.append(row)
                    progress.console.print(f"{row.claim}: {row.ours}, met: {MET[row.met]}", highlight=False)
            progress.advance(task)
        fsync.append(fsync_ms(Path(folder)))
    rows.append(ResultRow("this disk: fsync of 4 kB before / after", f"{fsync[0]:.2f} / {fsync[1]:.2f} ms"))
    _print(rows, options.quick)
    return 1 if any(row.met is False for row in rows) else 0


def _print(rows: list[ResultRow], quick: bool) -> None:
    console = Console(width=180 if not sys.stdout.isatty() else None)
    table = Table("claim", "ours", "peer", "ratio", "limit", "met", box=MARKDOWN)
    for row in rows:
        table.add_row(row.claim, row.ours, row.peer, row.ratio, row.limit, MET[row.met])
    console.print(table)
    console.print(f"{date.today()}, {'--quick, ' if quick else ''}{_machine()}", highlight=False)


def _machine() -> str:
    server = subprocess.run([str(find_binary()), "--version"], capture_output=True, text=True, check=True)
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("agent-mediator", "nats-py", "uvloop")]
    system = f"{platform.system()} {platform.release()}"
    parts = [f"{os.cpu_count()} cores", system, f"Python {platform.python_version()}", *packages, server.stdout.strip()]
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
