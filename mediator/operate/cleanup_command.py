"""The clean-up as a command of its own: ``mediator cleanup``.

An SQLite file has one owner. A running service is asked to clean up; without one, the file is opened for one pass at a
time, so that a starting service finds it free. On PostgreSQL any number of processes may clean up.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import structlog

from mediator.broker import Broker, wall_clock
from mediator.cleanup.clock import ClockRecord
from mediator.cleanup.collector import CleanupStep, Collector
from mediator.errors import MediatorError, SetupError
from mediator.mailboxes.bounds import DAY
from mediator.operate.access import OldEndedSessions
from mediator.operate.audit import OldAudits
from mediator.operate.scheduler import PASS_SECONDS
from mediator.operate.store_access import ask_or_do, ask_service, open_broker
from mediator.settings.settings import Settings

Say = Callable[[str], None]
Give = Callable[[dict[str, Any]], None]

_log = structlog.get_logger("cleanup")


async def run(
    settings: Settings,
    steps_of_parts: Sequence[CleanupStep],
    *,
    daemon: bool,
    dry_run: bool,
    confirm_clock: bool,
    say: Say,
    give: Give | None = None,
) -> int:
    """Clean up once, or with ``daemon`` until SIGTERM or SIGINT; ``say`` gets lines for the operator.

    ``give``, if any, gets the answer of a single pass as a dictionary instead. ``dry_run`` only reports what would be
    removed and why; ``confirm_clock`` resumes expiry that a service paused. Returns the exit code; raises
    :class:`MediatorError`.
    """
    if daemon + dry_run + confirm_clock > 1:
        raise SetupError("cleanup: expected one of --daemon, --dry-run and --confirm-clock")
    if confirm_clock:
        answer = await ask_service(settings, "confirm-clock", within=PASS_SECONDS)
        if give is not None:
            give(answer)
            return 0
        ahead = answer["ahead_seconds"]
        say(f"confirmed: the clock is right; it had jumped {ahead} s ahead" if ahead else "expiry was not paused")
        return 0
    if daemon:
        with _until_signal():
            await _again_and_again(settings, steps_of_parts, say)
        return 0
    collector = _collector(settings, steps_of_parts)
    if dry_run:
        answer = await _turn(settings, "cleanup-plan", lambda broker: _plan(collector, broker))
        give(answer) if give is not None else _say_plan(answer, say)
        return 0
    answer = await _turn(settings, "cleanup", lambda broker: _pass(collector, broker))
    give(answer) if give is not None else say(_removed(answer["removed"]) or "nothing to remove")
    return 0


async def _again_and_again(settings: Settings, steps_of_parts: Sequence[CleanupStep], say: Say) -> None:
    # Kept between passes, since it watches the clock.
    collector = _collector(settings, steps_of_parts)
    trouble = ""
    while True:
        try:
            answer = await _turn(settings, "cleanup", lambda broker: _pass(collector, broker))
        except MediatorError as error:
            if str(error) != trouble:
                trouble = str(error)
                say(trouble)
        else:
            if trouble:
                trouble = ""
                say("clean-up works again")
            if removed := _removed(answer["removed"]):
                say(removed)
        await asyncio.sleep(settings.cleanup.interval_seconds)


_Work = Callable[[Broker], Any]


async def _turn(settings: Settings, command: str, work: _Work) -> dict[str, Any]:
    """Let the service do it, or own the file for as long as it takes; PostgreSQL is shared, so nobody is asked."""

    async def do() -> dict[str, Any]:
        async with open_broker(settings, "cleanup") as broker:
            answer: dict[str, Any] = await work(broker)
            return answer

    if settings.database_url is not None:
        return await do()
    return await ask_or_do(settings, command, {}, do, within=PASS_SECONDS)


def all_steps(settings: Settings, of_parts: Sequence[CleanupStep]) -> list[CleanupStep]:
    """Return what the clean-up does beside the mailboxes: for the parts, the audit log, and sessions that ended."""
    return [*of_parts, OldAudits(settings.operators.audit_days), OldEndedSessions()]


def _collector(settings: Settings, of_parts: Sequence[CleanupStep]) -> Collector:
    return Collector(
        wall_clock(),
        all_steps(settings, of_parts),
        keep_groups=settings.push.keep_days * DAY,
        instance=settings.instance,
        record=ClockRecord(settings.data_dir),
    )


async def _pass(collector: Collector, broker: Broker) -> dict[str, Any]:
    removed = await collector.run(broker)
    await broker.upkeep()
    return {"removed": dict(removed)}


async def _plan(collector: Collector, broker: Broker) -> dict[str, Any]:
    findings = await collector.plan(broker)
    return {"findings": [asdict(finding) for finding in findings], "paused": collector.paused}


def _removed(removed: dict[str, int]) -> str:
    words = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(removed.items()))
    return f"removed {words}" if words else ""


def _say_plan(answer: dict[str, Any], say: Say) -> None:
    if answer["paused"]:
        say(answer["paused"])
    for finding in answer["findings"]:
        count = f"at least {finding['count']}" if finding["more"] else str(finding["count"])
        say(f"{count} {finding['what']}: {finding['why']}")
        for example in finding["examples"]:
            say(f"  {_shown(example)}")
    if not answer["findings"]:
        say("nothing to remove")


def _shown(example: dict[str, Any]) -> str:
    where = f"{example['tenant']}/{example['address'] or '(no address)'} number {example['number']}"
    if example["expired_at"] is None:
        return where
    at = datetime.fromtimestamp(example["expired_at"] / 1000, UTC)
    return f"{where}, expired {at.isoformat(sep=' ', timespec='seconds')}"


@contextmanager
def _until_signal() -> Iterator[None]:
    """Cancel the body at SIGTERM and SIGINT, and return normally."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    signalled = False

    def stop() -> None:
        nonlocal signalled
        signalled = True
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    except asyncio.CancelledError:
        if not signalled:
            raise
        task.uncancel()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    _log.info("stopped", pid=os.getpid())
