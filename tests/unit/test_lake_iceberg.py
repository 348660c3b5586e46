"""The lake in an Iceberg catalog: the same rows by the same files, whatever ingest and compaction did in between."""

import sys
from datetime import date
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="needs the extra pipeline")
pytest.importorskip("pyiceberg", reason="needs the extra iceberg")

import orjson
from deltalake import DeltaTable
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.expressions import GreaterThanOrEqual
from pyiceberg.utils.config import Config

from mediator.cli import main
from mediator.errors import SetupError
from mediator.mailboxes.events import Event, EventType
from pipeline.lake.compaction import compact
from pipeline.lake.iceberg import publish
from tests.harness.histories import HOUR, START
from tests.harness.lakes import Lake
from tests.integration.test_cli_json import check_shape, shapes

DAY = 24 * HOUR


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """A catalog in SQLite, configured as a user would."""
    (tmp_path / "warehouse").mkdir()
    monkeypatch.setenv("PYICEBERG_CATALOG__OURS__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__OURS__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__OURS__WAREHOUSE", f"file://{tmp_path}/warehouse")
    # It is read when the module is imported.
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    return load_catalog("ours")


def add(lake: Lake, first: int, at: int = START, tenant: str = "default") -> None:
    numbers = range(first, first + 10)
    lake.add([Event(EventType.STORED, at + n, tenant, 7, 2, n, 100, at + n) for n in numbers])


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(tmp_path / "a lake [1]")
    add(lake, 0)
    add(lake, 10, START + DAY)
    lake.update()
    return lake


def same_rows(catalog: Catalog, lake: Lake, name: str) -> int:
    """Compare a table's rows in the catalog and in the lake, and return how many there are."""
    kept = DeltaTable(lake.path / name).to_pyarrow_table().drop_columns("date").to_pylist()
    published = catalog.load_table(f"mail.{name}").scan().to_arrow().to_pylist()
    assert sorted(map(str, published)) == sorted(map(str, kept))
    return len(kept)


def test_the_catalog_has_the_rows_of_the_lake(catalog: Catalog, lake: Lake) -> None:
    done = publish(lake.path, "ours", "mail")
    assert same_rows(catalog, lake, "events") == 20
    assert same_rows(catalog, lake, "usage_hourly") == 2
    files = sum(len(DeltaTable(lake.path / name).file_uris()) for name in ("events", "usage_hourly", "usage_messages"))
    assert (done.tables, done.added >= files, done.removed) == (6, True, 0)
    # Nothing is copied.
    assert list((lake.path.parent / "warehouse").rglob("*.parquet")) == []
    again = publish(lake.path, "ours", "mail")
    assert (again.tables, again.added, again.removed) == (6, 0, 0)
    table = catalog.load_table("mail.events")
    assert len(table.snapshots()) == 1


def test_what_ingest_and_compaction_change_is_followed(catalog: Catalog, lake: Lake) -> None:
    publish(lake.path, "ours", "mail")
    add(lake, 20)
    compact(lake.path)
    assert same_rows_not_yet(catalog) == 20
    done = publish(lake.path, "ours", "mail")
    assert done.added > 0
    assert done.removed > 0
    assert same_rows(catalog, lake, "events") == 30
    lake.remove_events(date(2026, 3, 1))
    publish(lake.path, "ours", "mail")
    assert same_rows(catalog, lake, "events") == 10


def same_rows_not_yet(catalog: Catalog) -> int:
    return catalog.load_table("mail.events").scan().to_arrow().num_rows


def test_readers_skip_the_files_of_other_days(catalog: Catalog, lake: Lake) -> None:
    publish(lake.path, "ours", "mail")
    scan = catalog.load_table("mail.events").scan(GreaterThanOrEqual("at", "2026-03-02T00:00:00+00:00"))
    assert len(list(scan.plan_files())) == 1
    assert scan.to_arrow().num_rows == 10


def test_tables_of_somebody_else_stay_as_they_are(catalog: Catalog, lake: Lake, tmp_path: Path) -> None:
    publish(lake.path, "ours", "mail")
    other = Lake(tmp_path / "other")
    add(other, 0)
    with pytest.raises(SetupError, match=r"mail\.events is there already, and not a table of the lake .*other"):
        publish(other.path, "ours", "mail")
    assert same_rows(catalog, lake, "events") == 20


def test_a_catalog_that_is_not_configured_is_named(lake: Lake) -> None:
    with pytest.raises(SetupError, match=r"^the catalog nowhere: URI missing"):
        publish(lake.path, "nowhere", "mail")


def test_the_command_says_what_it_did(
    catalog: Catalog, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["pipeline", "publish", "--iceberg", "ours", "--namespace", "mail", "--lake", str(lake.path), "--json"]
    monkeypatch.setattr(sys, "argv", ["mediator", *words, "--data-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    told = orjson.loads(capsys.readouterr().out)
    assert told.pop("error") == ""
    check_shape("pipeline publish", told, shapes())
    assert told["tables"] == 6
    assert same_rows(catalog, lake, "events") == 20
