"""Compaction of the lake: merges small files, removes old days, and vacuums files that no table refers to."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from deltalake import DeltaTable

from mediator.operate.units import format_count
from pipeline.lake import ARCHIVE, EVENTS, TABLES, Place, ProgressCallback, no_progress
from pipeline.lake.delta import lock_lake
from pipeline.lake.storage import delta_arguments, is_table
from pipeline.source.schema import PARTITION

VACUUM_HOURS = 168
"""Unreferenced files are kept this long, for running readers and for time travel."""

ARCHIVE_FILE_BYTES = 32 << 20
"""Target size of merged archive files: each becomes one row group, whose payloads a reader's task may hold at once."""


@dataclass(slots=True)
class CompactResult:
    """What a run of ``compact`` did."""

    merged: int = 0
    """Small files that were merged."""
    made: int = 0
    days: int = 0
    """Days of events that were removed."""
    archive_days: int = 0
    """Days of the archive that were removed."""
    removed: int = 0
    """Files deleted from disk."""

    def lines(self) -> Iterator[str]:
        """Yield the result as lines for people."""
        files = format_count(self.merged, "file")
        yield f"{files} became {self.made:,}, {self.removed:,} old ones removed from the disk"
        if self.days:
            yield f"{format_count(self.days, 'day')} of events removed"
        if self.archive_days:
            yield f"{format_count(self.archive_days, 'day')} of the archive removed"


def compact(
    lake: Place,
    *,
    keep_days: int | None = None,
    keep_archive_days: int | None = None,
    now: datetime | None = None,
    on_progress: ProgressCallback = no_progress,
) -> CompactResult:
    """Merge small files in the pipeline's tables and vacuum them; other tables in the folder stay untouched.

    ``keep_days`` removes events older than that, ``keep_archive_days`` archived messages.

    Raises :class:`SetupError` and :class:`UnavailableError` as :func:`pipeline.lake.delta.lock_lake`.
    """
    upkept = CompactResult()
    today = (now or datetime.now(UTC)).date()
    with lock_lake(lake):
        paths = [path for name in TABLES if is_table(path := lake / name)]
        for done, path in enumerate(paths):
            on_progress("tables", done, len(paths))
            if path == lake / EVENTS:
                upkept.days += _forget(path, today, keep_days)
            elif path == lake / ARCHIVE:
                upkept.archive_days += _forget(path, today, keep_archive_days)
            _merge(path, ARCHIVE_FILE_BYTES if path == lake / ARCHIVE else None, upkept)
        on_progress("tables", len(paths), len(paths))
    return upkept


def _forget(path: Place, today: date, keep_days: int | None) -> int:
    """Remove older days, whole partitions at once; return how many."""
    if keep_days is None:
        return 0
    first = (today - timedelta(days=keep_days)).isoformat()
    delta = DeltaTable(**delta_arguments(path))
    days = [day for part in delta.partitions() if (day := part[PARTITION]) is not None and day < first]
    if days:
        # DeltaTable.delete() panics if the path has brackets.
        gone = [(PARTITION, "in", days)]
        delta.create_write_transaction([], "overwrite", delta.schema(), [PARTITION], partition_filters=gone)
    return len(days)


def _merge(path: Place, file_bytes: int | None, upkept: CompactResult) -> None:
    delta = DeltaTable(**delta_arguments(path))
    merged = delta.optimize.compact(target_size=file_bytes)
    upkept.merged += merged["numFilesRemoved"]
    upkept.made += merged["numFilesAdded"]
    upkept.removed += len(DeltaTable(**delta_arguments(path)).vacuum(VACUUM_HOURS, dry_run=False, full=True))
    if not isinstance(path, Path):
        # A store has no folders.
        return
    for folder in sorted(path.rglob("*/"), reverse=True):
        if "_delta_log" not in folder.parts and not any(folder.iterdir()):
            folder.rmdir()
