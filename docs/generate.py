"""Writes the pages of documentation that are made from the program: ``python docs/generate.py``."""

import enum
import inspect
import types
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo

from mediator.cli import app
from mediator.endpoint import Endpoint
from mediator.settings import Settings, Tenant, User
from mediator.settings_sources import CONFIG_VARIABLE, options, variable_name

_HEAD = f"""\
# Configuration

<!-- Made by docs/generate.py from mediator/settings.py; edit there. -->

Every option has a default that works; most installations set a handful. Values come from, the first wins:

1. flags of the command line (`mediator serve --help` lists them),
2. the environment: the variable named with each option; an empty one counts as not set. Tables and lists are JSON,
3. a TOML file: `--config FILE`, or `{CONFIG_VARIABLE}`; an option it does not know is an error,
4. the default.

Tables are merged over the sources key by key, lists are taken whole. A service that is configured wrongly does not
start: it names each wrong option, where its value stands, and what was expected.

```toml
# mediator.toml: an example, open to the network
data_dir = "/var/lib/mediator"
nats = "0.0.0.0:4222"

[quotas]
mailbox_messages = 100000

[tenants.acme]
users = [{{ name = "acme", password = "change me" }}]
```

`mediator serve --nats 0.0.0.0:4300`, `MEDIATOR_NATS=0.0.0.0:4300` and `nats = "0.0.0.0:4300"` say the same;
so do `MEDIATOR_QUOTAS__MAILBOX_MESSAGES=100000` and the table above.
"""


def configuration() -> str:
    """Return docs/configuration.md: each option with its values, default, variable and advice."""
    sections = [_HEAD, "## Options\n"]
    sections += [
        _option(path, field) for path, field in options(Settings) if len(path) == 1 and _table_of(field) is None
    ]
    for path, field in options(Settings):
        if (table := _table_of(field)) is not None:
            sections.append(f"## {path[0]}\n\n{_sentence(table)}\n")
            sections += [_option((*path, *inner), inside) for inner, inside in options(table)]
    sections.append(f"## tenants.NAME\n\n{_sentence(Tenant)}\n")
    sections += [_plain(("tenants", "NAME", *path), field) for path, field in options(Tenant)]
    sections.append(f"## tenants.NAME.users\n\n{_sentence(User)} Each entry of the list has:\n")
    sections += [_plain(path, field) for path, field in options(User)]
    return "\n".join(sections)


_COMMANDS = """\
# Commands

<!-- Made by docs/generate.py from mediator/cli; edit there. -->

One program, `mediator`. `mediator COMMAND --help` shows what stands here.

- `send`, `fetch`, `ack`, `nack`, `extend`, `query`, `delete`, `mailbox create`, `agent` and `bench` speak NATS as any
  client does. They find the service through its data directory, as `status` does (`--data-dir`, `--config`), or speak
  to the server that `--server` names, from anywhere. Where no service runs on the data directory they say so, and speak
  to no other; only a `nats_url` in the settings is used then. `agent eval` speaks to nobody.
- `mailbox list`, `show`, `set` and `delete`, `dead`, `doctor` and `status`, and for DIDComm `invite`, `invitations`,
  `connections`, `keys` and `identity`, are the operator's: they ask the service on this machine through `control.sock`
  in its data directory, which only the user that runs the service may open. They see every tenant: `mailbox list` and
  `status` show all of them, the others one, that of `--tenant`.

A SPAN is written `500ms`, `90s`, `5m`, `2h`, `7d`, `1h30m`; a number alone is seconds. WHEN is a span from now (ahead
for `send`, back for `fetch` and `query`), a date such as `2026-01-31T12:00Z` (local time without a zone), or Unix
seconds. Times are shown in UTC.

With `--json`, the last option of each command that prints data, a command prints one JSON object on one line instead
of text. Its `error` is `""`, or says what failed, as on standard error; the other fields are those of the service's
reply, payloads in base64. `fetch --follow` prints one object for each reply that has messages.

Exit codes: 0, it was done; 1, it was not, and the error is on standard error; 2, wrong usage or configuration, or the
data belong to another process.
"""


def commands() -> str:
    """Return docs/commands.md: each command with its help, arguments, options and example."""
    return "\n".join([_COMMANDS, *_commands(app, "mediator")])


def _commands(group: typer.Typer, path: str) -> Iterator[str]:
    for command in group.registered_commands:
        callback = command.callback
        assert callback is not None
        name = command.name or callback.__name__
        yield _command(f"{path} {name}", callback, command.epilog or "")
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _commands(inner.typer_instance, f"{path} {inner.name}")


def _command(path: str, callback: Callable[..., Any], example: str) -> str:
    hints = get_type_hints(callback, include_extras=True)
    parameters = inspect.signature(callback).parameters.values()
    usage, rows = [path], []
    for parameter in parameters:
        kind, info = get_args(hints[parameter.name])[:2]
        required = parameter.default is inspect.Parameter.empty
        written = _written(parameter.name, kind, info)
        if isinstance(info, ArgumentInfo) or required:
            usage.append(written if required else f"[{written}]")
        rows.append(f"| `{_cell(written)}` | {_cell(_meaning(info, kind, parameter.default))} |")
    lines = [f"## {path}", inspect.getdoc(callback) or "", f"`{' '.join(usage)}`"]
    lines.append("\n".join(["| Argument or option | Meaning |", "|---|---|", *rows]))
    lines.append(f"{example.replace('Example: ', 'Example: `', 1)}`")
    return "\n\n".join(lines) + "\n"


def _written(name: str, kind: Any, info: ArgumentInfo | OptionInfo) -> str:
    several = get_origin(_bare(kind)) is list
    if isinstance(info, ArgumentInfo):
        return f"{info.metavar}{'...' if several else ''}"
    # Of several names typer takes the first for the default, which an annotation cannot give.
    names = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
    option = names[0] if names else f"--{name.replace('_', '-')}"
    return option if kind is bool else f"{option} {info.metavar or _word(kind)}"


def _bare(kind: Any) -> Any:
    """The type without ``| None``."""
    return next((part for part in get_args(kind) if part is not type(None)), kind) if _is_union(kind) else kind


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in {Union, types.UnionType}


def _word(kind: Any) -> str:
    bare = _bare(kind)
    if get_origin(bare) is list:
        bare = get_args(bare)[0]
    if issubclass(bare, enum.Enum):
        return "|".join(str(word.value) for word in bare)
    return {int: "NUMBER", float: "NUMBER", Path: "PATH"}.get(bare, "TEXT")


def _meaning(info: ArgumentInfo | OptionInfo, kind: Any, default: Any) -> str:
    text = info.help or ""
    if isinstance(info.show_default, str):
        text += f" Default: {info.show_default}."
    elif default not in (None, inspect.Parameter.empty, "") and kind is not bool:
        text += f" Default: {default.value if isinstance(default, enum.Enum) else default}."
    if info.envvar:
        text += f" (`{info.envvar}`)"
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {"configuration.md": configuration, "commands.md": commands}


def _option(path: tuple[str, ...], field: FieldInfo) -> str:
    facts = f"{_values(field)} · default: {_default(field)} · `{variable_name(path)}`"
    return f"### {'.'.join(path)}\n\n{facts}\n\n{field.description}\n"


def _plain(path: tuple[str, ...], field: FieldInfo) -> str:
    return f"### {'.'.join(path)}\n\n{_values(field)}\n\n{field.description}\n"


def _sentence(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip()


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _default(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default_text" in extra:
        return str(extra["default_text"])
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None:
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _values(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    if get_origin(annotation) in {Union, types.UnionType}:
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is not None and hasattr(annotation, "__metadata__"):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{word}`" for word in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{word.value}`" for word in annotation)
    if annotation in _KINDS:
        return _KINDS[annotation] + _range(field)
    return {dict: "table", list: "list"}[get_origin(annotation)]


_KINDS: dict[Any, str] = {
    bool: "`true` or `false`",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    Endpoint: "HOST:PORT",
    SecretStr: "text, secret",
}


def _range(field: FieldInfo) -> str:
    bounds = {name: getattr(rule, name) for rule in field.metadata for name in ("ge", "le") if hasattr(rule, name)}
    if "le" in bounds:
        return f", {bounds['ge']} to {bounds['le']}"
    return f", at least {bounds['ge']}" if "ge" in bounds else ""


if __name__ == "__main__":
    for name, page in PAGES.items():
        Path(__file__).with_name(name).write_text(page(), encoding="utf-8")
