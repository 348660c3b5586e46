"""The page of the clean-up: what it removed and when, what it would remove now, and the jobs of the scheduler."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from aiohttp import web

from mediator.console.pages import Page, Shown, Visit
from mediator.ops.operations import Answer

PER_PAGE: Final = 50
PLOTTED: Final = 3
"""Kinds that have a line of their own in the plot; the rest has one together."""
REST: Final = "other"


async def _show(visit: Visit) -> Shown:
    before = {"before": visit.number("before", 0, 0, 2**53)} if visit.text("before") else {}
    hours = (await visit.run("cleanup-hours"))["hours"]
    return {
        "hours": [each for each in hours[::-1] if each["passes"]],
        "series": _series(hours),
        "history": await visit.run("cleanup-history", limit=PER_PAGE, **before),
        "asked": before,
        "plan": await visit.run("cleanup-plan"),
        "jobs": (await visit.run("job-list"))["jobs"],
    }


async def _plot(visit: Visit) -> Shown:
    hours = (await visit.run("cleanup-hours"))["hours"]
    columns = {"at": [each["at"] for each in hours], "seconds": [each["seconds"] for each in hours]}
    for name, kinds in _series(hours).items():
        columns[name] = [sum(each["removed"].get(kind, 0) for kind in kinds) for each in hours]
    return web.json_response(body=orjson.dumps({"kept": len(hours), "columns": columns}))


def _series(hours: Sequence[Answer]) -> Mapping[str, Sequence[str]]:
    """Return the lines of the plot, each with the kinds that it counts, the most frequent first."""
    total: Counter[str] = Counter()
    for each in hours:
        total.update(each["removed"])
    kinds = [kind for kind, _ in total.most_common()] or ["messages"]
    lines: dict[str, Any] = {kind: [kind] for kind in kinds[:PLOTTED]}
    return lines | ({REST: kinds[PLOTTED:]} if kinds[PLOTTED:] else {})


PAGES: Final = (Page("/cleanup", "Clean-up", _show, "Service"), Page("/cleanup.json", "", _plot))
