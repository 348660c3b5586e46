"""Runs are recorded without secrets and within bounds, and judged by what is known of their processes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import BadRequestError
from mediator.operate.run_history import SCHEDULED
from mediator.operate.runs import (
    GONE,
    HIDDEN,
    MAX_ARGUMENT,
    MAX_ARGUMENTS,
    MAX_ERROR,
    Outcome,
    Run,
    find_failed,
    new_ending,
    new_run,
    next_due,
    resolve_outcomes,
    without_secrets,
)

T0 = 1_767_225_600_000
HOUR = 3_600_000
OK, FAILED, KILLED, RUNNING = Outcome.SUCCEEDED, Outcome.FAILED, Outcome.KILLED, Outcome.RUNNING


def run(no: int, outcome: Outcome = OK, command: str = "ingest", at: int = T0, instance: str = "i") -> Run:
    ended = None if outcome is RUNNING else at + 1
    return Run(no, command, (), instance, "p", at, ended, outcome, {}, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--password", "HUSH"],
        ["--nats-password=HUSH"],
        ["--token", "HUSH"],
        ["--conf", "spark.hadoop.fs.s3a.secret.key=HUSH"],
        ["--conf=spark.hadoop.fs.s3a.access.key=HUSH"],
        ["--conf", "spark.ssl.keyPassword=HUSH=="],
        ["--database-url", "postgresql://user:HUSH@host/db"],
        ["--database-url=postgresql://user:HU@SH/HUSH@host/db"],
        ["--conf", "x=postgresql://host/db?user=u&password=HUSH"],
        ["--remote", "sc://host:15002/;token=HUSH;user_id=u"],
        ["host=h user=u password=HUSH"],
        ["--api-key", "-HUSH"],
        ["--server", "user:HUSH@host:4222"],
        ["--server=host:4222,user:HU@SH/HUSH@host:4222"],
        ["--conf", "spark.hadoop.fs.pwd=HUSH"],
    ],
)
def test_a_secret_on_the_command_line_is_left_out(arguments: list[str]) -> None:
    shown = without_secrets([*arguments, "--lake", "/data/lake"])
    assert "HUSH" not in " ".join(shown)
    assert HIDDEN in " ".join(shown)
    assert shown[-2:] == ["--lake", "/data/lake"]


def test_what_is_no_secret_stays_as_it_is() -> None:
    arguments = ["--conf", "spark.driver.memory=2g", "--master", "local[2]", "--remote", "sc://host:15002", "-v", ""]
    assert without_secrets(arguments) == arguments


@given(st.lists(st.text(), max_size=100), st.text())
def test_whatever_is_recorded_is_bounded_lines_of_text(arguments: list[str], error: str) -> None:
    new = new_run("ingest", arguments, "i", "p")
    assert len(new.arguments) <= MAX_ARGUMENTS + 1
    kept = new_ending(FAILED, {}, error)
    for text, limit in [(kept.error, MAX_ERROR), *((argument, MAX_ARGUMENT) for argument in new.arguments)]:
        assert len(text) <= limit
        assert len(text.splitlines()) <= 1
        assert "\0" not in text
        text.encode()


def test_an_error_that_is_too_long_says_that_it_is_cut() -> None:
    assert new_ending(FAILED, {}, "x" * 1000).error == "x" * (MAX_ERROR - 1) + HIDDEN
    assert new_ending(FAILED, {}, "one\n  two\r\n").error == "one two"


@pytest.mark.parametrize("command", ["", "Ingest", "in gest", "-x", "a" * 33, "1"])
def test_what_is_no_command_is_refused(command: str) -> None:
    with pytest.raises(BadRequestError, match=r"^name: "):
        new_run(command, [], "i", "p")


@pytest.mark.parametrize(
    "numbers",
    [
        {"rows": "3"},
        {"rows": True},
        {"rows": None},
        {"rows": float("nan")},
        {"rows": float("-inf")},
        {"rows": 2**63},
        {"Rows": 1},
        {"a b": 1},
        {"": 1},
        {f"n{number}": number for number in range(65)},
    ],
)
def test_what_is_no_number_is_refused(numbers: dict[str, object]) -> None:
    with pytest.raises(BadRequestError, match=r"^numbers"):
        new_ending(OK, numbers, "")


def test_a_run_does_not_end_by_running_on() -> None:
    with pytest.raises(BadRequestError, match=r"^outcome: "):
        new_ending(RUNNING, {}, "")


def test_a_run_without_an_end_whose_process_is_gone_was_killed() -> None:
    runs = [run(4, RUNNING), run(3, RUNNING), run(2), run(1, FAILED)]
    shown = resolve_outcomes(runs, lambda one: one.id != 4)
    assert [one.outcome for one in shown] == [RUNNING, KILLED, OK, FAILED]
    assert [one.error for one in shown] == ["", GONE, "", ""]


def test_trouble_is_a_last_run_that_did_not_succeed() -> None:
    assert find_failed([], "i") == []
    runs = [
        run(9, RUNNING),
        run(8, FAILED, "report"),
        run(7, FAILED, instance="other"),
        run(6),
        run(5, FAILED),
        run(4, KILLED, "compact"),
        run(3, OK, "report"),
    ]
    assert [one.id for one in find_failed(runs, "i")] == [8, 4]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], True),
        ([run(1)], True),
        ([run(1, at=T0 + 1)], False),
        ([run(1, FAILED, at=T0 + 1)], False),
        ([run(2, at=T0 + HOUR), run(1)], False),
        ([run(2), run(1, at=T0 + HOUR)], True),
        ([run(1, RUNNING)], False),
        ([run(2, FAILED), run(1, RUNNING)], False),
        ([run(1, at=T0 + 2 * HOUR)], True),
        ([run(1, at=T0 + 1, command="report")], True),
        ([run(1, RUNNING, instance="other")], True),
        # Ended at its time's end, and cut off by the end of the service.
        ([run(1, KILLED, at=T0 + 1)], False),
        ([replace(run(1, KILLED, at=T0 + 1), ended_at=None)], False),
    ],
)
def test_a_command_is_due_when_its_interval_is_over(runs: list[Run], expected: bool) -> None:
    assert next_due(runs, "i", {"ingest": None}, HOUR, T0 + HOUR) == ("ingest" if expected else None)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], "ingest"),
        ([run(1, at=T0 + 1)], "report"),
        ([run(2, RUNNING, "report"), run(1, at=T0 + 1)], None),
        ([run(2, RUNNING, "ingest", at=T0 + 1)], None),
        ([run(2, RUNNING, "compact"), run(1, at=T0 + 1)], "report"),
        ([run(1, FAILED, at=T0 + 1)], None),
        ([run(2, OK, "report", at=T0 + 2), run(1, at=T0 + 1)], None),
        ([run(2, FAILED, "report", at=T0 + 2), run(1, at=T0 + 1)], None),
        ([run(3, at=T0 + 9), run(2, OK, "report")], "report"),
        ([run(2, OK, "report", at=T0 + 2), run(1)], "ingest"),
    ],
)
def test_commands_that_build_on_each_other_come_in_their_order(runs: list[Run], expected: str | None) -> None:
    assert next_due(runs, "i", {"ingest": None, "report": "ingest"}, HOUR, T0 + HOUR) == expected


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        # Without a journal nothing is ingested, and still mail waits for the archive.
        ([run(1, FAILED, at=T0 + 1)], "archive"),
        ([run(2, FAILED, "archive", at=T0 + 1), run(1, at=T0 + 1)], "report"),
        ([run(2, OK, "archive", at=T0 + 1), run(1, FAILED, at=T0 + 1)], None),
        ([run(2, FAILED, "archive", at=T0 + 1), run(1, FAILED, at=T0 + 1)], None),
    ],
)
def test_what_builds_on_nothing_that_failed_is_run(runs: list[Run], expected: str | None) -> None:
    assert next_due(runs, "i", SCHEDULED, HOUR, T0 + HOUR) == expected


def test_what_was_cut_off_is_begun_again_sooner() -> None:
    killed = run(1, KILLED)
    assert next_due([killed], "i", {"ingest": None}, 24 * HOUR, T0 + HOUR) is None
    cut_off = replace(killed, ended_at=None)
    assert next_due([cut_off], "i", {"ingest": None}, 24 * HOUR, T0 + HOUR) == "ingest"
    assert next_due([cut_off], "i", {"ingest": None}, 24 * HOUR, T0 + HOUR - 1) is None
