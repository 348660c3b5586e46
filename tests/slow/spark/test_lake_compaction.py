"""Upkeep of the lake: fewer files with the same rows, no days that are over, nothing that a reader still needs gone."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from mediator.errors import SetupError, UnavailableError
from pipeline.lake.compaction import compact
from pipeline.lake.delta import lock_lake as held_lake
from pipeline.lake.ingest import ingest
from tests.slow.spark.journals import DAY, START, event, held, line, write

NOW = datetime.fromtimestamp(START / 1000, UTC)


def test_small_files_become_one_and_old_days_go(spark: SparkSession, tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake [1]"
    for seq in range(1, 4):
        write(journal, seq, [line(seq, [event(seq, START - back * DAY) for back in (0, 1, 30)])])
        ingest(spark, journal, lake)
    before = held(lake)
    done = compact(lake)
    assert (done.merged, done.made, done.days, done.removed) == (9, 3, 0, 0)
    assert sorted(held(lake)) == sorted(before)
    assert len(DeltaTable(lake / "events").file_uris()) == 3
    old = DeltaTable(lake / "events", version=3).to_pyarrow_table()
    assert old.num_rows == len(before)

    write(journal, 4, [line(4, [event(4)]), line(2, [event(2, START - back * DAY) for back in (0, 1, 30)])])
    summary = ingest(spark, journal, lake)
    assert (summary.events, summary.repeated) == (1, 3)

    assert compact(lake, keep_days=1, now=NOW).days == 1
    assert {each[4] // DAY for each in held(lake)} == {START // DAY, START // DAY - 1}
    assert len(held(lake)) == 7

    a_week_later(lake / "events")
    before = held(lake)
    assert compact(lake).removed > 9
    assert sorted(held(lake)) == sorted(before)
    left = {path.name for path in (lake / "events").rglob("*.parquet")}
    assert left == {Path(uri).name for uri in DeltaTable(lake / "events").file_uris()}
    assert all(any(path.iterdir()) for path in (lake / "events").iterdir() if path.is_dir())


def a_week_later(table: Path) -> None:
    """Let what the log says was removed have been removed eight days before."""
    for path in (table / "_delta_log").glob("*.json"):
        removed = re.compile(r'("deletionTimestamp":)(\d+)')
        path.write_text(removed.sub(lambda found: f"{found[1]}{int(found[2]) - 8 * DAY}", path.read_text()))


def test_compact_leaves_tables_of_others_alone(tmp_path: Path) -> None:
    lake, theirs = tmp_path / "lake", tmp_path / "lake" / "theirs"
    with held_lake(lake, create=True):
        pass
    for number in range(3):
        write_deltalake(theirs, pa.table({"number": [number]}), mode="append")
    (theirs / "notes").mkdir()
    (theirs / "left.parquet").touch()
    before = sorted(lake.rglob("*"))
    assert compact(lake).merged == 0
    assert sorted(lake.rglob("*")) == before


def test_only_a_lake_that_nobody_works_on(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="not a lake"):
        compact(tmp_path / "lake")
    with held_lake(tmp_path / "lake", create=True), pytest.raises(UnavailableError, match="in use by process"):
        compact(tmp_path / "lake")
    assert compact(tmp_path / "lake").merged == 0
