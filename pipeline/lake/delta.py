"""The lake and its Delta tables: in a folder that one process at a time writes to, or in an object store.

Spark's tasks write a batch as Parquet files into its own folder inside a table and say what they wrote, and deltalake
commits it: one commit adds the files and records the source's progress as an application transaction. After a crash
only a folder may be left over whose batch was never committed. Each commit also names its writer, so of two processes
that write to a table at once the second is refused; in a folder, a lock refuses it before it begins.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote
from uuid import uuid4

import orjson
import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from mediator.errors import SetupError, UnavailableError
from pipeline.lake import Place
from pipeline.lake.storage import (
    DataFiles,
    Writer,
    WrittenFile,
    delta_arguments,
    open_filesystem,
    read_file,
    sync,
    write_batches,
    write_file,
    write_rows,
)

MARKER = "lake.json"
LOCK = "lake.lock"
VERSION = 1
"""Version of the folder's layout; tables have their own."""
_DISK_FULL = os.strerror(errno.ENOSPC)
_UNREADABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f]")
"""Characters that deltalake cannot handle in a path: it reads %41 as A and a backslash as a slash."""
_BATCH = re.compile(r"(?P<number>\d{20})-(?P<source>.+)\.[0-9a-f]{8}")
_WRITER = "mediator.writer"
"""The application transaction of every commit of ours but compaction's, which changes no rows."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S*")
"""A URL with its query, which may have a signature."""


@contextmanager
def lock_lake(lake: Place, *, create: bool = False) -> Iterator[None]:
    """Lock the lake for writing; readers need no lock. A lake in an object store has none: see :class:`LakeTable`.

    Raises :class:`SetupError` for a folder that is not a lake or that a newer version made, and
    :class:`UnavailableError` when another process holds the lock (the text names it) or the lake cannot be written.
    """
    with translate_errors(lake):
        if create:
            _create(lake)
        check_lake(lake)
        with lock_folder(lake, f"the lake {lake}"):
            yield


def check_usable(lake: Place, *, create: bool) -> None:
    """Raise :class:`SetupError` unless the folder is a lake or, with ``create``, can become one; change nothing.

    For commands that start Spark before they open the lake. Raises :class:`UnavailableError` when it cannot be read.
    """
    if found := _UNREADABLE.search(str(lake)):
        raise SetupError(f"{lake}: Delta tables cannot be kept under a path with {found[0]!r}; name another folder")
    with translate_errors(lake):
        if not (create and _is_new(lake)):
            check_lake(lake)


def check_lake(lake: Place) -> None:
    """Raise :class:`SetupError` unless the folder is a lake that this version can read."""
    try:
        version = orjson.loads(read_file(lake, MARKER))["version"]
    except FileNotFoundError:
        if not _is_empty(lake):
            raise SetupError(f"{lake}: not a lake, and not empty; name a lake or an empty folder") from None
        raise SetupError(f"{lake}: not a lake; `mediator pipeline ingest` creates one in an empty folder") from None
    except NotADirectoryError:
        raise SetupError(f"{lake}: expected a folder") from None
    except (ValueError, KeyError, TypeError):
        raise SetupError(f'{lake}/{MARKER}: damaged, expected {{"version": {VERSION}}}') from None
    if version != VERSION:
        raise SetupError(f"{lake}: the lake has version {version}, this program supports {VERSION}; use a newer one")


@contextmanager
def translate_errors(lake: Place) -> Iterator[None]:
    """Raise :class:`UnavailableError` for errors of Spark, deltalake and the disk while writing to a lake."""
    try:
        yield
    except (OSError, DeltaError) as error:
        raise UnavailableError(f"the lake {lake}: {_one_line(error)}") from error
    except (PySparkException, Py4JError) as error:
        if _DISK_FULL not in str(error):
            raise
        raise UnavailableError(f"the lake {lake}: {_DISK_FULL}") from error


def _one_line(error: Exception) -> str:
    if _DISK_FULL in str(error):
        return _DISK_FULL
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    # deltalake tells the cause of an error in a line below it, marked with an arrow, and other things in more lines.
    first, *others = _QUERY.sub(r"\1", _COLOURS.sub("", str(text))).splitlines()
    causes = [line.partition("↳")[2].strip() for line in others if "↳" in line]
    return ": ".join([first, *causes])[:500]


def _is_new(lake: Place) -> bool:
    """Whether a lake can be created here: the folder is empty, or can be created."""
    if isinstance(lake, Path) and not lake.is_dir():
        return next(path for path in (lake, *lake.parents) if path.exists()).is_dir()
    return _is_empty(lake)


def _is_empty(lake: Place) -> bool:
    found = open_filesystem(lake).get_file_info(pafs.FileSelector("", allow_not_found=True))
    # What a crash left while creating the lake does not count.
    return all(info.base_name == LOCK or info.base_name.startswith(f"{MARKER}.") for info in found)


def _create(lake: Place) -> None:
    if isinstance(lake, Path):
        if lake.exists() and not lake.is_dir():
            raise SetupError(f"{lake}: expected a folder")
        # Private like the service's database, since it has the same mail. An existing folder keeps its mode.
        lake.mkdir(0o700, parents=True, exist_ok=True)
    if _is_empty(lake):
        write_file(lake, MARKER, orjson.dumps({"version": VERSION}))


@contextmanager
def lock_folder(folder: Place, what: str) -> Iterator[None]:
    """Lock a folder; :class:`UnavailableError` says which process holds ``what``. In an object store, do nothing."""
    if not isinstance(folder, Path):
        yield
        return
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


def check_present(place: Place, folder: str, files: Sequence[WrittenFile]) -> None:
    """Raise :class:`SetupError` unless this process finds what tasks wrote into a folder; sync it."""
    found = open_filesystem(place).get_file_info([file.path for file in files])
    here = sum(file.rows for file, info in zip(files, found, strict=True) if info.size == file.size)
    count = sum(file.rows for file in files)
    if here != count:
        raise SetupError(
            f"{place}: Spark wrote {count:,} rows, but this process finds {here:,} of them; nothing was added. Spark's "
            "executors and this process have to see the same folder, on a disk that all machines mount; or keep the "
            "lake in an object store"
        )
    if isinstance(place, Path) and files:
        sync(place / folder)


class LakeTable:
    """A Delta table of the lake, opened or created."""

    def __init__(self, path: Place, schema: StructType, partition: str | None = None) -> None:
        """``partition`` is the partition column.

        Raises :class:`SetupError` when a newer version made the table, or it has other columns.
        """
        self.path = path
        self._schema = schema
        self._partition = [partition] if partition is not None else []
        wanted = Schema.from_json(schema.json())
        try:
            self._delta = DeltaTable(**delta_arguments(path))
        except TableNotFoundError:
            self._delta = DeltaTable.create(
                **delta_arguments(path), schema=wanted, partition_by=self._partition, mode="ignore"
            )
        except DeltaError as error:
            if "nsupported" in str(error):
                raise SetupError(
                    f"{path}: a newer version of the program wrote this table; use that version"
                ) from error
            raise UnavailableError(f"the table {path}: {_one_line(error)}") from error
        self._widen(wanted)

    def _widen(self, wanted: Schema) -> None:
        """Add the columns that an older version's table lacks; in rows that are there they are null."""
        known = {field.name: field for field in self._delta.schema().fields}
        lacking = [field for field in wanted.fields if field.name not in known]
        unknown = known.keys() - {field.name for field in wanted.fields}
        if unknown or any(known.get(field.name, field) != field for field in wanted.fields):
            raise SetupError(
                f"{self.path}: the table has other columns than this version expects; use the version that created it"
            )
        if lacking:
            try:
                self._delta.alter.add_columns(lacking)
            except DeltaError as error:
                raise UnavailableError(f"the table {self.path}: {_one_line(error)}") from error
            self._delta = DeltaTable(**delta_arguments(self.path))

    def read_up_to(self, source: str) -> int:
        """Return the progress that the last batch of a source recorded, -1 without one."""
        version = self._delta.transaction_version(source)
        return -1 if version is None else version

    @property
    def version(self) -> int:
        """The version of the table's last commit."""
        return int(self._delta.version())

    def append(self, rows: DataFrame, name: str, sources: Mapping[str, int]) -> int:
        """Have Spark add rows, and record each source's progress in one commit; return the number of rows.

        See :meth:`append_written`.
        """
        return self.append_written(partial(write_rows, rows, self._schema), name, sources)

    def append_written(
        self,
        write: Writer,
        name: str,
        sources: Mapping[str, int],
        *,
        replacing: Sequence[str] | None = None,
    ) -> int:
        """Add the rows that ``write`` writes, and record each source's progress in one commit; return their number.

        ``name`` is ``<20 digits>-<source>``, one of ``sources`` with its number. The same commit removes what the table
        has in the partitions ``replacing``.

        Raises :class:`UnavailableError` when another process has committed since this table was opened, and
        :class:`SetupError` when files that tasks wrote are not here. Nothing is added then.
        """
        folder = f"{name}.{uuid4().hex[:8]}"
        files = write(self.path, folder, self._partition[0] if self._partition else None)
        check_present(self.path, folder, files)
        done = [Transaction(source, number) for source, number in sources.items()]
        self.commit(files, "append" if replacing is None else "overwrite", replacing, done)
        self._remove_unfinished(folder, files)
        return sum(file.rows for file in files)

    def commit(
        self,
        files: Sequence[WrittenFile],
        mode: Literal["append", "overwrite"],
        replacing: Sequence[str] | None = None,
        done: Sequence[Transaction] = (),
    ) -> None:
        """Commit files, and that this process wrote to the table; of two that do so at once the second fails."""
        try:
            self._delta.create_write_transaction(
                [file.add_action(self._partition) for file in files],
                mode,
                self._delta.schema(),
                self._partition,
                partition_filters=None if replacing is None else [(self._partition[0], "in", list(replacing))],
                commit_properties=CommitProperties(app_transactions=[*done, Transaction(_WRITER, self.version + 1)]),
            )
        except CommitFailedError as error:
            if "concurrent" not in str(error).lower():
                raise
            # Not even the files are removed: it may be our own commit, whose answer was lost.
            raise UnavailableError(
                f"the table {self.path}: another process has written to it meanwhile; run the command again"
            ) from error
        # A DeltaTable does not see its own write transactions.
        self._delta = DeltaTable(**delta_arguments(self.path))
        if isinstance(self.path, Path):
            sync(self.path / "_delta_log" / f"{self.version:020d}.json")

    def _remove_unfinished(self, folder: str, files: Sequence[WrittenFile]) -> None:
        """Remove what tasks wrote that failed or were repeated."""
        filesystem = open_filesystem(self.path)
        committed = {file.path for file in files}
        for info in filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True, recursive=True)):
            if info.type == pafs.FileType.File and info.path not in committed:
                filesystem.delete_file(info.path)

    def append_next(self, rows: DataFrame, source: str) -> int:
        """Add rows as the next batch of a source whose batches are only counted; return the number of rows."""
        number = self.read_up_to(source) + 1
        return self.append(rows, f"{number:020d}-{source}", {source: number})

    def rewrite(self, partition: str, files: Sequence[str], change: Callable[[pa.Table], pa.Table]) -> None:
        """Replace all files of a partition in one commit: ``change`` maps the rows of each; empty files are dropped."""
        folder = f"rewritten.{uuid4().hex[:8]}/{self._partition[0]}={partition}"
        written: list[WrittenFile] = []
        for file in files:
            rows = change(self.open_files([file]).dataset().to_table())
            written += write_batches(rows.to_batches(), rows.schema, self.path, folder, None)
        self.commit([replace(file, partition=partition) for file in written], "overwrite", [partition])

    def drop_history(self) -> None:
        """Delete all files that the table no longer refers to, and the log of earlier versions.

        In an object store, where another process may be writing: only those that it did refer to.
        """
        alone = isinstance(self.path, Path)
        self._delta.vacuum(0, dry_run=False, enforce_retention_duration=False, full=alone)
        self._delta = DeltaTable(**delta_arguments(self.path))
        self._delta.create_checkpoint()
        filesystem = open_filesystem(self.path)
        for info in filesystem.get_file_info(pafs.FileSelector("_delta_log")):
            if info.base_name[:20].isdigit() and int(info.base_name[:20]) < self.version:
                filesystem.delete_file(info.path)
        if isinstance(self.path, Path):
            sync(self.path / "_delta_log")

    def sweep(self) -> None:
        """Remove what crashed runs wrote but did not commit.

        In an object store it may be another process that has yet to commit: there, compaction removes it after a week.
        """
        if isinstance(self.path, Path):
            for path in self.path.iterdir():
                batch = _BATCH.fullmatch(path.name)
                if batch is not None and int(batch["number"]) > self.read_up_to(batch["source"]):
                    shutil.rmtree(path)

    def column(self, name: str) -> list[Any]:
        """Return all values of a column of a small table."""
        return list(self._delta.to_pyarrow_table(columns=[name])[name].to_pylist())

    def open_files(self, names: Sequence[str]) -> DataFiles:
        """Return some of the table's files, to read them."""
        return DataFiles(self.path, tuple(names))

    def files(self, *columns: str) -> list[dict[str, Any]]:
        """Return each file's ``name``, ``partition``, and ``min.x`` and ``max.x`` (or None) for each column ``x``."""
        actions = pa.table(self._delta.get_add_actions(flatten=True))
        bounds = [f"{bound}.{column}" for column in columns for bound in ("min", "max")]
        values = [
            actions[name].to_pylist() if name in actions.column_names else [None] * actions.num_rows for name in bounds
        ]
        names = [unquote(path) for path in actions["path"].to_pylist()]
        days = actions[f"partition.{self._partition[0]}"].to_pylist() if self._partition else [None] * len(names)
        rows = zip(names, days, *values, strict=True)
        return [dict(zip(("name", "partition", *bounds), row, strict=True)) for row in rows]

    def all_files(self) -> DataFiles:
        """Return all of the table's files."""
        return self.open_files([file["name"] for file in self.files()])

    def added_since(self, version: int) -> DataFiles | None:
        """Return the files that commits after ``version`` added; None if the log no longer says."""
        names: list[str] = []
        for number in range(version + 1, self.version + 1):
            try:
                lines = read_file(self.path, f"_delta_log/{number:020d}.json").splitlines()
            except FileNotFoundError:
                return None
            actions = [json.loads(line).get("add") for line in lines]
            # Compaction rewrites rows and adds none.
            names += [unquote(action["path"]) for action in actions if action is not None and action["dataChange"]]
        found = open_filesystem(self.path).get_file_info(names)
        return self.open_files(names) if all(info.type == pafs.FileType.File for info in found) else None

    def files_with(self, key: str, column: str, spans: Mapping[str, tuple[int, int]]) -> DataFiles:
        """Return the files whose statistics allow a row with one of the keys and a number in its span."""
        bounds = [f"{bound}.{name}" for name in (key, column) for bound in ("min", "max")]
        files = self.files(key, column)
        return self.open_files([file["name"] for file in files if _overlaps(spans, *(file[name] for name in bounds))])


def _overlaps(spans: Mapping[str, tuple[int, int]], first: str, last: str, low: int, high: int) -> bool:
    # A file without statistics may have any row.
    if None in (first, last, low, high):
        return True
    return any(first <= key <= last and low <= span[1] and high >= span[0] for key, span in spans.items())
