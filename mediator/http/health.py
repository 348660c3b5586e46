"""Health checks: named, run concurrently, each with a time limit."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from mediator.errors import MediatorError

Check = Callable[[], Awaitable[str | None]]
"""Returns None, or in a few words what is wrong; everybody who can reach /readyz sees them."""

CHECK_SECONDS = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The results of the checks: for each name ``ok``, or what is wrong."""

    checks: dict[str, str] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether every check passed."""
        return all(result == "ok" for result in self.checks.values())


class Health(Collector):
    """Runs the checks. As a collector it gives Prometheus the last report."""

    def __init__(self, timeout: float = CHECK_SECONDS) -> None:
        """``timeout``: seconds that a report waits for the checks."""
        self._timeout = timeout
        self._checks: dict[str, Check] = {}
        self._waits_for: dict[str, Callable[[], str | None] | None] = {}
        self._running: dict[str, asyncio.Task[str]] = {}
        self._last = HealthReport()

    def add(self, name: str, check: Check, waits_for: Callable[[], str | None] | None = None) -> None:
        """Run ``check`` from now on; an earlier one of the same name is replaced.

        ``waits_for`` says why the check is late, where that is known.
        """
        self._checks[name], self._waits_for[name] = check, waits_for

    async def report(self) -> HealthReport:
        """Run every check and report within the timeout.

        A check that is still running is not started again; all reports meanwhile wait for the same result.
        """
        for name, check in self._checks.items():
            running = self._running.get(name)
            if running is None or running.done():
                self._running[name] = asyncio.create_task(_run(name, check), name=f"health-{name}")
        tasks = {name: self._running[name] for name in self._checks}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=self._timeout)
        self._last = HealthReport({n: t.result() if t.done() else self._late(n) for n, t in tasks.items()})
        return self._last

    def _late(self, name: str) -> str:
        waits_for = self._waits_for[name]
        return (waits_for and waits_for()) or f"no answer within {self._timeout:g} s"

    async def close(self) -> None:
        """Cancel the checks that are still running."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the last report as series."""
        yield GaugeMetricFamily("mediator_ready", "1 while every check passes.", value=self._last.ready)
        checks = GaugeMetricFamily("mediator_check_ok", "1 while this check passes.", labels=["check"])
        for name, result in self._last.checks.items():
            checks.add_metric([name], result == "ok")
        yield checks


async def _run(name: str, check: Check) -> str:
    try:
        return await check() or "ok"
    except MediatorError as error:
        return str(error)
    except Exception as error:
        # The text of an unexpected error may name a host or a user, so it goes to the log only.
        _log.warning("health check failed", check=name, exc_info=True)
        return f"failed: {type(error).__name__}"
