"""The lake: Delta tables that any tool can read."""

import re
from pathlib import Path

ARCHIVE = "archive"
EVENTS = "events"
GAPS = "gaps"
QUARANTINE = "quarantine"
USAGE_HOURLY = "usage_hourly"
USAGE_WAITS = "usage_waits"
USAGE_GROUPS = "usage_groups"
VECTORS = "vectors"
BAD_CARDS = "bad_cards"
TABLES = (ARCHIVE, BAD_CARDS, EVENTS, GAPS, QUARANTINE, USAGE_GROUPS, USAGE_HOURLY, USAGE_WAITS, VECTORS)
"""All tables of ours; a user may keep others in the lake's folder."""
REPLAYS = "replays"
"""No table: the folder of what replays keep until they are done."""


def table(lake: Path, name: str) -> Path:
    """Return the folder of a table of the lake."""
    return lake / name


def readable(path: Path | str) -> str:
    """Return a path as Spark's readers take it for this one file: they look for patterns in it."""
    return "file:" + re.sub(r"([\\*?{}\[\]])", r"\\\1", str(path))
