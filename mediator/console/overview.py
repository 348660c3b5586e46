"""The overview: what the service does now, the last hour, its instances, and what the doctor warns of."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from aiohttp import web

from mediator.console.console import Console
from mediator.console.pages import Page, Shown, Visit
from mediator.console.streams import Broadcast, event
from mediator.errors import MediatorError
from mediator.operate.activity import LANE_WORDS, PERIOD, Activity, Sample
from mediator.operate.operations import Actor, Answer, Right

FINDINGS_SECONDS: Final = 60.0
"""Between two looks of the doctor for live pages."""
_ITSELF: Final = Actor("console", frozenset({Right.READ}), "local")
"""Reads what all live pages show."""
PLOTS: Final[Sequence[tuple[str, str, int]]] = (
    ("In: messages a second", " ".join(f"incoming.{lane}" for lane in LANE_WORDS), 1),
    ("Out: messages a second delivered", " ".join(f"outgoing.{lane}" for lane in LANE_WORDS), 1),
    ("Acknowledged: messages a second", " ".join(f"acknowledged.{lane}" for lane in LANE_WORDS), 1),
    ("Depth: messages stored", "messages", 1),
    ("Latency of requests, ms", "p99 p50", 1000),
    ("Requests a second, and those that failed", "failed requests", 1),
)
"""Captions, names of the columns of ``activity-history``, and by what they are multiplied."""


class Overview:
    """The page and its live parts, which are rendered once for all who look."""

    def __init__(self, console: Console, activity: Activity) -> None:
        self._console = console
        self._live = Broadcast()
        self._findings: list[Answer] = []
        self._findings_at = 0.0
        activity.listener = self._publish

    def pages(self) -> tuple[Page, ...]:
        """Return the pages."""
        return (
            Page("", "Overview", self._show, group="Service", template="overview.html"),
            Page("/history", "The last hour in numbers", self._history),
            Page("/history.json", "", self._samples),
            Page("/live", "", self._follow),
        )

    async def _show(self, visit: Visit) -> Shown:
        return {
            "plots": PLOTS,
            **_numbers(await visit.run("activity")),
            "found": (await visit.run("installation", quick=True))["findings"],
        }

    async def _history(self, visit: Visit) -> Shown:
        """Show means of each minute: a table of hundreds of rows helps nobody."""
        columns = (await visit.run("activity-history"))["columns"]
        per = 60 // PERIOD
        rows = [
            {"at": values[-1], **{name: _mean(columns[name][start : start + per]) for name in columns if name != "at"}}
            for start in range(0, len(columns["at"]), per)
            if (values := columns["at"][start : start + per])
        ]
        return {"rows": rows[::-1], "lanes": LANE_WORDS}

    async def _samples(self, visit: Visit) -> Shown:
        return web.json_response(body=orjson.dumps(await visit.run("activity-history")))

    async def _follow(self, visit: Visit) -> Shown:
        return await self._console.streams.serve(visit.request, visit.actor, self._live.follow())

    async def _publish(self, sample: Sample) -> None:
        if not self._live.followers:
            return
        run, now = self._console.operations.run, time.monotonic()
        try:
            numbers = _numbers(await run(_ITSELF, "activity", {}))
            if now - self._findings_at > FINDINGS_SECONDS:
                self._findings = (await run(_ITSELF, "installation", {"quick": True}))["findings"]
                self._findings_at = now
        except (MediatorError, TimeoutError):
            # The next sample is tried again; until then, pages show the last one.
            return
        render = self._console.render
        self._live.publish(
            event("facts", await render("console/overview_facts.html", **numbers))
            + event("numbers", await render("console/overview_numbers.html", **numbers))
            + event("findings", await render("console/overview_findings.html", found=self._findings))
            + event("sample", orjson.dumps(dict(sample)).decode())
        )


def _numbers(activity: Answer) -> Mapping[str, Any]:
    """Return what the page shows of the operation's answer."""
    own = activity["instances"][0]
    return {"activity": activity, "own": own, "sample": own["sample"], "lanes": LANE_WORDS}


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
