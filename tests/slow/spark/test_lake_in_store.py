"""A lake in an object store: the same rows as on a disk, nothing lost or twice by kills and by two at once."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from mediator.errors import SetupError, UnavailableError
from mediator.journal import FOLDER
from mediator.journal.segments import read_up_to
from mediator.store.sqlite import SqliteStore
from pipeline.lake import EVENTS, JOURNAL, QUARANTINE, ObjectPlace, Place
from pipeline.lake.archive import ArchiveResult, archive, forget, read_archive
from pipeline.lake.compaction import compact
from pipeline.lake.datasource import register
from pipeline.lake.ingest import UploadResult, ingest, list_segments, upload
from pipeline.lake.replay import ReplayProgress, ReplaySelection, ReplayTarget, replay
from pipeline.lake.sealing import Key
from pipeline.lake.storage import delta_arguments, open_filesystem
from pipeline.reports.engines import duck_engine, spark_engine
from pipeline.reports.usage import TABLES, define_tables, update
from pipeline.source.options import ReadOptions
from tests.harness.object_stores import SECRET, ObjectStore, object_store
from tests.harness.stores import migrated
from tests.integration.test_cli_json import check_shape, shapes
from tests.slow.spark.conftest import Call
from tests.slow.spark.journals import event, fill, line, write
from tests.slow.spark.killing import Victim
from tests.slow.spark.mail import Mail
from tests.slow.spark.test_archive import fill as fill_outbox
from tests.slow.spark.test_archive import remove, shown, waiting

KEY = Key(bytes(32))
BOX = "task.full"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("store") / "log") as store:
        yield store


@pytest.fixture
def lake(store: ObjectStore) -> ObjectPlace:
    return store.new_place()


def count(lake: Place, table: str = EVENTS) -> tuple[int, int]:
    """Return how many rows DuckDB finds in a table, and how many different ones."""
    rows = DeltaTable(**delta_arguments(lake / table)).to_pyarrow_dataset()
    with duckdb.connect() as db:
        db.register("rows", rows)
        [found] = db.execute("SELECT count(*), count(DISTINCT (instance, seq, position)) FROM rows").fetchall()
    return found


def files(lake: Place, table: str) -> set[str]:
    """Return the Parquet files that a table's folder has, by name."""
    from pyarrow.fs import FileSelector

    found = open_filesystem(lake / table).get_file_info(FileSelector("", recursive=True))
    return {info.path for info in found if info.path.endswith(".parquet") and "_delta_log" not in info.path}


def usage(lake: Place) -> dict[str, list[str]]:
    """Return the rows of the usage tables."""
    with duck_engine() as engine:
        define_tables(engine, lake)
        return {name: sorted(map(str, engine.rows(f"SELECT * FROM {name}"))) for name in TABLES}


def test_a_store_gets_the_rows_that_a_disk_gets(
    spark: SparkSession, lake: ObjectPlace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, disk = tmp_path / "journal", tmp_path / "lake"
    for number in range(2):
        more = fill(journal, 2, first=1 + number * 1000)
        assert ingest(spark, journal, lake).events == ingest(spark, journal, disk).events == more
        with duck_engine() if number else spark_engine(spark) as engine:
            assert update(engine, lake) == update(engine, disk)
        assert usage(lake) == usage(disk)
    assert count(lake) == count(disk) == (2 * more, 2 * more)
    # A line that came twice is found in the files there.
    fill(journal, 1, first=1)
    (journal / f"{1:020d}-host-1.jsonl").rename(journal / f"{9000:020d}-host-1.jsonl")
    assert (again := ingest(spark, journal, lake)).events == 0
    assert again.repeated > 0

    before = files(lake, EVENTS)
    done = compact(lake)
    assert done.merged > 0
    # Readers need the old ones for a week.
    assert before < files(lake, EVENTS)
    assert count(lake) == (2 * more, 2 * more)
    assert usage(lake) == usage(disk)

    register(spark)
    options = {f"storage.{name}": value for name, value in lake.options}
    frame = spark.read.format("mq9lake").options(lake=lake.url, table=EVENTS, **options).load()
    assert frame.select("instance", "seq", "position").distinct().count() == 2 * more
    frame.explain(True)
    shown = capsys.readouterr().out
    assert "mq9lake" in shown
    assert SECRET not in shown


def test_of_two_that_write_at_once_the_second_is_refused(
    spark: SparkSession, lake: ObjectPlace, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    events = fill(journal, 2)
    inner: list[int] = []

    def meanwhile(_step: str, _done: int, _of: int | None) -> None:
        if not inner:
            inner.append(0)
            inner[0] = ingest(spark, journal, lake).events

    with pytest.raises(UnavailableError, match="another process has written to it meanwhile; run the command again"):
        ingest(spark, journal, lake, meanwhile)
    assert inner == [events]
    assert count(lake) == (events, events)
    assert ingest(spark, journal, lake).events == 0


def test_uploaded_files_of_the_journal_are_enough(spark: SparkSession, lake: ObjectPlace, tmp_path: Path) -> None:
    gap = (
        b'{"at":1767225600000,"why":"space","segment":"s.jsonl","seqs":{"host-1":[3,9]},"from":1767225500000,'
        b'"to":1767225600000,"events":12,"bytes":900}\n'
    )
    journals = [tmp_path / name for name in ("one", "two")]
    # More than fits into one part of an upload.
    events = fill(journals[0], 1, lines=700, events=200)
    events += fill(journals[1], 1, first=10_000)
    bad = write(journals[1], 20_000, [line(20_000, [event(20_000)]), b"{torn\n"])
    (journals[0] / "gaps.jsonl").write_bytes(gap)
    (journals[1] / "gaps.jsonl").write_bytes(gap.replace(b"[3,9]", b"[1,2]"))
    sizes = [sum(path.stat().st_size for path in journal.glob("0*")) for journal in journals]
    assert max(sizes) > 6 << 20
    for journal, files, size in zip(journals, (1, 2), sizes, strict=True):
        assert upload(journal, lake, journal.name) == UploadResult(files, size)
        assert read_up_to(journal) == max(path.name for path in journal.glob("0*"))
        assert upload(journal, lake, journal.name) == UploadResult(0, 0)
        shutil.rmtree(journal)
    done = ingest(spark, lake / JOURNAL, lake)
    assert (done.segments, done.events, done.quarantined, done.gaps) == (3, events + 1, 1, 2)
    assert count(lake) == (events + 1, events + 1)
    [lost] = DeltaTable(**delta_arguments(lake / QUARANTINE)).to_pyarrow_table().to_pylist()
    assert (lost["file"], lost["line"], lost["text"]) == (bad.name, 2, "{torn")
    assert list_segments(lake / JOURNAL) == []
    # One that came again has nothing new.
    write(journals[1], 20_000, [line(20_000, [event(20_000)])])
    assert upload(journals[1], lake, "two").files == 1
    assert ingest(spark, lake / JOURNAL, lake).events == 0
    assert list_segments(lake / JOURNAL) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("at", ["before", "after"])
def test_a_kill_beside_the_commit_loses_and_doubles_nothing(
    spark: SparkSession, lake: ObjectPlace, tmp_path: Path, at: str
) -> None:
    journal = tmp_path / "journal"
    events = fill(journal, 2)
    stops = tmp_path / "stops.json"
    stops.write_text(json.dumps({"url": lake.url, "options": dict(lake.options), "at": at}))
    with Victim(tmp_path / "log", "tests.slow.spark.dying_at_commit", journal, stops) as victim:
        victim.until(lambda: victim.said("it stands"))
        victim.kill()
    assert files(lake, EVENTS) != set()
    assert read_up_to(journal) == ""
    committed = events if at == "after" else 0
    assert count(lake) == (committed, committed)
    assert ingest(spark, journal, lake).events == events - committed
    assert count(lake) == (events, events)
    assert read_up_to(journal) != ""


@pytest.mark.rule("S6")
async def test_archived_mail_is_replayed_and_forgotten(
    spark: SparkSession, mail: Mail, lake: ObjectPlace, tmp_path: Path
) -> None:
    await mail.create("again")
    outbox = SqliteStore(migrated(tmp_path / "mediator.db"))
    source = ReadOptions(data_dir=tmp_path)
    sent = fill_outbox(outbox, 12, headers={"Own": "Grüße 😀"})
    # The first run is killed before it empties the outbox.
    with pytest.raises(KilledError):
        archive(spark, source, lake, KEY, killed)
    assert waiting(outbox) == len(sent)
    assert archive(spark, source, lake, KEY, remove(outbox)) == ArchiveResult(found=len(sent))
    assert waiting(outbox) == 0
    outbox.close()
    assert shown(read_archive(spark, lake, [KEY])) == sent

    target = ReplayTarget("again", (("nats.url", mail.service.nats_url), ("timeoutSeconds", "60")))
    done = replay(spark, lake, ReplaySelection("default", (BOX,)), target, [KEY])
    assert done == ReplayProgress(12, done=12)
    assert len(await mail.payloads("again")) == 12
    assert files(lake, "replays") == set()

    assert forget(lake, "default", BOX) == 12
    assert forget(lake, "default", BOX) == 0
    assert read_archive(spark, lake, [KEY]).collect() == []
    assert files(lake, "archive") == set()


class KilledError(Exception):
    pass


def killed(_copies: Any) -> None:
    raise KilledError


def test_commands_open_it_and_show_no_secret(
    call: Call, store: ObjectStore, lake: ObjectPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.options.items():
        monkeypatch.setenv(f"MEDIATOR_PIPELINE__STORAGE__{name.upper()}", value)
    # Where runs are recorded.
    migrated(tmp_path / "mediator.db")
    events = fill(tmp_path / FOLDER, 2)
    code, out, err = call(tmp_path, "ingest", "--lake", lake.url)
    assert code == 0, err
    assert f"{events} events added" in out
    monkeypatch.setenv("MEDIATOR_PIPELINE__LAKE", lake.url)
    code, out, err = call(tmp_path, "upload", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told.pop("error") == ""
    check_shape("pipeline upload", told, shapes())
    code, _, refused = call(tmp_path, "upload", "--lake", tmp_path / "lake")
    assert code == 2
    assert "expected a place in an object store" in refused
    code, out, err = call(tmp_path, "report")
    assert code == 0, err
    assert (tmp_path / "report.html").is_file()
    code, _, err = call(tmp_path, "compact")
    assert code == 0, err
    code, shown, _ = call(tmp_path, "runs", "--json")
    assert code == 0
    assert [run["outcome"] for run in json.loads(shown)["runs"]] == ["succeeded"] * 4

    monkeypatch.setenv("MEDIATOR_PIPELINE__STORAGE__AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("MEDIATOR_PIPELINE__STORAGE__MAX_RETRIES", "0")
    code, out, refused = call(tmp_path, "ingest")
    assert code == 1
    assert f"the lake {lake.url}: " in refused
    assert "Connection refused" in refused
    for text in (shown, out, err, refused, repr(lake), str(lake)):
        assert SECRET not in text


def test_what_is_no_lake_is_said(spark: SparkSession, store: ObjectStore, lake: ObjectPlace, tmp_path: Path) -> None:
    fill(tmp_path / "journal", 1)
    with pytest.raises(SetupError, match="not a lake; `mediator pipeline ingest` creates one"):
        compact(lake)
    with open_filesystem(lake).open_output_stream("notes.txt", buffer_size=64) as file:
        file.write(b"ours")
    with pytest.raises(SetupError, match="not a lake, and not empty"):
        ingest(spark, tmp_path / "journal", lake)
    missing = ObjectPlace("s3://there-is-none/lake", tuple(store.options.items()))
    with pytest.raises(UnavailableError, match=r"the lake s3://there-is-none/lake: .*"):
        ingest(spark, tmp_path / "journal", missing)
