"""The ingest: what is new in the journal comes into the lake, each event once, and no more than that is read."""

from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable
from pyarrow.dataset import field
from pyspark.sql import SparkSession

from mediator.errors import SetupError, UnavailableError
from mediator.journal import events as told
from mediator.journal.segments import read_up_to
from pipeline.lake.delta import lock_lake as held_lake
from pipeline.lake.ingest import ingest
from tests.slow.spark.journals import DAY, START, event, expected, fill, held, line, row, write


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    folder = tmp_path / "journal"
    folder.mkdir()
    return folder


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def test_all_that_is_new_comes_once(spark: SparkSession, journal: Path, lake: Path) -> None:
    count = fill(journal, 3)
    first = ingest(spark, journal, lake)
    assert (first.segments, first.events, first.repeated, first.quarantined) == (3, count, 0, 0)
    assert sorted(held(lake)) == sorted(row(each) for each in told(journal))
    assert read_up_to(journal) == max(path.name for path in journal.glob("*.jsonl"))

    again = ingest(spark, journal, lake)
    assert (again.segments, again.events) == (0, 0)
    more = fill(journal, 1, first=1000)
    assert ingest(spark, journal, lake).events == more
    assert len(held(lake)) == count + more


def test_what_comes_again_is_left_out_wherever_it_stands(spark: SparkSession, journal: Path, lake: Path) -> None:
    lines = [line(seq, [event(seq * 10 + at) for at in range(3)]) for seq in range(1, 6)]
    other = line(2, [event(999)], instance="host-2")
    write(journal, 1, [*lines[:3], lines[1], other])
    write(journal, 4, [lines[3], lines[0]])
    assert ingest(spark, journal, lake).repeated == 6
    write(journal, 6, [lines[4], lines[2], other])
    summary = ingest(spark, journal, lake)
    assert (summary.events, summary.repeated, summary.compared > 0) == (3, 4, True)
    rows = held(lake)
    assert len(rows) == len(set(rows)) == 16
    assert set(rows) == expected([*lines, other])


def test_a_run_costs_what_is_new(spark: SparkSession, journal: Path, lake: Path, tmp_path: Path) -> None:
    for number in range(3):
        fill(journal, 1, first=1 + number * 1000)
        ingest(spark, journal, lake)
    # Whoever opened what was read before would find nothing.
    away = tmp_path / "away"
    for path in [*journal.glob("*.jsonl"), *(lake / "events").rglob("*.parquet")]:
        kept = away / path.relative_to(tmp_path)
        kept.parent.mkdir(parents=True, exist_ok=True)
        path.rename(kept)
    added = fill(journal, 1, first=5000)
    summary = ingest(spark, journal, lake)
    assert (summary.segments, summary.events, summary.compared) == (1, added, 0)


def test_days_have_folders_whatever_the_clock_says(spark: SparkSession, journal: Path, lake: Path) -> None:
    days = [0, START, START + DAY - 1, START + DAY, 253_402_300_799_999]
    write(journal, 1, [line(1, [event(0, at, created_at=0) for at in days])])
    ingest(spark, journal, lake)
    assert [each[4] for each in sorted(held(lake))] == days
    with duckdb.connect() as reader:
        files = DeltaTable(lake / "events").file_uris()
        rows = f"read_parquet({files}, hive_partitioning=true)"
        found = reader.sql(f"select date::varchar, count(*), min(seq) from {rows} group by 1 order by 1").fetchall()
    assert found == [("1970-01-01", 1, 1), ("2026-01-01", 2, 1), ("2026-01-02", 1, 1), ("9999-12-31", 1, 1)]


def test_statistics_let_readers_skip_files(spark: SparkSession, journal: Path, lake: Path) -> None:
    for number in range(2):
        fill(journal, 1, first=1 + number * 1000)
        ingest(spark, journal, lake)
    rows = DeltaTable(lake / "events").to_pyarrow_table(filters=[("seq", ">=", 1000)])
    assert min(rows["seq"].to_pylist()) >= 1000
    dataset = DeltaTable(lake / "events").to_pyarrow_dataset()
    assert len(list(dataset.get_fragments(filter=field("seq") >= 1000))) == 1


def test_gaps_are_taken_in_once(spark: SparkSession, journal: Path, lake: Path) -> None:
    gap = (
        b'{"at":1767225600000,"why":"space","segment":"s.jsonl","seqs":{"host-1":[3,9]},"from":1767225500000,'
        b'"to":1767225600000,"events":12,"bytes":900}\n'
    )
    (journal / "gaps.jsonl").write_bytes(gap + b"{torn\n")
    assert ingest(spark, journal, lake).gaps == 2
    (journal / "gaps.jsonl").write_bytes(gap + b"{torn\n" + gap.replace(b"[3,9]", b"[10,11]"))
    assert ingest(spark, journal, lake).gaps == 1
    rows = DeltaTable(lake / "gaps").to_pyarrow_table().to_pylist()
    assert sorted(each["why"] for each in rows) == ["space", "space", "unreadable"]
    assert sorted(each["seqs"] or [] for each in rows) == [[], [("host-1", [3, 9])], [("host-1", [10, 11])]]


def test_one_at_a_time(spark: SparkSession, journal: Path, lake: Path) -> None:
    with held_lake(lake, create=True), pytest.raises(UnavailableError, match=r"in use by process \d+ on "):
        ingest(spark, journal, lake)
    assert ingest(spark, journal, lake).segments == 0


@pytest.mark.parametrize("mode", [0o700, 0o750])
def test_only_its_owner_reads_a_lake_that_is_made_here(lake: Path, mode: int) -> None:
    if mode != 0o700:
        lake.mkdir(mode)
    with held_lake(lake, create=True):
        assert lake.stat().st_mode & 0o777 == mode


def test_what_is_no_lake_is_left_alone(spark: SparkSession, journal: Path, lake: Path, tmp_path: Path) -> None:
    lake.mkdir()
    (lake / "thesis.txt").write_text("mine")
    with pytest.raises(SetupError, match="not a lake"):
        ingest(spark, journal, lake)
    assert [path.name for path in lake.iterdir()] == ["thesis.txt"]
    with pytest.raises(SetupError, match="expected a folder"):
        ingest(spark, journal, lake / "thesis.txt")
    with pytest.raises(SetupError, match="no such journal"):
        ingest(spark, tmp_path / "nothing", lake)


def test_a_lake_of_a_newer_program_is_left_alone(spark: SparkSession, journal: Path, lake: Path) -> None:
    fill(journal, 1)
    ingest(spark, journal, lake)
    log = lake / "events" / "_delta_log" / f"{0:020d}.json"
    made = log.read_text()
    log.write_text(made.replace('"minReaderVersion":1', '"minReaderVersion":99'))
    with pytest.raises(SetupError, match="newer version"):
        ingest(spark, journal, lake)
    log.write_text(made.replace('\\"position\\"', '\\"place\\"'))
    with pytest.raises(SetupError, match="other columns"):
        ingest(spark, journal, lake)
    log.write_text("torn")
    with pytest.raises(UnavailableError, match="events"):
        ingest(spark, journal, lake)
    (lake / "lake.json").write_text('{"version":2}')
    with pytest.raises(SetupError, match="version 2"):
        ingest(spark, journal, lake)


def test_a_file_that_is_dropped_meanwhile_is_done_without(spark: SparkSession, journal: Path, lake: Path) -> None:
    fill(journal, 2)
    oldest = min(journal.glob("*.jsonl"))

    def drop(step: str, done: int, of: int | None) -> None:
        if step == "files" and oldest.exists():
            oldest.unlink()

    assert ingest(spark, journal, lake, drop).events == 100
