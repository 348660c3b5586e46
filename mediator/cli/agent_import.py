"""The command import: many cards at once, from files, folders and URLs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli import show
from mediator.cli.client import Client, Login, RefusedError, talk
from mediator.cli.failing import CommandError
from mediator.cli.options import AsJson, Config, DataDir, Password, Server, User
from mediator.errors import MediatorError
from mediator.operators.spans import show_count

if TYPE_CHECKING:
    from registry.importing import Addresses, Piece

IN_FLIGHT = 64
SHOWN = 10
"""Problems that are told; the others are counted."""
FETCH_SECONDS = 10.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("import", epilog="Example: mediator agent import cards/ more.jsonl --mailbox-prefix catalog")(import_)


def import_(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="A card or an array of cards (.json), a card a line (.jsonl), a folder of both, a URL, or a list of "
            "URLs, one a line (.txt).",
        ),
    ],
    mailbox_prefix: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Cards that name no mailbox get this address and their id or name."),
    ] = None,
    server: Server = None,
    user: User = None,
    password: Password = None,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Register many agents; cards that are refused are told and left out, exit code 1 when there are any.

    Importing again replaces what was imported, so an import that was interrupted is simply made once more.
    """
    from registry.importing import Addresses

    addresses = Addresses(mailbox_prefix) if mailbox_prefix is not None else None
    result = _Result()

    async def work(client: Client) -> None:
        try:
            async with fetching() as fetch:
                await _import(client, sources, addresses, fetch, result)
        except CommandError as error:
            error.fields |= result.fields
            if not as_json:
                _summary(result, prefixed=addresses is not None)
            raise
        if as_json:
            show.as_json(result.fields)
        else:
            _summary(result, prefixed=addresses is not None)

    talk(Login.of(server, user, password, config, data_dir), work)
    if result.failed:
        raise typer.Exit(1)


@dataclass
class _Result:
    registered: int = 0
    warned: int = 0
    """Of them, cards that are not what they claim to be."""
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
    client: Client,
    sources: list[str],
    addresses: "Addresses | None",
    fetch: Callable[[str], Awaitable[bytes]],
    result: _Result,
) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from registry.importing import pieces, size_of

    waiting = pieces(sources)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Progress(*columns, console=show.console(stderr=True)) as progress:
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
        except* CommandError as errors:
            raise errors.exceptions[0] from None


async def _register(
    client: Client,
    piece: "Piece",
    addresses: "Addresses | None",
    fetch: Callable[[str], Awaitable[bytes]],
    result: _Result,
) -> None:
    """Register one card; what is wrong with it is noted, and only a service that does not answer ends the import."""
    from registry.cards import MAX_CARD

    if piece.problem:
        result.refuse(piece.where, piece.problem)
        return
    try:
        card = await fetch(piece.url) if piece.url else piece.data
        if addresses is not None:
            card = addresses.give(card)
        if len(card) > MAX_CARD:
            raise CommandError(f"expected at most {MAX_CARD} bytes, got {len(card)}")
    except (MediatorError, CommandError) as error:
        result.refuse(piece.where, str(error))
        return
    try:
        answer = await client.ask("AGENT.REGISTER", card)
    except RefusedError as error:
        result.refuse(piece.where, str(error))
        return
    result.registered += 1
    result.warned += bool(answer.fields["warnings"])


@asynccontextmanager
async def fetching() -> AsyncIterator[Callable[[str], Awaitable[bytes]]]:
    """Fetch cards by URL; the person at this machine chose them, so they may lead into its own network."""
    from ipaddress import ip_network

    from mediator.http.guard import Guard
    from registry.fetching import fetch_card

    guard = Guard([ip_network("0.0.0.0/0"), ip_network("::/0")])
    try:
        yield lambda url: fetch_card(guard, url, FETCH_SECONDS)
    finally:
        await guard.close()


def _summary(result: _Result, *, prefixed: bool) -> None:
    show.say(f"registered {show_count(result.registered, 'card')}")
    if result.warned:
        show.say(f"of them {result.warned} with warnings: they are not all that they claim to be")
    if result.failed:
        show.say(f"refused {result.failed}")
    for problem in result.problems:
        show.hint(problem)
    if result.failed > len(result.problems):
        show.hint(f"… and {result.failed - len(result.problems)} more")
    if not prefixed and any(": mailbox: " in problem for problem in result.problems):
        show.hint("Cards that name no mailbox are given one by --mailbox-prefix.")
