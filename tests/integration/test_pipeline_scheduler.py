"""The pipeline as a child of the service: bounded in time and words, never two at once, and what is known of it."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mediator.operate.run_history import SCHEDULED, RunHistory, RunOperations
from mediator.operate.runs import RUN_VARIABLE, Outcome, Run, is_gone, process_name
from mediator.system import child_process as child
from mediator.system.child_process import ChildEnd, run_child
from pipeline.service import MAX_LINE, MAX_LINES, ChildLog, PipelineOperations, PipelineScheduler
from tests.harness.clock import ShiftedClock
from tests.harness.core import HOUR, Core, core, make_settings
from tests.harness.waiting import until

LONG = 60.0
"""Seconds that no test reaches."""
FOREVER = "import signal, sys; print('up', flush=True); signal.pause()"
STUBBORN = ["/bin/sh", "-c", "trap '' TERM; sleep 1000 & echo $!; wait"]
"""A shell heeds nothing sooner than a Python would."""


def python(code: str) -> list[str]:
    """A command line that runs some Python; what the runner adds are its arguments."""
    return [sys.executable, "-c", code]


# The child.


async def run(command: list[str], environment: Mapping[str, str], within: float) -> tuple[ChildEnd, Sequence[str]]:
    """Run a child; return how it ended, and its last lines."""
    output = ChildLog()
    return await run_child(command, environment, within, output.read), tuple(output.last_lines)


async def test_a_child_runs_in_a_group_with_lower_priority() -> None:
    code = "import os, sys; print(os.getpriority(os.PRIO_PROCESS, 0), os.getpgid(0) == os.getpid()); sys.exit(3)"
    ended, lines = await run(python(code), os.environ, LONG)
    assert ended == ChildEnd(3, timed_out=False)
    assert lines == (f"{min(19, os.getpriority(os.PRIO_PROCESS, 0) + child.NICE)} True",)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties processes to cores")
async def test_a_child_and_what_it_starts_have_one_core() -> None:
    code = "import os, subprocess; subprocess.run(['nproc']); print(os.sched_getaffinity(0))"
    _, lines = await run(python(code), {"PATH": os.environ["PATH"]}, LONG)
    assert lines == ("1", str({max(os.sched_getaffinity(0))}))


async def test_a_child_gets_only_the_given_environment() -> None:
    _, lines = await run(python("import os; print(os.environ.get('HOME'), os.environ['ONE'])"), {"ONE": "1"}, LONG)
    assert lines == ("None 1",)


async def test_much_output_of_a_child_is_bounded_in_the_log() -> None:
    code = "import sys; [print('x' * 100_000 if n == 5 else n) for n in range(1000)]; print('last', file=sys.stderr)"
    with capture_logs() as logs:
        ended, lines = await run(python(code), os.environ, LONG)
    said = [entry["text"] for entry in logs if entry["event"] == "pipeline output"]
    assert ended.code == 0
    # Two streams on one pipe: what is on the second comes when it likes.
    assert "last" in {*lines, *said}
    assert len(said) == MAX_LINES
    assert max(map(len, said)) == MAX_LINE
    assert [entry["lines"] for entry in logs if entry["event"] == "more output of the pipeline"] == [1001 - MAX_LINES]


async def test_a_child_whose_time_is_over_is_ended() -> None:
    ended, _ = await run(python(FOREVER), os.environ, 0.2)
    assert ended == ChildEnd(-signal.SIGTERM, timed_out=True)


async def test_one_that_does_not_heed_is_killed_with_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE_SECONDS", 0.3)
    # With a low priority a busy machine may not get so far as to ignore the signal.
    monkeypatch.setattr(child, "NICE", 0)
    ended, lines = await run(STUBBORN, os.environ, 2.0)
    assert ended == ChildEnd(-signal.SIGKILL, timed_out=True)
    inner = int(lines[0])
    await until(lambda: process_name(inner) == "")


async def test_a_child_that_is_given_up_is_ended() -> None:
    running = asyncio.create_task(run(python(FOREVER), os.environ, LONG))
    with capture_logs() as logs:
        await until(lambda: logs)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not waiting()


async def test_a_child_that_is_given_up_twice_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second cancel, while the child has time to end, once left it running."""
    monkeypatch.setattr(child, "GRACE_SECONDS", 0.3)
    output = ChildLog()
    running = asyncio.create_task(run_child(STUBBORN, os.environ, LONG, output.read))
    await until(lambda: output.last_lines)
    running.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not waiting()
    inner = int(output.last_lines[0])
    await until(lambda: process_name(inner) == "")


async def test_a_program_that_is_not_there_is_an_error_with_its_name() -> None:
    ended, lines = await run(["/nowhere/python"], os.environ, LONG)
    assert ended.code == 1
    assert lines == ("/nowhere/python: No such file or directory",)


def children() -> list[int]:
    """The processes whose parent is this one; the kernel's own list of them may miss some while others end."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent(pid) == os.getpid()]


def parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def waiting() -> list[int]:
    """The children that run :data:`FOREVER`, but those that are about to: exec shows no command for a moment."""
    return [pid for pid in children() if command_line(pid)[1:] == ["-c", FOREVER]]


def command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:3]
    return []


# Processes.


async def test_a_process_is_known_from_one_that_got_its_number_later() -> None:
    process = await asyncio.create_subprocess_exec(*python("input()"), stdin=asyncio.subprocess.PIPE)
    name = process_name(process.pid)
    assert not is_gone(name, ours=True)
    assert not is_gone(process_name(), ours=True)
    *place, start = name.split()
    assert is_gone(" ".join([*place, str(int(start) + 1)]), ours=False)
    process.kill()
    await process.wait()
    assert process_name(process.pid) == ""
    assert is_gone(name, ours=False)


@pytest.mark.parametrize("name", ["another-boot pid:[1] 1 1", "", "x", "\ud800"])
def test_only_our_own_processes_are_known_to_be_gone(name: str) -> None:
    assert is_gone(name, ours=True)
    assert not is_gone(name, ours=False)


# Rounds.


@contextlib.asynccontextmanager
async def rounds(
    home: Core, program: Sequence[str], *, every: int = 1, minutes: int = 60, **pipeline: str
) -> AsyncIterator[tuple[PipelineScheduler, RunHistory]]:
    pipeline_settings = {"every": every, "max_minutes": minutes, **pipeline}
    settings = make_settings(data_dir=home.data_dir, instance="here", pipeline=pipeline_settings)
    book = RunHistory(home.broker, "here", home.metrics)
    made = PipelineScheduler(book, home.broker, settings, program)
    try:
        yield made, book
    finally:
        await made.stop()


async def ran(made: PipelineScheduler, book: RunHistory) -> list[Run]:
    """Have a round done and return the runs, the oldest first."""
    await made.start_due()
    await until(lambda: not made.task.running)
    return (await book.newest())[::-1]


async def test_a_round_has_its_order_and_comes_again_when_it_is_time(tmp_path: Path) -> None:
    clock = ShiftedClock()
    async with core(tmp_path, clock) as home, rounds(home, python("")) as (made, book):
        runs = await ran(made, book)
        assert [run.command for run in runs] == list(SCHEDULED)
        assert {(run.outcome, run.error, run.instance) for run in runs} == {(Outcome.SUCCEEDED, "", "here")}
        assert runs[0].arguments == ("--data-dir", str(tmp_path))
        assert all(run.started_at <= (run.ended_at or 0) for run in runs)
        clock.ahead = HOUR - 60_000
        assert len(await ran(made, book)) == len(SCHEDULED)
        clock.ahead = 2 * HOUR
        assert [run.command for run in await ran(made, book)] == [*SCHEDULED, *SCHEDULED]
        assert home.value("mediator_pipeline_runs_total", outcome="succeeded") == 2 * len(SCHEDULED)


async def test_the_program_gets_what_it_needs_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIATOR_CONFIG", "/nowhere.toml")
    monkeypatch.setenv("MEDIATOR_TENANTS__A__API_TOKENS", '["HUSH-HUSH-HUSH-HUSH"]')
    monkeypatch.setenv("MEDIATOR_SPARK_MASTER", "local[1]")
    code = (
        "import json, os, sys; told = {k: v for k, v in os.environ.items() if k.startswith('MEDIATOR_')}\n"
        "open('%s', 'a').write(json.dumps([sys.argv[1:], told]) + '\\n')" % (tmp_path / "told")
    )
    keys = tmp_path / "keys"
    async with core(tmp_path) as home, rounds(home, python(code), archive_key_file=str(keys)) as (made, book):
        runs = await ran(made, book)
    told: list[list[Any]] = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [arguments for arguments, _ in told] == [
        ["pipeline", command, "--data-dir", str(tmp_path)] for command in SCHEDULED
    ]
    assert [environment for _, environment in told] == [
        {
            "MEDIATOR_SPARK_MASTER": "local[1]",
            "MEDIATOR_INSTANCE": "here",
            "MEDIATOR_PIPELINE__DELIVERY_GOAL_SECONDS": "60",
            "MEDIATOR_PIPELINE__ARCHIVE_KEY_FILE": str(keys),
            RUN_VARIABLE: str(run.id),
        }
        for run in runs
    ]


async def test_a_failed_run_keeps_its_reason(tmp_path: Path) -> None:
    code = "import sys; print('Traceback'); sys.exit(sys.argv[2] == 'ingest' and 'mediator: no Java was found')"
    async with core(tmp_path) as home, rounds(home, python(code)) as (made, book):
        with capture_logs() as logs:
            run, other = await ran(made, book)
        assert (run.command, run.outcome, run.error) == ("ingest", Outcome.FAILED, "no Java was found")
        # Which does not build on it.
        assert (other.command, other.outcome) == ("archive", Outcome.SUCCEEDED)
        assert home.value("mediator_pipeline_failing") == 1
        assert [entry["reason"] for entry in logs if entry["event"] == "pipeline run failed"] == ["no Java was found"]
        assert len(await ran(made, book)) == 2
        [finding] = await RunOperations(book, 1).examine()
        assert finding.level == "problem"
        assert "mediator pipeline ingest" in finding.text
        assert "no Java was found" in finding.text
        [finding] = await RunOperations(book, 0).examine()
        assert finding.level == "note"
        # One that is run by hand and succeeds ends the alarm.
        no = await book.begin("ingest", [], process_name())
        await book.end(no, Outcome.SUCCEEDED, {"events": 5}, "")
        assert home.value("mediator_pipeline_failing") == 0


async def test_a_child_that_is_killed_is_known_to_be(tmp_path: Path) -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    async with core(tmp_path) as home, rounds(home, python(code)) as (made, book):
        run, _ = await ran(made, book)
    assert (run.outcome, run.error) == (Outcome.KILLED, "ended by SIGKILL")


async def test_a_child_past_its_time_is_recorded_as_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with core(tmp_path) as home, rounds(home, python(FOREVER), minutes=1) as (made, book):
        # The same way, with a minute that is over soon.
        monkeypatch.setattr("pipeline.service._MINUTE", 0.005)
        run, _ = await ran(made, book)
        assert run.outcome is Outcome.KILLED
        assert run.error == "time limit exceeded: pipeline.max_minutes is 1"
        assert run.ended_at is not None


async def test_never_two_at_once_whoever_runs_them(tmp_path: Path) -> None:
    async with core(tmp_path) as home, rounds(home, python(FOREVER)) as (made, book):
        await made.start_due()
        await until(waiting)
        await made.start_due()
        async with rounds(home, python("")) as (other, _):
            assert len(await ran(other, book)) == 1
        assert len(waiting()) == 1


async def test_a_service_that_stops_ends_its_child(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        async with rounds(home, python(FOREVER)) as (made, book):
            await made.start_due()
            await until(waiting)
        assert not waiting()
        # Of a service that is gone it shows as killed; this process lives on.
        [run] = await book.newest()
        assert (run.outcome, run.process) == (Outcome.RUNNING, process_name())


async def test_a_run_cut_off_by_the_end_is_killed_and_begun_again(tmp_path: Path) -> None:
    clock = ShiftedClock()
    async with core(tmp_path, clock) as home, rounds(home, python(""), every=24) as (made, book):
        process = await asyncio.create_subprocess_exec(*python("input()"), stdin=asyncio.subprocess.PIPE)
        await book.begin("ingest", [], process_name(process.pid))
        [run] = await ran(made, book)
        assert run.outcome is Outcome.RUNNING
        process.kill()
        await process.wait()
        run, other = await ran(made, book)
        assert (run.outcome, run.ended_at) == (Outcome.KILLED, None)
        assert other.command == "archive"
        clock.ahead = HOUR
        assert [run.command for run in await ran(made, book)] == ["ingest", "archive", "ingest", "report"]


async def test_a_child_that_tells_its_own_end_has_the_last_word(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys; from pathlib import Path; from mediator.operate.control import send_command\n"
        f"asyncio.run(send_command(Path(sys.argv[-1]), 'run-end', run=int(os.environ['{RUN_VARIABLE}']),"
        " outcome='succeeded',"
        " numbers={'events': 7}))"
    )
    async with core(tmp_path) as home, rounds(home, python(code)) as (made, book):
        home.operations.add_methods(RunOperations(book, 1))
        runs = await ran(made, book)
        assert [run.numbers for run in runs] == [{"events": 7}] * len(SCHEDULED)
        assert home.value("mediator_pipeline_runs_total", outcome="succeeded") == len(SCHEDULED)
        [finding] = await RunOperations(book, 1).examine()
        assert finding.level == "ok"


async def test_a_program_that_cannot_be_started_is_a_failed_run(tmp_path: Path) -> None:
    async with core(tmp_path) as home, rounds(home, [str(tmp_path / "absent")]) as (made, book):
        run, _ = await ran(made, book)
    assert (run.outcome, run.error) == (Outcome.FAILED, f"{tmp_path / 'absent'}: No such file or directory")


async def test_an_operator_starts_a_run_and_cancels_it(tmp_path: Path) -> None:
    async with core(tmp_path) as home, rounds(home, python(FOREVER)) as (made, book):
        home.operations.add_methods(RunOperations(book, 1))
        home.operations.add_methods(PipelineOperations(made, tmp_path, 1))
        assert "name: expected ingest" in (await home.ask("run-start", name="compact"))["error"]
        no = (await home.ask("run-start", name="report"))["run"]
        await until(waiting)
        assert (await home.ask("pipeline-state"))["running"] == {"run": no, "command": "report"}
        assert "already running: pipeline report" in (await home.ask("run-start", name="ingest"))["error"]
        assert (await home.ask("run-cancel"))["cancelled"]
        assert not waiting()
        shown = await until(lambda: ended(home, no))
        assert (shown["outcome"], shown["error"]) == ("killed", "cancelled by an operator")
        assert not (await home.ask("run-cancel"))["cancelled"]
        assert "run not found" in (await home.ask("run-show", run=no + 1))["error"]


async def ended(home: Core, no: int) -> dict[str, Any] | None:
    shown = await home.ask("run-show", run=no)
    return shown if shown["ended_at"] else None


async def test_a_failed_run_keeps_the_end_of_its_output(tmp_path: Path) -> None:
    code = "print('one'); print('password=hush'); raise SystemExit(3)"
    async with core(tmp_path) as home, rounds(home, python(code)) as (made, book):
        home.operations.add_methods(RunOperations(book, 1))
        run, _ = await ran(made, book)
        assert (await home.ask("run-show", run=run.id))["log"] == ["one", "password=…"]


# The control socket.


@pytest.mark.parametrize(
    ("command", "fields", "error"),
    [
        ("run-begin", {}, "name: expected a command of the pipeline"),
        ("run-begin", {"name": "x", "arguments": "y"}, "arguments: expected array"),
        ("run-begin", {"name": "x", "arguments": [1]}, "arguments[0]: expected string"),
        ("run-begin", {"name": "x", "process": "p" * 201}, "process: expected at most 200 characters"),
        ("run-end", {"run": 1}, "outcome: expected a value, there is none"),
        ("run-end", {"run": 1, "outcome": "running"}, "outcome: expected succeeded, failed, killed"),
        ("run-end", {"run": 0, "outcome": "failed"}, "run: expected 1 to 9223372036854775807"),
        ("run-end", {"run": 1, "outcome": "failed", "numbers": []}, "numbers: expected object"),
        ("run-end", {"run": 1, "outcome": "failed", "numbers": {"a": "b"}}, "numbers.a: expected number"),
        ("run-end", {"run": 1, "outcome": "failed", "error_text": 1}, "error_text: expected string"),
        ("run-list", {"limit": 1001}, "limit: expected 1 to 1000"),
    ],
)
async def test_what_is_asked_wrongly_is_refused_and_changes_nothing(
    tmp_path: Path, command: str, fields: dict[str, Any], error: str
) -> None:
    async with core(tmp_path) as home:
        book = RunHistory(home.broker, "here", home.metrics)
        home.operations.add_methods(RunOperations(book, 0))
        no = await book.begin("ingest", [], process_name())
        assert no == 1
        assert await home.ask(command, **fields) == {"error": error}
        [run] = await book.newest()
        assert run.outcome is Outcome.RUNNING


async def test_a_run_over_the_socket_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        home.operations.add_methods(RunOperations(RunHistory(home.broker, "here", home.metrics), 0))
        begun = await home.ask(
            "run-begin", name="replay", arguments=["--password", "HUSH", *["x"] * 100], process=process_name()
        )
        assert await home.ask("run-end", run=begun["run"] + 1, outcome="failed") == {"error": "", "ended": False}
        [shown] = (await home.ask("run-list", limit=5))["runs"]
        assert shown["outcome"] == "running"
        assert shown["arguments"][:2] == ["--password", "…"]
        assert len(shown["arguments"]) == 65
        end = {"run": begun["run"], "outcome": "failed", "numbers": {"rows": 3, "seconds": 0.5}}
        assert (await home.ask("run-end", **end, error_text="no\nroom"))["ended"]
        assert not (await home.ask("run-end", **end))["ended"]
        [shown] = (await home.ask("run-list", limit=5))["runs"]
        assert (shown["outcome"], shown["numbers"], shown["error"]) == ("failed", end["numbers"], "no room")
        assert shown["started_at"] <= shown["ended_at"]
