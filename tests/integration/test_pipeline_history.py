"""How commands of the pipeline record their runs: through the service, or in the store where nobody owns it."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
import pytest

from mediator.errors import SetupError, StoreHeldError, UnavailableError
from mediator.operate import store_access
from mediator.operate.run_history import RunHistory, RunHistoryClient, RunOperations
from mediator.operate.runs import RUN_VARIABLE, Outcome
from mediator.settings.settings import Settings
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from pipeline.jobs import record_run
from tests.harness.core import Core, core, make_settings


def settings(data_dir: Path) -> Settings:
    return make_settings(data_dir=data_dir, instance="here")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A data directory with a database that nobody holds."""
    SqliteStore(database_path(tmp_path)).close()
    return tmp_path


@pytest.fixture(autouse=True)
def _no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_VARIABLE, raising=False)


def serve(home: Core) -> None:
    home.operations.add_methods(RunOperations(RunHistory(home.broker, "here", home.metrics), 0))


# Where they are kept.


def test_without_a_service_a_run_is_kept_in_the_store(database: Path) -> None:
    book = RunHistoryClient(settings(database))
    no = book.begin("ingest", ["--lake", "/x", "--password", "HUSH"])
    [run] = book.newest(5)
    assert (run["run"], run["outcome"], run["ended_at"]) == (no, "running", None)
    assert run["arguments"] == ["--lake", "/x", "--password", "…"]
    book.end(no, Outcome.SUCCEEDED, {"events": 12, "seconds": 0.5}, "")
    [run] = book.newest(5)
    assert (run["outcome"], run["numbers"], run["instance"]) == ("succeeded", {"events": 12, "seconds": 0.5}, "here")
    assert run["started_at"] <= run["ended_at"]
    # Nothing holds the file.
    SqliteStore(database_path(database)).close()


async def test_with_a_service_it_is_asked(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        serve(home)
        book = RunHistoryClient(settings(tmp_path))
        no = await asyncio.to_thread(book.begin, "replay", ["a.b"])
        await asyncio.to_thread(book.end, no, Outcome.FAILED, {"rows": 1}, "no room")
        [run] = await asyncio.to_thread(book.newest, 5)
        assert (run["run"], run["outcome"], run["error"]) == (no, "failed", "no room")
        assert home.value("mediator_pipeline_runs_total", outcome="failed") == 1


async def test_a_run_may_begin_with_a_service_and_end_without(tmp_path: Path) -> None:
    book = RunHistoryClient(settings(tmp_path))
    async with core(tmp_path) as home:
        serve(home)
        no = await asyncio.to_thread(book.begin, "ingest", [])
    await asyncio.to_thread(book.end, no, Outcome.SUCCEEDED, {}, "")
    [run] = await asyncio.to_thread(book.newest, 5)
    assert (run["run"], run["outcome"]) == (no, "succeeded")


def test_no_database_is_made_for_the_sake_of_a_run(tmp_path: Path) -> None:
    for call in (lambda book: book.begin("ingest", []), lambda book: book.newest(1)):
        with pytest.raises(SetupError, match="no database in"):
            call(RunHistoryClient(settings(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_another_holds_is_not_waited_for_long(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_access, "START_SECONDS", 0.2)
    store = SqliteStore(database_path(database))
    try:
        with pytest.raises(StoreHeldError):
            RunHistoryClient(settings(database)).begin("ingest", [])
    finally:
        store.close()


async def test_a_service_that_keeps_no_runs_is_an_error(tmp_path: Path) -> None:
    async with core(tmp_path):
        with pytest.raises(UnavailableError, match="command: expected one of"):
            await asyncio.to_thread(RunHistoryClient(settings(tmp_path)).begin, "ingest", [])


# What a command does.


def test_what_a_command_did_is_its_run(database: Path) -> None:
    said: list[str] = []
    book = RunHistoryClient(settings(database))
    with record_run(book, "ingest", ["--lake", "x"], said.append) as numbers:
        assert book.newest(1)[0]["outcome"] == "running"
        numbers["events"] = 3
    [run] = book.newest(5)
    assert (run["command"], run["outcome"], run["numbers"]) == ("ingest", "succeeded", {"events": 3})
    assert said == []


@pytest.mark.parametrize(
    ("error", "outcome", "text"),
    [
        (UnavailableError("the lake is full"), "failed", "unavailable: the lake is full"),
        (ValueError(), "failed", "ValueError"),
        (KeyboardInterrupt(), "killed", "interrupted"),
        (SystemExit(3), "failed", "3"),
    ],
)
def test_what_a_command_raises_is_kept_and_goes_on(
    database: Path, error: BaseException, outcome: str, text: str
) -> None:
    book = RunHistoryClient(settings(database))

    def command() -> None:
        with record_run(book, "ingest", [], print) as numbers:
            numbers["events"] = 2
            raise error

    with pytest.raises(type(error)) as raised:
        command()
    assert raised.value is error
    [run] = book.newest(5)
    assert (run["outcome"], run["error"], run["numbers"]) == (outcome, text, {"events": 2})


def test_a_run_that_cannot_be_recorded_runs_all_the_same(tmp_path: Path) -> None:
    said: list[str] = []
    with record_run(RunHistoryClient(settings(tmp_path)), "ingest", [], said.append) as numbers:
        numbers["events"] = 1
    [line] = said
    assert line.startswith("this run is not recorded: data_dir: no database in")


def test_an_end_that_cannot_be_recorded_fails_nothing(database: Path) -> None:
    said: list[str] = []
    with record_run(RunHistoryClient(settings(database)), "ingest", [], said.append):
        database_path(database).rename(database / "away")
    [line] = said
    assert line.startswith("the end of this run is not recorded: data_dir: no database in")


def test_numbers_that_are_none_are_lost_alone(database: Path) -> None:
    said: list[str] = []
    with record_run(RunHistoryClient(settings(database)), "ingest", [], said.append) as numbers:
        numbers["share"] = float("nan")
    assert said == ["the numbers of this run are not recorded: numbers.share: expected a finite number below 2**63"]
    [run] = RunHistoryClient(settings(database)).newest(5)
    assert (run["outcome"], run["numbers"]) == ("succeeded", {})


def test_a_child_continues_the_run_begun_for_it(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = RunHistoryClient(settings(database))
    no = book.begin("ingest", [])
    monkeypatch.setenv(RUN_VARIABLE, str(no))
    with record_run(book, "ingest", [], print) as numbers:
        numbers["events"] = 4
    [run] = book.newest(5)
    assert (run["run"], run["outcome"], run["numbers"]) == (no, "succeeded", {"events": 4})


# The command.


async def mediator(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "mediator", "pipeline", "runs", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "MEDIATOR_INSTANCE": "here", "COLUMNS": "200"},
    )
    out, said = await process.communicate()
    return process.returncode or 0, out.decode(), said.decode()


def record(data_dir: Path, runs: Sequence[tuple[str, Outcome, Mapping[str, int | float], str]]) -> None:
    book = RunHistoryClient(settings(data_dir))
    for command, outcome, numbers, error in runs:
        book.end(book.begin(command, ["--lake", "/l"]), outcome, numbers, error)


async def test_the_command_shows_runs_as_a_table_and_as_json(database: Path) -> None:
    failed = ("report", Outcome.FAILED, {}, "no \x1b[31mroom")
    await asyncio.to_thread(
        record, database, [("ingest", Outcome.SUCCEEDED, {"events": 12345, "rate": 0.51234}, ""), failed]
    )
    code, out, _ = await mediator("--data-dir", str(database))
    assert code == 0
    assert "\x1b" not in out
    for text in ("ingest --lake /l", "succeeded", "events 12,345", "rate 0.512", "report --lake /l", "failed", "room"):
        assert text in out
    assert out.index("report") < out.index("ingest")
    code, out, _ = await mediator("--data-dir", str(database), "--json", "--limit", "1")
    assert code == 0
    [run] = orjson.loads(out)["runs"]
    assert (run["command"], run["outcome"]) == ("report", "failed")


async def test_the_command_asks_the_service_that_runs(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        serve(home)
        code, out, _ = await mediator("--data-dir", str(tmp_path))
        assert (code, out) == (0, "the pipeline has not run yet\n")


async def test_where_there_is_nothing_the_command_says_so(tmp_path: Path) -> None:
    code, out, said = await mediator("--data-dir", str(tmp_path / "none"))
    assert (code, out) == (2, "")
    assert said.startswith("mediator: data_dir: no database in")
