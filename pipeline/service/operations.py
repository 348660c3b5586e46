"""Operations that start and cancel runs of the pipeline in this instance, and say whether there is a report."""

import asyncio
from pathlib import Path
from typing import Any

from mediator.ops.operations import Answer, OperationRequest, Right, operation, read_text
from mediator.ops.runs.history import SCHEDULED
from mediator.ops.schemas import COUNT, FLAG, TEXT, TIME, about, obj, or_null
from pipeline.service.scheduler import PipelineScheduler


def report_file(data_dir: Path) -> Path:
    """Return where ``mediator pipeline report`` writes its page, unless its caller names another place."""
    return data_dir / "lake" / "report.html"


class PipelineOperations:
    """The operations ``run-start``, ``run-cancel`` and ``pipeline-state``."""

    def __init__(self, scheduler: PipelineScheduler, data_dir: Path, every: int) -> None:
        """``every``: hours between scheduled runs; 0: none."""
        self._scheduler = scheduler
        self._report = report_file(data_dir)
        self._every = every

    @operation(
        "run-start",
        Right.OPERATE,
        "Begin a run of the pipeline now, as a child process of the instance that answers",
        obj(run=COUNT),
        fields={"name": about(TEXT, "The command of the pipeline.", enum=list(SCHEDULED))},
        required=("name",),
        method="POST",
        path="/runs",
    )
    async def _start(self, request: OperationRequest) -> Answer:
        return {"run": await self._scheduler.start(read_text(request, "name"))}

    @operation(
        "run-cancel",
        Right.OPERATE,
        "End the run of the pipeline that the instance that answers has begun",
        obj(cancelled=FLAG),
        method="POST",
        path="/pipeline/cancel",
    )
    async def _cancel(self, _request: OperationRequest) -> Answer:
        return {"cancelled": await self._scheduler.cancel()}

    @operation(
        "pipeline-state",
        Right.READ,
        "What the instance that answers runs of the pipeline, and the newest report",
        obj(
            every=about(COUNT, "Hours between runs that the service begins; 0: it begins none."),
            running=or_null(obj(run=COUNT, command=TEXT)),
            report=or_null(obj(at=TIME, bytes=COUNT)),
        ),
        path="/pipeline",
    )
    async def _show(self, _request: OperationRequest) -> Answer:
        running = self._scheduler.running
        shown = None if running is None else {"run": running.no, "command": running.command}
        return {"every": self._every, "running": shown, "report": await asyncio.to_thread(_describe, self._report)}


def _describe(file: Path) -> dict[str, Any] | None:
    try:
        known = file.stat()
    except OSError:
        return None
    return {"at": known.st_mtime, "bytes": known.st_size}
