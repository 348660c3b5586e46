"""The conformance suite passes against this service at every level, and finds what a broken one does wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.didcomm import SUITE, DidcommSession, Target
from conformance.running import Outcome, Result, run_checks
from pickup.protocols import routing
from pickup.rules import message_queue
from tests.harness.didcomm_service import Door, Invites
from tests.integration.test_didcomm_bad_input import mediating

SECONDS = 60.0
"""For each answer; the machine may be busy."""
FAMILIES = list(dict.fromkeys(check.id.rpartition(".")[0] for check in SUITE))


async def run(invitations: list[str], *only: str, seconds: float = SECONDS) -> list[Result]:
    target = await Target.find(invitations, seconds)
    checks = [check for prefix in only for check in SUITE.select(prefix)]
    return await run_checks(checks, lambda transcript: DidcommSession.open(target, transcript, seconds))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rule("D1", "D2", "D3", "D4", "D5", "D6", "D7", "D8", "D9", "D10", "D12", "D13")
async def test_all_checks_pass(door: Door, invites: Invites, family: str):
    results = await run([invites.v1, invites.v2], f"{family}.")
    failed = [result for result in results if result.outcome is not Outcome.PASSED]
    assert not failed, "\n".join(f"{result.check.id}: {result.detail}\n{result.transcript}" for result in failed)


def drop_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_queue, "acknowledge", lambda *_: 0)


def acknowledge_at_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = message_queue.deliver

    def broken(tx: Any, connection: Any, *more: Any, **named: Any) -> Any:
        messages = deliver(tx, connection, *more, **named)
        message_queue.acknowledge(tx, connection, [message.msg_id for message in messages], 1)
        return messages

    monkeypatch.setattr(message_queue, "deliver", broken)


def acknowledge_when_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    next_arrived = message_queue.next_arrived

    def broken(tx: Any, connection: Any, *more: Any, **named: Any) -> Any:
        messages, cursor = next_arrived(tx, connection, *more, **named)
        message_queue.acknowledge(tx, connection, [message.msg_id for message in messages], 1)
        return messages, cursor

    monkeypatch.setattr(message_queue, "next_arrived", broken)


def count_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    status = message_queue.status

    def broken(*given: Any, **named: Any) -> Any:
        right = status(*given, **named)
        return replace(right, count=right.count + 1)

    monkeypatch.setattr(message_queue, "status", broken)


def lose_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        pass

    monkeypatch.setattr(routing, "forward", broken)


@pytest.mark.parametrize(
    ("breakage", "check"),
    [
        (drop_acknowledgements, "didcomm.pickup2.received-removes"),
        (drop_acknowledgements, "didcomm.pickup3.received-answers-status"),
        (acknowledge_at_delivery, "didcomm.pickup4-v2.unacknowledged-mail-stays"),
        (acknowledge_when_pushed, "didcomm.pickup2.live-mail-unacknowledged-is-queued"),
        (count_one_more, "didcomm.pickup3.status-counts"),
        (lose_forwards, "didcomm.routing.v2-passes-on"),
    ],
    ids=lambda value: value.__name__ if callable(value) else value,
)
async def test_what_is_broken_on_purpose_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breakage: Callable[[pytest.MonkeyPatch], None], check: str
):
    breakage(monkeypatch)
    async with mediating(tmp_path) as door:
        made = await door.invite()
        (result,) = await run([made["v1_url"], made["v2_url"]], check, seconds=2.0)
    assert result.outcome is Outcome.FAILED, result.detail
