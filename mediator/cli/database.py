"""The commands on the whole database: backup, restore, migrate-to, verify, and forget."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.options import Address, CommandGroup, CommandOptions, TenantOptions
from mediator.cli.service import DatabaseUrl
from mediator.operate.units import format_bytes, format_count, format_time

if TYPE_CHECKING:
    from mediator.backup import BackupManifest
    from mediator.store.sqlite_copy import Progress


backup_app = CommandGroup()

File = Annotated[Path, typer.Argument(metavar="FILE", help="The file of the backup.")]
verify_app = CommandGroup()
forget_app = CommandGroup()


@backup_app.command(epilog="Example: mediator backup /backup/monday.tar")
def backup(
    file: File,
    with_keys: Annotated[
        bool,
        typer.Option("--with-keys", help="Include the keys that are kept beside the database; guard the file well."),
    ] = False,
    database_url: DatabaseUrl = None,
    *,
    options: CommandOptions,
) -> None:
    """Write the whole database into one new file, while the service runs or not.

    It has everything that was answered with success before the command began.
    """
    settings = options.load(database_url=database_url)
    from mediator.backup import backup as write
    from mediator.parts import backup_scope

    with _progress() as on_progress:
        manifest = write(settings, backup_scope(settings), file, with_keys=with_keys, on_progress=on_progress)
    size = file.stat().st_size
    if options.as_json:
        output.print_json({"file": str(file), "bytes": size, **_fields(manifest)})
        return
    output.print_line(f"wrote {file}: {format_bytes(size)}, {_contents(manifest)}")
    for name in manifest.left_out:
        output.print_hint(f"{name} is not in it: keep a copy of it elsewhere, or use --with-keys")


@backup_app.command(epilog="Example: mediator restore /backup/monday.tar --data-dir /var/lib/mediator")
def restore(file: File, database_url: DatabaseUrl = None, *, options: CommandOptions) -> None:
    """Make a database from a backup: in an empty data directory, or an empty PostgreSQL database.

    The backup may be of the other kind of database. Numbers that were given out after it are not given again.
    """
    settings = options.load(database_url=database_url)
    from mediator.backup import restore as read
    from mediator.parts import backup_scope

    with _progress() as on_progress:
        done = read(settings, backup_scope(settings), file, on_progress=on_progress)
    if options.as_json:
        more = {"skipped_ids": done.skipped, "later_messages": done.later, "missing_keys": done.missing_keys}
        output.print_json({**_fields(done.manifest), **more})
        return
    output.print_line(f"restored {_contents(done.manifest)}")
    output.print_line(f"each mailbox skips {done.skipped} msg_ids, so that none is given twice")
    if done.later:
        output.print_line(
            f"not in it, says the journal: {format_count(done.later, 'message')} that came after the backup"
        )
    for name in done.missing_keys:
        output.print_hint(f"put {name} into {settings.data_dir}, or its content into the settings, before you start")


@backup_app.command("migrate-to", epilog="Example: mediator migrate-to postgresql://mediator@db.internal/mediator")
def migrate_to(
    url: Annotated[str, typer.Argument(metavar="URL", help="An empty PostgreSQL database: postgresql://…")],
    *,
    options: CommandOptions,
) -> None:
    """Copy the SQLite database of a stopped service into an empty PostgreSQL database, with everything kept."""
    settings = options.load()
    from mediator.backup import migrate_to as move

    with _progress() as on_progress:
        rows = move(settings, url, on_progress=on_progress)
    if options.as_json:
        output.print_json({"rows": dict(rows)})
        return
    count = format_count(sum(rows.values()), "row")
    output.print_line(f"copied {count} of {len(rows)} tables; the file in {settings.data_dir} stays as it is")
    output.print_line("now set database_url, and start the service with the same data directory")


def _fields(manifest: "BackupManifest") -> dict[str, object]:
    shown = manifest.model_dump(include={"version", "instance", "database", "rows", "left_out"})
    return {**shown, "taken_at": manifest.taken_at / 1000, "keys": manifest.keys}


def _contents(manifest: "BackupManifest") -> str:
    mailboxes = format_count(manifest.rows.get("mailbox", 0), "mailbox", "mailboxes")
    messages = format_count(manifest.rows.get("message", 0) + manifest.rows.get("delayed", 0), "message")
    keys = f", {', '.join(manifest.keys)}" if manifest.keys else ""
    return f"{mailboxes} with {messages}{keys}, as of {format_time(manifest.taken_at / 1000)}"


@contextmanager
def _progress() -> "Iterator[Progress]":
    """Show a bar for each step on a terminal."""
    with output.progress("{task.percentage:>3.0f} %") as progress:
        bars = {}

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done, total=total)

        yield on_progress


@verify_app.command(epilog="Example: mediator verify --data-dir /var/lib/mediator")
def verify(options: CommandOptions) -> None:
    """Check database, counters, index and journal against each other; exit code 1 when there is damage.

    It only reads, beside a running service or without one.
    """
    settings = options.load()
    from mediator.parts import verify_checks
    from mediator.verify.report import verify as run

    with output.progress("{task.percentage:>3.0f} %") as progress:
        bar = progress.add_task("verify", total=1.0)
        report = run(
            settings,
            verify_checks(settings),
            lambda title, part: progress.update(bar, description=title, completed=part),
        )
    if options.as_json:
        output.print_json(report.as_dict())
    else:
        for found in report.damage:
            output.print_line(f"!!  {found.kind.code}, {format_count(found.count, 'time')}: {found.kind.text}")
            for example in found.examples:
                output.print_line(f"      {example}")
            output.print_line(f"    {found.kind.advice}")
        for title, reason in report.skipped:
            output.print_line(f" *  not checked: {title}: {reason}")
        kinds = format_count(len(report.damage), "kind") + " of damage" if report.damage else "nothing is damaged"
        output.print_line(f"{format_count(report.checks, 'check')} in {report.seconds:.1f} s: {kinds}")
    if report.damage:
        raise typer.Exit(1)


@forget_app.command(epilog="Example: mediator forget agent.inbox --yes")
def forget(
    address: Address,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    *,
    options: TenantOptions,
) -> None:
    """Remove a mailbox and every trace of its mail: database, archive, agent card, DIDComm connection.

    It works through the running service, or on the database itself where none runs.
    """
    settings = options.load()
    if not yes:
        typer.confirm(
            f"Remove {address} with all its mail, its archived mail, its agent and its DIDComm connection for ever?",
            abort=True,
            err=True,
        )
    from mediator.operate import logs
    from mediator.operate.forgetting import FORGET_SECONDS, forget_offline
    from mediator.operate.store_access import ask_or_do
    from mediator.parts import cleanup_steps, find_parts

    # The result is printed below; the log is for problems.
    logs.setup("warning", settings.log_format)
    fields = {"tenant": options.tenant, "mail_address": address}
    parts = find_parts()
    steps, of_parts = cleanup_steps(settings), [part.forget_address for part in parts]
    answer = asyncio.run(
        ask_or_do(
            settings,
            "mailbox-forget",
            fields,
            lambda: forget_offline(settings, steps, of_parts, fields),
            within=FORGET_SECONDS,
        )
    )
    removed: dict[str, int] = dict(answer["removed"])
    left: list[str] = list(answer["left"])
    for part in parts:
        files = part.forget_files(settings, options.tenant, address)
        if files is not None:
            removed.update({kind: count for kind, count in files.removed.items() if count})
            left += [files.left] if files.left else []
    _print_forgotten(options, address, removed, left)


def _print_forgotten(options: TenantOptions, address: str, removed: dict[str, int], left: list[str]) -> None:
    result: dict[str, Any] = {"mail_address": address, "removed": removed, "left": left}
    if options.as_json:
        output.print_json(result)
        return
    for kind, count in removed.items():
        output.print_line(f"removed {count} {kind.replace('_', ' ')}")
    if not removed:
        output.print_line(f"nothing was kept of {address}")
    for text in left:
        output.print_line(f" *  may be left: {text}")
