"""Runs the benchmarks and prints their table: `python -m benchmarks [--quick] [--write] [CLAIM …]`."""

import argparse
import importlib
import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from datetime import date
from pathlib import Path

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import pages
from benchmarks.bench import KILLS, Bench, ResultRow, headline
from benchmarks.disk import fsync_ms
from mediator.nats.server import find_binary

QUICK = (
    "send", "fetch", "push", "didcomm", "gateway", "mailboxes", "flat", "quiet", "kill", "didcomm_instances",
    "didcomm_scale", "discover", "costs", "simulation",
)  # fmt: skip
"""Measured through the ports of a whole service; the headlines come from these."""
REST = (
    "postgres", "registering", "journal", "envelopes", "encoding", "keywords", "vectors", "embed", "pipeline_lake",
    "pipeline_report", "pipeline_mail", "remembered", "copying", "floor", "mixed",
)  # fmt: skip
"""One part each, or minutes for a round; not with --quick unless named."""
NOT_OPTIMISED = (
    "This Python was built without optimisations (--enable-optimizations), so the service needs more CPU than it does "
    "elsewhere. Measure with another: make bench BENCH_PYTHON=/usr/bin/python3"
)


def main() -> int:
    """Return 1 when a limit is not met."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the claims about speed and size."
    )
    known = (*QUICK, *REST)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"any of {', '.join(known)}; all without")
    parser.add_argument("--quick", action="store_true", help="short rounds on less data; without the single parts")
    parser.add_argument("--minutes", type=float, help="how long mixed takes; 15 without, 5 with --quick")
    parser.add_argument("--kills", type=int, default=KILLS, help=f"how often kill kills the service; {KILLS} without")
    parser.add_argument("--write", action="store_true", help="write the tables into README.md and docs/")
    options = parser.parse_args()
    if unknown := set(options.claims) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(known)}")
    if not _is_optimised():
        print(NOT_OPTIMISED, file=sys.stderr)
    # Both sides compute on one thread; numpy reads this when a benchmark first imports it.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Log lines of the registry's code, when it runs in this process, would break the progress bar.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    chosen = [claim for claim in known if claim in options.claims] or list(QUICK if options.quick else known)
    rows, fsync = _run(chosen, options)
    shown = [row for found in rows.values() for row in found if options.claims or row.headline]
    origin = _origin(options, fsync)
    print(pages.table(shown), origin, sep="\n\n", flush=True)
    if options.write:
        if not options.claims:
            pages.write(pages.HEADLINES, f"{pages.table(shown)}\n\n{origin}")
            pages.write(pages.SUMMARY, f"{pages.table(pages.summary(shown), pages.SUMMARY_COLUMNS)}\n\n{origin}")
        for claim, found in rows.items():
            pages.write(claim, f"{pages.table(found)}\n\n{origin}")
    return 1 if any(row.met is False for found in rows.values() for row in found) else 0


def _run(claims: list[str], options: argparse.Namespace) -> tuple[dict[str, list[ResultRow]], list[float]]:
    """Return the rows of each claim, and how long an fsync took before and after, in ms."""
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
    rows: dict[str, list[ResultRow]] = {}
    # TMPDIR decides which disk is measured.
    with tempfile.TemporaryDirectory(prefix="mediator-bench-") as folder, progress:
        fsync = [fsync_ms(Path(folder))]
        task = progress.add_task("", total=len(claims))
        for claim in claims:
            started = time.monotonic()
            rows[claim] = []
            with tempfile.TemporaryDirectory(dir=folder) as own:
                bench = Bench(
                    options.quick,
                    Path(own),
                    lambda text: progress.update(task, description=text),
                    lambda text: progress.console.print(text, highlight=False, markup=False, soft_wrap=True),
                    options.minutes,
                    options.kills,
                )
                try:
                    for row in importlib.import_module(f"benchmarks.{claim}").run(bench):
                        rows[claim].append(row)
                        told = f"{row.claim}: {row.ours}, {row.peer}, {row.ratio}, met: {pages.MET[row.met]}"
                        progress.console.print(told, highlight=False)
                except Exception as error:
                    # The others still count; hours may have gone into them.
                    progress.console.print_exception()
                    rows[claim].append(
                        headline(ResultRow(f"{claim}: failed, {error!r:.200}".replace("|", "/"), "-", met=False))
                    )
            progress.console.print(f"{claim} took {time.monotonic() - started:.0f} s", highlight=False)
            progress.advance(task)
        fsync.append(fsync_ms(Path(folder)))
    return rows, fsync


def _is_optimised() -> bool:
    """Whether this Python was built with measured profiles (PGO)."""
    built = str(sysconfig.get_config_var("CONFIG_ARGS"))
    # Debian and Ubuntu always do so on amd64 and arm64, and by their own rules, of which the arguments say nothing.
    return "--enable-optimizations" in built or "--with-wheel-pkg-dir=/usr/share/python-wheels" in built


def _origin(options: argparse.Namespace, fsync: list[float]) -> str:
    """Return where and when the figures were taken."""
    chosen = ["--quick"] if options.quick else []
    chosen += [f"--minutes {options.minutes:g}"] if options.minutes else []
    chosen += [f"--kills {options.kills}"] if options.kills != KILLS else []
    arguments = " ".join([*chosen, *options.claims])
    command = f'`make bench ARGS="{arguments}"`' if arguments else "`make bench`"
    server = subprocess.run([str(find_binary()), "--version"], capture_output=True, text=True, check=True)
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("agent-mediator", "nats-py", "uvloop")]
    system = f"{platform.system()} {platform.release()}"
    python = f"Python {platform.python_version()}, {'' if _is_optimised() else 'not '}optimised"
    parts = [str(date.today()), command, f"{os.cpu_count()} cores", system, python]
    parts += [*packages, server.stdout.strip(), f"fsync of 4 kB before and after {fsync[0]:.2f} and {fsync[1]:.2f} ms"]
    return ", ".join(parts) + "."


if __name__ == "__main__":
    sys.exit(main())
