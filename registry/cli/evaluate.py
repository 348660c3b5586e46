"""The command `mediator agent eval`: measures search quality on an operator's own cards and requests."""

import asyncio
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mediator.cli import output
from mediator.cli.options import CommandError, CommandGroup, CommandOptions, one_of, words_of
from mediator.operate.units import format_count

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from registry.evaluation import CardCatalog, ConfidenceInterval, EvaluationCase
    from registry.settings import RegistrySettings

Run = Mapping[str, Sequence[str]]
"""Answers by qid: keys of cards, best first."""
Figures = Mapping[str, "ConfidenceInterval"]
"""Intervals by the name of the measure."""


class Cost(NamedTuple):
    """What a configuration costs."""

    cpu_ms: float
    """Of a request, of all processes."""
    memory_mb: float
    """Resident, of the processes that hold models."""


class Mode(StrEnum):
    """How to search."""

    TEXT = "text"
    SEMANTIC = "semantic"
    RERANKED = "reranked"
    VECTORS = "vectors"


app = CommandGroup()


@app.command(
    "eval", epilog="Example: mediator agent eval cards.jsonl requests.jsonl --model all-MiniLM-L6-v2 --model ./other"
)
def evaluate(
    cards: Annotated[
        Path, typer.Argument(metavar="CARDS", help="The cards: one per line (.jsonl), or an array (.json).")
    ],
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="REQUESTS",
            help='One a line: {"qid", "query", "relevant": [id or mailbox of each card that is right, …]}.',
        ),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model of sentence-transformers, a folder or a name, or several as one, A=0.3+B=0.7; repeatable.",
            show_default="as the settings say",
        ),
    ] = None,
    embeddings_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The server that has the models, in place of this machine; as registry.embeddings_url.",
        ),
    ] = None,
    mode: Annotated[
        list[Mode] | None,
        typer.Option(
            metavar=words_of(Mode),
            parser=one_of(Mode),
            help="Search by keywords, by keywords and vectors as the service does, the same re-ranked by the server at "
            "registry.rerank_url, or by vectors alone; repeatable.",
            show_default="all that the settings allow",
        ),
    ] = None,
    limit_queries: Annotated[
        int | None, typer.Option(min=1, help="Use only so many requests, a random choice that is always the same.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the answers, one line for each request and mode.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with saved answers, of another model for example.")
    ] = None,
    *,
    options: CommandOptions,
) -> None:
    """Measure how well agents are found: nDCG, recall and hits on your own cards and requests.

    The cards are registered in memory, in this process: no service needs to run, and a running one is not affected.
    """
    from rich.progress import MofNCompleteColumn

    from registry.cards.sources import read_sources
    from registry.evaluation import read_cases, read_catalog

    catalog = read_catalog(read_sources([str(cards)]))
    try:
        cases = list(read_cases(requests, catalog))
    except OSError as error:
        raise CommandError(f"cannot read {requests}: {error.strerror}") from None
    if not cases:
        raise CommandError(f"{requests}: expected one request at least")
    if limit_queries is not None and limit_queries < len(cases):
        cases = random.Random(0).sample(cases, limit_queries)
    baseline = None if against is None else _load(against)
    settings = options.load()
    from mediator.operate import logs
    from registry.settings import RegistrySettings

    # What goes wrong is said by the command itself.
    logs.setup("error", settings.log_format)
    registry = settings.section(RegistrySettings).model_copy(update={"semantic": True})
    modes = list(dict.fromkeys(mode or (each for each in Mode if each is not Mode.RERANKED or registry.rerank_url)))
    if Mode.RERANKED not in modes:
        registry = registry.model_copy(update={"rerank_url": None})
    elif registry.rerank_url is None:
        raise CommandError("--mode reranked needs a server: set registry.rerank_url")
    needed = [None] if modes == [Mode.TEXT] else _configurations(registry, model, embeddings_url)
    runs: dict[str, Run] = {}
    costs: dict[str, Cost] = {}
    not_reranked: dict[str, Mapping[str, int]] = {}
    with output.progress(MofNCompleteColumn()) as progress:
        for number, chosen in enumerate(needed):
            # Keywords find the same with every model.
            some = [mode for mode in modes if mode is not Mode.TEXT or not number]
            found, problems = asyncio.run(_runs(catalog, cases, some, chosen, settings.data_dir, progress))
            for way, (run, cost) in found.items():
                plain = way is Mode.TEXT or len(needed) == 1
                label = way.value if plain else f"{way.value}, {_name(chosen)}"
                runs[label], costs[label] = run, cost
                if way is Mode.RERANKED:
                    not_reranked[label] = problems
    if save is not None:
        _save(save, runs)
    about = {
        "model": ", ".join(filter(None, map(_name, needed))) or None,
        "cards": len(catalog.cards),
        "requests": len(cases),
    }
    _show(cases, runs, baseline, costs, not_reranked, about, as_json=options.as_json)


def _configurations(
    settings: "RegistrySettings", models: Sequence[str] | None, url: str | None
) -> list["RegistrySettings"]:
    from pydantic import ValidationError

    from registry.embedding.models import join_models, split_model

    if not models and url is None:
        return [settings]
    models = models or [settings.model_copy(update={"embeddings_url": url}).embedding_model]
    try:
        names = [join_models([f"{one}={weight}" for one, weight in split_model(model)]) for model in models]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    try:
        fields = settings.model_dump() | {"models": [], "embeddings_url": url}
        return [settings.model_validate(fields | {"model": name}) for name in dict.fromkeys(names)]
    except ValidationError as error:
        raise typer.BadParameter(error.errors()[0]["msg"], param_hint="--embeddings-url") from None


def _name(chosen: "RegistrySettings | None") -> str:
    return "" if chosen is None else chosen.embedding_model


async def _runs(
    catalog: "CardCatalog",
    cases: Sequence["EvaluationCase"],
    modes: Sequence[Mode],
    chosen: "RegistrySettings | None",
    data_dir: Path,
    progress: "Progress",
) -> tuple[dict[Mode, tuple[Run, Cost]], Mapping[str, int]]:
    """Return answers and costs by mode, and how many requests were not re-ranked, by reason."""
    from mediator.system.usage import cpu_seconds, resident_mb
    from registry.evaluation import run_trial

    bars: dict[str, TaskID] = {}
    suffix = f" {_name(chosen)}"[:60]

    def update(step: str, done: int) -> None:
        if step not in bars:
            bars[step] = progress.add_task(step + suffix, total=len(catalog.cards))
        progress.update(bars[step], completed=done)

    async with run_trial(catalog, chosen, data_dir, update) as trial:
        ways = {
            Mode.TEXT: trial.by_text,
            Mode.SEMANTIC: trial.by_meaning,
            Mode.RERANKED: trial.by_reranking,
            Mode.VECTORS: trial.by_vectors,
        }
        runs: dict[Mode, dict[str, Sequence[str]]] = {mode: {} for mode in modes}
        cpu_here = dict.fromkeys(modes, 0.0)
        bar = progress.add_task("requests" + suffix, total=len(cases))
        before = cpu_seconds(trial.encoder_pids)
        for case in cases:
            for mode in modes:
                began = time.process_time()
                runs[mode][case.qid] = await ways[mode](case.query)
                cpu_here[mode] += time.process_time() - began
            progress.advance(bar)
        # A request is encoded once for all modes, and its vectors are remembered.
        encoding = cpu_seconds(trial.encoder_pids) - before
        memory = sum(map(resident_mb, trial.encoder_pids))
        costs = {
            mode: Cost(cpu_here[mode] / len(cases) * 1000, 0)
            if mode is Mode.TEXT
            else Cost((cpu_here[mode] + encoding) / len(cases) * 1000, memory)
            for mode in modes
        }
        return {mode: (run, costs[mode]) for mode, run in runs.items()}, trial.not_reranked


# Runs in files.


def _save(path: Path, runs: Mapping[str, Run]) -> None:
    import orjson

    lines = (
        orjson.dumps({"qid": qid, "mode": mode, "ranked": ranked}) + b"\n"
        for mode, run in runs.items()
        for qid, ranked in run.items()
    )
    try:
        with path.open("wb") as file:
            file.writelines(lines)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


def _load(path: Path) -> dict[str, Run]:
    import orjson

    runs: dict[str, dict[str, list[str]]] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    fields = orjson.loads(line)
                    runs.setdefault(str(fields["mode"]), {})[str(fields["qid"])] = [*map(str, fields["ranked"])]
                except (ValueError, TypeError, KeyError):
                    raise CommandError(f'{path}:{number}: expected {{"qid", "mode", "ranked": […]}}') from None
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    return dict(runs)


# Figures.


def _show(
    cases: Sequence["EvaluationCase"],
    runs: Mapping[str, Run],
    baseline: Mapping[str, Run] | None,
    costs: Mapping[str, Cost],
    not_reranked: Mapping[str, Mapping[str, int]],
    about: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    from registry.evaluation import MEASURES, intervals, rate_all

    rows = {mode: rate_all(cases, run) for mode, run in runs.items()}
    figures = {mode: _named(intervals(found)) for mode, found in rows.items()}
    first, *others = rows
    differences = {f"{mode} - {first}": _named(intervals(rows[mode] - rows[first])) for mode in others}
    for mode, run in (baseline or {}).items():
        if mode in rows:
            change = intervals(rows[mode] - rate_all(cases, run))
            differences[f"{mode} - {mode} saved"] = _named(change)
    if as_json:
        spent = {name: cost._asdict() for name, cost in costs.items()}
        measured = {"modes": _plain(figures), "differences": _plain(differences), "costs": spent}
        output.print_json(
            {**about, **measured, "not_reranked": {name: dict(why) for name, why in not_reranked.items()}}
        )
        return
    counts = format_count(about["cards"], "card"), format_count(about["requests"], "request")
    output.print_line(", ".join([*counts, about["model"] or "no model"]))
    columns = [f"{measure}#" for measure in MEASURES]
    rows_shown = ([name, *map(_shown, found.values()), *_costs(costs[name])] for name, found in figures.items())
    output.print_table(["mode", *columns, "CPU#", "memory#"], rows_shown)
    if differences:
        output.print_table(
            ["difference", *columns], ([name, *map(_signed, row.values())] for name, row in differences.items())
        )
    for name, why in not_reranked.items():
        for problem, count in why.items():
            output.print_hint(f"{name}: {format_count(count, 'request')} {problem}")
    output.print_hint(
        "CPU is that of a request, in all processes here; memory is that of the processes here that hold models."
    )
    output.print_hint("In brackets: 95 % bootstrap intervals of the mean.")
    if differences:
        output.print_hint("A difference is significant if its interval does not contain 0.")


def _named(found: Iterable["ConfidenceInterval"]) -> Figures:
    from registry.evaluation import MEASURES

    return dict(zip(MEASURES, found, strict=True))


def _plain(figures: Mapping[str, Figures]) -> dict[str, dict[str, dict[str, float]]]:
    return {name: {measure: found._asdict() for measure, found in row.items()} for name, row in figures.items()}


def _shown(found: "ConfidenceInterval") -> str:
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _costs(cost: Cost) -> tuple[str, str]:
    return f"{cost.cpu_ms:.1f} ms", f"{cost.memory_mb:.0f} MB"


def _signed(found: "ConfidenceInterval") -> str:
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
