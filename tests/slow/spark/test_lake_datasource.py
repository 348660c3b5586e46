"""``mq9lake``: Spark reads the tables of a lake without Delta's jars, and no file that its statistics exclude."""

import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable, Field
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, StringStartsWith

from mediator.errors import BadRequestError, UnavailableError
from mediator.mailboxes.events import Event, EventType
from pipeline.lake import datasource
from pipeline.lake.datasource import FilePartition, LakeDataSource, LakeReader, register
from tests.harness.histories import HOUR, START
from tests.harness.lakes import Lake

DAY = 24 * HOUR


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Three files: two of a day, and one of the next."""
    lake = Lake(tmp_path / "lake")
    for first, at in ((0, START), (10, START + 60_000), (20, START + DAY)):
        numbers = range(first, first + 10)
        lake.add([Event(EventType.STORED, at + n, "default", 7, 2, n, 100 + n, at + n) for n in numbers])
    lake.update()
    return lake


def source(kept: Lake, **options: str) -> LakeDataSource:
    return LakeDataSource({"lake": str(kept.path), "table": "events"} | options)


def read(kept: Lake, *filters: Filter, **options: str) -> tuple[int, list[dict[str, Any]]]:
    """Read as one task after the other; return how many files were read, and the rows."""
    asked = source(kept, **options)
    reader = asked.reader(asked.schema())
    assert isinstance(reader, LakeReader)
    assert list(reader.pushFilters(list(filters))) == list(filters), "Spark applies them too"
    files = reader.partitions()
    return len(files), [row for file in files for batch in reader.read(file) for row in batch.to_pylist()]


def test_a_table_is_read_as_deltalake_reads_it(spark: SparkSession, lake: Lake) -> None:
    register(spark)
    frame = spark.read.format("mq9lake").option("lake", str(lake.path)).option("table", "events").load()
    assert frame.rdd.getNumPartitions() == 3
    expected = DeltaTable(lake.path / "events").to_pyarrow_table().to_pylist()
    found = [row.asDict() for row in frame.collect()]
    for row in found:
        row["at"], row["created_at"] = (row[name].astimezone(UTC) for name in ("at", "created_at"))
    assert sorted(found, key=lambda row: row["seq"]) == sorted(expected, key=lambda row: row["seq"])
    one = frame.where("date = DATE '2026-03-02' AND msg_id > 24").select(F.sum("bytes")).first()
    assert one is not None
    assert one[0] == sum(100 + n for n in range(25, 30))


def test_the_tables_of_codes_name_what_events_have(spark: SparkSession, lake: Lake) -> None:
    register(spark)
    for table in ("events", "event_types", "lanes"):
        spark.read.format("mq9lake").options(lake=str(lake.path), table=table).load().createOrReplaceTempView(table)
    named = spark.sql(
        "SELECT event_types.name AS what, lanes.name AS lane, count(*) AS events FROM events "
        "JOIN event_types ON events.what = event_types.code JOIN lanes ON events.lane = lanes.code GROUP BY ALL"
    )
    assert [tuple(row) for row in named.collect()] == [("stored", "normal", 30)]


def test_columns_have_comments(spark: SparkSession, lake: Lake) -> None:
    register(spark)
    spark.sql(f"CREATE OR REPLACE TEMP VIEW commented USING mq9lake OPTIONS (lake '{lake.path}', table 'events')")
    comments = {row.col_name: row.comment for row in spark.sql("DESCRIBE commented").collect()}
    assert comments["what"] == "What happened, as a code of the table event_types"
    every: set[str] = set()
    for table in ("events", "usage_hourly", "usage_messages", "usage_groups", "usage_waits"):
        every |= set(source(lake, table=table).schema().names)
    assert {"at", "came", "group", "hour", "unread"} <= every & set(datasource.COMMENTS)


@pytest.mark.parametrize(
    ("filters", "files", "ids"),
    [
        ([], 3, range(30)),
        ([EqualTo(("date",), date(2026, 3, 2))], 1, range(20, 30)),
        ([In(("date",), (date(2026, 3, 1), date(2026, 3, 9)))], 2, range(20)),
        ([GreaterThan(("msg_id",), 14)], 2, range(15, 30)),
        ([GreaterThanOrEqual(("msg_id",), 15), LessThan(("msg_id",), 20)], 1, range(15, 20)),
        ([LessThan(("at",), datetime.fromtimestamp(START / 1000 + 1, UTC))], 1, range(10)),
        ([EqualTo(("tenant",), "nobody")], 0, ()),
        # What cannot be compared is left to Spark.
        ([EqualTo(("what",), 1000)], 3, range(30)),
        ([StringStartsWith(("tenant",), "d"), EqualTo(("nothing", "inside"), 1)], 3, range(30)),
    ],
)
def test_filters_skip_files_by_their_statistics(
    lake: Lake, filters: list[Filter], files: int, ids: "range | tuple[()]"
) -> None:
    count, rows = read(lake, *filters)
    assert (count, sorted(row["msg_id"] for row in rows)) == (files, list(ids))


def test_columns_are_read_in_the_order_they_are_named(lake: Lake) -> None:
    _, rows = read(lake, EqualTo(("msg_id",), 21), columns="date, bytes")
    assert [list(row.items()) for row in rows] == [[("date", date(2026, 3, 2)), ("bytes", 121)]]


def test_usage_tables_are_those_that_duckdb_reads(lake: Lake) -> None:
    rows = DeltaTable(lake.path / "usage_hourly").to_pyarrow_dataset()
    assert rows is not None
    [expected] = duckdb.sql("SELECT sum(sent), sum(bytes_in) FROM rows").fetchall()
    _, found = read(lake, table="usage_hourly")
    assert (sum(row["sent"] for row in found), sum(row["bytes_in"] for row in found)) == expected


def test_a_file_that_compaction_removed_is_named(lake: Lake) -> None:
    asked = source(lake)
    reader = asked.reader(asked.schema())
    gone = FilePartition("gone.parquet", ())
    with pytest.raises(UnavailableError, match=r"gone\.parquet: it is gone: compaction"):
        list(reader.read(gone))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"table": "mail"}, 'table: expected one of archive, bad_cards, events, .*, event_types, lanes, got "mail"'),
        ({"table": "../secret"}, "table: expected one of"),
        ({"table": "archive"}, "table: the lake .* has no table archive yet"),
        ({"lake": "hdfs://host/lake"}, "lake: expected the folder of a lake"),
        ({"storage.aws_region": "x"}, r"storage\.aws_region: expected only with a lake in an object store"),
        ({"lake": "/nowhere"}, "lake: /nowhere: not a lake"),
        ({"columns": "payload"}, 'columns: no column "payload", there are instance, '),
        ({"colums": "at"}, "colums: unknown option"),
    ],
)
def test_wrong_options_are_named(lake: Lake, options: dict[str, str], problem: str) -> None:
    with pytest.raises(BadRequestError, match=f"^{problem}"):
        source(lake, **options).schema()


def test_spark_says_which_option_is_wrong_and_who_looked(spark: SparkSession, tmp_path: Path) -> None:
    register(spark)
    with pytest.raises(PySparkException) as error:
        spark.read.format("mq9lake").options(lake=str(tmp_path / "no"), table="events").load()
    first = str(error.value).splitlines()[0]
    assert re.search(r"BadRequestError: lake: .*not a lake; .*; Spark's driver looked, on ", first), first


def test_columns_of_another_type_are_refused(spark: SparkSession, lake: Lake) -> None:
    register(spark)
    reader = spark.read.format("mq9lake").options(lake=str(lake.path), table="events")
    with pytest.raises(PySparkException, match="schema: expected columns of events"):
        reader.schema("msg_id string").load().collect()
    some = reader.schema("msg_id bigint").load()
    assert some.count() == 30


def test_columns_that_are_newer_than_a_file_are_null(lake: Lake) -> None:
    DeltaTable(lake.path / "events").alter.add_columns([Field("newer", "string")])
    _, rows = read(lake, EqualTo(("msg_id",), 21), columns="newer, msg_id")
    assert {"newer": None, "msg_id": 21} in rows
