"""The commands from the journal to the page, as they are called: what they tell, and what they refuse."""

import csv
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import orjson
import pytest

from mediator.mailboxes.events import Event, EventType
from mediator.store.sqlite import SqliteStore
from tests.harness.samples import add
from tests.slow.spark.conftest import Call
from tests.slow.spark.journals import DAY, START, line, write
from tests.unit.test_report_page import Parsed

Run = Callable[..., tuple[int, str, str]]
HOUR = DAY // 24


@pytest.fixture
def run(call: Call, tmp_path: Path) -> Run:
    """Call a command on a data directory of the test's own."""
    return partial(call, tmp_path)


def event(what: EventType, at: int, msg_id: int, created_at: int, tenant: str = "default") -> Event:
    return Event(what, at, tenant, 7, 2, msg_id, 100, created_at, 0 if what is EventType.STORED else 3)


def test_the_report_shows_the_journal_and_its_gaps(run: Run, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    first = [event(EventType.STORED, START + number, number, START + number) for number in range(3)]
    # Of the second day nothing is told. On the third the clock goes back by an hour behind the first message.
    third = START + 2 * DAY + 3 * HOUR
    jumped = [event(EventType.STORED, third, 3, third), event(EventType.DELIVERED, third - HOUR, 3, third)]
    other = [event(EventType.STORED, third, 0, third, "other")]
    write(journal, 1, [line(1, first), b"{torn\n", line(2, jumped), line(3, other)])
    gap = {"at": START, "why": "space", "seqs": {"host-1": [4, 9]}, "from": START, "to": START, "events": 12}
    (journal / "gaps.jsonl").write_bytes(orjson.dumps({**gap, "bytes": 900}) + b"\n" + b"{damaged\n")
    assert run("ingest")[0] == 0

    code, out, _ = run("report", "--json", "--tenant", "default", "--engine", "spark")
    told = orjson.loads(out)
    assert (code, told["days"]) == (0, ["2026-01-01", "2026-01-03"])
    assert told["totals"] == {**dict.fromkeys(told["totals"], 0), "sent": 4, "delivered": 1, "bytes_in": 400}
    shown = Parsed((tmp_path / "lake" / "report.html").read_text())
    assert (shown.named["sent"], shown.named["depth"]) == ("4", "4")
    # What was delivered before it came, by the clock, did not wait.
    assert "0 ms" in shown.text
    for words in ("12 events from 2026-01-01 00:00", "are lost: space", "are lost: unreadable", "1 lines", "JSON"):
        assert words in shown.text
    assert "other" not in shown.text

    # Merged files would be read as new ones were it not for the log; a page that cannot be written costs the tables
    # nothing.
    write(journal, 5, [line(5, [event(EventType.ACKNOWLEDGED, third + HOUR, 0, START)])])
    assert run("ingest")[0] == run("compact")[0] == 0
    page = tmp_path / "none" / "page.html"
    code, _, err = run("report", "--output", page)
    assert (code, f"cannot write {page}: No such file" in err) == (1, True)
    page.parent.mkdir()
    assert run("report", "--output", page)[1] == f"0 days calculated anew; the page is {page}\n"
    assert Parsed(page.read_text()).named["acknowledged"] == "1"

    # A day without events is a page without numbers, but for what is there.
    code, out, _ = run("report", "--json", "--from", "2026-01-02", "--to", "2026-01-02", "--output", page)
    assert (code, set(orjson.loads(out)["totals"].values())) == (0, {0})
    shown = Parsed(page.read_text())
    assert (shown.named["sent"], shown.named["depth"]) == ("0", "3")
    assert "12 events" not in shown.text

    code, _, err = run("report", "--addresses")
    assert (code, f"data.dir: there is no mediator.db in {tmp_path}" in err) == (1, True)
    with closing(SqliteStore(tmp_path / "mediator.db")) as store, store.transaction() as tx:
        for number in range(1, 8):
            add(tx, f"box.{number}")
    page.with_name(f"{page.name}.new").touch(0o644)
    assert run("report", "--addresses", "--output", page, "--csv", tmp_path / "tenants.csv")[0] == 0
    assert "7 box.7" in Parsed(page.read_text()).text
    assert page.stat().st_mode & 0o777 == 0o600
    rows = list(csv.DictReader((tmp_path / "tenants.csv").read_text().splitlines()))
    assert [(row["tenant"], row["sent"], row["acknowledged"], row["depth"]) for row in rows] == [
        ("default", "4", "1", "4"),
        ("other", "1", "0", "1"),
    ]

    code, _, err = run("report", "--from", "2026-01-03", "--to", "2026-01-02")
    assert (code, "from: expected a day not after 2026-01-02, got 2026-01-03" in err) == (1, True)


@pytest.mark.parametrize("command", ["report", "compact"])
def test_a_folder_that_is_no_lake_is_refused(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    for lake in ("none", "mine", "mine/thesis.txt"):
        code, out, err = run(command, "--lake", tmp_path / lake)
        assert (code, out) == (2, "")
        assert "not a lake" in err or "expected a folder" in err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_day_that_is_none_is_wrong_usage(run: Run) -> None:
    code, _, err = run("report", "--from", "yesterday")
    assert (code, 'expected a day as YYYY-MM-DD, got "yesterday"' in err) == (2, True)
