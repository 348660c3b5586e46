"""Whether the service can do its work: named checks, run side by side, none of which can hold up the answer."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from mediator.errors import MediatorError

Check = Callable[[], Awaitable[str | None]]
"""Answers None, or in a few words what is wrong; the words are shown to whoever asks for /readyz."""

CHECK_SECONDS = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """What the checks said: for each name ``ok``, or what is wrong."""

    checks: dict[str, str] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether every check is content."""
        return all(said == "ok" for said in self.checks.values())


class Health(Collector):
    """The checks. As a collector it tells Prometheus the last report."""

    def __init__(self, timeout: float = CHECK_SECONDS) -> None:
        """``timeout`` is the seconds one question waits for the checks."""
        self._timeout = timeout
        self._checks: dict[str, Check] = {}
        self._running: dict[str, asyncio.Task[str]] = {}
        self._last = Report()

    def add(self, name: str, check: Check) -> None:
        """Ask ``check`` from now on; a name that is there already is replaced."""
        self._checks[name] = check

    async def report(self) -> Report:
        """Ask every check and answer within the timeout.

        A check that has not answered is not asked again beside itself: who asks meanwhile waits for the same answer.
        """
        for name, check in self._checks.items():
            running = self._running.get(name)
            if running is None or running.done():
                self._running[name] = asyncio.create_task(_ask(name, check), name=f"health-{name}")
        asked = {name: self._running[name] for name in self._checks}
        if asked:
            await asyncio.wait(asked.values(), timeout=self._timeout)
        late = f"no answer within {self._timeout:g} s"
        self._last = Report({name: task.result() if task.done() else late for name, task in asked.items()})
        return self._last

    async def close(self) -> None:
        """Give up the checks that have not answered."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The last report as series."""
        yield GaugeMetricFamily("mediator_ready", "1 while every check is content.", value=self._last.ready)
        checks = GaugeMetricFamily("mediator_check_ok", "1 while this check is content.", labels=["check"])
        for name, said in self._last.checks.items():
            checks.add_metric([name], said == "ok")
        yield checks


async def _ask(name: str, check: Check) -> str:
    try:
        return await check() or "ok"
    except MediatorError as error:
        return str(error)
    except Exception as error:
        # The text of an unexpected error may name a host or a user: it is for the log only.
        _log.warning("health check failed", check=name, exc_info=True)
        return f"failed: {type(error).__name__}"
