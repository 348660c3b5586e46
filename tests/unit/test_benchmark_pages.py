"""The pages hold a place for the table of every benchmark, and tables say which rows are unsteady."""

import re
from pathlib import Path

import pytest

from benchmarks import memory, pages, simulation
from benchmarks.__main__ import QUICK, REST
from benchmarks.bench import Bench, ResultRow, at_least, headline
from benchmarks.mixed_clients import Books
from benchmarks.simulation import Constants, Work

SLOW_DISK = Constants(client=Work(10, 1), router=Work(0, 0), service=Work(200, 20), disk=1000)


def test_every_benchmark_has_one_place_in_the_pages():
    text = "".join(page.read_text() for page in (pages.README, pages.RESULTS, pages.SCALE))
    places = re.findall(r"<!-- bench: (\w+) -->\n.*?\n<!-- end -->", text, re.DOTALL)
    assert sorted(places) == sorted([pages.HEADLINES, pages.SUMMARY, *QUICK, *REST])


def test_rows_of_the_readme_are_rows_of_the_results():
    """They are from the same run, none is edited, and each that belongs there is there."""
    place = r"<!-- bench: {} -->\n.*?\|---.*?\n(.*?)<!-- end -->"
    (shown,) = re.findall(place.format(pages.SUMMARY), pages.README.read_text(), re.DOTALL)
    (headlines,) = re.findall(place.format(pages.HEADLINES), pages.RESULTS.read_text(), re.DOTALL)
    rows = [ResultRow(line.split(" | ")[0].removeprefix("| "), line) for line in headlines.splitlines() if "|" in line]
    origin = headlines.rpartition("|")[2].strip()
    cells = [row.ours.split(" | ")[: pages.SUMMARY_COLUMNS] for row in pages.summary(rows)]
    assert shown.splitlines() == [*(f"{' | '.join(each)} |" for each in cells), "", origin]
    assert len(pages.summary(rows)) > len(pages.OF_SUMMARY)


def test_a_written_table_replaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench: send -->\nold\n<!-- end -->\nafter\n")
    for name in ("README", "RESULTS", "SCALE"):
        monkeypatch.setattr(pages, name, page)
    pages.write("send", "new \\1")
    assert page.read_text() == "before\n<!-- bench: send -->\nnew \\1\n<!-- end -->\nafter\n"


def test_a_row_whose_rounds_differ_says_unsteady():
    steady, unsteady = (at_least("SEND", "/s", ours, [10, 10], 1) for ours in ([10, 11], [10, 14]))
    assert "| 10 % |" in pages.table([steady])
    assert "**33 %: unsteady**" in pages.table([unsteady])


def test_rounds_alternate_which_side_goes_first(tmp_path: Path):
    order: list[str] = []
    bench = Bench(quick=True, folder=tmp_path, status=lambda _: None, tell=lambda _: None)
    bench.in_turn("SEND", {side: lambda _, side=side: order.append(side) for side in "AB"}, rounds=2)
    assert order == ["A", "B", "B", "A"]


@pytest.mark.parametrize(("per_hour", "minutes", "flat"), [(19, 60, True), (60, 60, False), (60, 10, None)])
def test_memory_is_flat_by_a_line_after_the_warm_up(per_hour: float, minutes: int, flat: bool | None):
    seconds = range(0, minutes * 60, 5)
    grown = memory.fit([(at, 100.0 + per_hour * at / 3600 - (at < minutes * 15) * 50) for at in seconds])
    assert grown.per_hour == pytest.approx(per_hour)
    assert grown.flat is flat


def test_books_tell_what_is_missing_and_what_came_twice():
    books = Books()
    books.arrived(1)
    for number in (1, 2, 3):
        books.sent(number)
    assert (books.missing, books.unaccounted) == (2, 0)
    for number in (2, 3, 3):
        books.arrived(number)
    assert (books.missing, books.unaccounted) == (0, 1)


def test_headline_keeps_everything_else_of_a_row():
    assert headline(ResultRow("SEND", "1 /s", met=True)) == ResultRow("SEND", "1 /s", met=True, headline=True)


def test_one_request_in_flight_waits_for_every_step():
    alone = 10 + 1 + 200 + 20 + 1000
    assert simulation.throughput(SLOW_DISK, 1, cores=2) == pytest.approx(1e6 / alone)


def test_many_requests_share_commits_up_to_the_cpu():
    rates = [simulation.throughput(SLOW_DISK, count, cores=2) for count in (1, 10, 100, 1000)]
    assert rates == sorted(rates)
    assert rates[1] == pytest.approx(10 * rates[0], rel=0.2)
    assert 0.8 * 1e6 / 20 < rates[3] < 1e6 / 20


def test_one_core_for_client_and_service_is_slower_than_two():
    one, two = (simulation.throughput(SLOW_DISK, 1000, cores=cores) for cores in (1, 2))
    assert one < two


def test_constants_of_two_points_predict_these_points():
    few = simulation.Point(1, [1e6 / 1250], batch=1, client=20, router=0, service=220)
    many = simulation.Point(100, [40_000], batch=50, client=3, router=0, service=24)
    constants = simulation.fit(few, many)
    assert simulation.throughput(constants, 1) == pytest.approx(few.rate)
    assert constants.service.of(50) == pytest.approx(50 * many.service)
