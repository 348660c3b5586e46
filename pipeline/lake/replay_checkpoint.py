"""The checkpoint of a replay, kept in the lake until the replay is done: its plan and its progress."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import orjson

from mediator.errors import DamagedError
from mediator.ops.units import format_count
from pipeline.lake import REPLAYS
from pipeline.lake.folder import sync

PLAN = "plan"
_PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How far a replay has come."""

    messages: int
    """Messages in the plan."""
    replaced: int = 0
    """Older messages of a key, which are not sent."""
    done: int = 0
    """Messages of the plan that were handled, from its beginning."""
    missing: int = 0
    """Planned messages that were no longer in the archive."""
    refused: int = 0
    """Planned messages that NATS cannot carry unchanged."""
    example: str = ""
    """Why one of them was refused."""

    @property
    def sent(self) -> int:
        """Messages that the service confirmed."""
        return self.done - self.missing - self.refused

    @property
    def numbers(self) -> dict[str, int]:
        """The counts by name."""
        names = ("messages", "replaced", "missing", "refused", "sent")
        return {name: getattr(self, name) for name in names}

    def after(self, end: int, found: int, refused: int, example: str | None) -> Self:
        """Return the progress after a chunk that ends before ``end``."""
        return replace(
            self,
            done=end,
            missing=self.missing + end - self.done - found,
            refused=self.refused + refused,
            example=self.example or example or "",
        )

    def lines(self) -> Iterator[str]:
        """Yield the result as lines for people."""
        yield f"{format_count(self.sent, 'message')} sent"
        if self.replaced:
            yield f"{self.replaced:,} older ones of their keys were not"
        if self.missing:
            yield f"{self.missing:,} were no longer in the archive"
        if self.refused:
            yield f"{self.refused:,} cannot be sent as they are, such as {self.example}"


class ReplayCheckpoint:
    """The folder of one replay, named by a hash of the selection and the target."""

    def __init__(self, lake: Path, wishes: list[Any]) -> None:
        identity = orjson.dumps(wishes, option=orjson.OPT_SERIALIZE_DATACLASS | orjson.OPT_SORT_KEYS)
        self.folder = lake / REPLAYS / sha256(identity).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)

    def progress(self) -> ReplayProgress | None:
        """Return the progress, None for a new replay; :class:`DamagedError` when it cannot be read."""
        path = self.folder / _PROGRESS
        try:
            return ReplayProgress(**orjson.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            raise DamagedError(f"{path} cannot be read; remove {self.folder} to start over") from None

    def keep(self, progress: ReplayProgress) -> None:
        """Save the progress."""
        new = self.folder / f"{_PROGRESS}.new"
        new.write_text(json.dumps(asdict(progress)))
        sync(new)
        new.replace(self.folder / _PROGRESS)

    def keep_plan(self, progress: ReplayProgress) -> None:
        """Sync the plan, then save the progress, which is meaningless without it."""
        for path in (self.folder / PLAN).glob("*.parquet"):
            sync(path)
        self.keep(progress)

    def forget(self) -> None:
        """Remove the checkpoint, the progress first: without it the rest is ignored."""
        (self.folder / _PROGRESS).unlink()
        shutil.rmtree(self.folder)
