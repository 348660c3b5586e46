"""The commands that say how things stand: doctor and status."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mediator.cli import show
from mediator.cli.failing import CommandError
from mediator.cli.operator import ask_service
from mediator.cli.options import AsJson, Config, DataDir, Tenant, load
from mediator.mailboxes.address import parse_address
from mediator.operators.spans import show_bytes, show_count, show_moment

_MARKS = {"problem": "!!", "note": " *", "ok": "ok"}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: mediator doctor agent.inbox")(doctor)
    app.command(epilog="Example: mediator status")(status)


def doctor(
    address: Annotated[
        str | None, typer.Argument(metavar="ADDRESS", help="Mailbox; without it the whole installation.")
    ] = None,
    tenant: Tenant = "default",
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Explain why a mailbox is stuck, or check the whole installation; exit code 1 when there is a problem."""
    if address is None:
        findings = _installation(config, data_dir)
    else:
        answer = ask_service(config, data_dir, "doctor", tenant=tenant, mail_address=parse_address(address))
        findings = answer["findings"]
    if as_json:
        show.as_json({"findings": findings})
    else:
        for finding in findings:
            show.say(f"{_MARKS[finding['level']]}  {finding['text']}")
            if finding["advice"]:
                show.say(f"    {finding['advice']}")
    if any(finding["level"] == "problem" for finding in findings):
        raise typer.Exit(1)


def _installation(config: Path | None, data_dir: Path | None) -> list[dict[str, Any]]:
    """Ask the service; where none runs, say so, and look at what can be seen without it."""
    try:
        found: list[dict[str, Any]] = ask_service(config, data_dir, "installation")["findings"]
    except CommandError as error:
        from dataclasses import asdict

        from mediator.operators.integrity import file_findings, offline_findings
        from mediator.operators.operating import disk_findings

        folder = load(config, data_dir=data_dir).data_dir
        first = {"level": "problem", "text": f"The service does not answer: {error}.", "advice": ""}
        seen = [*disk_findings(folder), *file_findings(folder), *offline_findings(folder)]
        return [first, *(asdict(finding) for finding in seen)]
    return found


def status(config: Config = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show where the service listens, whether it is ready, and what it holds; exit code 1 when it is not ready."""
    view = ask_service(config, data_dir, "overview")
    time = ask_service(config, data_dir, "status")
    if as_json:
        show.as_json({**view, "next_due": time["next_due"], "last_removed": time["last_removed"]})
    else:
        for name, value in _facts(view, time):
            show.say(f"{name:<16}{value}")
    if not view["ready"]:
        raise typer.Exit(1)


def _facts(view: dict[str, Any], time: dict[str, Any]) -> list[tuple[str, str]]:
    wrong = [f"{name}: {said}" for name, said in view["checks"].items() if said != "ok"]
    removed = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(time["last_removed"].items()))
    waiting = show_count(view["waiting"], "FETCH", "FETCHes")
    return [
        ("service", f"{view['instance']}, version {view['version']}, process {view['pid']}"),
        ("since", show_moment(view["since"])),
        ("ready", "yes" if view["ready"] else f"no; {'; '.join(wrong)}"),
        ("nats", view["nats"]),
        ("http", f"port {view['http_port']}"),
        ("database", f"{view['database']}, data in {view['data_dir']}"),
        (
            "now",
            f"{show_count(view['pending'], 'request')} inside, {waiting} waiting",
        ),
        ("delayed", f"the next is due {show_moment(time['next_due'])}" if time["next_due"] else "none that is known"),
        ("clean-up", f"the last pass removed {removed}" if removed else "the last pass removed nothing"),
        *(
            (f"tenant {name}", f"{show_count(held['messages'], 'message')}, {show_bytes(held['bytes'])}")
            for name, held in view["tenants"].items()
        ),
    ]
