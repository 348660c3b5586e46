"""The command ``mediator forget``: removes a mailbox from every place below the data directory."""

import asyncio
from typing import Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.options import Address, CommandGroup, TenantOptions

app = CommandGroup()


@app.command(epilog="Example: mediator forget agent.inbox --yes")
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
    from mediator.ops import logs
    from mediator.ops.forgetting import FORGET_SECONDS, forget_offline
    from mediator.ops.store_access import ask_or_do
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
    _print(options, address, removed, left)


def _print(options: TenantOptions, address: str, removed: dict[str, int], left: list[str]) -> None:
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
