"""Upkeep of the lake: small files become large ones, old days go, and what no table has any more leaves the disk."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from deltalake import DeltaTable

from mediator.operators.spans import show_count
from pipeline.lake import ARCHIVE, EVENTS, TABLES, table
from pipeline.lake.events import PARTITION
from pipeline.lake.folder import held
from pipeline.telling import Told, to_nobody

VACUUM_HOURS = 168
"""Files that no table has any more are kept so long for readers that have begun, and for looks into the past."""

ARCHIVE_FILE_BYTES = 32 << 20
"""Up to so large archived messages are merged: what is merged is one group of rows, of which a reader's task may have
to hold all payloads at once."""


@dataclass(slots=True)
class Upkept:
    """What was done."""

    merged: int = 0
    """Small files that are part of larger ones now."""
    made: int = 0
    days: int = 0
    """Days of events that were over and went."""
    archive_days: int = 0
    """Days of the archive that were over and went."""
    removed: int = 0
    """Files that left the disk."""

    def lines(self) -> Iterator[str]:
        """Say it to people."""
        yield f"{show_count(self.merged, 'file')} became {self.made:,}, {self.removed:,} old ones removed from the disk"
        if self.days:
            yield f"{show_count(self.days, 'day')} of events removed"
        if self.archive_days:
            yield f"{show_count(self.archive_days, 'day')} of the archive removed"


def compact(
    lake: Path,
    *,
    keep_days: int | None = None,
    keep_archive_days: int | None = None,
    now: datetime | None = None,
    told: Told = to_nobody,
) -> Upkept:
    """Merge small files in the tables that the pipeline writes, and vacuum them; others in the folder stay as they are.

    ``keep_days`` removes events older than that, ``keep_archive_days`` archived messages.

    Raises :class:`SetupError` and :class:`UnavailableError` as :func:`pipeline.lake.folder.held`.
    """
    upkept = Upkept()
    today = (now or datetime.now(UTC)).date()
    with held(lake):
        paths = [path for name in TABLES if (path := table(lake, name)).joinpath("_delta_log").is_dir()]
        for done, path in enumerate(paths):
            told("tables", done, len(paths))
            if path == table(lake, EVENTS):
                upkept.days += _forget(path, today, keep_days)
            elif path == table(lake, ARCHIVE):
                upkept.archive_days += _forget(path, today, keep_archive_days)
            _merge(path, ARCHIVE_FILE_BYTES if path == table(lake, ARCHIVE) else None, upkept)
        told("tables", len(paths), len(paths))
    return upkept


def _forget(path: Path, today: date, keep_days: int | None) -> int:
    """Remove the days that are older; whole partitions, so no file is read."""
    if keep_days is None:
        return 0
    first = (today - timedelta(days=keep_days)).isoformat()
    delta = DeltaTable(path)
    days = [day for part in delta.partitions() if (day := part[PARTITION]) is not None and day < first]
    if days:
        # Its delete() panics where the path has brackets.
        gone = [(PARTITION, "in", days)]
        delta.create_write_transaction([], "overwrite", delta.schema(), [PARTITION], partition_filters=gone)
    return len(days)


def _merge(path: Path, file_bytes: int | None, upkept: Upkept) -> None:
    delta = DeltaTable(path)
    merged = delta.optimize.compact(target_size=file_bytes)
    upkept.merged += merged["numFilesRemoved"]
    upkept.made += merged["numFilesAdded"]
    upkept.removed += len(DeltaTable(path).vacuum(VACUUM_HOURS, dry_run=False, full=True))
    for folder in sorted(path.rglob("*/"), reverse=True):
        if "_delta_log" not in folder.parts and not any(folder.iterdir()):
            folder.rmdir()
