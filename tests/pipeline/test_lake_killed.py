"""An ingest that SIGKILL ends between two tables: the next one goes on, and each event is in the lake once.

The other places where it hurts are those of tests/acceptance/test_pipeline.py.
"""

import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from mediator.journal import events as told
from mediator.segments import read_up_to
from pipeline.lake.ingest import ingest
from tests.pipeline.journals import fill, held, row, write
from tests.pipeline.killing import killed
from tests.spark import small

PROGRAM = """
import sys
from pathlib import Path
from pipeline.lake.ingest import ingest
from pipeline.session import session

conf = dict(each.split("=", 1) for each in sys.argv[3:])
ingest(session(master="local[1]", conf=conf.items()), Path(sys.argv[1]), Path(sys.argv[2]))
"""
SHOWS = "quarantine/_delta_log/*1.json"
"""What appears when bad lines are kept and nothing else is."""


@pytest.mark.timeout(300)
def test_bad_lines_and_events_are_there_once_after_a_kill_between_them(spark: SparkSession, tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    first = fill(journal, 2)
    bad = write(journal, 900, [b"{torn\n"])
    settings = (f"{name}={value}" for name, value in small().items())
    assert killed([sys.executable, "-c", PROGRAM, journal, lake, *settings], lambda: any(lake.glob(SHOWS)))
    assert not DeltaTable(lake / "events").file_uris()
    more = fill(journal, 1, first=1000)
    summary = ingest(spark, journal, lake)
    assert summary.events == first + more
    assert read_up_to(journal) > bad.name
    bad.unlink()
    assert sorted(held(lake)) == sorted(row(each) for each in told(journal))
    assert DeltaTable(lake / "quarantine").to_pyarrow_table().num_rows == 1
    for name in ("events", "quarantine"):
        table = DeltaTable(lake / name)
        assert {str(path) for path in (lake / name).rglob("*.parquet")} == set(table.file_uris())
