"""``mq9lake`` as a Spark data source: the tables of a lake as frames, without Delta's jars.

A partition is a file; files whose statistics say that no row fits the filters are not read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import LongType, StringType, StructField, StructType

from mediator.errors import BadRequestError, SetupError, UnavailableError
from mediator.mailboxes.events import EventType
from mediator.mailboxes.lanes import LANES
from pipeline.lake import TABLES, ObjectPlace, Place, is_url
from pipeline.lake.storage import DataFiles, delta_arguments
from pipeline.source import hide_tracebacks
from pipeline.source.options import normalize_names, split_words
from pipeline.source.side import who_looked

if TYPE_CHECKING:
    from deltalake import DeltaTable

FORMAT = "mq9lake"
OPTIONS = ("lake", "table", "columns")
STORAGE = "storage."
"""What the options begin with that open an object store; what is not given comes from where Spark's processes run."""
_CODES = StructType(
    [
        StructField("code", LongType(), metadata={"comment": "The number in the table events"}),
        StructField("name", StringType(), metadata={"comment": "What the views call it"}),
    ]
)
DIMENSIONS: Mapping[str, Sequence[tuple[int, str]]] = {
    "event_types": [(kind.value, kind.name.lower().replace("_", " ")) for kind in EventType],
    "lanes": [(lane.value, lane.name.lower()) for lane in LANES],
}
"""Tables that say what the codes of ``events`` mean: of its columns ``what`` and ``lane``."""
COMMENTS = {
    "acknowledged": "ACKs; in usage_groups and usage_messages the messages that had one",
    "at": "When it happened",
    "bytes": "Size of the message, as it counts towards quotas",
    "came": "Messages that became visible",
    "created_at": "When the message became visible",
    "date": "The day in UTC, by which the table is partitioned",
    "expire_at": "Null if it does not expire",
    "group": "Number of the consumer group, 0 without one",
    "headers": "The sender's own headers; null if they are sealed",
    "hour": "The beginning of the hour",
    "instance": "The service that wrote the line of the journal",
    "key_id": "The key that seals the message; null if it is not sealed",
    "lane": "The lane; in events as a code of the table lanes",
    "mailbox": "Number of the mailbox; in archive its address",
    "mailbox_no": "Number of the mailbox",
    "msg_id": "Ascending within a mailbox, -1 for an event of a mailbox",
    "outbox_seq": "Number in the outbox",
    "payload": "The payload, sealed if there is a key_id",
    "position": "Place of the event in its line of the journal",
    "reason": "Why it could not be read",
    "seq": "Number of the line of the journal",
    "tenant": "The owner of the mailbox; null: all tenants",
    "unread": "Messages that no group was given yet",
    "what": "What happened, as a code of the table event_types",
}
"""What columns mean, as ``DESCRIBE`` shows it."""


@hide_tracebacks
class LakeDataSource(DataSource):
    """The entry points that Spark calls."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``spark.read.format``."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of the table, or those that ``columns`` names, with comments."""
        options = LakeOptions.of(self.options)
        known = options.schema
        return StructType([known[name] for name in options.columns or known.names])

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of the table's current version."""
        options = LakeOptions.of(self.options)
        known = {field.name: field.dataType for field in options.schema}
        for field in schema:
            if known.get(field.name) != field.dataType:
                raise BadRequestError("schema", f"expected columns of {options.table} with its types, got {field.name}")
        if options.table in DIMENSIONS:
            return _DimensionReader(DIMENSIONS[options.table], schema)
        return LakeReader(options, schema)


@dataclass(frozen=True)
class LakeOptions:
    """What to read."""

    lake: Place
    table: str
    columns: tuple[str, ...]

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "LakeOptions":
        """Read the options; :class:`BadRequestError` names a wrong one."""
        storage = {name[len(STORAGE) :]: value for name, value in given.items() if name.lower().startswith(STORAGE)}
        options = normalize_names({k: v for k, v in given.items() if not k.lower().startswith(STORAGE)}, OPTIONS)
        lake, table = options.get("lake", ""), options.get("table", "")
        if not lake or ("://" in lake and not is_url(lake)) or "\0" in lake:
            raise BadRequestError("lake", "expected the folder of a lake, or its URL in an object store")
        if storage and not is_url(lake):
            raise BadRequestError(f"{STORAGE}{min(storage)}", "expected only with a lake in an object store")
        tables = (*sorted(TABLES), *DIMENSIONS)
        if table not in tables:
            raise BadRequestError("table", f'expected one of {", ".join(tables)}, got "{table[:100]}"')
        place = ObjectPlace(lake, tuple(sorted(storage.items()))) if is_url(lake) else Path(lake).absolute()
        read = cls(place, table, split_words(options, "columns"))
        for name in read.columns:
            if name not in read.schema.names:
                raise BadRequestError("columns", f'no column "{name[:100]}", there are {", ".join(read.schema.names)}')
        return read

    @cached_property
    def schema(self) -> StructType:
        """The columns of the table, with comments."""
        import json

        if self.table in DIMENSIONS:
            return _CODES
        found = StructType.fromJson(json.loads(self.open().schema().to_json()))
        return StructType([_commented(field) for field in found])

    def open(self) -> "DeltaTable":
        """Open the table; :class:`BadRequestError` if there is no such lake, or it has no such table yet."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        from pipeline.lake.delta import check_lake

        try:
            check_lake(self.lake)
            return DeltaTable(**delta_arguments(self.lake / self.table))
        except TableNotFoundError:
            reason = f"the lake {self.lake} has no table {self.table} yet{who_looked()}"
            raise BadRequestError("table", reason) from None
        except SetupError as error:
            raise BadRequestError("lake", f"{error}{who_looked()}") from None
        except (OSError, DeltaError) as error:
            reason = f"cannot read {self.table}: {str(error).splitlines()[0][:500]}{who_looked()}"
            raise BadRequestError("lake", reason) from None


def _commented(field: StructField) -> StructField:
    comment = COMMENTS.get(field.name)
    return StructField(field.name, field.dataType, True, {"comment": comment} if comment else {})


@dataclass(frozen=True)
class FilePartition(InputPartition):
    """A file of the table."""

    name: str
    """Where it is below the table."""
    constants: tuple[tuple[str, Any], ...]
    """The columns by which the table is partitioned, which the file does not have."""


@hide_tracebacks
class LakeReader(DataSourceReader):
    """Reads the version of a table that is the newest when the query is planned."""

    def __init__(self, options: LakeOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._filters: list[Filter] = []

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Use comparisons of columns to skip files and groups of rows; Spark still applies them to each row."""
        self._filters = [each for each in filters if _comparison(each) is not None]
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Return the files that may have rows which fit the filters."""
        from pyarrow.dataset import get_partition_keys

        dataset = self._options.open().to_pyarrow_dataset()
        return [
            FilePartition(each.path, tuple(get_partition_keys(each.partition_expression).items()))
            for each in dataset.get_fragments(filter=self._condition(dataset.schema))
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the record batches of a file, in a task."""
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema

        assert isinstance(partition, FilePartition)
        wanted = to_arrow_schema(self._schema, timezone="UTC")
        constants = dict(partition.constants)
        own = pa.schema([field for field in wanted if field.name not in constants])
        table = self._options.lake / self._options.table
        try:
            file = DataFiles(table, [partition.name]).dataset()
            # A column that is newer than the file is null.
            newer = [field for field in own if field.name not in file.schema.names]
            file = file.replace_schema(pa.schema([*file.schema, *newer]))
            rows = file.to_batches(columns=own.names, filter=self._condition(file.schema))
            for batch in rows:
                columns = [
                    pa.repeat(pa.scalar(constants[field.name], field.type), batch.num_rows)
                    if field.name in constants
                    else batch.column(field.name).cast(field.type)
                    for field in wanted
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=wanted)
        except OSError as error:
            gone = "it is gone: compaction removed what it had replaced a week ago, so run the query again"
            reason = gone if isinstance(error, FileNotFoundError) else error.strerror
            raise UnavailableError(f"{table / partition.name}: {reason}{who_looked()}") from None

    def _condition(self, schema: Any) -> Any:
        """Return the filters on columns of an Arrow schema as one expression; None without any."""
        found = [_expression(each, schema) for each in self._filters]
        known = [each for each in found if each is not None]
        return reduce(and_, known) if known else None


_OPERATORS = {
    EqualTo: "__eq__",
    GreaterThan: "__gt__",
    GreaterThanOrEqual: "__ge__",
    LessThan: "__lt__",
    LessThanOrEqual: "__le__",
    In: "isin",
}


def _comparison(filter_: Filter) -> str | None:
    """Return the method of an Arrow expression for a comparison of a column; None for other filters."""
    name = _OPERATORS.get(type(filter_))
    return name if name is not None and len(getattr(filter_, "attribute", ())) == 1 else None


def _expression(filter_: Any, schema: Any) -> Any:
    """Return a comparison as an Arrow expression; None if the schema lacks the column, or the value is none of it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    method, [column] = _comparison(filter_), filter_.attribute
    assert method is not None
    if column not in schema.names:
        return None
    kind = schema.field(column).type
    try:
        value = pa.array(filter_.value, kind) if method == "isin" else pa.scalar(filter_.value, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None
    return getattr(pc.field(column), method)(value)


class _DimensionReader(DataSourceReader):
    """Reads a table of codes."""

    def __init__(self, rows: Sequence[tuple[int, str]], schema: StructType) -> None:
        self._rows = rows
        self._names = schema.names

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Leave all filters to Spark."""
        return filters

    def read(self, _partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Yield the rows."""
        for code, name in self._rows:
            row = {"code": code, "name": name}
            yield tuple(row[column] for column in self._names)


def register(spark: SparkSession) -> None:
    """Register the format ``mq9lake`` with ``spark``, where the package is not installed."""
    spark.dataSource.register(LakeDataSource)
