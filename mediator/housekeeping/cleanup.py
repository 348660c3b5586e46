"""The clean-up as a service of its own: ``mediator cleanup``.

An SQLite file has one owner. When that is a running service, it is asked to clean up; when nobody owns the file, it is
opened here, for one pass at a time, so that a service that starts finds it free. On PostgreSQL any number may run.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import structlog

from mediator.broker import Broker, wall_clock
from mediator.errors import MediatorError, SetupError, StoreHeldError, UnavailableError
from mediator.housekeeping.collector import Collector
from mediator.journal import Journal
from mediator.metrics import Metrics
from mediator.operators.control import ask
from mediator.scheduler import PASS_SECONDS
from mediator.settings import Settings
from mediator.settings_push import DAY
from mediator.store.opening import database_path, open_store

START_SECONDS = 10.0
"""How long a file may be held by one who does not answer yet: a service that is starting, or another pass."""
RETRY_SECONDS = 0.1

Say = Callable[[str], None]
Give = Callable[[dict[str, Any]], None]

_log = structlog.get_logger("cleanup")


async def run(
    settings: Settings, *, daemon: bool, dry_run: bool, confirm_clock: bool, say: Say, give: Give | None = None
) -> int:
    """Clean up once, or with ``daemon`` until SIGTERM or SIGINT; ``say`` gets lines for the operator.

    ``give`` gets the answer as it is instead, but for the daemon's.

    ``dry_run`` removes nothing and says what would go and why; ``confirm_clock`` lets a service that paused expiry go
    on. Returns the exit code. Raises :class:`MediatorError` when it cannot be done.
    """
    if daemon + dry_run + confirm_clock > 1:
        raise SetupError("cleanup: expected one of --daemon, --dry-run and --confirm-clock")
    if confirm_clock:
        answer = await _asked(settings, "confirm-clock")
        if give is not None:
            give(answer)
            return 0
        ahead = answer["ahead_seconds"]
        say(f"confirmed: the clock is right; it had jumped {ahead} s ahead" if ahead else "expiry was not paused")
        return 0
    if daemon:
        with _until_signal():
            await _again_and_again(settings, say)
        return 0
    if dry_run:
        answer = await _turn(settings, "cleanup-plan", lambda broker: _plan(_collector(settings), broker))
        give(answer) if give is not None else _say_plan(answer, say)
        return 0
    collector = _collector(settings)
    answer = await _turn(settings, "cleanup", lambda broker: _pass(collector, broker))
    give(answer) if give is not None else say(_removed(answer["removed"]) or "nothing to remove")
    return 0


async def _again_and_again(settings: Settings, say: Say) -> None:
    # Kept between passes: it knows how the clock stood, and a restart confirms what it is now.
    collector = _collector(settings)
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
                say("the clean-up works again")
            if removed := _removed(answer["removed"]):
                say(removed)
        await asyncio.sleep(settings.cleanup.interval_seconds)


_Work = Callable[[Broker], Any]


async def _turn(settings: Settings, command: str, work: _Work) -> dict[str, Any]:
    """Have the owner of the file do it, or be the owner for as long as it takes."""
    if settings.database_url is not None:
        return await _own(settings, work)
    end = asyncio.get_running_loop().time() + START_SECONDS
    while True:
        try:
            return await _asked(settings, command)
        except SetupError as nobody:
            if not database_path(settings.data_dir).exists():
                raise SetupError(f"data_dir: no database in {settings.data_dir}, and {nobody}") from None
        try:
            return await _own(settings, work)
        except StoreHeldError:
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(RETRY_SECONDS)


async def _asked(settings: Settings, command: str) -> dict[str, Any]:
    """Have the service do it; :class:`SetupError` when none listens, else the error is the service's own."""
    answer = await ask(settings.data_dir, command, within=PASS_SECONDS)
    if answer["error"]:
        raise UnavailableError(answer["error"].removeprefix("unavailable: "))
    return answer


async def _own(settings: Settings, work: _Work) -> dict[str, Any]:
    async with _opened(settings) as broker:
        answer: dict[str, Any] = await work(broker)
        return answer


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[Broker]:
    # Not on another thread: given up while it opens, the file would stay held.
    store = open_store(settings)
    try:
        owner = settings.database_url is None
        # Its owner tells as the service would; who only shares it leaves that to the services.
        name = settings.instance if owner else f"{settings.instance[:48]}.cleanup.{os.getpid()}"
        journal = Journal(settings.journal, settings.data_dir, name, Metrics())
        broker = Broker(store, settings.bounds, observers=[journal.observe] if settings.journal.enabled else [])
        try:
            if owner:
                await journal.start(broker)
            else:
                journal.leave_to_others(broker.clock())
            try:
                yield broker
            finally:
                await journal.stop()
        finally:
            await broker.close()
    finally:
        store.close()


def _collector(settings: Settings) -> Collector:
    keep = settings.push.keep_days * DAY
    return Collector(wall_clock(), settings.didcomm.forget_after, settings.registry.liveness, keep_groups=keep)


async def _pass(collector: Collector, broker: Broker) -> dict[str, Any]:
    removed = await collector.run(broker)
    await broker.upkeep()
    return {"removed": dict(removed)}


async def _plan(collector: Collector, broker: Broker) -> dict[str, Any]:
    findings = await collector.plan(broker)
    return {"findings": [asdict(finding) for finding in findings], "paused": None}


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
    return f"{where}, time over {at.isoformat(sep=' ', timespec='seconds')}"


@contextmanager
def _until_signal() -> Iterator[None]:
    """End what runs in here in good order at SIGTERM and SIGINT."""
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
