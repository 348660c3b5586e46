"""The command that makes the report, without Spark: what it prints and writes, and who may read it."""

import csv
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import orjson
import pytest

pytest.importorskip("duckdb", reason="needs the extra pipeline")
pytest.importorskip("pyspark", reason="needs the extra pipeline")

from mediator.cli import main
from mediator.mailboxes.events import Event, EventType
from mediator.parts import installed_settings
from mediator.store.sqlite import SqliteStore
from pipeline.part import part
from pipeline.reports.usage import TOTALS
from tests.harness.histories import HOUR, START
from tests.harness.lakes import Lake
from tests.harness.samples import add
from tests.harness.stores import migrated
from tests.unit.test_report_page import Parsed

Run = Callable[..., tuple[int, str, str]]
DAY = 24 * HOUR


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        words = ["mediator", "pipeline", "report", *map(str, arguments), "--data-dir", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, " ".join(said.err.replace("│", " ").split())

    return run


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(tmp_path / "lake")
    lake.add(
        [
            *(Event(EventType.STORED, START + n, "default", 7, 2, n, 100, START + n) for n in range(3)),
            *(Event(EventType.LEASED, START + 90_000 * n, "default", 7, 2, n, 100, START + n, 5) for n in range(2)),
            Event(EventType.STORED, START + DAY, "other", 8, 2, 0, 50, START + DAY),
        ]
    )
    return lake


def test_the_report_is_made_without_spark(run: Run, lake: Lake, tmp_path: Path) -> None:
    code, out, err = run("--json", "--tenant", "default", "--by", "day", "--csv", tmp_path / "tenants.csv")
    told = orjson.loads(out)
    assert (code, told["days"]) == (0, ["2026-03-01", "2026-03-02"])
    assert "Spark" not in err
    assert told["totals"] == {**dict.fromkeys(TOTALS, 0), "sent": 3, "leased": 2, "bytes_in": 300}
    shown = Parsed((lake.path / "report.html").read_text())
    assert (shown.named["sent"], shown.named["depth"]) == ("3", "3")
    assert "delivered within 1 min?" in shown.text
    assert "other" not in shown.text
    [row] = csv.DictReader((tmp_path / "tenants.csv").read_text().splitlines())
    assert (row["tenant"], row["mailboxes"], row["sent"], row["depth"]) == ("default", "1", "3", "3")

    page = lake.path / "report.html"
    assert run()[1] == f"0 days calculated anew; the page is {page}\n"
    assert Parsed(page.read_text()).named["sent"] == "4"


def test_the_goal_of_the_settings_is_what_the_page_asks(run: Run, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIATOR_PIPELINE__DELIVERY_GOAL_SECONDS", "120")
    assert run()[0] == 0
    text = Parsed((lake.path / "report.html").read_text()).text
    assert "delivered within 2 min?" in text
    assert "100% of the mail that was delivered" in text


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--engine", "duckdb", "--master", "local[2]"), 2, "expected spark beside --master"),
        (("--engine", "duckdb", "--conf", "spark.a=b"), 2, "expected spark beside --master"),
        (("--engine", "postgres"), 2, "'postgres' is not one of"),
        (("--by", "year"), 2, "'year' is not one of"),
        (("--from", "yesterday"), 2, 'expected a day as YYYY-MM-DD, got "yesterday"'),
        (("--from", "2026-03-02", "--to", "2026-03-01"), 1, "from: expected a day not after 2026-03-01"),
        (("--output", "/dev/null/page.html"), 1, "cannot write /dev/null/page.html"),
    ],
)
def test_wrong_options_name_themselves(run: Run, lake: Lake, arguments: tuple[str, ...], code: int, said: str) -> None:
    ended, out, err = run(*arguments)
    assert (ended, out) == (code, "")
    assert said in err


def test_a_damaged_table_is_one_line(run: Run, lake: Lake) -> None:
    assert run()[0] == 0
    for [path] in lake.files("usage_hourly").values():
        Path(path).write_bytes(b"PAR1 nothing PAR1")
    code, out, err = run()
    assert (code, out) == (1, "")
    assert "mediator: report: " in err, err
    assert "usage_hourly" in err


def test_a_forgotten_mailbox_is_in_no_report(run: Run, lake: Lake, tmp_path: Path) -> None:
    with closing(SqliteStore(migrated(tmp_path / "mediator.db"))) as store, store.transaction() as tx:
        for number in range(1, 8):
            add(tx, f"box.{number}")
    report = lake.path / "report.html"
    settings = installed_settings()(data_dir=tmp_path)
    assert run("--addresses")[0] == 0
    assert "7 box.7" in report.read_text()
    assert report.stat().st_mode & 0o777 == 0o600
    assert part.forget_files(settings, "default", "no.such") is None
    assert report.exists()
    assert part.forget_files(settings, "default", "box.7") == ({"reports": 1}, "")
    assert not report.exists()
    # Nothing else of a lake has an address.
    assert not [path for path in lake.path.rglob("*") if path.is_file() and b"box.7" in path.read_bytes()]
