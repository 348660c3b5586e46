"""Sets to judge a registry by: those that lie beside the checkout, else the small one of the tests' own."""

import os
import random
from dataclasses import dataclass
from pathlib import Path

from registry.cards.card import read_card
from registry.cards.sources import read_sources
from registry.evaluation import CardCatalog, EvaluationCase, read_cases, read_catalog

OWN = Path(__file__).parents[2] / "data"
CARDS, REQUESTS = "catalog.jsonl", "queries.jsonl"


@dataclass(frozen=True)
class Set:
    """A catalog with its requests."""

    name: str
    catalog: CardCatalog
    cases: list[EvaluationCase]


def sets() -> list[Set]:
    """Read the sets in the folder ``EVAL_DIR`` names, each a folder of its own; without it the tests' own."""
    folder = os.environ.get("EVAL_DIR")
    found = sorted(path.parent for path in Path(folder).glob(f"*/{CARDS}")) if folder else []
    return [_read(path.name, path) for path in found] or [_read("own", OWN)]


def languages() -> Set:
    """Read the set of requests in seven languages; a ``qid`` begins with the language and the one of the card."""
    return _read("languages", OWN / "languages")


def _read(name: str, folder: Path) -> Set:
    catalog = read_catalog(read_sources([str(folder / CARDS)]))
    return Set(name, catalog, list(read_cases(folder / REQUESTS, catalog)))


def sliced(whole: Set, cards: int) -> Set:
    """Return requests drawn at random with the cards that answer them, about so many cards, and nothing else."""
    wanted: set[str] = set()
    cases: list[EvaluationCase] = []
    for case in random.Random(0).sample(whole.cases, len(whole.cases)):
        if len(wanted | case.relevant) <= cards:
            wanted |= case.relevant
            if len(cases) < cards:
                cases.append(case)
    kept = [card for card in whole.catalog.cards if key_of(whole.catalog, card) in wanted]
    return Set(whole.name, CardCatalog(kept, whole.catalog.keys), cases)


def key_of(catalog: CardCatalog, card: bytes) -> str:
    """Return what requests call a card."""
    return catalog.keys[read_card(card).address]
