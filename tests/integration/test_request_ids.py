"""The id of a request: in the log lines that it causes, and in answers, over NATS and HTTP."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from mediator.mailboxes.mailbox import Kind, Mailbox
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import KindHooks
from mediator.operate import logs
from mediator.request_context import RequestScope, TraceHooks
from tests.harness.app import app
from tests.harness.door import serving

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Log:
    """The lines of a service, as JSON."""

    def __init__(self, level: str) -> None:
        self._stream = io.StringIO()
        logs.setup(level, "json", self._stream)

    def ids(self, event: str) -> list[str | None]:
        """Return the request ids of the lines with an event."""
        lines: list[dict[str, Any]] = [json.loads(line) for line in self._stream.getvalue().splitlines()]
        return [line.get("request_id") for line in lines if line["event"] == event]


@pytest.fixture
def log() -> Iterator[Log]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield Log("debug")
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"X-Request-Id": "a.B_c:9-"}, "a.B_c:9-"),
        ({"x-request-id": "a", "traceparent": PARENT}, "a"),
        ({"Traceparent": PARENT}, TRACE),
        ({"X-Request-Id": "a" * 65, "traceparent": PARENT}, TRACE),
    ],
)
def test_an_id_that_is_given_is_kept(headers: dict[str, str], expected: str) -> None:
    assert RequestScope(headers).id == expected


@pytest.mark.parametrize("headers", [None, {}, {"X-Request-Id": "a b"}, {"X-Request-Id": ""}, {"traceparent": "00-x"}])
def test_a_request_without_a_usable_id_gets_one(headers: dict[str, str] | None) -> None:
    scope = RequestScope(headers)
    assert scope.id == scope.id != RequestScope(headers).id
    assert len(scope.id) == 16


class Broken(TraceHooks):
    """Fails whatever is delivered."""

    def delivered(self, *_args: object) -> None:
        structlog.get_logger("nats").info("before it fails")
        raise ZeroDivisionError


async def test_a_failure_over_nats_names_the_request(tmp_path: Path, log: Log) -> None:
    def broken(_tx: object, _mailbox: Mailbox, _draft: Draft) -> Draft:
        raise ZeroDivisionError

    async with serving(tmp_path) as service:
        await service.create()
        fine = await service.ask("MSG.SEND.task", b"", {"traceparent": PARENT})
        assert "request_id" not in fine
        service.broker.hooks[Kind.STANDARD] = KindHooks(check_send=broken, find_holder=lambda _tx, _mailbox: None)
        service.broker.trace = Broken()
        sent = await service.ask("MSG.SEND.task", b"", {"X-Request-Id": "order-17"})
        fetched = [await service.ask("MSG.FETCH.task", {}) for _ in range(2)]
    assert (sent["error"], sent["request_id"]) == ("internal error", "order-17")
    ids = [reply["request_id"] for reply in fetched]
    assert len(set(ids)) == 2
    # Lines of the same request have the same id, and no other has it.
    assert log.ids("before it fails") == ids
    assert log.ids("request failed") == ["order-17", *ids]
    assert log.ids("request")[-4:] == [TRACE, "order-17", *ids]


async def test_http_answers_name_the_request(tmp_path: Path, log: Log) -> None:
    async with app(tmp_path, didcomm={"enabled": True}) as service:
        plain = await service.call("GET", "/livez")
        named = await service.call("GET", "/livez", X_Request_Id="probe-1")
        refused = await service.call("GET", "/agents/none")
        direct = await service.call("POST", "/didcomm", b"{}", X_Request_Id="bad id")
    assert "X-Request-Id" not in plain.headers
    assert named.headers["X-Request-Id"] == "probe-1"
    ids = [answer.headers["X-Request-Id"] for answer in (refused, direct)]
    assert direct.status == 400
    assert [len(id) for id in ids] == [16, 16]
    assert log.ids("request")[1:] == ["probe-1", *ids]
