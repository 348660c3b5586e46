"""The command `mediator agent import`: registers many cards from files, folders and URLs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from mediator.cli import output
from mediator.cli.client import ClientOptions
from mediator.cli.options import CommandError, CommandGroup
from mediator.endpoint import Endpoint
from mediator.errors import AddressRefusedError, MediatorError, UnreachableError
from mediator.operate.units import format_count

if TYPE_CHECKING:
    from mediator.client import Client
    from registry.cards.sources import AddressAssigner, CardSource

IN_FLIGHT = 64
SHOWN = 10
"""Problems that are shown; the others are only counted."""
FETCH_SECONDS = 10.0


app = CommandGroup()


@app.command("import", epilog="Example: mediator agent import cards/ more.jsonl --mailbox-prefix catalog")
def import_(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="A card or an array of cards (.json), one card per line (.jsonl), a folder of both, an https "
            "URL, or one URL per line (.txt).",
        ),
    ],
    mailbox_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Prefix of the addresses for cards without a mailbox; the id or name follows."
        ),
    ] = None,
    *,
    options: ClientOptions,
) -> None:
    """Register many agents; refused cards are reported and left out, and the exit code is then 1.

    Importing again replaces cards, so an interrupted import can simply be repeated.
    """
    from registry.cards.sources import AddressAssigner

    addresses = AddressAssigner(mailbox_prefix) if mailbox_prefix is not None else None
    result = _ImportResult()

    async def work(client: "Client") -> None:
        try:
            async with fetching() as fetch:
                await _import(client, sources, addresses, fetch, result)
        except CommandError as error:
            error.fields |= result.fields
            if not options.as_json:
                _summary(result, prefixed=addresses is not None)
            raise
        if options.as_json:
            output.print_json(result.fields)
        else:
            _summary(result, prefixed=addresses is not None)

    options.run(work)
    if result.failed:
        raise typer.Exit(1)


@dataclass
class _ImportResult:
    registered: int = 0
    warned: int = 0
    """Those of the registered cards that have warnings."""
    failed: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "registered": self.registered,
            "with_warnings": self.warned,
            "refused": self.failed,
            "problems": self.problems,
        }

    def refuse(self, where: str, problem: str) -> None:
        self.failed += 1
        if len(self.problems) < SHOWN:
            self.problems.append(f"{where}: {problem}")


async def _import(
    client: "Client",
    sources: list[str],
    addresses: "AddressAssigner | None",
    fetch: Callable[[str], Awaitable[bytes]],
    result: _ImportResult,
) -> None:
    from registry.cards.sources import read_sources, size_of

    waiting = read_sources(sources)
    with output.progress("{task.fields[count]}") as progress:
        bar = progress.add_task("cards", total=size_of(sources) or None, count="")

        async def worker() -> None:
            # All workers draw from one iterator, which reads the files no further than they have come.
            for piece in waiting:
                await _register(client, piece, addresses, fetch, result)
                count = f"{result.registered} registered" + (f", {result.failed} refused" if result.failed else "")
                progress.update(bar, advance=len(piece.data or piece.where) + 1, count=count)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(IN_FLIGHT):
                    group.create_task(worker())
        except* (UnreachableError, CommandError) as errors:
            raise errors.exceptions[0] from None


async def _register(
    client: "Client",
    piece: "CardSource",
    addresses: "AddressAssigner | None",
    fetch: Callable[[str], Awaitable[bytes]],
    result: _ImportResult,
) -> None:
    """Register one card and count the result; only a service that does not answer ends the import."""
    from registry.cards.card import MAX_CARD

    if piece.problem:
        result.refuse(piece.where, piece.problem)
        return
    try:
        card = await fetch(piece.url) if piece.url else piece.data
        if addresses is not None:
            card = addresses.assign(card)
        if len(card) > MAX_CARD:
            raise CommandError(f"expected at most {MAX_CARD} bytes, got {len(card)}")
    except (MediatorError, CommandError) as error:
        result.refuse(piece.where, str(error))
        return
    try:
        answer = await client.request("AGENT.REGISTER", card)
    except UnreachableError:
        raise
    except MediatorError as error:
        result.refuse(piece.where, str(error))
        return
    result.registered += 1
    result.warned += bool(answer["warnings"])


@asynccontextmanager
async def fetching() -> AsyncIterator[Callable[[str], Awaitable[bytes]]]:
    """Fetch cards by URL; the user of this machine chose the URLs, so private networks are allowed.

    On the way from another machine anybody could replace the card, and with it the mailbox that gets the agent's mail,
    so plain HTTP is for this machine alone; other URLs raise :class:`AddressRefusedError`.
    """
    from ipaddress import ip_network

    from mediator.http.guard import Guard
    from registry.cards.sources import fetch_card

    guard = Guard([ip_network("0.0.0.0/0"), ip_network("::/0")])

    async def fetch(url: str) -> bytes:
        if not _encrypted_or_local(url):
            raise AddressRefusedError("url: expected https; http is only for this machine")
        return await fetch_card(guard, url, FETCH_SECONDS)

    try:
        yield fetch
    finally:
        await guard.close()


def _encrypted_or_local(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme.lower() != "http" or Endpoint(parts.hostname or "", 0).loopback
    except ValueError:
        return True  # the guard says what is wrong with it


def _summary(result: _ImportResult, *, prefixed: bool) -> None:
    output.print_line(f"registered {format_count(result.registered, 'card')}")
    if result.warned:
        output.print_line(f"of them {result.warned} with warnings: they are not all that they claim to be")
    if result.failed:
        output.print_line(f"refused {result.failed}")
    for problem in result.problems:
        output.print_hint(problem)
    if result.failed > len(result.problems):
        output.print_hint(f"… and {result.failed - len(result.problems)} more")
    if not prefixed and any(": mailbox: " in problem for problem in result.problems):
        output.print_hint("--mailbox-prefix assigns a mailbox to cards without one.")
