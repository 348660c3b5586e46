"""The lake: Delta tables that any tool can read."""

from pathlib import Path

ARCHIVE = "archive"
EVENTS = "events"
GAPS = "gaps"
QUARANTINE = "quarantine"
REPLAYS = "replays"
"""No table: the folder of what replays keep until they are done."""


def table(lake: Path, name: str) -> Path:
    """Return the folder of a table of the lake."""
    return lake / name
