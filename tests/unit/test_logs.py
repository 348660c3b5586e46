"""Log lines: both forms, UTC, and that payloads, secrets and whole addresses never stand in them (A7)."""

import io
import json
import logging
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog

from mediator.errors import NoSuchMailboxError, NotAllowedError
from mediator.mailboxes.address import redact
from mediator.operate import logs
from mediator.operate.logs import LogOperations
from mediator.operate.operations import Actor, Operations, Right

ADDRESS = "kx7fsecretaddressofsomebody"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(form: Literal["console", "json"] = "json", level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    logs.setup(level, form, stream)
    return stream


def only(stream: io.StringIO) -> dict[str, Any]:
    [line] = stream.getvalue().splitlines()
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_a_json_line_has_event_level_logger_and_utc_time() -> None:
    stream = lines()
    structlog.get_logger("mediator.test").warning("disk full", free=3)
    line = only(stream)
    assert (line["event"], line["level"], line["logger"], line["free"]) == ("disk full", "warning", "mediator.test", 3)
    at = datetime.fromisoformat(line["timestamp"])
    assert at.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)


@pytest.mark.parametrize("form", ["console", "json"])
def test_secrets_are_taken_out_of_both_forms(form: Literal["console", "json"]) -> None:
    stream = lines(form)
    structlog.contextvars.bind_contextvars(token="secret-token")
    structlog.get_logger().info(
        "stored",
        payload=b"secret-payload",
        headers={"x": "secret-header"},
        password="secret-password",
        address=ADDRESS,
        mail_address=ADDRESS,
        request={"payload": "secret-nested", "mail_address": ADDRESS, "items": [{"token": "secret-deep"}]},
        deep={"a": {"b": {"c": {"d": {"e": {"payload": "secret-depth"}}}}}},
    )
    text = stream.getvalue()
    assert "secret" not in text
    assert text.count(redact(ADDRESS)) == 3
    assert logs.HIDDEN in text


def test_an_address_that_is_no_text_is_hidden_whole() -> None:
    stream = lines()
    structlog.get_logger().info("odd", address=[ADDRESS])
    assert only(stream)["address"] == logs.HIDDEN


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_shows_no_variables_rows_or_addresses(form: Literal["console", "json"]) -> None:
    payload, said = "secret-local", "disk I/O error\nDETAIL: row (secret-row)"

    def failing(local: str) -> None:
        try:
            raise NoSuchMailboxError(ADDRESS)
        except NoSuchMailboxError as error:
            raise ValueError(said) from error

    stream = lines(form)
    try:
        failing(payload)
    except ValueError:
        structlog.get_logger().exception("commit failed")
    text = stream.getvalue()
    assert "secret" not in text
    assert "ValueError: disk I/O error" in text
    assert "NoSuchMailboxError: mailbox_not_found" in text
    assert "in failing" in text


def test_exceptions_in_a_group_are_all_told() -> None:
    stream = lines()
    try:
        raise ExceptionGroup("two", [ValueError("one thing"), KeyError("another")])
    except ExceptionGroup:
        structlog.get_logger().exception("failed")
    told = only(stream)["exception"]
    assert "ValueError: one thing" in told
    assert "KeyError: 'another'" in told


def test_lines_of_libraries_come_in_the_same_form() -> None:
    stream = lines()
    logging.getLogger("apscheduler.executors").info("ran a job")
    logging.getLogger("nats").error("gone %s", "away")
    line = only(stream)
    assert (line["event"], line["level"], line["logger"]) == ("gone away", "error", "nats")


def test_less_severe_lines_are_left_out() -> None:
    stream = lines(level="warning")
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert only(stream)["event"] == "loud"


def test_setting_up_again_replaces() -> None:
    first = lines()
    second = lines("console", "debug")
    structlog.get_logger().debug("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_a_value_json_does_not_know_is_written_as_text() -> None:
    stream = lines()
    structlog.get_logger().info("odd", what={1, 2}, keys={3: object})
    assert only(stream)["what"] == "{1, 2}"


# The last lines, for operators.


async def recent(**fields: Any) -> list[dict[str, Any]]:
    operations = Operations()
    operations.add_methods(LogOperations())
    operator = Actor("ada", frozenset({Right.READ, Right.OPERATE}), "token")
    answer = await operations.run(operator, "log", {"limit": logs.MAX_RECENT, **fields})
    return list(answer["lines"])


async def test_operators_see_the_last_lines_as_they_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_recent", deque(maxlen=logs.MAX_RECENT))
    stream = lines()
    log = structlog.get_logger("push")
    log.info("one", mail_address=ADDRESS, token="secret", count=2, path=Path("/x"))
    logging.getLogger("library").warning("two %s", "words")
    log.error("x" * 100_000, long="y" * 100_000)
    log.debug("below the level")
    found = await recent()
    assert [(each["level"], each["logger"], each["event"][:10]) for each in found] == [
        ("error", "push", "x" * 10),
        ("warning", "library", "two words"),
        ("info", "push", "one"),
    ]
    assert found[2]["fields"] == {"mail_address": redact(ADDRESS), "token": logs.HIDDEN, "count": 2, "path": "/x"}
    assert all(len(json.dumps(each)) < 3 * logs.MAX_RECENT_TEXT for each in found)
    assert [each["event"] for each in await recent(level="warning")][1:] == ["two words"]
    assert len(stream.getvalue().splitlines()) == 3
    for number in range(2 * logs.MAX_RECENT):
        log.info("many", number=number)
    found = await recent()
    assert [each["fields"]["number"] for each in found[:: logs.MAX_RECENT - 1]] == [999, 500]


@pytest.mark.parametrize("right", [right for right in Right if right is not Right.OPERATE])
async def test_who_may_not_operate_reads_no_log(right: Right) -> None:
    operations = Operations()
    operations.add_methods(LogOperations())
    with pytest.raises(NotAllowedError):
        await operations.run(Actor("ben", frozenset({right}), "token"), "log", {})
