"""Options that many commands share, alone and in groups, the parsers of their values, and how a command fails.

A command takes a group of options as one parameter: a dataclass whose fields are the options. Typer knows only single
options, so :class:`CommandGroup` shows it the fields::

    @app.command()
    def status(options: CommandOptions) -> None: ...
"""

import inspect
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import wraps
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

from mediator.cli.output import Cells, print_json, print_line, print_records, print_table
from mediator.mailboxes.address import parse_address
from mediator.operate.units import parse_duration, parse_seconds, parse_time

if TYPE_CHECKING:
    from mediator.operate.records import Column
    from mediator.settings.settings import Settings


T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
F = TypeVar("F", bound=Callable[..., Any])


class CommandError(Exception):
    """What a command was to do was not done; the text is for the person who gave it."""

    def __init__(self, text: str, /, **fields: Any) -> None:
        """``fields`` are what ``--json`` shows beside ``error``."""
        super().__init__(text)
        self.fields = fields


class CommandGroup(typer.Typer):
    """Commands that may take groups of options."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """Add the decorated function, with the fields of its groups of options as options of their own."""
        add = super().command(name, **options)

        def decorate(function: F) -> F:
            add(_expand_groups(function))
            return function

        return decorate

    def only(self, word: str) -> typer.Typer:
        """Return the program with no command or group but the one of this name, or all of it where none has it.

        Typer makes all commands of a program before it runs one, which takes longer than most of ours.
        """
        program = copy(self)
        program.registered_commands = [command for command in self.registered_commands if _name(command) == word]
        program.registered_groups = [
            group
            for group in self.registered_groups
            if word == group.name or (not isinstance(group.name, str) and _has(group.typer_instance, word))
        ]
        return program if program.registered_commands or program.registered_groups else self


def _name(command: CommandInfo) -> str:
    return command.name or get_command_name(command.callback.__name__ if command.callback else "")


def _has(group: typer.Typer | None, word: str) -> bool:
    """Whether a command or a group within a group that has no name itself, and so no word on the command line."""
    return group is not None and (
        any(_name(command) == word for command in group.registered_commands)
        or any(inner.name == word for inner in group.registered_groups)
    )


def _expand_groups(function: Callable[..., None]) -> Callable[..., None]:
    groups: dict[str, tuple[type, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        members = [parameter]
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            members = list(inspect.signature(kind).parameters.values())
            groups[parameter.name] = kind, [member.name for member in members]
        parameters += [member.replace(kind=inspect.Parameter.KEYWORD_ONLY) for member in members]

    @wraps(function)
    def command(**values: Any) -> None:
        made = {
            name: kind(**{member: values.pop(member) for member in members}) for name, (kind, members) in groups.items()
        }
        function(**values, **made)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parser(read: Callable[[str], T]) -> Callable[[str | T], T]:
    """Make a parser whose error says what was expected; of a ValueError typer shows only the value."""

    def parse(text: str | T) -> T:
        if not isinstance(text, str):
            # typer passes defaults through the parser, too.
            return text
        try:
            return read(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def one_of(kind: type[E]) -> Callable[[str | E], E]:
    """Return a parser for the words of an enumeration, in any case; its error suggests the nearest word."""
    words = [word.value for word in kind]

    def read(text: str) -> E:
        word = text.lower().replace("-", "_")
        if word in words:
            return kind(word)
        near = get_close_matches(word, words, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f'expected {", ".join(words[:-1])} or {words[-1]}, got "{text[:40]}"{hint}')

    return _parser(read)


def words_of(kind: type[StrEnum]) -> str:
    """Return the words of an enumeration as help shows them."""
    return "|".join(word.value for word in kind)


span = _parser(parse_duration)
seconds = _parser(parse_seconds)
later = _parser(lambda text: parse_time(text, int(time.time()), ahead=True))
earlier = _parser(lambda text: parse_time(text, int(time.time()), ahead=False))

SPAN = "SPAN"
MOMENT = "WHEN"


def timed(parser: Callable[[Any], int], help: str, **more: Any) -> Any:
    """Return an option for a span or a point in time, which one of the parsers above reads."""
    metavar = MOMENT if parser in (later, earlier) else SPAN
    return typer.Option(metavar=metavar, parser=parser, help=help, **more)


def one_word(kind: type[StrEnum], help: str, **more: Any) -> Any:
    """Return an option for a word of an enumeration."""
    return typer.Option(metavar=words_of(kind), parser=one_of(kind), help=help, **more)


Config = Annotated[
    Path | None, typer.Option(help="TOML file with settings; `mediator init` writes one.", envvar="MEDIATOR_CONFIG")
]
DataDir = Annotated[Path | None, typer.Option(help="Data directory of the service.", show_default="./mediator-data")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text; its `error` is empty unless it failed.")
]
Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="Mail address.", parser=parse_address)]
Ids = Annotated[list[int], typer.Argument(metavar="ID", help="The msg_ids.", min=0)]
SomeIds = Annotated[list[int] | None, typer.Argument(metavar="ID", help="The msg_ids; none: all.", min=0)]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Group = Annotated[str, typer.Option("--group", metavar="NAME", help="The consumer group.")]


@dataclass(frozen=True)
class SettingsOptions:
    """Where a command finds the settings and the data of the service."""

    config: Config = None
    data_dir: DataDir = None

    def load(self, **overrides: Any) -> "Settings":
        """Read the settings; flags win."""
        from mediator.parts import installed_settings

        return installed_settings().load(self.config, data_dir=self.data_dir, **overrides)

    @property
    def names_service(self) -> bool:
        """Whether the options or the environment say which service of this machine is meant."""
        return self.config is not None or self.data_dir is not None or "MEDIATOR_DATA_DIR" in os.environ

    @property
    def serve_command(self) -> str:
        """The command that starts the service of these options."""
        given = {"--config": self.config, "--data-dir": self.data_dir}
        return " ".join(
            ["mediator serve", *(f"{name} {shlex.quote(str(path))}" for name, path in given.items() if path)]
        )


@dataclass(frozen=True)
class OutputOptions:
    """How a command prints its result."""

    as_json: AsJson = False

    def print(self, fields: Mapping[str, Any], text: str) -> None:
        """Print a result as one JSON object, or as a line of text."""
        print_json(fields) if self.as_json else print_line(text)

    def print_rows(
        self, fields: Mapping[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]], nothing: str
    ) -> None:
        """Print a result as one JSON object, or its rows as a table; ``nothing`` is the line for no rows."""
        if self.as_json or not rows:
            self.print(fields, nothing)
        else:
            print_table(columns, rows)

    def print_records(
        self,
        fields: Mapping[str, Any],
        name: str,
        columns: "Sequence[Column]",
        nothing: str,
        cells: Cells | None = None,
    ) -> None:
        """Print a result as one JSON object, or the records in its list ``name`` as a table."""
        if self.as_json or not fields[name]:
            self.print(fields, nothing)
        else:
            print_records(columns, fields[name], cells)


@dataclass(frozen=True)
class CommandOptions(OutputOptions, SettingsOptions):
    """Options of a command that asks the running service, or prints what it did."""

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """Send a command to the control socket; :class:`CommandError` if the service refuses it or does not run."""
        import asyncio

        from mediator.errors import SetupError
        from mediator.operate.control import send_command

        try:
            answer = asyncio.run(send_command(self.load().data_dir, command, **fields))
        except SetupError as error:
            raise CommandError(
                f"{error}; start `{self.serve_command}`, or name the directory of a running service with --data-dir: "
                "operators' commands reach it there, on its own machine and as its own user, not over NATS"
            ) from None
        if answer["error"]:
            raise CommandError(str(answer["error"]))
        return answer


def asks(operation: str, done: str, *, confirm: str = "", **fixed: Any) -> Callable[[F], F]:
    """Make a command that asks an operation; its parameters are the operation's fields, beside those that are fixed.

    ``done`` is the line for the answer, ``confirm`` a question that ``--yes`` answers; ``$name`` in them is a field.
    What ends the line behind a semicolon may be empty.
    """

    def decorate(declared: F) -> F:
        @wraps(declared)
        def command(*, options: CommandOptions, yes: bool = False, **fields: Any) -> None:
            if confirm and not yes:
                typer.confirm(Template(confirm).substitute(fields), abort=True, err=True)
            answer = options.ask(operation, **fixed, **fields)
            options.print(answer, Template(done).substitute({**fixed, **fields, **answer}).rstrip("; "))

        return cast(F, _mark(command, operation, fixed))

    return decorate


def lists(
    operation: str, name: str, columns: "Sequence[Column]", nothing: str, *, cells: Cells | None = None, **fixed: Any
) -> Callable[[F], F]:
    """Make a command that shows a list of an operation's answer as a table, ``nothing`` if it is empty; see `asks`."""

    def decorate(declared: F) -> F:
        @wraps(declared)
        def command(*, options: CommandOptions, **fields: Any) -> None:
            options.print_records(options.ask(operation, **fixed, **fields), name, columns, nothing, cells)

        return cast(F, _mark(command, operation, fixed))

    return decorate


def _mark(command: Callable[..., None], operation: str, fixed: Mapping[str, Any]) -> Any:
    """Note which operation a command asks, and the fields that are fixed."""
    command.asked = operation, frozenset(fixed)  # type: ignore[attr-defined]
    return command


@dataclass(frozen=True)
class _TenantOption:
    tenant: Annotated[str, typer.Option(help="The tenant.")] = "default"


@dataclass(frozen=True)
class TenantOptions(CommandOptions, _TenantOption):
    """Options of an operator's command about one tenant."""

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """Send a command about the tenant; raises as :meth:`CommandOptions.ask`."""
        return super().ask(command, tenant=self.tenant, **fields)
