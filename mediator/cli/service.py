"""The commands that run, set up and look after the service: serve, init, check, migrate, cleanup, doctor, status."""

import asyncio
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.client import CredentialOptions
from mediator.cli.options import (
    AsJson,
    CommandError,
    CommandGroup,
    CommandOptions,
    Config,
    OutputOptions,
    SettingsOptions,
    TenantOptions,
    lists,
)
from mediator.login import Login
from mediator.mailboxes.address import parse_address
from mediator.operate.records import AuditEntry
from mediator.operate.units import format_bytes, format_count, format_fields, format_time
from mediator.system.private_files import open_file

if TYPE_CHECKING:
    from mediator.app import RunningService
    from mediator.settings.settings import Settings

DatabaseUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="postgresql://…; without it an SQLite file in the data directory.")
]


app = CommandGroup()


@app.command(epilog="Example: mediator serve --data-dir /var/lib/mediator --nats 127.0.0.1:4222")
def serve(
    options: SettingsOptions,
    nats: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the managed NATS server listens.", show_default="127.0.0.1:4222"),
    ] = None,
    nats_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Serve this NATS server or cluster instead of starting one.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where health and metrics are served.", show_default="127.0.0.1:8080"),
    ] = None,
    database_url: DatabaseUrl = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
) -> None:
    """Run the service until SIGTERM or Ctrl-C."""
    settings = options.load(
        nats=nats,
        nats_url=nats_url,
        http=http,
        database_url=database_url,
        log_level=log_level,
    )
    import uvloop

    from mediator.app import serve as run_service
    from mediator.operate import logs

    logs.setup(settings.log_level, settings.log_format)
    uvloop.run(run_service(settings, lambda running: _greet(settings, running)))


def _greet(settings: "Settings", running: "RunningService") -> None:
    if not sys.stdout.isatty():
        return
    where = (
        ""
        if settings.data_dir == Path("mediator-data").absolute()
        else f" --data-dir {shlex.quote(str(settings.data_dir))}"
    )
    login = "" if settings.anonymous or settings.nats_url is not None else " --user NAME --password …"
    host = "127.0.0.1" if settings.http.host in ("0.0.0.0", "::") else settings.http.host
    host = f"[{host}]" if ":" in host else host
    console = f"  console  {running.console_link}\n" if running.console_link else ""
    output.print_line(
        "\n"
        "The mediator is ready.\n"
        f"  NATS   {running.nats_url}\n"
        f"  HTTP   http://{host}:{running.http_port}  (/readyz, /metrics)\n"
        f"{console}"
        f"  data   {settings.data_dir}\n\n"
        "Try, in another terminal:\n"
        f"  mediator mailbox create my.inbox{where}{login}\n"
        f"  mediator send my.inbox 'hello'{where}{login}\n"
        f"  mediator fetch my.inbox --deliver earliest{where}{login}\n"
    )
    sys.stdout.flush()


@app.command(epilog="Example: mediator init /etc/mediator.toml")
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")] = Path("mediator.toml"),
    *,
    options: OutputOptions,
) -> None:
    """Write a configuration file to start from: every option, its default and what it protects, as comments."""
    from mediator.cli.configuration import template

    try:
        # Private: the operator will write passwords into it.
        with os.fdopen(open_file(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as new:
            new.write(template())
    except FileExistsError:
        raise CommandError(f"{file} is there already; nothing was written") from None
    except OSError as error:
        raise CommandError(f"cannot write {file}: {error.strerror}") from None
    text = f"wrote {file}; edit it, then: mediator check --config {file} && mediator serve --config {file}"
    options.print({"file": str(file)}, text)


@app.command(epilog="Example: mediator check --config /etc/mediator.toml")
def check(
    config: Config = None,
    snippet: Annotated[
        bool, typer.Option("--snippet", help="Print the accounts to paste into your own NATS server, nothing else.")
    ] = False,
    *,
    credentials: CredentialOptions,
    as_json: AsJson = False,
) -> None:
    """Explain the settings; with a NATS server of your own, verify that requests arrive there.

    With accounts, give the login of a tenant's user: the command checks that its requests reach the service, and that
    it cannot list what others subscribe to.
    """
    settings = SettingsOptions(config).load()
    from mediator.cli.configuration import accounts_snippet, explain, verify

    if snippet:
        text = accounts_snippet(settings)
        output.print_json({"snippet": text}) if as_json else typer.echo(text, nl=False)
        return
    explained = [*explain(settings)]
    if not as_json:
        _print_facts(explained)
    found = [] if settings.nats_url is None else asyncio.run(verify(settings, Login("", **vars(credentials))))
    if as_json:
        server = [{"result": result, "text": text} for result, text in found]
        output.print_json({"settings": dict(explained), "server": server})
    else:
        _print_facts(found)


def _print_facts(facts: Iterable[tuple[str, str]]) -> None:
    for name, text in facts:
        output.print_line(f"{name:<11}{text}")


@app.command(epilog="Example: mediator migrate --data-dir /var/lib/mediator")
def migrate(*, database_url: DatabaseUrl = None, options: CommandOptions) -> None:
    """Migrate the database to the schema of this version; prints what was applied. `serve` does the same at startup."""
    settings = options.load(database_url=database_url)
    from mediator.store.opening import open_store

    store = open_store(settings.data_dir, settings.store_url, settings.migrations_of_parts)
    store.close()
    names = store.migrated
    if options.as_json:
        output.print_json({"applied": names})
        return
    for name in names:
        output.print_line(f"applied {name}")
    if not names:
        output.print_line("the schema is up to date")


@app.command(epilog="Example: mediator cleanup --dry-run")
def cleanup(
    database_url: DatabaseUrl = None,
    daemon: Annotated[bool, typer.Option("--daemon", help="Run until SIGTERM, as a service of its own.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed, and why.")] = False,
    confirm_clock: Annotated[
        bool,
        typer.Option("--confirm-clock", help="Confirm that the clock is right after a jump; expiry continues."),
    ] = False,
    *,
    options: CommandOptions,
) -> None:
    """Remove what has expired, through the running service or, where none runs, by itself."""
    if daemon and options.as_json:
        raise typer.BadParameter("--daemon runs until it is stopped, and has no result to print", param_hint="--json")
    settings = options.load(database_url=database_url)
    from mediator.operate import logs
    from mediator.operate.cleanup_command import run
    from mediator.parts import cleanup_steps

    # The result is printed below; the log is for problems.
    logs.setup(settings.log_level if daemon else "warning", settings.log_format)
    give = output.print_json if options.as_json else None
    work = run(
        settings,
        cleanup_steps(settings),
        daemon=daemon,
        dry_run=dry_run,
        confirm_clock=confirm_clock,
        say=output.print_line,
        give=give,
    )
    code = asyncio.run(work)
    if code:
        raise typer.Exit(code)


_MARKS = {"problem": "!!", "note": " *", "ok": "ok"}


AUDIT_COLUMNS = AuditEntry.columns("no", "at", "actor", "via", "operation", "tenant", "fields", "result")
state_app = CommandGroup()
operators_app = CommandGroup(help="Change who may use the console and the admin API.", no_args_is_help=True)


@state_app.command(epilog="Example: mediator doctor agent.inbox")
def doctor(
    address: Annotated[
        str | None, typer.Argument(metavar="ADDRESS", help="Mailbox; without it the whole installation.")
    ] = None,
    *,
    options: TenantOptions,
) -> None:
    """Explain why a mailbox is stuck, or check the whole installation; exit code 1 when there is a problem."""
    if address is None:
        findings = _installation(options)
    else:
        answer = options.ask("doctor", mail_address=parse_address(address))
        findings = answer["findings"]
    if options.as_json:
        output.print_json({"findings": findings})
    else:
        _print_findings(findings)
    if any(finding["level"] == "problem" for finding in findings):
        raise typer.Exit(1)


def _print_findings(findings: Sequence[Mapping[str, Any]]) -> None:
    for finding in findings:
        output.print_line(f"{_MARKS[finding['level']]}  {finding['text']}")
        if finding["advice"]:
            output.print_line(f"    {finding['advice']}")


def _installation(options: CommandOptions) -> list[dict[str, Any]]:
    """Ask the service; where none runs, say so, and check what can be checked without it."""
    try:
        found: list[dict[str, Any]] = options.ask("installation")["findings"]
    except CommandError as error:
        from mediator.operate.service_operations import disk_findings, file_findings, offline_findings

        folder = options.load().data_dir
        text = f"The service does not answer: {error}."
        first = {"level": "problem", "text": text, "advice": "", "link": "", "code": "unreachable"}
        seen = [*disk_findings(folder), *file_findings(folder), *offline_findings(folder)]
        return [first, *(finding.to_json() for finding in seen)]
    return found


@state_app.command(epilog="Example: mediator status")
def status(options: CommandOptions) -> None:
    """Show where the service listens, what it holds, and what is wrong; exit code 1 when it is not ready."""
    view = options.ask("overview")
    time = options.ask("status")
    found = [each for each in options.ask("installation", quick=True)["findings"] if each["level"] != "ok"]
    if options.as_json:
        times = {"next_due": time["next_due"], "last_removed": time["last_removed"]}
        output.print_json({**view, **times, "findings": found})
    else:
        for name, value in _facts(view, time):
            output.print_line(f"{name:<16}{value}")
        _print_findings(found)
    if not view["ready"]:
        raise typer.Exit(1)


@state_app.command(epilog="Example: mediator console")
def console(options: CommandOptions) -> None:
    """Print the link that signs in to the console on this machine, where the settings name no operators."""
    link = options.ask("local-access")["console"]
    if not link:
        raise CommandError("sign in at /console as an operator of the settings: see docs/howto/operators.md")
    output.print_json({"console": link}) if options.as_json else output.print_line(link)


def _facts(view: dict[str, Any], time: dict[str, Any]) -> list[tuple[str, str]]:
    wrong = [f"{name}: {said}" for name, said in view["checks"].items() if said != "ok"]
    removed = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(time["last_removed"].items()))
    waiting = format_count(view["waiting"], "FETCH", "FETCHes")
    return [
        ("service", f"{view['instance']}, version {view['version']}, process {view['pid']}"),
        ("since", format_time(view["since"])),
        ("ready", "yes" if view["ready"] else f"no; {'; '.join(wrong)}"),
        ("nats", view["nats"]),
        ("http", f"port {view['http_port']}"),
        ("database", f"{view['database']}, data in {view['data_dir']}"),
        ("durability", view["durability"]),
        (
            "now",
            f"{format_count(view['pending'], 'request')} inside, {waiting} waiting",
        ),
        ("delayed", f"the next is due {format_time(time['next_due'])}" if time["next_due"] else "none that is known"),
        ("clean-up", f"the last pass removed {removed}" if removed else "the last pass removed nothing"),
        *(
            (f"tenant {name}", f"{format_count(held['messages'], 'message')}, {format_bytes(held['bytes'])}")
            for name, held in view["tenants"].items()
        ),
    ]


@state_app.command(epilog="Example: mediator alarms")
def alarms(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most this many that ended.")] = 100,
    *,
    options: CommandOptions,
) -> None:
    """List the problems of the service with when each began, and those of the last week that ended."""
    answer = options.ask("alarm-list", limit=limit)
    options.print(answer, "\n".join(alarm_lines(answer)))


def alarm_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the command prints of alarms."""
    for title, name in (("Now", "present"), ("Ended", "ended")):
        yield f"{title}:" if answer[name] else f"{title}: none"
        for alarm in answer[name]:
            ended = f" to {format_time(alarm['ended_at'])}" if name == "ended" else ""
            yield f"  {format_time(alarm['began_at'])}{ended}  {alarm['text']}"
            if name == "present" and alarm["advice"]:
                yield f"    {alarm['advice']}"


def _audited(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in format_fields(entry["fields"]))


def _result(entry: Mapping[str, Any]) -> str:
    return str(entry["result"]) + (f" ({entry['times']} times)" if entry["times"] > 1 else "")


@state_app.command(epilog="Example: mediator audit --actor ada")
@lists("audit-list", "entries", AUDIT_COLUMNS, "no entries", cells={"fields": _audited, "result": _result})
def audit(
    actor: Annotated[str, typer.Option(help="Only what this operator did.")] = "",
    operation: Annotated[str, typer.Option(help="Only this operation, such as mailbox-delete.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most this many, newest first.")] = 100,
    *,
    options: CommandOptions,
) -> None:
    """List what operators changed, and which payloads they read."""


@operators_app.command(epilog="Example: mediator operators reload")
def reload(options: CommandOptions) -> None:
    """Have the service read operators.tokens of its settings again; who is removed there is signed out."""
    answer = options.ask("operators-reload")
    done = [f"{what} {', '.join(answer[what])}" for what in ("added", "removed", "changed") if answer[what]]
    text = f"operators from {answer['source']}: {'; '.join(done) or 'nothing has changed'}"
    if answer["waiting"]:
        text += f"\nOther options differ too, and wait for a restart: {', '.join(answer['waiting'])}"
    options.print(answer, text)
