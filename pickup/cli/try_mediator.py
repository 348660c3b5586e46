"""The command try: connects as a wallet, and sends and picks up a message, step by step."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.errors import CommandError
from mediator.cli.options import CommandGroup, CommandOptions

if TYPE_CHECKING:
    from pickup.client import Grant, Holder

TEXT = "hello from mediator try"
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

    steps = _Steps(quiet=options.as_json)
    try:
        asyncio.run(_attempt(invitation, steps))
    except (ClientError, CommandError) as error:
        raise CommandError(str(error), steps=steps.taken) from error
    if options.as_json:
        output.print_json({"steps": steps.taken})


async def _attempt(invitation: str, steps: "_Steps") -> None:
    from pickup.client import Holder

    async with await Holder.connect(invitation, label="mediator try") as holder:
        steps.done("connected", f"DIDComm {holder.generation}, {holder.link.endpoints[0]}")
        grant = await holder.mediate()
        steps.done("granted", grant.endpoint)
        key = await holder.add_key()
        steps.done("registered", _short(key))
        await _send(holder, grant, key)
        steps.done("sent", f'"{TEXT}", sealed, in a forward to the mediator')
        status = await holder.status()
        steps.done("waiting", f"{status.count} message")
        for mail in await holder.fetch():
            letter = await holder.open(mail)
            message = letter.message
            content = message["content"] if "content" in message else message["body"]["content"]
            steps.done("picked up", f'"{content}" from {_short(letter.sender or "nobody")}')
            status = await holder.received([mail.id])
            steps.done("acknowledged", f"{status.count} left")
        if not steps.picked_up or status.count:
            raise CommandError("the message did not come back")
        await holder.remove_key(key)
        steps.done("removed", _short(key))


async def _send(holder: "Holder", grant: "Grant", key: str) -> None:
    from pickup.client import Sender
    from pickup.mediation.records import Generation

    async with Sender() as sender:
        if holder.generation is Generation.V1:
            type = "https://didcomm.org/basicmessage/1.0/message"
            message = {"@type": type, "@id": "hello", "content": TEXT}
            await sender.send_v1(key, grant.routing, grant.endpoint, message)
        else:
            type = "https://didcomm.org/basicmessage/2.0/message"
            body = {"content": TEXT}
            await sender.send_v2(key, grant.routing[0], grant.endpoint, {"id": "hello", "type": type, "body": body})


class _Steps:
    """Says what was done, and how long it took; ``quiet`` only keeps it."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._last = time.perf_counter()
        self.taken: list[dict[str, Any]] = []

    @property
    def picked_up(self) -> bool:
        return any(step["step"] == "picked up" for step in self.taken)

    def done(self, step: str, what: str) -> None:
        now = time.perf_counter()
        milliseconds = (now - self._last) * 1000
        if not self._quiet:
            output.print_line(f"{step:<{WIDTH}} {what}  ({milliseconds:.0f} ms)")
        self._last = now
        self.taken.append({"step": step, "what": what, "ms": round(milliseconds, 3)})


def _short(name: str) -> str:
    return name if len(name) <= 64 else f"{name[:56]}…"
