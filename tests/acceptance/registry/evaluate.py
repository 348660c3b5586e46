"""Measures how well the registry finds, end to end: `python -m tests.acceptance.registry.evaluate`, or `make eval`.

A real service, each set in a tenant, every card registered and every request asked over NATS. ``EVAL_DIR`` names the
folder of sets; without it those beside the checkout are taken, else the tests' own.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from registry.evaluation.measures import MEASURES, ConfidenceInterval, intervals, rate_all
from tests.acceptance.registry.asking import Answers, embedded, registries
from tests.acceptance.registry.sets import Set, sets, sliced
from tests.harness.service import Services

MODES = ("text", "semantic")
Results = dict[str, dict[str, Answers]]
"""By set and mode."""


def main() -> int:
    """Return 1 when semantic search is below a floor: on a set by more than chance, as a mean at all."""
    parser = argparse.ArgumentParser(prog="make eval", description="Measure how well agents are found.")
    parser.add_argument("--cards", type=int, help="only about so many cards of each set, with their requests")
    parser.add_argument(
        "--floor",
        action="append",
        default=[],
        metavar="SET=NUMBER",
        help="nDCG@10 that semantic search must reach on a set, or, with SET 'mean', over all sets; give several",
    )
    options = parser.parse_args()
    floors = {name: float(number) for name, _, number in (floor.partition("=") for floor in options.floor)}
    if "EVAL_DIR" not in os.environ and (beside := sorted(Path().resolve().parent.glob("*/eval"))):
        os.environ["EVAL_DIR"] = str(beside[0])
    wanted = [sliced(each, options.cards) if options.cards else each for each in sets()]
    return _print(wanted, asyncio.run(_measure(wanted)), floors)


async def _measure(wanted: Sequence[Set]) -> Results:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results: Results = {}
    with (
        tempfile.TemporaryDirectory(prefix="mediator-eval-") as folder,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        services = Services(Path(folder))
        try:
            async with registries(services, wanted) as (service, filled):
                count = sum(len(each.catalog.cards) for each in wanted)
                bar = progress.add_task("registered", total=count)
                for registry in filled:
                    await registry.fill()
                    progress.advance(bar, len(registry.set.catalog.cards))
                bar = progress.add_task("embedded", total=count)
                await embedded(service, count, lambda done: progress.update(bar, completed=done))
                for registry in filled:
                    found = results.setdefault(registry.set.name, {})
                    for mode in MODES:
                        bar = progress.add_task(f"{registry.set.name}, {mode}", total=len(registry.set.cases))
                        found[mode] = await registry.answers(mode, lambda bar=bar: progress.advance(bar))
        finally:
            services.close()
    return results


def _print(wanted: Sequence[Set], results: Results, floors: dict[str, float]) -> int:
    columns = ("set", "asked by", *MEASURES, "floor", "a request, p50 / p99")
    table = Table(*columns, box=MARKDOWN)
    means: dict[str, list[float]] = {mode: [] for mode in MODES}
    reached: dict[str, float] = {}
    for each in wanted:
        for mode in MODES:
            answers = results[each.name][mode]
            figures = intervals(rate_all(each.cases, answers.ranked))
            means[mode].append(figures[0].mean)
            floor = floors.get(each.name) if mode == "semantic" else None
            if mode == "semantic":
                # Of a small set the mean alone says little: it is missed when that is more than chance.
                reached[each.name] = figures[0].high
            times = statistics.quantiles(answers.seconds, n=100)
            spans = f"{times[49] * 1000:.1f} / {times[98] * 1000:.1f} ms"
            table.add_row(
                each.name, mode, *map(_shown, figures), _floor(floor, figures[0].mean, figures[0].high), spans
            )
    for mode, found in means.items():
        mean = statistics.fmean(found)
        floor = floors.get("mean") if mode == "semantic" else None
        table.add_row("mean", mode, f"{mean:.3f}", *[""] * 4, _floor(floor, mean, mean), "")
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for note in sorted({note for modes in results.values() for answers in modes.values() for note in answers.notes}):
        console.print(f"note: {note}", markup=False, highlight=False)
    reached["mean"] = statistics.fmean(means["semantic"])
    return 1 if any(reached[name] < floor for name, floor in floors.items() if name in reached) else 0


def _shown(found: ConfidenceInterval) -> str:
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _floor(floor: float | None, mean: float, high: float) -> str:
    if floor is None:
        return ""
    return f"{floor:.2f} {'met' if mean >= floor else 'within chance' if high >= floor else 'NOT MET'}"


if __name__ == "__main__":
    sys.exit(main())
