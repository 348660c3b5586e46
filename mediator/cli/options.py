"""The options that many commands share, and how their values are read."""

import shlex
import time
from collections.abc import Callable
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mediator.mailboxes.address import parse_address
from mediator.operators.spans import parse_moment, parse_seconds, parse_span

if TYPE_CHECKING:
    from mediator.settings import Settings

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


def _refusing(read: Callable[[str], T]) -> Callable[[str | T], T]:
    """Have typer say what was expected; of a ValueError it would show only the value."""

    def parser(text: str | T) -> T:
        if not isinstance(text, str):
            # A default is handed in as it stands.
            return text
        try:
            return read(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parser


def one_of(kind: type[E]) -> Callable[[str | E], E]:
    """Return what reads a word of an enumeration, in any case; another word is refused, with the nearest one."""
    words = [word.value for word in kind]

    def read(text: str) -> E:
        word = text.lower().replace("-", "_")
        if word in words:
            return kind(word)
        near = get_close_matches(word, words, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f'expected {", ".join(words[:-1])} or {words[-1]}, got "{text[:40]}"{hint}')

    return _refusing(read)


def words_of(kind: type[StrEnum]) -> str:
    """Return the words of an enumeration as help shows them."""
    return "|".join(word.value for word in kind)


span = _refusing(parse_span)
seconds = _refusing(parse_seconds)
later = _refusing(lambda text: parse_moment(text, int(time.time()), ahead=True))
earlier = _refusing(lambda text: parse_moment(text, int(time.time()), ahead=False))

SPAN = "SPAN"
MOMENT = "WHEN"

Config = Annotated[
    Path | None, typer.Option(help="TOML file with settings; `mediator init` writes one.", envvar="MEDIATOR_CONFIG")
]
DataDir = Annotated[Path | None, typer.Option(help="Data directory of the service.", show_default="./mediator-data")]
Server = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="NATS server to speak to.",
        envvar="MEDIATOR_NATS_SERVER",
        show_default="the service on the data directory",
    ),
]
User = Annotated[str | None, typer.Option(help="NATS user.", envvar="MEDIATOR_NATS_USER")]
Password = Annotated[str | None, typer.Option(help="Its password.", envvar="MEDIATOR_NATS_PASSWORD")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text; its `error` is empty unless it failed.")
]
Tenant = Annotated[str, typer.Option(help="Tenant it is about.")]


def mail_address(text: str) -> str:
    """Read a mail address."""
    return parse_address(text)


Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="Mail address.", parser=mail_address)]
Ids = Annotated[list[int], typer.Argument(metavar="ID", help="The msg_ids.", min=0)]
Group = Annotated[str, typer.Option("--group", metavar="NAME", help="The consumer group.")]


def serve_command(config: Path | None, data_dir: Path | None) -> str:
    """Return the command that starts the service which these options name."""
    given = {"--config": config, "--data-dir": data_dir}
    return " ".join(["mediator serve", *(f"{name} {shlex.quote(str(path))}" for name, path in given.items() if path)])


def load(config: Path | None, **overrides: Any) -> "Settings":
    """Read the settings; flags win."""
    from mediator.settings import Settings

    return Settings.load(config, **overrides)
