"""What the pipeline adds to the service: settings, commands, operations, pages, and scheduled runs.

Spark is never loaded by the service.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from mediator.parts import ForgottenFiles, Part

if TYPE_CHECKING:
    import typer

    from mediator.host import Host
    from mediator.settings.settings import Settings
    from mediator.settings.types import PartSettings
    from mediator.verify.checks import VerifyCheck


class PipelinePart(Part):
    """Copies journal and archive into a lake, and reports on them."""

    name = "pipeline"

    def settings(self) -> "type[PartSettings]":
        """Return the options of the pipeline."""
        from pipeline.settings import PipelineSettings

        return PipelineSettings

    def add_commands(self, app: "typer.Typer") -> None:
        """Add the group ``pipeline``."""
        from pipeline.commands import app as pipeline

        app.add_typer(pipeline, name="pipeline")

    def forget_files(self, settings: "Settings", tenant: str, address: str) -> ForgottenFiles | None:
        """Remove the messages of the mailbox from the archive in the lake, and a report that names its address.

        All else in the lake names mailboxes by number.
        """
        from importlib.util import find_spec
        from pathlib import Path

        from mediator.errors import MediatorError
        from mediator.system.extras import install_command
        from pipeline.lake import ARCHIVE
        from pipeline.settings import lake_of, report_file

        lake, removed = lake_of(settings), {}
        report = report_file(settings, lake)
        if report.is_file() and address.encode() in report.read_bytes():
            report.unlink()
            removed["reports"] = 1
        if isinstance(lake, Path) and not (lake / ARCHIVE / "_delta_log").is_dir():
            return ForgottenFiles(removed) if removed else None
        if not find_spec("deltalake"):
            left = f"the archive in {lake}: {install_command('pipeline')} and run the command again"
            return ForgottenFiles(removed, left)
        from pipeline.lake.archive import forget
        from pipeline.lake.delta import translate_errors
        from pipeline.lake.storage import is_table

        try:
            with translate_errors(lake):
                if not is_table(lake / ARCHIVE):
                    return ForgottenFiles(removed) if removed else None
            return ForgottenFiles(removed | {"archived": forget(lake, tenant, address)})
        except MediatorError as error:
            return ForgottenFiles(removed, f"the archive in {lake}: {error}; run the command again")

    def verify_checks(self, settings: "Settings") -> "Sequence[VerifyCheck]":
        """Check the files of the lake."""
        from pipeline.verify import LakeFiles

        return (LakeFiles(),)

    @asynccontextmanager
    async def open(self, host: "Host") -> AsyncIterator[None]:
        """Add operations and pages, and run what is due if ``pipeline.every`` is set."""
        from mediator.operate.run_history import RunHistory, RunOperations
        from pipeline.outbox import ArchiveOperations
        from pipeline.service import CHECK_SECONDS, PipelineOperations, PipelineScheduler, add_pages
        from pipeline.settings import PipelineSettings, lake_of, report_file

        chosen = host.settings.section(PipelineSettings)
        history = RunHistory(host.broker, host.settings.instance, host.metrics)
        await history.measure()
        runs = RunOperations(history, chosen.every)
        host.operations.add_methods(runs)
        host.operations.add_methods(ArchiveOperations(host.broker))
        host.add_doctor_check(runs.examine)
        scheduler = PipelineScheduler(history, host.broker, host.settings)
        report = report_file(host.settings, lake_of(host.settings))
        host.operations.add_methods(PipelineOperations(scheduler, report, chosen.every))
        add_pages(host.console, report)
        if chosen.every:
            host.add_job(scheduler.start_due, CHECK_SECONDS, "due runs of the pipeline")
        try:
            yield
        finally:
            await scheduler.stop()


part = PipelinePart()
