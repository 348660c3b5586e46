"""The engines that run the SQL files of the reports unchanged: DuckDB in this process, and Spark.

The files use what both know. DuckDB gets two of Spark's functions as macros; names that are reserved words in SQL are
renamed where a table is read, and named as they were where it is written (:data:`RENAMED`).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import duckdb
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType, TimestampType

from pipeline.lake import Place
from pipeline.lake.storage import DataFiles, Writer, WrittenFile, read_files, write_batches, write_rows

RENAMED = {"at": "happened_at", "group": "group_no"}
"""Columns of the lake that are reserved words, and what the SQL files call them."""
MEMORY = "2GB"
"""Of DuckDB; what needs more is written to a scratch folder."""
WRITE_ROWS = 16_384
"""Rows that DuckDB hands over at a time to be written."""
_ZONE = "spark.sql.session.timeZone"
_MACROS = """
CREATE MACRO unix_millis(moment) AS epoch_ms(moment);
CREATE MACRO timestamp_millis(number) AS make_timestamptz(number * 1000);
"""

Row = dict[str, Any]


class Engine(Protocol):
    """Runs SQL over named relations; days and hours are in UTC."""

    def read(self, name: str, schema: StructType, files: DataFiles) -> None:
        """Name the rows of Parquet files, with their columns :data:`RENAMED`."""

    def values(self, name: str, schema: StructType, rows: Sequence[Sequence[Any]]) -> None:
        """Name a few rows of values."""

    def define(self, name: str, query: str, *, kept: bool = False) -> None:
        """Name a query; ``kept`` computes it once, for all that use it."""

    def rows(self, query: str) -> list[Row]:
        """Return all rows of a query, which returns no timestamps."""

    def writer(self, query: str, schema: StructType) -> Writer:
        """Return a function that writes a query's rows as Parquet files with the columns of the schema."""


class DuckEngine:
    """DuckDB in this process, which reads only what it is told to; it writes what does not fit to a scratch folder."""

    def __init__(self, scratch: Path) -> None:
        self._db = duckdb.connect(
            config={
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "memory_limit": MEMORY,
                "temp_directory": str(scratch),
                "threads": len(os.sched_getaffinity(0)),
            }
        )
        self._db.execute("SET TimeZone = 'UTC'; SET preserve_insertion_order = false; SET enable_progress_bar = false")
        self._db.execute(_MACROS)

    def close(self) -> None:
        """Free its memory."""
        self._db.close()

    def read(self, name: str, schema: StructType, files: DataFiles) -> None:
        """See :class:`Engine`."""
        if not files.names:
            self.values(name, StructType([_renamed(field) for field in schema]), [])
            return
        columns = ", ".join(f'"{field.name}" AS {RENAMED.get(field.name, field.name)}' for field in schema)
        rows = self._db.from_arrow(files.dataset(to_arrow_schema(schema, timezone="UTC")))
        rows.project(columns).create_view(name, replace=True)

    def values(self, name: str, schema: StructType, rows: Sequence[Sequence[Any]]) -> None:
        """See :class:`Engine`."""
        columns = ", ".join(f"{field.name} {_type_of(field.dataType)}" for field in schema)
        self._db.execute(f"CREATE OR REPLACE TEMP TABLE {name} ({columns})")
        if rows:
            columns_of = [pa.array(list(column)) for column in zip(*rows, strict=True)]
            self._db.from_arrow(pa.table(columns_of, names=schema.names)).insert_into(name)

    def define(self, name: str, query: str, *, kept: bool = False) -> None:
        """See :class:`Engine`."""
        self._db.execute(f"CREATE OR REPLACE TEMP {'TABLE' if kept else 'VIEW'} {name} AS {query}")

    def rows(self, query: str) -> list[Row]:
        """See :class:`Engine`."""
        found = self._db.execute(query)
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def writer(self, query: str, schema: StructType) -> Writer:
        """See :class:`Engine`."""
        columns = ", ".join(
            f'CAST({RENAMED.get(field.name, field.name)} AS {_type_of(field.dataType)}) AS "{field.name}"'
            for field in schema
        )

        def write(place: Place, folder: str, partition: str | None) -> list[WrittenFile]:
            rows = self._db.sql(f"SELECT {columns} FROM ({query})").to_arrow_reader(WRITE_ROWS)
            return write_batches(rows, to_arrow_schema(schema, timezone="UTC"), place, folder, partition)

        return write


def _type_of(kind: Any) -> str:
    return "TIMESTAMPTZ" if isinstance(kind, TimestampType) else str(kind.simpleString())


def _renamed(field: Any) -> Any:
    return type(field)(RENAMED.get(field.name, field.name), field.dataType)


class SparkEngine:
    """A Spark session, whose time zone is UTC."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._kept: list[Any] = []

    def close(self) -> None:
        """Free what was kept in memory."""
        for frame in self._kept:
            frame.unpersist()

    def read(self, name: str, schema: StructType, files: DataFiles) -> None:
        """See :class:`Engine`."""
        read_files(self._spark, schema, files).withColumnsRenamed(RENAMED).createOrReplaceTempView(name)

    def values(self, name: str, schema: StructType, rows: Sequence[Sequence[Any]]) -> None:
        """See :class:`Engine`."""
        self._spark.createDataFrame([tuple(row) for row in rows], schema).createOrReplaceTempView(name)

    def define(self, name: str, query: str, *, kept: bool = False) -> None:
        """See :class:`Engine`."""
        frame = self._spark.sql(query)
        if kept:
            self._kept.append(frame.cache())
        frame.createOrReplaceTempView(name)

    def rows(self, query: str) -> list[Row]:
        """See :class:`Engine`."""
        return [row.asDict() for row in self._spark.sql(query).collect()]

    def writer(self, query: str, schema: StructType) -> Writer:
        """See :class:`Engine`."""
        columns = [F.col(RENAMED.get(each.name, each.name)).cast(each.dataType).alias(each.name) for each in schema]
        frame = self._spark.sql(query).select(*columns)

        def write(place: Place, folder: str, partition: str | None) -> list[WrittenFile]:
            parted = frame if partition is None else frame.repartition(partition)
            return write_rows(parted, schema, place, folder, partition)

        return write


@contextmanager
def duck_engine() -> Iterator[DuckEngine]:
    """Yield DuckDB, on the cores of this process."""
    with TemporaryDirectory(prefix="mediator-") as scratch:
        engine = DuckEngine(Path(scratch))
        try:
            yield engine
        finally:
            engine.close()


@contextmanager
def spark_engine(spark: SparkSession) -> Iterator[SparkEngine]:
    """Yield a session as an engine; its time zone is set back at the end."""
    zone = spark.conf.get(_ZONE) or "UTC"
    spark.conf.set(_ZONE, "UTC")
    engine = SparkEngine(spark)
    try:
        yield engine
    finally:
        engine.close()
        spark.conf.set(_ZONE, zone)
