"""The lake: a folder that one process at a time writes to, and its Delta tables.

Spark writes a batch as Parquet files into its own folder inside a table, and deltalake commits them: one commit adds
the files and records the source's progress as an application transaction. After a crash only a folder may be left over
whose batch was never committed.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from mediator.errors import SetupError, UnavailableError
from pipeline.lake import spark_path

MARKER = "lake.json"
LOCK = "lake.lock"
VERSION = 1
"""Version of the folder's layout; tables have their own."""
_DISK_FULL = os.strerror(errno.ENOSPC)
_UNREADABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f]")
"""Characters that deltalake cannot handle in a path: it reads %41 as A and a backslash as a slash."""
_BATCH = re.compile(r"(?P<number>\d{20})-(?P<source>.+)\.[0-9a-f]{8}")
_WRITE_CONF = {
    # Other readers take Spark's default timestamp format (INT96) for nanoseconds.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Otherwise every task sorts its rows by partition before it writes any.
    "spark.sql.maxConcurrentOutputFileWriters": "16",
}
_MAX_TEXT = 64
"""Longest text in statistics, in characters."""


@contextmanager
def lock_lake(lake: Path, *, create: bool = False) -> Iterator[None]:
    """Lock the lake for writing; readers need no lock.

    Raises :class:`SetupError` for a folder that is not a lake or that a newer version made, and
    :class:`UnavailableError` when another process holds the lock (the text names it) or the lake cannot be written.
    """
    with translate_errors(lake):
        if create:
            _create(lake)
        check_lake(lake)
        with lock_folder(lake, f"the lake {lake}"):
            yield


def check_usable(lake: Path, *, create: bool) -> None:
    """Raise :class:`SetupError` unless the folder is a lake or, with ``create``, can become one; change nothing.

    For commands that start Spark before they open the lake.
    """
    if found := _UNREADABLE.search(str(lake)):
        raise SetupError(f"{lake}: Delta tables cannot be kept under a path with {found[0]!r}; name another folder")
    if not (create and _is_new(lake)):
        check_lake(lake)


def check_lake(lake: Path) -> None:
    """Raise :class:`SetupError` unless the folder is a lake that this version can read."""
    try:
        version = orjson.loads((lake / MARKER).read_bytes())["version"]
    except FileNotFoundError:
        if lake.is_dir() and not _is_empty(lake):
            raise SetupError(f"{lake}: not a lake, and not empty; name a lake or an empty folder") from None
        raise SetupError(f"{lake}: not a lake; `mediator pipeline ingest` creates one in an empty folder") from None
    except NotADirectoryError:
        raise SetupError(f"{lake}: expected a folder") from None
    except (ValueError, KeyError, TypeError):
        raise SetupError(f'{lake / MARKER}: damaged, expected {{"version": {VERSION}}}') from None
    if version != VERSION:
        raise SetupError(f"{lake}: the lake has version {version}, this program supports {VERSION}; use a newer one")


@contextmanager
def translate_errors(lake: Path) -> Iterator[None]:
    """Raise :class:`UnavailableError` for errors of Spark, deltalake and the disk while writing to a lake."""
    try:
        yield
    except (OSError, DeltaError) as error:
        raise UnavailableError(f"the lake {lake}: {_first_line(error)}") from error
    except (PySparkException, Py4JError) as error:
        if _DISK_FULL not in str(error):
            raise
        raise UnavailableError(f"the lake {lake}: {_DISK_FULL}") from error


def _first_line(error: Exception) -> str:
    # Errors of deltalake have several lines.
    if _DISK_FULL in str(error):
        return _DISK_FULL
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0][:500]


def _is_new(lake: Path) -> bool:
    """Whether a lake can be created here: the folder is empty, or can be created."""
    if lake.is_dir():
        return _is_empty(lake)
    return next(path for path in (lake, *lake.parents) if path.exists()).is_dir()


def _is_empty(lake: Path) -> bool:
    # What a crash left while creating the lake does not count.
    return all(path.name == LOCK or path.name.startswith(f"{MARKER}.") for path in lake.iterdir())


def _create(lake: Path) -> None:
    if lake.exists() and not lake.is_dir():
        raise SetupError(f"{lake}: expected a folder")
    # Private like the service's database, since it has the same mail. An existing folder keeps its mode.
    lake.mkdir(0o700, parents=True, exist_ok=True)
    if _is_empty(lake):
        new = lake / f"{MARKER}.{os.getpid()}"
        new.write_bytes(orjson.dumps({"version": VERSION}))
        new.replace(lake / MARKER)


@contextmanager
def lock_folder(folder: Path, what: str) -> Iterator[None]:
    """Lock a folder; :class:`UnavailableError` says which process holds ``what``."""
    # Unbuffered: on a full disk a buffer could not be flushed, and the file would stay open.
    with os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnavailableError(f"{what} is in use by {_owner(file.read(4096))}") from None
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(orjson.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
        yield


def _owner(content: bytes) -> str:
    try:
        owner = orjson.loads(content)
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def sync(path: Path) -> None:
    """Sync a file and its directory entry to disk."""
    for each in (path, path.parent):
        file = os.open(each, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


class LakeTable:
    """A Delta table of the lake, opened or created."""

    def __init__(self, path: Path, schema: StructType, partition: str | None = None) -> None:
        """``partition`` is the partition column.

        Raises :class:`SetupError` when a newer version made the table, or it has other columns.
        """
        self.path = path
        self._partition = [partition] if partition is not None else []
        wanted = Schema.from_json(schema.json())
        try:
            self._delta = DeltaTable(path)
        except TableNotFoundError:
            self._delta = DeltaTable.create(path, wanted, partition_by=self._partition, mode="ignore")
        except DeltaError as error:
            if "nsupported" in str(error):
                raise SetupError(
                    f"{path}: a newer version of the program wrote this table; use that version"
                ) from error
            raise UnavailableError(f"the table {path}: {str(error).splitlines()[0][:500]}") from error
        if self._delta.schema() != wanted:
            raise SetupError(
                f"{path}: the table has other columns than this version expects; use the version that created it"
            )

    def read_up_to(self, source: str) -> int:
        """Return the progress that the last batch of a source recorded, -1 without one."""
        version = self._delta.transaction_version(source)
        return -1 if version is None else version

    @property
    def version(self) -> int:
        """The version of the table's last commit."""
        return int(self._delta.version())

    def append(self, rows: DataFrame, name: str, sources: Mapping[str, int]) -> int:
        """Add rows and record each source's progress in one commit; return the number of rows.

        See :meth:`append_written`.
        """
        return self.append_written(partial(write_files, rows), name, sources)

    def append_written(
        self,
        write: Callable[..., int],
        name: str,
        sources: Mapping[str, int],
        *,
        replacing: Sequence[str] | None = None,
    ) -> int:
        """Add the rows that ``write`` writes, and record each source's progress in one commit; return their number.

        ``write`` gets a folder and the partition column, writes Parquet files and returns the number of rows. ``name``
        is ``<20 digits>-<source>``, one of ``sources`` with its number. The same commit removes what the table
        has in the partitions ``replacing``.
        """
        folder = self.path / f"{name}.{uuid4().hex[:8]}"
        count = write(folder, *self._partition)
        actions = [self._describe(path) for path in sorted(folder.rglob("*.parquet"))]
        for path in (folder, self.path):
            sync(path)
        done = [Transaction(source, number) for source, number in sources.items()]
        self._delta.create_write_transaction(
            [*actions],
            "append" if replacing is None else "overwrite",
            self._delta.schema(),
            self._partition,
            partition_filters=None if replacing is None else [(self._partition[0], "in", list(replacing))],
            commit_properties=CommitProperties(app_transactions=done),
        )
        # A DeltaTable does not see its own write transactions.
        self._delta = DeltaTable(self.path)
        sync(self.path / "_delta_log" / f"{self._delta.version():020d}.json")
        return count

    def append_next(self, rows: DataFrame, source: str) -> int:
        """Add rows as the next batch of a source whose batches are only counted; return the number of rows."""
        number = self.read_up_to(source) + 1
        return self.append(rows, f"{number:020d}-{source}", {source: number})

    def rewrite(self, partition: str, files: Sequence[Path], change: Callable[[pa.Table], pa.Table]) -> None:
        """Replace all files of a partition in one commit: ``change`` maps the rows of each; empty files are dropped."""
        assert self._partition
        folder = self.path / f"rewritten.{uuid4().hex[:8]}" / f"{self._partition[0]}={partition}"
        folder.mkdir(parents=True)
        written = []
        for number, file in enumerate(files):
            rows = change(pq.ParquetFile(file).read())
            if rows.num_rows:
                written.append(folder / f"part-{number:05d}.parquet")
                # One row group, as compaction makes them.
                pq.write_table(rows, written[-1], compression="zstd", row_group_size=rows.num_rows)
        self._delta.create_write_transaction(
            [self._describe(path) for path in written],
            "overwrite",
            self._delta.schema(),
            self._partition,
            partition_filters=[(self._partition[0], "in", [partition])],
        )
        self._delta = DeltaTable(self.path)

    def drop_history(self) -> None:
        """Delete all files that the table no longer refers to, and the log of earlier versions."""
        self._delta.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
        self._delta = DeltaTable(self.path)
        self._delta.create_checkpoint()
        log = self.path / "_delta_log"
        for path in log.iterdir():
            if path.name[:20].isdigit() and int(path.name[:20]) < self.version:
                path.unlink()
        sync(log)

    def sweep(self) -> None:
        """Remove what crashed runs wrote but did not commit."""
        for path in self.path.iterdir():
            batch = _BATCH.fullmatch(path.name)
            if batch is not None and int(batch["number"]) > self.read_up_to(batch["source"]):
                shutil.rmtree(path)

    def column(self, name: str) -> list[Any]:
        """Return all values of a column of a small table."""
        return list(self._delta.to_pyarrow_table(columns=[name])[name].to_pylist())

    def files(self, *columns: str) -> list[dict[str, Any]]:
        """Return each file's ``path``, ``partition``, and ``min.x`` and ``max.x`` (or None) for each column ``x``."""
        actions = pa.table(self._delta.get_add_actions(flatten=True))
        names = [f"{bound}.{column}" for column in columns for bound in ("min", "max")]
        values = [
            actions[name].to_pylist() if name in actions.column_names else [None] * actions.num_rows for name in names
        ]
        paths = [str(self.path / unquote(path)) for path in actions["path"].to_pylist()]
        days = actions[f"partition.{self._partition[0]}"].to_pylist() if self._partition else [None] * len(paths)
        rows = zip(paths, days, *values, strict=True)
        return [dict(zip(("path", "partition", *names), row, strict=True)) for row in rows]

    def added_since(self, version: int) -> list[str] | None:
        """Return the files that commits after ``version`` added; None if the log no longer says."""
        found: list[str] = []
        for number in range(version + 1, self.version + 1):
            try:
                lines = (self.path / "_delta_log" / f"{number:020d}.json").read_text("utf-8").splitlines()
            except FileNotFoundError:
                return None
            actions = [json.loads(line).get("add") for line in lines]
            # Compaction rewrites rows and adds none.
            found += [action["path"] for action in actions if action is not None and action["dataChange"]]
        paths = [self.path / unquote(path) for path in found]
        return [str(path) for path in paths] if all(path.exists() for path in paths) else None

    def files_with(self, key: str, column: str, spans: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return the files whose statistics allow a row with one of the keys and a number in its span."""
        actions = pa.table(self._delta.get_add_actions(flatten=True))
        wanted = ("path", f"min.{key}", f"max.{key}", f"min.{column}", f"max.{column}")
        if not set(wanted) <= set(actions.column_names):
            return [str(self.path / unquote(path)) for path in actions["path"].to_pylist()]
        rows = zip(*(actions[name].to_pylist() for name in wanted), strict=True)
        return [str(self.path / unquote(path)) for path, *bounds in rows if _overlaps(spans, *bounds)]

    def _describe(self, path: Path) -> AddAction:
        """Sync a file to disk, and return its add action."""
        sync(path)
        relative = path.relative_to(self.path)
        folders = dict(part.split("=", 1) for part in relative.parts[1:-1])
        stats = _statistics(pq.read_metadata(path))
        status = path.stat()
        return AddAction(
            relative.as_posix(),
            status.st_size,
            {name: unquote(value) for name, value in folders.items()},
            status.st_mtime_ns // 1_000_000,
            True,
            json.dumps(stats),
        )


def write_files(rows: DataFrame, folder: Path, *partition: str) -> int:
    """Let Spark write rows as Parquet files below a folder that it replaces, and return their number.

    Raises :class:`SetupError`, and leaves no file, unless this process finds as many rows there as Spark wrote:
    executors on other machines write to their own disks.
    """
    written = Observation()
    with _conf(rows):
        counted = rows.observe(written, F.count(F.lit(1)).alias("rows"))
        counted.write.mode("overwrite").option("compression", "zstd").partitionBy(*partition).parquet(f"file:{folder}")
    count = int(written.get["rows"])
    here = sum(pq.read_metadata(path).num_rows for path in folder.rglob("*.parquet"))
    if here != count:
        shutil.rmtree(folder, ignore_errors=True)
        raise SetupError(
            f"{folder.parent}: Spark wrote {count:,} rows, but this process finds {here:,} of them; nothing was added. "
            "Spark's executors and this process have to see the same folder, on a disk that all machines mount"
        )
    return count


def read_files(spark: SparkSession, schema: StructType, files: Sequence[str]) -> DataFrame:
    """Return the rows of Parquet files of a table."""
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*map(spark_path, files))


def _overlaps(spans: Mapping[str, tuple[int, int]], first: str, last: str, low: int, high: int) -> bool:
    # A file without statistics may have any row.
    if None in (first, last, low, high):
        return True
    return any(first <= key <= last and low <= span[1] and high >= span[0] for key, span in spans.items())


def _statistics(file: pq.FileMetaData) -> dict[str, Any]:
    """Return a file's Delta statistics: the bounds of each column that has them, times in ISO 8601."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    for column in range(file.num_columns):
        groups = [file.row_group(index).column(column) for index in range(file.num_row_groups)]
        known = [group.statistics for group in groups]
        bounds = [(each.min, each.max) for each in known if each is not None and each.has_min_max]
        # A row group of nulls has no bounds; any other group without bounds makes the column's unknown.
        unknown = any(each is None or (not each.has_min_max and each.num_values > 0) for each in known)
        if not bounds or unknown or any(_long(value) for value in (*bounds[0], *bounds[-1])):
            continue
        name = file.row_group(0).column(column).path_in_schema
        low[name] = _plain(min(first for first, _ in bounds))
        high[name] = _plain(max(last for _, last in bounds))
    return {"numRecords": file.num_rows, "minValues": low, "maxValues": high, "nullCount": {}}


def _long(value: object) -> bool:
    return isinstance(value, bytes) or (isinstance(value, str) and len(value) > _MAX_TEXT)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return value.isoformat() if isinstance(value, date) else value


@contextmanager
def _conf(rows: DataFrame) -> Iterator[None]:
    """Set the configuration for writing that has no option on the writer, and restore it afterwards."""
    conf = rows.sparkSession.conf
    before = {name: conf.get(name, None) for name in _WRITE_CONF}
    for name, value in _WRITE_CONF.items():
        conf.set(name, value)
    try:
        yield
    finally:
        for name, was in before.items():
            if was is None:
                conf.unset(name)
            else:
                conf.set(name, was)
