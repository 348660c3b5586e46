"""Tables of the lake, without Spark: an older one is widened, and of two writers at once the second is refused."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="needs the extra pipeline")

from pyspark.sql.types import LongType, StringType, StructField, StructType

from mediator.errors import SetupError, UnavailableError
from pipeline.lake.delta import LakeTable
from pipeline.reports.engines import duck_engine

NUMBER, DAY = StructField("number", LongType()), StructField("day", StringType())
TEXT = StructField("text", StringType())
OLD = StructType([NUMBER, DAY])
NEW = StructType([NUMBER, TEXT, DAY])


def add(table: LakeTable, schema: StructType, number: int, columns: str) -> int:
    with duck_engine() as engine:
        rows = engine.writer(f"SELECT {number} AS number, {columns}, '2026-03-01' AS day", schema)
        return table.append_written(rows, f"{number:020d}-test", {"test": number})


def rows(table: LakeTable) -> list[tuple[int, str | None]]:
    with duck_engine() as engine:
        engine.read("rows", StructType([NUMBER, TEXT]), table.all_files())
        return [(row["number"], row["text"]) for row in engine.rows("SELECT number, text FROM rows ORDER BY number")]


def test_an_older_table_is_widened(tmp_path: Path) -> None:
    table = LakeTable(tmp_path / "table", OLD, "day")
    with duck_engine() as engine:
        table.append_written(
            engine.writer("SELECT 1 AS number, '2026-03-01' AS day", OLD), f"{1:020d}-test", {"test": 1}
        )
    table = LakeTable(tmp_path / "table", NEW, "day")
    assert rows(table) == [(1, None)]
    assert table.read_up_to("test") == 1
    assert add(table, NEW, 2, "'two' AS text") == 1
    assert rows(LakeTable(tmp_path / "table", NEW, "day")) == [(1, None), (2, "two")]
    # What a newer version added, this one would lose.
    with pytest.raises(SetupError, match="other columns"):
        LakeTable(tmp_path / "table", OLD, "day")
    other = StructType([StructField("number", StringType()), TEXT, DAY])
    with pytest.raises(SetupError, match="other columns"):
        LakeTable(tmp_path / "table", other, "day")


def test_the_second_of_two_writers_is_refused(tmp_path: Path) -> None:
    first, second = (LakeTable(tmp_path / "table", NEW, "day") for _ in range(2))
    assert add(first, NEW, 1, "'mine' AS text") == 1
    # Another source, and other rows: it might have looked for what is there already.
    with pytest.raises(UnavailableError, match="another process has written to it meanwhile"):
        add(second, NEW, 2, "'theirs' AS text")
    again = LakeTable(tmp_path / "table", NEW, "day")
    assert rows(again) == [(1, "mine")]
    assert add(again, NEW, 2, "'theirs' AS text") == 1
