"""What a replay keeps in the lake until it is done: its plan, and how far it came."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import orjson

from mediator.errors import DamagedError
from mediator.operators.spans import show_count
from pipeline.lake import REPLAYS
from pipeline.lake.folder import sync

PLAN = "plan"
_PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replay came."""

    messages: int
    """Planned to be sent."""
    replaced: int = 0
    """Older messages of a key, which are not."""
    done: int = 0
    """Of the plan, from its beginning."""
    missing: int = 0
    """Planned, and no longer in the archive when their turn came."""
    refused: int = 0
    """Planned, and not to be sent as they are."""
    example: str = ""
    """Why one of them was refused."""

    @property
    def sent(self) -> int:
        """Messages that have their receipt."""
        return self.done - self.missing - self.refused

    @property
    def numbers(self) -> dict[str, int]:
        """All of it that is a number, by a word."""
        names = ("messages", "replaced", "missing", "refused", "sent")
        return {name: getattr(self, name) for name in names}

    def after(self, end: int, found: int, refused: int, example: str | None) -> Self:
        """Return how far it is after a chunk that ends before ``end``."""
        return replace(
            self,
            done=end,
            missing=self.missing + end - self.done - found,
            refused=self.refused + refused,
            example=self.example or example or "",
        )

    def lines(self) -> Iterator[str]:
        """Say it to people."""
        yield f"{show_count(self.sent, 'message')} sent"
        if self.replaced:
            yield f"{self.replaced:,} older ones of their keys were not"
        if self.missing:
            yield f"{self.missing:,} were no longer in the archive"
        if self.refused:
            yield f"{self.refused:,} cannot be sent as they are, such as {self.example}"


class Replays:
    """The folder of one replay, named by all that makes it this one."""

    def __init__(self, lake: Path, wishes: list[Any]) -> None:
        told = orjson.dumps(wishes, option=orjson.OPT_SERIALIZE_DATACLASS | orjson.OPT_SORT_KEYS)
        self.folder = lake / REPLAYS / sha256(told).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)

    def progress(self) -> Progress | None:
        """Return how far it came; None: it is to begin. Raises :class:`DamagedError` when that cannot be read."""
        path = self.folder / _PROGRESS
        try:
            return Progress(**orjson.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            raise DamagedError(f"{path} cannot be read; remove {self.folder} to begin anew") from None

    def keep(self, progress: Progress) -> None:
        """Keep how far it came."""
        new = self.folder / f"{_PROGRESS}.new"
        new.write_text(json.dumps(asdict(progress)))
        sync(new)
        new.replace(self.folder / _PROGRESS)

    def keep_plan(self, progress: Progress) -> None:
        """Keep what the plan is, after the plan itself: without a plan its progress would be that of nothing."""
        for path in (self.folder / PLAN).glob("*.parquet"):
            sync(path)
        self.keep(progress)

    def forget(self) -> None:
        """Remove all of it; without its progress the rest is nothing."""
        (self.folder / _PROGRESS).unlink()
        shutil.rmtree(self.folder)
