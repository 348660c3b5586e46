"""The lake: Delta tables that any tool can read."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ProgressCallback = Callable[[str, int, int | None], None]
"""Reports the progress of a long job: the step ("segments"), how many units of it are done and how many there are.

The number of units is None if it is unknown. The callback is called often, on the thread that does the work, so it must
return at once.
"""

ARCHIVE = "archive"
EVENTS = "events"
GAPS = "gaps"
QUARANTINE = "quarantine"
USAGE_HOURLY = "usage_hourly"
USAGE_WAITS = "usage_waits"
USAGE_GROUPS = "usage_groups"
USAGE_MESSAGES = "usage_messages"
USAGE_WAIT_COUNTS = "usage_wait_counts"
VECTORS = "vectors"
BAD_CARDS = "bad_cards"
TABLES = (
    *(ARCHIVE, BAD_CARDS, EVENTS, GAPS, QUARANTINE, VECTORS),
    *(USAGE_GROUPS, USAGE_HOURLY, USAGE_MESSAGES, USAGE_WAIT_COUNTS, USAGE_WAITS),
)
"""The tables of the pipeline; users may keep others in the lake's folder."""
SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
"""Object stores; the part of a URL before ``://``."""
REPORT = "report.html"
"""The page of the newest report, unless a run names another file."""
JOURNAL = "journal"
"""The folder of files of the journal that were copied to the lake and not yet ingested; not a table."""
REPLAYS = "replays"
"""The folder of the checkpoints of unfinished replays; not a table."""


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """A place in an object store."""

    url: str
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """What opens it, as deltalake names them; secrets among them."""

    def __truediv__(self, name: str) -> "ObjectPlace":
        return ObjectPlace(f"{self.url.rstrip('/')}/{name}", self.options)

    def __str__(self) -> str:
        return self.url


Place = Path | ObjectPlace
"""A folder, or a place in an object store: a lake, or a table in it."""


def is_url(text: str) -> bool:
    """Whether a text is the URL of a place in an object store."""
    return text.partition("://")[0] in SCHEMES and "://" in text


def spark_path(path: Path | str) -> str:
    """Return a path for Spark's readers, with the characters escaped that they take for glob patterns."""
    return "file:" + re.sub(r"([\\*?{}\[\]])", r"\\\1", str(path))


def no_progress(step: str, done: int, of: int | None) -> None:
    """Report nothing."""
