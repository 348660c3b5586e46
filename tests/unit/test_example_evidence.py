"""examples/evidence: its files fit together, and its SQL runs on a real lake, in DuckDB as in Evidence."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb", reason="needs the extra pipeline")
pytest.importorskip("pyspark", reason="needs the extra pipeline")
pytest.importorskip("yaml", reason="needs the extra dev")

import duckdb
import yaml

from mediator.mailboxes.events import Event, EventType
from tests.harness.histories import HOUR, START
from tests.harness.lakes import Lake

PROJECT = Path(__file__).parents[2] / "examples" / "evidence"
PAGE = (PROJECT / "pages" / "index.md").read_text()
QUERIES = dict(re.findall(r"^```sql (\w+)\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL))
INPUTS = {"${inputs.tenant.value}": "%"}


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what Evidence makes of the file that export.py writes: a table for each query of the source."""
    lake = Lake(tmp_path / "lake")
    lake.add(
        [
            *(Event(EventType.STORED, START + n, "default", 7, 2, n, 100, START + n) for n in range(3)),
            *(Event(EventType.LEASED, START + 90_000 * n, "default", 7, 2, n, 100, START + n, 5) for n in range(2)),
            Event(EventType.ACKNOWLEDGED, START + 90_000, "default", 7, 2, 0, 100, START, 5),
            Event(EventType.STORED, START + HOUR, "other", 8, 2, 0, 50, START + HOUR),
        ]
    )
    lake.update()
    spec = importlib.util.spec_from_file_location("export", PROJECT / "export.py")
    assert spec is not None
    assert spec.loader is not None
    export = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(export)
    connection = yaml.safe_load((PROJECT / "sources" / "lake" / "connection.yaml").read_text())
    assert PROJECT / "sources" / "lake" / connection["options"]["filename"] == export.FILE
    monkeypatch.setattr(export, "LAKE", lake.path)
    monkeypatch.setattr(export, "FILE", tmp_path / "lake.duckdb")
    export.main()
    # A second time, as a scheduler would.
    export.main()
    database = duckdb.connect()
    database.execute(f"ATTACH '{export.FILE}' AS file (READ_ONLY); CREATE SCHEMA {connection['name']}")
    for query in (PROJECT / "sources" / "lake").glob("*.sql"):
        database.execute(f"USE file; CREATE TABLE memory.lake.{query.stem} AS {query.read_text()}; USE memory")
    return database


def rows(database: Any, name: str) -> list[dict[str, Any]]:
    query = QUERIES[name]
    for written, value in INPUTS.items():
        query = query.replace(written, value)
    found: list[dict[str, Any]] = database.sql(query).to_arrow_table().to_pylist()
    return found


def test_each_query_of_the_page_says_what_the_lake_has(database: Any) -> None:
    found = {name: rows(database, name) for name in QUERIES}
    assert found["totals"] == [{"sent": 4, "acknowledged": 1, "expired": 0, "died": 0}]
    assert [row["tenant"] for row in found["tenants"]] == ["default", "other"]
    assert [row["came"] for row in found["flow"]] == [3, 1]
    assert [row["median"] for row in found["waits"]] == [pytest.approx(45, abs=0.1)]
    assert [(row["mailbox"], row["unread"]) for row in found["unread"]] == [(7, 1), (8, 1)]
    assert [(row["group"], row["behind"]) for row in found["groups"]] == [(5, 1)]


def test_the_page_shows_columns_that_its_queries_have(database: Any) -> None:
    shown = re.findall(r"<(?:LineChart|BigValue|DataTable|Dropdown) data=\{(\w+)\}(.*)/?>", PAGE)
    assert {name for name, _ in shown} == set(QUERIES)
    for name, options in shown:
        columns = set(rows(database, name)[0])
        used = re.findall(r"\b(?:x|value)=(\w+)", options) + re.findall(r"'(\w+)'", options)
        assert set(used) <= columns, name


def test_the_packages_are_those_that_the_project_loads() -> None:
    packages = set(json.loads((PROJECT / "package.json").read_text())["dependencies"])
    plugins = yaml.safe_load((PROJECT / "evidence.config.yaml").read_text())["plugins"]
    assert {*plugins["components"], *plugins["datasources"]} <= packages
