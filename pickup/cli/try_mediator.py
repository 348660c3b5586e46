"""The command try: connects as a wallet, and sends and picks up a message, step by step."""

import asyncio
import time
from typing import Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.options import CommandError, CommandGroup, CommandOptions

WIDTH = 13


app = CommandGroup()


@app.command("try", epilog="Example: mediator try 'https://mediator.example/didcomm?oob=eyJAdHlwZSI6…'")
def attempt(
    invitation: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITATION",
            help="Link of an invitation, v1 or v2, long or short, or a mediator's DID. Without it, the service of this "
            "machine is asked for one.",
        ),
    ] = None,
    v2: Annotated[bool, typer.Option("--v2/--v1", help="Use an invitation for DIDComm v2, or for v1 (Aries).")] = False,
    *,
    options: CommandOptions,
) -> None:
    """Try a mediator as a wallet would: connect, get mediation, register a key, send oneself a message and pick it up.

    The keys are made for this and forgotten; the mediator keeps the connection, without keys or mail.
    """
    if invitation is None:
        made = options.ask("invite", tenant="default", label="", ttl_ms=None, uses=1)
        invitation = str(made["v2_url" if v2 else "v1_url"])
    from pickup.client import ClientError
    from pickup.client.trial import attempt as try_out

    steps = _Steps(quiet=options.as_json)
    try:
        asyncio.run(try_out(invitation, steps.done))
    except ClientError as error:
        raise CommandError(str(error), steps=steps.taken) from error
    if options.as_json:
        output.print_json({"steps": steps.taken})


class _Steps:
    """Says what was done, and how long it took; ``quiet`` only keeps it."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._last = time.perf_counter()
        self.taken: list[dict[str, Any]] = []

    def done(self, step: str, what: str) -> None:
        now = time.perf_counter()
        milliseconds = (now - self._last) * 1000
        if not self._quiet:
            output.print_line(f"{step:<{WIDTH}} {what}  ({milliseconds:.0f} ms)")
        self._last = now
        self.taken.append({"step": step, "what": what, "ms": round(milliseconds, 3)})
