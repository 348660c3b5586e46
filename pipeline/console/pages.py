"""The pages of the pipeline: its runs, one run with the end of its output, and the report."""

import asyncio
from pathlib import Path
from typing import Final

from aiohttp import web

from mediator.console.console import Console
from mediator.console.pages import Page, Shown, Visit
from mediator.errors import NotAllowedError
from mediator.ops.operations import Right
from mediator.ops.runs.history import SCHEDULED
from pipeline.reports import ADDRESSES
from pipeline.service.operations import report_file

MAX_REPORT: Final = 64 << 20
"""Bytes of a report that is shown."""
_HEADERS: Final = {
    # A page made elsewhere, with scripts in it: in an origin of its own, and without any way to ask anybody.
    "Content-Security-Policy": "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


def add_pages(console: Console, data_dir: Path) -> None:
    """Add the pages; ``data_dir`` has the folder of the lake."""

    async def show_report(visit: Visit) -> Shown:
        file = report_file(data_dir)
        size = await asyncio.to_thread(_size, file)
        if not 0 < size <= MAX_REPORT:
            raise web.HTTPNotFound
        if not visit.may(Right.READ_PAYLOAD) and ADDRESSES.encode() in await asyncio.to_thread(file.read_bytes):
            raise NotAllowedError(Right.READ_PAYLOAD)
        return web.FileResponse(file, headers={**_HEADERS, "Content-Type": "text/html; charset=utf-8"})

    console.add_pages(
        "pipeline",
        Path(__file__).with_name("templates"),
        Page("/pipeline", "Pipeline", _list, "Service"),
        Page("/pipeline/runs/{run}", "Run of the pipeline", _show, template="run.html"),
        Page("/pipeline/report", "", show_report),
    )


async def _list(visit: Visit) -> Shown:
    limit = visit.number("limit", 50, 1, 1000)
    runs = (await visit.run("run-list", limit=limit))["runs"]
    state = await visit.run("pipeline-state")
    return {"runs": runs, "commands": list(SCHEDULED), "limit_reached": len(runs) == limit, **state}


async def _show(visit: Visit) -> Shown:
    return {"run": await visit.run("run-show", run=visit.number("run", 0, 1, 2**53))}


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() and not file.is_symlink() else 0
