"""Where a lake is, a folder of this machine or a place in an object store, and the Parquet files there.

Everything is read and written through Arrow's file systems, by the driver and by Spark's tasks alike: neither Spark nor
Java need to know the store. A task gets a place with the options that open it inside its serialized function, never in
an option of Spark, a plan or a log.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from pipeline.lake import Place

ROW_GROUP_BYTES = 32 << 20
"""Bytes of rows that a task collects before it writes them; a row group of a file has no more."""
OPEN_FILES = 16
"""Files that a task writes to at a time, one for each partition."""
READ_ROWS = 8192
_MAX_TEXT = 64
"""Longest text in statistics, in characters."""
_WRITTEN = {"path": pa.string(), "partition": pa.string(), "size": pa.int64(), "rows": pa.int64(), "stats": pa.string()}


def delta_arguments(place: Place) -> dict[str, Any]:
    """Return the arguments by which deltalake opens a table."""
    if isinstance(place, Path):
        return {"table_uri": place}
    return {"table_uri": place.url, "storage_options": dict(place.options)}


def open_filesystem(place: Place) -> pafs.FileSystem:
    """Return the file system below a place."""
    if isinstance(place, Path):
        return pafs.SubTreeFileSystem(str(place), pafs.LocalFileSystem())
    return pafs.PyFileSystem(DeltaStorageHandler(place.url, dict(place.options)))


def read_file(place: Place, name: str) -> bytes:
    """Return a small file; :class:`FileNotFoundError` if it is missing."""
    if isinstance(place, Path):
        return (place / name).read_bytes()
    with open_filesystem(place).open_input_stream(name) as file:
        return bytes(file.read())


def write_file(place: Place, name: str, data: bytes) -> None:
    """Write a small file, or replace it: readers see all of it or nothing."""
    if isinstance(place, Path):
        new = place / f"{name}.{os.getpid()}"
        new.write_bytes(data)
        sync(new)
        new.replace(place / name)
        return
    # Without a buffer, deltalake is handed what it cannot write.
    with open_filesystem(place).open_output_stream(name, buffer_size=len(data) + 1) as file:
        file.write(data)


def is_table(place: Place) -> bool:
    """Whether a place has a Delta table."""
    [log] = open_filesystem(place).get_file_info(["_delta_log"])
    return bool(log.type == pafs.FileType.Directory)


def sync(path: Path) -> None:
    """Sync a file and its directory entry to disk."""
    for each in (path, path.parent):
        file = os.open(each, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Parquet files below a place, by their names there."""

    place: Place
    names: Sequence[str]

    def dataset(self, schema: pa.Schema | None = None) -> ds.Dataset:
        """Return the rows, with the columns of ``schema``; a column that a file lacks is null."""
        if isinstance(self.place, Path):
            # So that errors name the whole path.
            return ds.dataset([str(self.place / name) for name in self.names], schema, format="parquet")
        return ds.dataset(list(self.names), schema, format="parquet", filesystem=open_filesystem(self.place))


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A Parquet file that was written below a place; nothing refers to it yet."""

    path: str
    partition: str | None
    """The value of the partition column, which is not in the file."""
    size: int
    rows: int
    stats: str
    """Delta's statistics, as JSON."""

    def add_action(self, partition: Sequence[str]) -> AddAction:
        """Return the action that adds it to a table with these partition columns."""
        values = dict.fromkeys(partition, self.partition)
        return AddAction(self.path, self.size, values, time.time_ns() // 1_000_000, True, self.stats)


Writer = Callable[[Place, str, str | None], list[WrittenFile]]
"""Writes rows as Parquet files below a folder of a place; the third argument is the partition column."""


def write_rows(
    rows: DataFrame, schema: StructType, place: Place, folder: str, partition: str | None = None
) -> list[WrittenFile]:
    """Have Spark's tasks write rows, and return the files of those that completed."""
    task = partial(_write_task, to_arrow_schema(schema, timezone="UTC"), place, folder, partition)
    written = rows.select(*schema.names).mapInArrow(task, from_arrow_schema(pa.schema(_WRITTEN)))
    return [WrittenFile(*row) for row in written.collect()]


def _write_task(
    schema: pa.Schema, place: Place, folder: str, partition: str | None, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    written = write_batches(batches, schema, place, folder, partition)
    yield pa.RecordBatch.from_pylist([asdict(file) for file in written], pa.schema(_WRITTEN))


def write_batches(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, place: Place, folder: str, partition: str | None
) -> list[WrittenFile]:
    """Write rows as files of ``schema``, at least one for each value of the partition column that there is."""
    files = _PartWriter(schema, place, folder, partition)
    collected: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        collected.append(batch)
        size += batch.nbytes
        if size >= ROW_GROUP_BYTES:
            files.write(pa.Table.from_batches(collected))
            collected, size = [], 0
    if collected:
        files.write(pa.Table.from_batches(collected))
    return files.close()


class _PartWriter:
    """The files that one task writes; their names are unique, since a task may be repeated."""

    def __init__(self, schema: pa.Schema, place: Place, folder: str, partition: str | None) -> None:
        self._schema = schema
        self._columns = pa.schema([each for each in schema if each.name != partition])
        self._place = place
        self._filesystem = open_filesystem(place)
        self._folder = folder
        self._partition = partition
        self._open: dict[str | None, tuple[str, pq.ParquetWriter, list[pq.FileMetaData]]] = {}
        self._written: list[WrittenFile] = []

    def write(self, rows: pa.Table) -> None:
        """Write rows, one row group for each partition."""
        rows = rows.cast(self._schema)
        if self._partition is None:
            self._write(None, rows)
            return
        values = rows[self._partition]
        for value in values.unique():
            self._write(str(value.as_py()), rows.filter(pc.equal(values, value)).drop_columns(self._partition))

    def _write(self, value: str | None, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        if value not in self._open:
            if len(self._open) == OPEN_FILES:
                self.close()
            self._open[value] = self._create(value)
        self._open[value][1].write_table(rows, row_group_size=rows.num_rows)

    def _create(self, value: str | None) -> tuple[str, pq.ParquetWriter, list[pq.FileMetaData]]:
        folder = self._folder if value is None else f"{self._folder}/{self._partition}={value}"
        self._filesystem.create_dir(folder, recursive=True)
        path = f"{folder}/part-{uuid4().hex}.parquet"
        metadata: list[pq.FileMetaData] = []
        writer = pq.ParquetWriter(
            path, self._columns, filesystem=self._filesystem, compression="zstd", metadata_collector=metadata
        )
        return path, writer, metadata

    def close(self) -> list[WrittenFile]:
        """Complete the open files, and return all that were written so far."""
        for value, (path, writer, metadata) in self._open.items():
            writer.close()
            if isinstance(self._place, Path):
                sync(self._place / path)
            [info] = self._filesystem.get_file_info([path])
            stats = _statistics(metadata[0])
            self._written.append(WrittenFile(path, value, info.size, metadata[0].num_rows, json.dumps(stats)))
        self._open.clear()
        return self._written


def read_files(
    spark: SparkSession, schema: StructType, files: DataFiles, where: ds.Expression | None = None
) -> DataFrame:
    """Return the rows of Parquet files, with the columns of ``schema``; ``where`` has tasks skip those that fail it."""
    if not files.names:
        return spark.createDataFrame([], schema)
    tasks = min(len(files.names), int(spark.conf.get("spark.sql.shuffle.partitions") or 1))
    task = partial(_read_task, files, to_arrow_schema(schema, timezone="UTC"), where)
    # Spark cannot know how large the rows are: without the hint a join would send all of them to each executor.
    return spark.range(0, len(files.names), 1, tasks).mapInArrow(task, schema).hint("merge")


def _read_task(
    files: DataFiles, schema: pa.Schema, where: ds.Expression | None, numbers: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            rows = DataFiles(files.place, [files.names[number]]).dataset(schema)
            yield from rows.to_batches(
                filter=where, batch_size=READ_ROWS, batch_readahead=1, fragment_readahead=1, use_threads=False
            )


def _statistics(file: pq.FileMetaData) -> dict[str, Any]:
    """Return a file's Delta statistics: the bounds of each column that has them, times in ISO 8601."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    for column in range(file.num_columns):
        name = file.schema.column(column).path
        if "." in name:
            # A part of a list or a map.
            continue
        groups = [file.row_group(index).column(column) for index in range(file.num_row_groups)]
        known = [group.statistics for group in groups]
        bounds = [(each.min, each.max) for each in known if each is not None and each.has_min_max]
        # A row group of nulls has no bounds; any other group without bounds makes the column's unknown.
        unknown = any(each is None or (not each.has_min_max and each.num_values > 0) for each in known)
        if not bounds or unknown or any(_long(value) for value in (*bounds[0], *bounds[-1])):
            continue
        low[name] = _plain(min(first for first, _ in bounds))
        high[name] = _plain(max(last for _, last in bounds))
    return {"numRecords": file.num_rows, "minValues": low, "maxValues": high, "nullCount": {}}


def _long(value: object) -> bool:
    return isinstance(value, bytes) or (isinstance(value, str) and len(value) > _MAX_TEXT)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return value.isoformat() if isinstance(value, date) else value
