"""What agents are called and say to each other: the sets under EVAL_DIR, or the small one under tests/data.

A set is a folder with ``catalog.jsonl`` (agent cards: ``id``, ``name``, ``description``, ``skills``) and
``queries.jsonl`` (requests: ``query``). Sets are read where they lie, and in the same order every time.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = Path(__file__).parent.parent / "data"


@dataclass(frozen=True, slots=True)
class Content:
    """Cards and requests in a fixed order."""

    source: str
    cards: list[dict[str, Any]]
    requests: list[str]

    def card(self, number: int) -> dict[str, Any]:
        """Return a card; numbers beyond the last begin again."""
        return self.cards[number % len(self.cards)]

    def request(self, number: int) -> str:
        """Return a request; numbers beyond the last begin again."""
        return self.requests[number % len(self.requests)]

    def address(self, number: int) -> str:
        """Return a mail address for an agent: its number, and what its card is called (A1)."""
        words = re.findall(r"[a-z0-9]+", str(self.card(number)["id"]).lower())
        return ".".join([f"agent{number}", *words])[:128].rstrip(".")


def load() -> Content:
    """Read the content; the small set where EVAL_DIR is not set."""
    given = os.environ.get("EVAL_DIR")
    folders = sorted(catalog.parent for catalog in Path(given).glob("*/catalog.jsonl")) if given else [OWN]
    assert folders, f"EVAL_DIR={given} has no NAME/catalog.jsonl"
    cards = [card for folder in folders for card in _lines(folder / "catalog.jsonl")]
    requests = [str(line["query"]) for folder in folders for line in _lines(folder / "queries.jsonl")]
    assert cards, f"no cards in {folders}"
    assert requests, f"no requests in {folders}"
    # In turn from the sets' ends, so that the first few hundred are of every kind.
    return Content(given or str(OWN), _mixed(cards), _mixed(requests))


def _mixed(items: list[Any]) -> list[Any]:
    step = next(step for step in (97, 89, 83, 1) if len(items) % step or step == 1)
    return [items[number * step % len(items)] for number in range(len(items))]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
