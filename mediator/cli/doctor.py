"""The commands on the service's state: doctor, status, the console's link, the audit log, and reload of operators."""

from typing import Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.options import CommandError, CommandGroup, CommandOptions, TenantOptions
from mediator.mailboxes.address import parse_address
from mediator.operate.records import AuditEntry
from mediator.operate.units import format_bytes, format_count, format_time

_MARKS = {"problem": "!!", "note": " *", "ok": "ok"}


app = CommandGroup()
operators_app = CommandGroup(help="Change who may use the console and the admin API.", no_args_is_help=True)


@app.command(epilog="Example: mediator doctor agent.inbox")
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
        for finding in findings:
            output.print_line(f"{_MARKS[finding['level']]}  {finding['text']}")
            if finding["advice"]:
                output.print_line(f"    {finding['advice']}")
    if any(finding["level"] == "problem" for finding in findings):
        raise typer.Exit(1)


def _installation(options: CommandOptions) -> list[dict[str, Any]]:
    """Ask the service; where none runs, say so, and check what can be checked without it."""
    try:
        found: list[dict[str, Any]] = options.ask("installation")["findings"]
    except CommandError as error:
        from mediator.operate.service_operations import disk_findings, file_findings, offline_findings

        folder = options.load().data_dir
        first = {"level": "problem", "text": f"The service does not answer: {error}.", "advice": ""}
        seen = [*disk_findings(folder), *file_findings(folder), *offline_findings(folder)]
        return [first, *(finding.to_json() for finding in seen)]
    return found


@app.command(epilog="Example: mediator status")
def status(options: CommandOptions) -> None:
    """Show where the service listens, whether it is ready, and what it holds; exit code 1 when it is not ready."""
    view = options.ask("overview")
    time = options.ask("status")
    if options.as_json:
        output.print_json({**view, "next_due": time["next_due"], "last_removed": time["last_removed"]})
    else:
        for name, value in _facts(view, time):
            output.print_line(f"{name:<16}{value}")
    if not view["ready"]:
        raise typer.Exit(1)


@app.command(epilog="Example: mediator console")
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


@app.command(epilog="Example: mediator audit --actor ada")
def audit(
    actor: Annotated[str, typer.Option(help="Only what this operator did.")] = "",
    operation: Annotated[str, typer.Option(help="Only this operation, such as mailbox-delete.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most this many, newest first.")] = 100,
    *,
    options: CommandOptions,
) -> None:
    """List what operators changed, and which payloads they read."""
    answer = options.ask("audit-list", actor=actor, operation=operation, limit=limit)
    options.print_records(
        answer,
        "entries",
        AuditEntry.columns("no", "at", "actor", "via", "operation", "tenant", "fields", "result"),
        "no entries",
        fields=lambda entry: ", ".join(f"{name}={value}" for name, value in entry["fields"].items()),
        result=lambda entry: entry["result"] + (f" ({entry['times']} times)" if entry["times"] > 1 else ""),
    )


@operators_app.command(epilog="Example: mediator operators reload")
def reload(options: CommandOptions) -> None:
    """Have the service read operators.tokens of its settings again; who is removed there is signed out."""
    answer = options.ask("operators-reload")
    done = [f"{what} {', '.join(answer[what])}" for what in ("added", "removed", "changed") if answer[what]]
    text = f"operators from {answer['source']}: {'; '.join(done) or 'nothing has changed'}"
    if answer["waiting"]:
        text += f"\nOther options differ too, and wait for a restart: {', '.join(answer['waiting'])}"
    options.print(answer, text)
